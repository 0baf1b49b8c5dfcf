"""Object detectors: a small one without anchors, and torchvision's by name, with one form of results."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from trainer.config.model import ModelConfig
from trainer.config.models import models_of, opens
from trainer.config.registry import named
from trainer.config.suggest import nearest
from trainer.errors import BadInputError
from trainer.models.images import GroupNorm, make_norm, residual_stages

_NEAR = 1.0  # distance in strides from a box's center within which cells are positive: up to four cells
_PRIOR = 0.01  # score of a cell before training, as in Lin et al., 2017
_ALPHA, _GAMMA = 0.25, 2.0  # of the focal loss, from the same paper
_LARGEST = 6.0  # largest logarithm of a box's side, in strides, against infinities
_CANDIDATES = 300  # boxes per image before non-maximum suppression
_SAME = 0.6  # IoU threshold of non-maximum suppression


class Detections(NamedTuple):
    """Detections in an image, best first: boxes (k, 4), scores (k,), and labels, int64 (k,)."""

    boxes: torch.Tensor
    scores: torch.Tensor
    labels: torch.Tensor


class TinyDetector(nn.Module):
    """Anchor-free detector on one level, after FCOS (Tian et al., 2019) and CenterNet (Zhou et al., 2019).

    Each cell of the last feature map predicts the class and the box of an object near it.
    """

    def __init__(self, config: ModelConfig, channels: int, classes: int) -> None:
        """Builds the stages: each halves the resolution, as the stem; later ones double the width."""
        super().__init__()
        self.stride = 2 << len(config.blocks)
        self.stem = nn.Conv2d(channels, config.width, 3, 2, padding=1, bias=False)
        self.blocks, width = residual_stages(config, first_stride=2)
        self.norm = make_norm(config.norm, width)
        self.mix = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.mixed = make_norm(config.norm, width)
        self.classify = nn.Conv2d(width, classes, 1)
        self.locate = nn.Conv2d(width, 4, 1)
        nn.init.constant_(self.classify.bias, -math.log(1 / _PRIOR - 1))  # type: ignore[arg-type]
        nn.init.zeros_(self.locate.weight)
        nn.init.zeros_(self.locate.bias)  # type: ignore[arg-type]

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicts classes and boxes.

        Args:
            image: float (n, channels, height, width).

        Returns:
            Logits (n, cells, classes), and the cells' boxes (n, cells, 4): left, top, right and bottom in
            pixels.
        """
        hidden = torch.relu(self.norm(self.blocks(self.stem(image))))
        hidden = torch.relu(self.mixed(self.mix(hidden)))
        logits, box = (head(hidden).flatten(2).transpose(1, 2) for head in (self.classify, self.locate))
        box = box.float() if box.dtype in (torch.float16, torch.bfloat16) else box
        cells = cell_centers(hidden.shape[2], hidden.shape[3], self.stride, box)
        center = cells + box[..., :2] * self.stride
        half = box[..., 2:].clamp(max=_LARGEST).exp() * (self.stride / 2)
        return logits, torch.cat((center - half, center + half), 2)


def cell_centers(rows: int, columns: int, stride: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the centers (x, y) of cells in pixels, row by row: (rows * columns, 2)."""
    down, across = (
        (torch.arange(count, device=like.device, dtype=like.dtype) + 0.5) * stride
        for count in (rows, columns)
    )
    return torch.stack((across.repeat(rows), down.repeat_interleave(columns)), 1)


def tiny_losses(
    logits: torch.Tensor,
    boxes: torch.Tensor,
    cells: torch.Tensor,
    stride: int,
    true_boxes: torch.Tensor,
    true_labels: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """Returns the loss of each image, independent of the other images of the batch.

    It is the focal loss of the classes (Lin et al., 2017) plus one minus the generalized IoU of the boxes
    (Rezatofighi et al., 2019), both divided by the image's number of positive cells.

    Args:
        logits: float (n, cells, classes).
        boxes: float (n, cells, 4), in pixels.
        cells: float (cells, 2): centers of the cells.
        stride: Distance of neighboring cells in pixels.
        true_boxes: float (n, m, 4).
        true_labels: int64 (n, m).
        count: int64 (n,): number of valid boxes of the m.

    Returns:
        float (n,).
    """
    target, positive = assign(cells, stride, true_boxes, count)
    label = true_labels.gather(1, target)
    # Not one_hot, which computes the largest label on a CPU.
    numbers = torch.arange(logits.shape[2], device=logits.device)
    wanted = ((label[..., None] == numbers) & positive[..., None]).to(logits.dtype)
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    score = logits.sigmoid()
    wrong = score + wanted - 2 * score * wanted  # 1 - p of the right answer
    weight = 1 - _ALPHA + (2 * _ALPHA - 1) * wanted
    classes = (weight * wrong**_GAMMA * entropy).sum((1, 2))
    true = true_boxes.to(boxes.dtype).gather(1, target[..., None].expand(-1, -1, 4))
    localization = torch.where(positive, 1 - generalized_iou(boxes, true), 0.0).sum(1)
    return (classes + localization) / positive.sum(1).clamp(min=1)


def assign(
    cells: torch.Tensor, stride: int, true_boxes: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Assigns to each cell the smallest true box whose center is near.

    Returns:
        Index of the box, int64 (n, cells), and True where there is one, bool (n, cells).
    """
    center = (true_boxes[..., :2] + true_boxes[..., 2:]) / 2
    distance = (cells[:, None] - center[:, None]).abs().amax(3)  # (n, cells, m)
    valid = torch.arange(true_boxes.shape[1], device=count.device) < count[:, None]
    near = (distance < _NEAR * stride) & valid[:, None]
    area = (true_boxes[..., 2:] - true_boxes[..., :2]).prod(2)
    smallest, target = torch.where(near, area[:, None], torch.inf).min(2)
    return target, smallest < torch.inf


def generalized_iou(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Generalized IoU of boxes (..., 4) with boxes (..., 4): (...), in [-1, 1]."""
    least = torch.minimum(one, other)
    most = torch.maximum(one, other)
    both = (least[..., 2:] - most[..., :2]).clamp(min=0).prod(-1)
    hull = (most[..., 2:] - least[..., :2]).prod(-1)
    areas = (one[..., 2:] - one[..., :2]).prod(-1) + (other[..., 2:] - other[..., :2]).prod(-1)
    union = areas - both
    # Padding boxes are empty: their result isn't used, but must not give a NaN gradient.
    tiny = 1e-7
    return both / (union + tiny) - (hull - union) / (hull + tiny)


def make_detector(config: ModelConfig, norm: str, size: int, channels: int, classes: int) -> nn.Module:
    """Builds a detector by name.

    Args:
        config: Model configuration with the name.
        norm: Normalization of torchvision's models: "batch", "frozen" or "group".
        size: Side of the square images in pixels.
        channels: Channels of the images; torchvision's models take 3.
        classes: Number of classes without the background.

    Raises:
        BadInputError: If torchvision has no such box detector.
    """
    model: nn.Module
    if ours := opens(config.name, "detection"):
        model = named(ours)(config, channels, classes)
        return model
    from torchvision import models as torchvision_models
    from torchvision.models import detection

    names = torchvision_models.list_models(module=detection)
    names = [name for name in names if not name.startswith(("mask", "keypoint"))]  # need more than boxes
    if config.name not in names:
        known = [*models_of("detection"), *names]
        raise BadInputError(
            f"model.name: no detector '{config.name}'{nearest(config.name, known)} (there are: "
            f"{', '.join(known)})"
        )
    # SSDs resize every image to a fixed size.
    sizes = {} if config.name.startswith("ssd") else {"min_size": size, "max_size": size}
    model = torchvision_models.get_model(
        config.name, weights=None, weights_backbone=None, num_classes=classes + 1, **sizes
    )
    if norm != "batch":
        _replace_norms(model, norm)
    return model


def _replace_norms(module: nn.Module, norm: str) -> None:
    from torchvision.ops import FrozenBatchNorm2d

    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            width = child.num_features
            fresh = FrozenBatchNorm2d(width) if norm == "frozen" else GroupNorm(math.gcd(32, width), width)
            setattr(module, name, fresh)
        else:
            _replace_norms(child, norm)


def detections(
    model: nn.Module, images: torch.Tensor, most: int = 100, least: float = 0.0
) -> list[Detections]:
    """Detects objects in images.

    Args:
        model: Detector from `make_detector`, in evaluation mode.
        images: float (n, channels, height, width) from `Detection.inputs`.
        most: Largest number of boxes per image.
        least: Smallest score of a box.

    Returns:
        Detections of each image; labels count from 0.
    """
    if not isinstance(model, TinyDetector):
        found: list[dict[str, Any]] = model(list(images))
        return [_best(f["boxes"], f["scores"], f["labels"] - 1, most, least) for f in found]
    from torchvision.ops import batched_nms

    logits, boxes = model(images)
    height, width = images.shape[2:]
    across, down = boxes[..., 0::2].clamp(0, width), boxes[..., 1::2].clamp(0, height)
    boxes = torch.stack((across, down), -1).flatten(-2)
    classes = logits.shape[2]
    scores, flat = logits.float().sigmoid().flatten(1).topk(min(_CANDIDATES, logits[0].numel()))
    results = []
    for score, index, box in zip(scores, flat, boxes, strict=True):
        candidate, label = box[index // classes], index % classes
        kept = batched_nms(candidate, score, label, _SAME)
        results.append(_best(candidate[kept], score[kept], label[kept], most, least))
    return results


def _best(
    boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, most: int, least: float
) -> Detections:
    # torchvision's single-stage detectors may return the background class.
    chosen = (scores >= least) & (labels >= 0)
    return Detections(*(rows[chosen][:most] for rows in (boxes, scores, labels)))
