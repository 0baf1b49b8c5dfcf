"""Promise: a detector's loss adds up over micro-batches, its mean average precision is COCO's for any number
of ranks, and the embedded recipe learns and goes on with the same bits.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from tests.helpers import preloaded
from tests.helpers.refusals import refused
from tests.helpers.rows import read_rows
from tests.helpers.steps import assert_same_bits, train_some
from tests.helpers.toys import make_recipe
from trainer.config.model import ModelConfig
from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.data.formats.boxes import BOXES, COUNT
from trainer.models.detection import (
    TinyDetector,
    assign,
    cell_centers,
    detections,
    generalized_iou,
    make_detector,
    tiny_losses,
)
from trainer.tasks.detection import Detection, _torchvision_loss
from trainer.train.components.task import check_request, make_task


@pytest.fixture(autouse=True)
def few_canvases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.builtin.boxes.TRAIN", 96)
    monkeypatch.setattr("trainer.data.builtin.boxes.TEST", 13)


def recipe(**sections: Any) -> Recipe:
    sizes = {"image_size": 96, "global_batch_size": 16, "micro_batch_size": 8, "eval_batch_size": 3}
    data, boxes = {**sizes, **sections.pop("data", {})}, {"max_boxes": 8, **sections.pop("detection", {})}
    values = {"task": "detection", "model": {"width": 8, "norm": "group"}, **sections}
    return make_recipe(**values, data=data, detection=boxes)


def task_of(chosen: Recipe) -> Detection:
    task = make_task(chosen)
    assert isinstance(task, Detection)
    return task


def batch_of(task: Detection, samples: range, weight: torch.Tensor | None = None) -> Batch:
    out: Any = {
        name: np.zeros((len(samples), *f.shape), f.dtype) for name, f in task.train_data.fields.items()
    }
    random = np.full((len(samples), max(1, task.train_data.uniforms)), 0.3, np.float32)
    task.train_data.read(np.array(samples), random, out)
    return Batch({name: torch.from_numpy(array) for name, array in out.items()}, weight, None, len(samples))


@pytest.mark.compat
def test_a_rank_with_nothing_but_padding_calls_the_model_all_the_same() -> None:
    """Otherwise the other ranks would wait for its gradients."""
    called: list[int] = []

    class Counted(nn.Module):
        def forward(self, images: list[torch.Tensor], targets: Any) -> dict[str, torch.Tensor]:
            assert len(images) == len(targets)
            called.append(len(images))
            return {"loss": torch.ones((), requires_grad=True)}

    box = torch.tensor([[[0.0, 0, 4, 4]]]).expand(3, -1, -1)
    ones = torch.ones(3, 1, dtype=torch.int64)
    image = torch.zeros(3, 3, 8, 8)
    for weight, seen, total in (([1.0, 1, 0], 2, 2.0), ([0.0, 0, 0], 1, 0.0)):
        loss = _torchvision_loss(Counted(), image, box, ones, ones[:, 0], torch.tensor(weight))
        assert float(loss.detach()) == total
        loss.backward()
        assert called.pop() == seen


def test_the_tasks_loss_is_a_sum_that_padding_does_not_enter() -> None:
    task = task_of(recipe())
    torch.manual_seed(0)
    model = task.model()
    whole = task.loss(model, batch_of(task, range(8))).item()
    parts = [task.loss(model, batch_of(task, range(first, first + 2))).item() for first in range(0, 8, 2)]
    assert whole == pytest.approx(sum(parts), rel=1e-5)
    padded = batch_of(task, range(8), torch.tensor([1.0] * 4 + [0.0] * 4))
    padded.fields[BOXES][4:] = torch.nan
    assert task.loss(model, padded).item() == pytest.approx(sum(parts[:2]), rel=1e-5)


def test_focal_loss_and_overlap_are_torchvisions() -> None:
    torch.manual_seed(1)
    cells = cell_centers(4, 4, 8, torch.zeros(()))
    logits, boxes = torch.randn(1, 16, 3), torch.rand(1, 16, 4) * 10 + torch.tensor([0.0, 0, 12, 12])
    true, label = torch.tensor([[[6.0, 5, 18, 19]]]), torch.tensor([[2]])
    target, positive = assign(cells, 8, true, torch.tensor([1]))
    assert positive[0].nonzero()[:, 0].tolist() == [5], "the cell at 12, 12 alone"
    wanted = torch.zeros(1, 16, 3)
    wanted[0, 5, 2] = 1
    expected = sigmoid_focal_loss(logits, wanted, reduction="sum")
    expected += generalized_box_iou_loss(boxes[0, 5:6], true[0], reduction="sum")
    torch.testing.assert_close(
        tiny_losses(logits, boxes, cells, 8, true, label, torch.tensor([1]))[0], expected
    )
    assert generalized_iou(torch.zeros(4), torch.zeros(4)).isfinite() and target.shape == (1, 16)


def test_a_cell_near_two_boxes_is_for_the_smaller() -> None:
    cells = cell_centers(12, 12, 8, torch.zeros(()))
    boxes = torch.tensor([[[10.0, 10, 70, 70], [35, 35, 47, 47], [90, 90, 95, 96]]])
    target, positive = assign(cells, 8, boxes, torch.tensor([3]))
    near = positive[0].nonzero()[:, 0].tolist()
    middles = cells[near].tolist()
    assert [36, 36] in middles and [44, 44] in middles
    assert {int(target[0, cell]) for cell in near} >= {1, 2}
    assert int(target[0, near[middles.index([36, 36])]]) == 1
    assert not assign(cells, 8, boxes, torch.tensor([0]))[1].any()


def test_what_cells_say_becomes_boxes() -> None:
    class Says(TinyDetector):
        def forward(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits, boxes = torch.full((2, 16, 3), -9.0), torch.zeros(2, 16, 4)
            logits[0, 5, 2], boxes[0, 5] = 3.0, torch.tensor([4.0, 4, 20, 20])
            logits[0, 6, 2], boxes[0, 6] = 2.0, torch.tensor([4.0, 4, 20, 19])  # the same again
            logits[0, 7, 1], boxes[0, 7] = 1.0, torch.tensor([4.0, 4, 20, 20])  # another class
            logits[1, 3, 0], boxes[1, 3] = 0.0, torch.tensor([-5.0, 3, 50, 9])
            return logits, boxes

    model, images = Says(ModelConfig(width=8), 1, 3), torch.zeros(2, 1, 32, 32)
    first, second = detections(model, images, most=5, least=0.1)
    assert first.labels.tolist() == [2, 1] and first.boxes.tolist() == [[4, 4, 20, 20]] * 2
    torch.testing.assert_close(first.scores, torch.tensor([3.0, 1.0]).sigmoid())
    assert second.boxes.tolist() == [[0, 3, 32, 9]], "within the image"
    assert len(detections(model, images, most=1)[0].labels) == 1


def test_the_embedded_recipe_goes_on_with_the_same_bits() -> None:
    augment = {"scale": [0.8, 1.25], "mosaic": 0.2}
    chosen = recipe(epochs=4, optim={"lr": 0.01, "warmup_steps": 0.1}, detection=augment, data={"workers": 0})
    task = task_of(chosen)
    check_request(chosen, task, 2)
    state, losses = train_some(chosen, task, range(9))
    half, first = train_some(chosen, task, range(4))
    resumed, last = train_some(chosen, task, range(4, 9), half)
    assert first + last == losses
    assert_same_bits(state, resumed)


@pytest.mark.slow  # whole recipes, minutes
@pytest.mark.parametrize(
    ("name", "figure", "least"), [("digits-detection", "map_50", 0.80), ("dtmf", "accuracy", 0.99)]
)
def test_an_embedded_recipe_reaches_what_it_should(
    name: str, figure: str, least: float, tmp_path: Path
) -> None:
    words = ["--out", str(tmp_path / "run"), "--set", "parallel.threads=1"]
    done = preloaded.run([sys.executable, "-m", "trainer", "train", name, *words], timeout=3600)
    assert done.returncode == 0, done.stderr
    assert read_rows(tmp_path / "run", ("eval",))[-1][figure] >= least


def test_padding_is_not_shown_to_torchvisions_models() -> None:
    class Counts(nn.Module):
        weight = torch.ones((), requires_grad=True)

        def forward(self, images: Any, targets: Any) -> dict[str, torch.Tensor]:
            assert all(image.shape == (3, 96, 96) for image in images)
            boxes = sum(len(target["boxes"]) for target in targets)
            assert all(int(target["labels"].min()) >= 1 for target in targets), "0 is the background"
            return {"a": self.weight * boxes / len(images), "b": self.weight * 0}

    chosen = recipe(model={"name": "fcos_resnet50_fpn"})
    task, model = task_of(chosen), Counts()
    batch = batch_of(task, range(8))
    assert task.loss(model, batch).item() == pytest.approx(float(batch.fields[COUNT].sum()))
    weighted = replace(batch, weight=torch.tensor([1.0] * 3 + [0.0] * 5))
    assert task.loss(model, weighted).item() == pytest.approx(float(batch.fields[COUNT][:3].sum()))
    nothing = task.loss(model, replace(batch, weight=torch.zeros(8)))
    nothing.backward()
    assert nothing.item() == 0 and model.weight.grad is not None and not model.weight.grad.any()


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"model": {"name": "fasterrcnn_resnet50_fp"}}, "fasterrcnn_resnet50_fp fasterrcnn_resnet50_fpn"),
        ({"detection": {"max_boxes": 5}}, "detection.max_boxes=6"),
        ({"data": {"image_size": 128}}, "data.image_size=96"),
    ],
)
def test_what_cannot_be_is_refused(sections: dict[str, Any], names: str) -> None:
    with refused(names):
        task_of(recipe(**sections)).model()


def test_losses_add_up_exactly_over_images() -> None:
    torch.manual_seed(0)
    cells = cell_centers(12, 12, 8, torch.zeros((), dtype=torch.float64))
    begin = torch.rand(6, 5, 2, dtype=torch.float64) * 60
    true = torch.cat((begin, begin + 5 + torch.rand(6, 5, 2, dtype=torch.float64) * 30), 2)
    logits = torch.randn(6, 144, 10, dtype=torch.float64)
    boxes = torch.rand(6, 144, 4, dtype=torch.float64) * 90
    labels, count = torch.randint(0, 10, (6, 5)), torch.arange(6)
    each = tiny_losses(logits, boxes, cells, 8, true, labels, count)
    assert each.shape == (6,) and bool((each > 0).all())
    for row in range(6):
        one = slice(row, row + 1)
        alone = tiny_losses(logits[one], boxes[one], cells, 8, true[one], labels[one], count[one])
        torch.testing.assert_close(alone, each[one], rtol=1e-12, atol=0)
        padded = true.clone()
        padded[row, int(count[row]) :] = torch.tensor([0.0, 0, 50, 50], dtype=torch.float64)
        assert torch.equal(tiny_losses(logits, boxes, cells, 8, padded, labels, count), each)


@pytest.mark.parametrize(("norm", "kept"), [("frozen", "FrozenBatchNorm2d"), ("group", "GroupNorm")])
def test_no_batch_statistics_where_batches_are_small(norm: str, kept: str) -> None:
    with torch.device("meta"):
        model = make_detector(ModelConfig(name="fasterrcnn_resnet50_fpn"), norm, 64, 3, 5)
    kinds = [type(module).__name__ for module in model.modules()]
    assert "BatchNorm2d" not in kinds and kinds.count(kept) == 53
