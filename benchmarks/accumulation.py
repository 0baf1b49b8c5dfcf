"""Is the gradient of every optimizer step that of its samples concatenated?

The trainer and any of the libraries are given the same model and the same micro-batches, whose number is not
a multiple of the accumulation. The optimizer is replaced by one that keeps the gradients which reach it and
changes nothing. Each gradient is then compared with that of the mean loss over the same samples, computed
from all of them at once.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.against import Judged, LibraryFailed, NotMeasured, blamed, chosen, print_judged
from benchmarks.array_task import ArrayTask
from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.data.dataset import NUM_ITEMS
from trainer.distributed.parallel import World
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED, BadInputError
from trainer.train.components.run import build
from trainer.train.step import train_step

MICRO_BATCH_SIZE, CLASSES = 2, 4
_LENGTH, _FEATURES = 5, 3
_LARGEST_ERROR = 1e-12


class Case(NamedTuple):
    """Micro-batches of an epoch, of 2 sequences of 5 tokens each.

    Attributes:
        micro_batches: How many; one epoch is trained.
        accumulation: How many make a step.
        tokens_vary: Whether only the first few tokens of a sequence are valid, of each another number.
    """

    micro_batches: int
    accumulation: int
    tokens_vary: bool

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, float64 (samples, 5, 3); their classes, int64 (samples, 5), -100 where not valid."""
        random = torch.Generator().manual_seed(self.micro_batches)
        samples = self.micro_batches * MICRO_BATCH_SIZE
        x = torch.randn(samples, _LENGTH, _FEATURES, dtype=torch.float64, generator=random)
        y = torch.randint(CLASSES, (samples, _LENGTH), generator=random)
        if self.tokens_vary:
            lengths = torch.randint(1, _LENGTH + 1, (samples, 1), generator=random)
            y[torch.arange(_LENGTH) >= lengths] = -100
        return x, y

    def loader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """The data as libraries like it: micro-batches in order."""
        return DataLoader(TensorDataset(*self.data()), batch_size=MICRO_BATCH_SIZE)


def steps_due(case: Case, last: Literal["cross", "weighted"] = "weighted") -> list[int]:
    """Micro-batches in each step; the last step has what is left, or with `cross` is filled."""
    full, rest = divmod(case.micro_batches, case.accumulation)
    return [case.accumulation] * full + [case.accumulation if last == "cross" else rest] * (rest > 0)


class Recorded:
    """Gradients that a library computed in a case.

    Attributes:
        model: As it was, for nothing changes it.
        seen: Micro-batches in the order in which their loss was computed: inputs and classes.
        updates: For each call of the optimizer the number of micro-batches seen before it, and the
            gradient, float64 (parameters,).
        way: How the library was used.
        variant: Where there are several ways, which one.
    """

    def __init__(self, way: str, model: nn.Module | None = None, variant: str = "") -> None:
        torch.manual_seed(0)
        self.way = way
        self.variant = variant
        self.model = model or nn.Sequential(nn.Linear(_FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).to(
            torch.float64
        )
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.updates: list[tuple[int, torch.Tensor]] = []

    def loss(
        self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean"
    ) -> torch.Tensor:
        """Cross entropy of a micro-batch, over its valid tokens; float64 ()."""
        self.seen.append((x, y))
        return cross_entropy(model(x), y, reduction)


class Recorder(torch.optim.Optimizer):
    """An optimizer that keeps the gradients and changes nothing."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__(recorded.model.parameters(), {"lr": 0.0})
        self._recorded = recorded

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Keeps the gradient; a closure computes it first."""
        loss = closure() if closure else None
        self._recorded.updates.append((len(self._recorded.seen), gradient_of(self._recorded.model)))
        return loss


def cross_entropy(logits: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Over whatever dimensions there are before the classes; -100 doesn't count."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


def gradient_of(model: nn.Module) -> torch.Tensor:
    """Returns all gradients concatenated, (parameters,); a missing one is 0."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts]).clone()


class Score(NamedTuple):
    """Correctness of a library's gradients.

    Attributes:
        cut: Micro-batches in each update.
        due: Micro-batches that each update should have.
        full: Largest relative error of the gradient over updates of a full step; None: there were none.
        ragged: For every other update, its gradient along the right one, in units of the right one.
        exact: Whether the updates are those due and no error is above 1e-12.
        right: Of the steps that are due, how many got an update of their micro-batches and no others, with
            no error above 1e-12.
    """

    cut: list[int]
    due: list[int]
    full: float | None
    ragged: list[float]
    exact: bool
    right: int


def judge(recorded: Recorded, accumulation: int, due: list[int]) -> Score:
    """Compares each gradient with that of the update's own samples, all at once."""
    cut, errors, ratios, before = [], [], [], 0
    for seen, gradient in recorded.updates:
        cut.append(seen - before)
        correct = _right_gradient(recorded, before, seen)
        errors.append(float((gradient - correct).norm() / correct.norm()))
        ratios.append(float(gradient @ correct / (correct @ correct)))
        before = seen
    full = [error for error, size in zip(errors, cut, strict=True) if size == accumulation]
    ragged = [ratio for ratio, size in zip(ratios, cut, strict=True) if size != accumulation]
    exact_spans = {span for span, error in zip(_spans(cut), errors, strict=True) if error <= _LARGEST_ERROR}
    right = sum(span in exact_spans for span in _spans(due))
    exact = cut == due and right == len(due)
    return Score(cut, due, max(full, default=None), ragged, exact, right)


def _spans(sizes: list[int]) -> list[tuple[int, int]]:
    """First micro-batch and the one after the last, of updates of so many each."""
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def _right_gradient(recorded: Recorded, start: int, stop: int) -> torch.Tensor:
    recorded.model.zero_grad()
    if start == stop:
        return gradient_of(recorded.model)
    x, y = (torch.cat(parts) for parts in zip(*recorded.seen[start:stop], strict=True))
    cross_entropy(recorded.model(x), y).backward()
    return gradient_of(recorded.model)


class _TokenTask(ArrayTask):
    """The case as the trainer takes it."""

    def __init__(self, case: Case, recorded: Recorded) -> None:
        self._recorded = recorded
        x, y = case.data()
        counts = {NUM_ITEMS: (y >= 0).sum(1).numpy()} if case.tokens_vary else {}
        super().__init__({"x": x.numpy(), "y": y.numpy(), **counts})
        if not case.tokens_vary:
            self.train_data.num_items = _LENGTH

    def model(self) -> nn.Module:
        """Returns the recorded model."""
        return self._recorded.model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy, summed over valid tokens."""
        x, y = batch.fields["x"], batch.fields["y"]
        if batch.weight is None:
            return self._recorded.loss(model, x.clone(), y.clone(), "sum")
        real = batch.weight > 0
        if real.any():
            self._recorded.seen.append((x[real], y[real]))
        each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
        return (each.sum(1) * batch.weight).sum()


def accumulate(case: Case, last: Literal["cross", "weighted"]) -> Recorded:
    """Runs the trainer's own step on a case."""
    recorded = Recorded(f"its own step, data.last_batch={last}")
    values: dict[str, Any] = {
        "epochs": 1,
        "data": {
            "global_batch_size": MICRO_BATCH_SIZE * case.accumulation,
            "micro_batch_size": MICRO_BATCH_SIZE,
            "last_batch": last,
        },
        "parallel": {"threads": 1},
    }
    world = World(0, 1, 0, torch.device("cpu"), None)
    run = build(Recipe.model_validate(values), _TokenTask(case, recorded), world, workers=0)
    run.state.optimizer = Recorder(recorded)
    batches = run.loader(run.share.batches())
    for step in range(run.plan.steps):
        train_step(run, batches, step)
    return recorded


CASES = (Case(5, 4, False), Case(7, 4, False), Case(5, 4, True), Case(7, 4, True))


def measure_ours() -> Iterator[Judged]:
    """Measures the trainer on every case, for both of its ways to treat a last step."""
    for last in _LASTS:
        for case in CASES:
            recorded = accumulate(case, last)
            score = judge(recorded, case.accumulation, steps_due(case, last))
            yield Judged("trainer", last, case, score, recorded.way)


def measure_library(name: str, measure: Callable[[Case], list[Recorded]]) -> Iterator[Judged]:
    """Runs a library's `accumulate` on every case."""
    for case in CASES:
        try:
            with blamed(name):
                found = measure(case)
        except NotMeasured as reason:
            yield Judged(name, "", case, None, f"not measured: {reason}")
            continue
        for recorded in found:
            score = judge(recorded, case.accumulation, steps_due(case))
            yield Judged(name, recorded.variant, case, score, recorded.way)


def with_script(
    libraries: Mapping[str, Callable[..., list[Recorded]]], timm_train: Path | None
) -> dict[str, Callable[..., list[Recorded]]]:
    """The libraries, timm with its train.py.

    Raises:
        BadInputError: If the file isn't there, or nobody asks for it.
    """
    if timm_train is not None:
        if "timm" not in libraries:
            raise BadInputError("--timm-train is only read with --against timm")
        if not timm_train.is_file():
            raise BadInputError(f"--timm-train: there is no file {timm_train}")
    scripts = {"timm": partial(libraries["timm"], script=timm_train)} if "timm" in libraries else {}
    return {**libraries, **scripts}


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument(
        "--against", default="", metavar="LIST", help="lightning,accelerate,timm: which to measure too"
    )
    bench.add_argument(
        "--timm-train", type=Path, metavar="FILE", help="timm's train.py, which its wheel doesn't hold"
    )
    bench.set_defaults(run=lambda options: bench_accumulation(options.against, options.timm_train))


def bench_accumulation(against: str = "", timm_train: Path | None = None) -> int:
    """Measures, prints a table and judges.

    Args:
        against: Libraries to measure beside the trainer, separated by commas.
        timm_train: timm's train.py, which its wheel doesn't hold.

    Returns:
        0 if every gradient of the trainer is exact (whatever those of the others are), 1 if not, 3 if it
        made no update to be judged.

    Raises:
        BadInputError: If a library isn't known, isn't there or fails.
    """
    try:
        return _bench(against, timm_train)
    except LibraryFailed as error:
        raise BadInputError(f"--against {error}; leave it out") from error


def _bench(against: str, timm_train: Path | None) -> int:
    libraries = with_script(chosen(against, "accumulate"), timm_train)
    theirs = (measure_library(name, measure) for name, measure in libraries.items())
    scores = print_judged(itertools.chain(measure_ours(), *theirs), _HEAD, _cells, _LEGEND)
    if not all(score.cut for score in scores):
        print("nothing measured: the trainer made no update")
        return EXIT_NOT_MEASURED
    return EXIT_DONE if all(score.exact for score in scores) else EXIT_FAILED


_LASTS: tuple[Literal["weighted"], Literal["cross"]] = ("weighted", "cross")
_HEAD = (
    *("library", "micro-batches at accumulation", "valid tokens", "micro-batches of each update", "due"),
    *("full steps: largest relative error", "other steps: gradient / right one", "verdict"),
)
_LEGEND = f"""\
- float64, one process, one epoch. The right gradient is that of the mean loss over the valid tokens of the
  update's samples, all at once. Exact: the updates due, and no relative error above {_LARGEST_ERROR:.0e}.
- trainer, weighted: the last step is what is left; cross (the default): the next epoch fills it."""


def _cells(judged: Judged) -> tuple[str, ...]:
    case, score = judged.case, judged.score
    return (
        judged.label,
        f"{case.micro_batches} at {case.accumulation}",
        "vary" if case.tokens_vary else "all",
        " + ".join(map(str, score.cut)) or "none",
        " + ".join(map(str, score.due)),
        "-" if score.full is None else f"{score.full:.1e}",
        ", ".join(f"{ratio:.3f}" for ratio in score.ragged) or "-",
        "exact" if score.exact else "WRONG",
    )
