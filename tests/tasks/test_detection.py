"""Promise: a detector's loss adds up over micro-batches, its mean average precision is COCO's for any number
of ranks, and the embedded recipe learns and goes on with the same bits.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from tests.helpers import preloaded
from tests.helpers.forked import attempt
from tests.helpers.steps import LITTLE, assert_same_bits, dry_run, train_some
from tests.helpers.toys import make_recipe
from tests.helpers.world import Ranks
from trainer.config.data import LoaderConfig
from trainer.config.model import ModelConfig, PrecisionConfig
from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.data.formats.boxes import BOXES, COUNT, CROWD, IMAGE, LABEL
from trainer.data.loader import RingLoader, Source
from trainer.data.sampling.plan import evaluation_share
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.models.detection import (
    TinyDetector,
    assign,
    cell_centers,
    detections,
    generalized_iou,
    make_detector,
    tiny_losses,
)
from trainer.tasks.average_precision import average_precision
from trainer.tasks.detection import Detection, _torchvision_loss
from trainer.train.components.task import check_request, make_task
from trainer.train.evaluate import evaluate


@pytest.fixture(autouse=True)
def few_canvases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.builtin.boxes.TRAIN", 96)
    monkeypatch.setattr("trainer.data.builtin.boxes.TEST", 13)


def recipe(**sections: Any) -> Recipe:
    data = {"image_size": 96, "global_batch_size": 16, "micro_batch_size": 8, "eval_batch_size": 3}
    values = {
        "task": "detection",
        "model": {"width": 8, "norm": "group"},
        "detection": {"max_boxes": 8, **sections.pop("detection", {})},
        "data": {**data, **sections.pop("data", {})},
        **sections,
    }
    return make_recipe(**values)


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


# The loss.


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


def test_losses_add_up_exactly_over_images() -> None:
    torch.manual_seed(0)
    cells = cell_centers(12, 12, 8, torch.zeros((), dtype=torch.float64))
    begin = torch.rand(6, 5, 2, dtype=torch.float64) * 60
    true = torch.cat((begin, begin + 5 + torch.rand(6, 5, 2, dtype=torch.float64) * 30), 2)
    logits, boxes = (
        torch.randn(6, 144, 10, dtype=torch.float64),
        torch.rand(6, 144, 4, dtype=torch.float64) * 90,
    )
    labels, count = torch.randint(0, 10, (6, 5)), torch.tensor([0, 1, 2, 3, 4, 5])
    each = tiny_losses(logits, boxes, cells, 8, true, labels, count)
    assert each.shape == (6,) and bool((each > 0).all())
    for row in range(6):
        one = slice(row, row + 1)
        alone = tiny_losses(logits[one], boxes[one], cells, 8, true[one], labels[one], count[one])
        torch.testing.assert_close(alone, each[one], rtol=1e-12, atol=0)
        padded = true.clone()
        padded[row, int(count[row]) :] = torch.tensor([0.0, 0, 50, 50], dtype=torch.float64)
        assert torch.equal(tiny_losses(logits, boxes, cells, 8, padded, labels, count), each)


def test_the_tasks_loss_is_a_sum_that_padding_does_not_enter() -> None:
    task = task_of(recipe())
    torch.manual_seed(0)
    model = task.model()
    whole = task.loss(model, batch_of(task, range(8))).item()
    parts = [task.loss(model, batch_of(task, range(first, first + 2))).item() for first in range(0, 8, 2)]
    assert whole == pytest.approx(sum(parts), rel=1e-5)
    weight = torch.tensor([1.0] * 4 + [0.0] * 4)
    padded = batch_of(task, range(8), weight)
    padded.fields[BOXES][4:] = torch.nan
    assert task.loss(model, padded).item() == pytest.approx(sum(parts[:2]), rel=1e-5)


def test_focal_loss_and_overlap_are_torchvisions() -> None:
    from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

    torch.manual_seed(1)
    cells = cell_centers(4, 4, 8, torch.zeros(()))
    logits, boxes = torch.randn(1, 16, 3), torch.rand(1, 16, 4) * 10 + torch.tensor([0.0, 0, 12, 12])
    true, label = torch.tensor([[[6.0, 5, 18, 19]]]), torch.tensor([[2]])
    target, positive = assign(cells, 8, true, torch.tensor([1]))
    assert positive[0].nonzero()[:, 0].tolist() == [5], "the cell at 12, 12 alone"
    wanted = torch.zeros(1, 16, 3)
    wanted[0, 5, 2] = 1
    expected = sigmoid_focal_loss(logits, wanted, reduction="sum") + generalized_box_iou_loss(
        boxes[0, 5:6], true[0], reduction="sum"
    )
    given_ = tiny_losses(logits, boxes, cells, 8, true, label, torch.tensor([1]))
    torch.testing.assert_close(given_[0], expected)
    assert generalized_iou(torch.zeros(4), torch.zeros(4)).isfinite()
    assert target.shape == (1, 16)


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


# What is found.


def test_what_cells_say_becomes_boxes() -> None:
    class Says(TinyDetector):
        def forward(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits, boxes = torch.full((2, 16, 3), -9.0), torch.zeros(2, 16, 4)
            logits[0, 5, 2], boxes[0, 5] = 3.0, torch.tensor([4.0, 4, 20, 20])
            logits[0, 6, 2], boxes[0, 6] = 2.0, torch.tensor([4.0, 4, 20, 19])  # the same again
            logits[0, 7, 1], boxes[0, 7] = 1.0, torch.tensor([4.0, 4, 20, 20])  # another class
            logits[1, 3, 0], boxes[1, 3] = 0.0, torch.tensor([-5.0, 3, 50, 9])
            return logits, boxes

    first, second = detections(Says(ModelConfig(width=8), 1, 3), torch.zeros(2, 1, 32, 32), most=5, least=0.1)
    assert first.labels.tolist() == [2, 1]
    assert first.boxes.tolist() == [[4, 4, 20, 20]] * 2
    torch.testing.assert_close(first.scores, torch.tensor([3.0, 1.0]).sigmoid())
    assert second.boxes.tolist() == [[0, 3, 32, 9]], "within the image"
    assert len(detections(Says(ModelConfig(width=8), 1, 3), torch.zeros(2, 1, 32, 32), most=1)[0].labels) == 1


def perfect(n: int, noise: float = 0.0, seed: int = 0, crowds: bool = False) -> dict[str, Any]:
    """Boxes of n images and detections of them, jittered, some missing, some of another class, some extra."""
    random = np.random.default_rng(seed)
    begin = random.random((n, 4, 2)) * 60
    true = np.concatenate((begin, begin + 10 + random.random((n, 4, 2)) * 20), 2).astype(np.float32)
    labels = random.integers(0, 3, (n, 4))
    found = (
        np.concatenate((true, true[:, ::-1]), 1)
        + random.standard_normal((n, 8, 4)).astype(np.float32) * noise
    )
    found[..., 2:] = np.maximum(found[..., 2:], found[..., :2] + 1)
    scores = np.round(random.random((n, 8)).astype(np.float32), 1)
    given_labels = np.concatenate((labels, labels[:, ::-1]), 1)
    if noise:
        wrong = random.random((n, 8)) < 0.2
        given_labels = np.where(wrong, random.integers(0, 3, (n, 8)), given_labels)
        scores[random.random((n, 8)) < 0.3] = -1
    else:
        scores[:, 4:] = -1
    crowd = (random.random((n, 4)) < 0.3) if crowds else np.zeros((n, 4), bool)
    return {
        "boxes": found,
        "scores": scores,
        "labels": given_labels,
        "true_boxes": true,
        "true_labels": labels,
        "true_crowd": crowd.astype(np.uint8),
        "true_area": (true[..., 2:] - true[..., :2]).prod(-1),
        "pixel": np.ones((n, 1), np.float32),
        "true_count": random.integers(0, 5, n) if noise else np.full(n, 4),
    }


def overlap(one: Any, other: Any, crowd: bool) -> float:
    wide, high = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    both = max(0.0, wide) * max(0.0, high)
    areas = [float((box[2] - box[0]) * (box[3] - box[1])) for box in (one, other)]
    return float(both / (areas[0] if crowd else areas[0] + areas[1] - both))


def by_hand(rows: dict[str, Any], threshold: float) -> Iterator[float]:
    """Average precision of each class that is there, with loops: greedy matching, 101 recalls."""
    n = len(rows["scores"])
    for label in range(3):
        verdicts, wanted = list[tuple[float, int, int, bool]](), 0
        for i in range(n):
            truths = [
                (rows["true_boxes"][i, j].astype(float), bool(rows["true_crowd"][i, j]))
                for j in range(rows["true_count"][i])
                if rows["true_labels"][i, j] == label
            ]
            wanted += sum(not crowd for _, crowd in truths)
            places = [j for j in range(8) if rows["labels"][i, j] == label and rows["scores"][i, j] >= 0]
            taken = set[int]()
            for rank, j in enumerate(sorted(places, key=lambda j: -rows["scores"][i, j])):
                box, score = rows["boxes"][i, j].astype(float), float(rows["scores"][i, j])
                fits = [
                    (overlap(box, truth, False), k)
                    for k, (truth, crowd) in enumerate(truths)
                    if not crowd and k not in taken and overlap(box, truth, False) >= threshold
                ]
                if fits:
                    taken.add(max(fits)[1])
                    verdicts.append((-score, i, rank, True))
                elif not any(crowd and overlap(box, truth, True) >= threshold for truth, crowd in truths):
                    verdicts.append((-score, i, rank, False))
        if not wanted:
            continue
        right, precisions, recalls = 0, [], []
        for count, (*_, hit) in enumerate(sorted(verdicts, key=lambda v: v[:3]), 1):
            right += hit
            precisions.append(right / count)
            recalls.append(right / wanted)
        at = np.linspace(0, 1, 101)
        yield float(
            np.mean(
                [
                    max((p for p, r in zip(precisions, recalls, strict=True) if r >= x), default=0.0)
                    for x in at
                ]
            )
        )


@pytest.mark.compat
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([0.5, 2.0, 5.0]), st.booleans())
def test_mean_average_precision_is_what_loops_give(seed: int, n: int, noise: float, crowds: bool) -> None:
    rows = perfect(n, noise, seed, crowds)
    given_ = average_precision(rows, 3)
    at_50 = list(by_hand(rows, 0.5))
    assert given_["map_50"] == pytest.approx(np.mean(at_50) if at_50 else 0.0, abs=1e-9)
    every = [list(by_hand(rows, threshold)) for threshold in np.linspace(0.5, 0.95, 10)]
    assert given_["map"] == pytest.approx(np.mean(every) if at_50 else 0.0, abs=1e-9)


def test_all_found_is_one_and_nothing_found_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    rows = perfect(5)
    assert average_precision(rows, 3) == {"map": 1.0, "map_50": 1.0}
    nothing = {**rows, "scores": np.full((5, 8), -1.0, np.float32)}
    assert average_precision(nothing, 3) == {"map": 0.0, "map_50": 0.0}
    empty = {**rows, "true_count": np.zeros(5, np.int64)}
    assert average_precision(empty, 3) == {"map": 0.0, "map_50": 0.0}
    assert capsys.readouterr().out == ""


class Jittered(Detection):
    """Finds what is there, each box a little beside its place."""

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        rows = dict(super().measure(model, batch))
        true = rows["true_boxes"]
        valid = torch.arange(true.shape[1]) < rows["true_count"]
        rows["boxes"] = true + torch.sin(true * 37) * 2
        rows["labels"] = torch.where(true[..., 0] % 5 < 1, 0, rows["true_labels"])
        rows["scores"] = torch.where(valid, true.sum(2) % 1.7 / 1.7, -1.0)
        return rows


def evaluated(world: World, recipe_: Recipe) -> dict[str, float]:
    from trainer.data.builtin import boxes

    sizes = boxes.TRAIN, boxes.TEST
    boxes.TRAIN, boxes.TEST = 2, 25  # ranks were forked before any test
    try:
        task = Jittered(recipe_.data, recipe_.model, recipe_.detection, 0)
    finally:
        boxes.TRAIN, boxes.TEST = sizes
    share = evaluation_share(len(task.evaluation_data), 3, world.rank, world.size)
    loader = RingLoader(Source(task.evaluation_data, share), world.device, 0, LoaderConfig())
    torch.manual_seed(3)
    metrics = evaluate(task, task.model(), loader, share, world, PrecisionConfig())
    loader.close()
    return metrics


def test_any_number_of_ranks_gives_the_same_figures(ranks: Ranks) -> None:
    (alone,) = ranks.run(1, evaluated, recipe())
    assert 0.1 < alone["map"] < alone["map_50"] < 1
    assert ranks.run(2, evaluated, recipe()) == [alone, alone]


# The recipes.


def test_the_embedded_recipe_learns_and_goes_on_with_the_same_bits() -> None:
    augment = {"scale": [0.8, 1.25], "mosaic": 0.2}
    chosen = recipe(epochs=4, optim={"lr": 0.01, "warmup_steps": 0.1}, detection=augment, data={"workers": 0})
    task = task_of(chosen)
    check_request(chosen, task, 2)
    state, losses = train_some(chosen, task, range(9))
    half, first = train_some(chosen, task, range(4))
    resumed, last = train_some(chosen, task, range(4, 9), half)
    assert first + last == losses
    assert_same_bits(state, resumed)
    _, later = train_some(chosen, task, range(9, 24), state)
    assert np.mean(later[-4:]) < 0.75 * losses[0], losses + later


@pytest.mark.slow  # the whole recipe, minutes; a shortened one runs above
def test_the_recipe_finds_four_of_five_digits(tmp_path: Path) -> None:
    from tests.helpers.rows import read_rows

    words = ["--out", str(tmp_path / "run"), "--set", "parallel.threads=1"]
    done = preloaded.run([sys.executable, "-m", "trainer", "train", "digits-detection", *words], timeout=3600)
    assert done.returncode == 0, done.stderr
    last = [row for row in read_rows(tmp_path / "run") if row["kind"] == "eval"][-1]
    assert last["map_50"] >= 0.80


@pytest.mark.parametrize("settings_", [[], ["model.name=retinanet_resnet50_fpn", "detection.norm=frozen"]])
def test_the_recipe_for_coco_runs_dry(settings_: list[str]) -> None:
    assert set(dry_run("coco-fasterrcnn", [*LITTLE, *settings_])) == {"map", "map_50"}


def test_padding_is_not_shown_to_torchvisions_models() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

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


@pytest.mark.parametrize(("norm", "kept"), [("frozen", "FrozenBatchNorm2d"), ("group", "GroupNorm")])
def test_no_batch_statistics_where_batches_are_small(norm: str, kept: str) -> None:
    with torch.device("meta"):
        model = make_detector(ModelConfig(name="fasterrcnn_resnet50_fpn"), norm, 64, 3, 5)
    kinds = [type(module).__name__ for module in model.modules()]
    assert "BatchNorm2d" not in kinds and kinds.count(kept) == 53


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"no detector 'fasterrcnn_resnet50_fp'.*fasterrcnn_resnet50_fpn"):
        chosen = recipe(model={"name": "fasterrcnn_resnet50_fp"})
        task_of(chosen).model()
    with pytest.raises(BadInputError, match=r"set detection.max_boxes=6"):
        task_of(recipe(detection={"max_boxes": 5}))
    with pytest.raises(BadInputError, match=r"data.image_size=96"):
        task_of(recipe(data={"image_size": 128}))
    with pytest.raises(ValueError, match="smallest factor"):
        recipe(detection={"scale": [2, 1]})
    with pytest.raises(BadInputError, match=r"data.path is missing"):
        task_of(recipe(data={"name": "coco"}))


def test_what_the_model_is_called_with() -> None:
    task = task_of(recipe())
    batch = batch_of(task, range(2))
    (image,) = task.inputs(batch)
    assert (image.shape, image.dtype) == ((2, 1, 96, 96), torch.float32)
    expected = (batch.fields[IMAGE].permute(0, 3, 1, 2) / 255 - 0.25) / 0.2
    torch.testing.assert_close(image, expected)
    logits, boxes = task.model()(image)
    assert (logits.shape, boxes.shape) == ((2, 144, 10), (2, 144, 4))
    assert task.describe()["classes"] == tuple("0123456789")
    assert {LABEL, CROWD} <= set(batch.fields)


@pytest.mark.slow  # a few steps go on above, in one process
def test_the_embedded_recipe_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Through whole attempts, with all that observes them."""
    chosen = recipe(
        max_steps=6,
        evaluation={"every": "end"},
        data={"name": "digits-canvas", "workers": 0},
        model={"width": 24, "blocks": [1, 1], "norm": "group"},
        log={"every": 2, "to": ["jsonl"]},
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert attempt(whole, chosen).code == 0
    assert attempt(cut, chosen, stop_after=3).code == 75
    assert attempt(cut, chosen).code == 0
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
