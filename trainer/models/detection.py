"""Detectors: a small one without anchors, and torchvision's by name; what they find, in one form."""

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
from trainer.models.images import make_norm, residual_stages

_NEAR = 1.0  # strides from a box's middle within which a cell is to find it: up to four cells do
_PRIOR = 0.01  # score of a cell before training, as in Lin et al., 2017
_ALPHA, _GAMMA = 0.25, 2.0  # of the focal loss, likewise
_LARGEST = 6.0  # logarithm of a box's side, in strides: no infinity
_CANDIDATES = 300  # boxes of an image that suppression looks at
_SAME = 0.6  # overlap from which two boxes of a class are one


class Detections(NamedTuple):
    """Objects found in an image: boxes (k, 4), scores (k,), and labels, int64 (k,), best first."""

    boxes: torch.Tensor
    scores: torch.Tensor
    labels: torch.Tensor


class TinyDetector(nn.Module):
    """A residual network whose cells each say what is near them and where it ends.

    In the manner of FCOS (Tian et al., 2019) and CenterNet (Zhou et al., 2019), on one level.
    """

    def __init__(self, config: ModelConfig, channels: int, classes: int) -> None:
        """Each stage halves the resolution, as the stem does, and, but for the first, doubles the width."""
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
        """Looks at images.

        Args:
            image: float (n, channels, height, width).

        Returns:
            Logits (n, cells, classes), and for each cell the box there, (n, cells, 4): left, top, right and
            bottom in pixels.
        """
        hidden = torch.relu(self.norm(self.blocks(self.stem(image))))
        hidden = torch.relu(self.mixed(self.mix(hidden)))
        logits, place = (part(hidden).flatten(2).transpose(1, 2) for part in (self.classify, self.locate))
        place = place.float() if place.dtype in (torch.float16, torch.bfloat16) else place
        cells = cell_middles(hidden.shape[2], hidden.shape[3], self.stride, place)
        middle = cells + place[..., :2] * self.stride
        half = place[..., 2:].clamp(max=_LARGEST).exp() * (self.stride / 2)
        return logits, torch.cat((middle - half, middle + half), 2)


def cell_middles(rows: int, columns: int, stride: int, like: torch.Tensor) -> torch.Tensor:
    """Middles of cells in pixels, row by row: (rows * columns, 2), across and down."""
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
    """Loss of each image by itself, so that a sum over images doesn't depend on their grouping.

    Focal loss of the classes (Lin et al., 2017) and one minus the generalized IoU of the boxes (Rezatofighi
    et al., 2019), each over the image's own number of cells that are to find something.

    Args:
        logits: float (n, cells, classes).
        boxes: float (n, cells, 4), in pixels.
        cells: float (cells, 2): their middles.
        stride: Pixels from one to the next.
        true_boxes: float (n, m, 4).
        true_labels: int64 (n, m).
        count: int64 (n,): how many of the m are valid.

    Returns:
        float (n,).
    """
    target, positive = assign(cells, stride, true_boxes, count)
    label = true_labels.gather(1, target)
    # Not one_hot, which asks a CPU's tensor for its largest value.
    classes_there = torch.arange(logits.shape[2], device=logits.device)
    wanted = ((label[..., None] == classes_there) & positive[..., None]).to(logits.dtype)
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    score = logits.sigmoid()
    wrong = score + wanted - 2 * score * wanted  # 1 - p of what is right
    weight = 1 - _ALPHA + (2 * _ALPHA - 1) * wanted
    classes = (weight * wrong**_GAMMA * entropy).sum((1, 2))
    true = true_boxes.to(boxes.dtype).gather(1, target[..., None].expand(-1, -1, 4))
    places = torch.where(positive, 1 - generalized_iou(boxes, true), 0.0).sum(1)
    return (classes + places) / positive.sum(1).clamp(min=1)


def assign(
    cells: torch.Tensor, stride: int, true_boxes: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Assigns to each cell the box that it is to find: the smallest whose middle is near.

    Returns:
        Index into the boxes, int64 (n, cells), and whether there is one, bool (n, cells).
    """
    middle = (true_boxes[..., :2] + true_boxes[..., 2:]) / 2
    away = (cells[:, None] - middle[:, None]).abs().amax(3)  # (n, cells, m)
    valid = torch.arange(true_boxes.shape[1], device=count.device) < count[:, None]
    near = (away < _NEAR * stride) & valid[:, None]
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
    # Where both are empty, padding beside padding, it is nobody's loss, and mustn't be a NaN's gradient.
    tiny = 1e-7
    return both / (union + tiny) - (hull - union) / (hull + tiny)


def make_detector(config: ModelConfig, norm: str, size: int, channels: int, classes: int) -> nn.Module:
    """Builds the detector that the configuration names.

    Args:
        config: Names it.
        norm: What stands in torchvision's models where BatchNorm does: "batch", "frozen" or "group".
        size: Of the square images, in pixels.
        channels: Of the images; torchvision's take 3.
        classes: Without the background.

    Raises:
        BadInputError: If torchvision has no such detector of boxes.
    """
    model: nn.Module
    if ours := opens(config.name, "detection"):
        model = named(ours)(config, channels, classes)
        return model
    from torchvision import models as torchvision_models
    from torchvision.models import detection

    names = torchvision_models.list_models(module=detection)
    names = [name for name in names if not name.startswith(("mask", "keypoint"))]  # they want more than boxes
    if config.name not in names:
        known = [*models_of("detection"), *names]
        raise BadInputError(
            f"model.name: no detector '{config.name}'{nearest(config.name, known)} (there are: "
            f"{', '.join(known)})"
        )
    # SSDs bring every image to a size of their own.
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
            fresh = FrozenBatchNorm2d(width) if norm == "frozen" else nn.GroupNorm(math.gcd(32, width), width)
            setattr(module, name, fresh)
        else:
            _replace_norms(child, norm)


def detections(
    model: nn.Module, images: torch.Tensor, most: int = 100, least: float = 0.0
) -> list[Detections]:
    """Finds objects in images with a detector.

    Args:
        model: From `make_detector`, in evaluation mode.
        images: float (n, channels, height, width), as `Detection.inputs` gives them.
        most: Boxes of an image.
        least: Score from which a box counts.

    Returns:
        For each image; labels count from 0.
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
        place, label = box[index // classes], index % classes
        kept = batched_nms(place, score, label, _SAME)
        results.append(_best(place[kept], score[kept], label[kept], most, least))
    return results


def _best(
    boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, most: int, least: float
) -> Detections:
    # The background, which torchvision's anchors of one stage may name, is nothing that was found.
    chosen = (scores >= least) & (labels >= 0)
    return Detections(*(rows[chosen][:most] for rows in (boxes, scores, labels)))
