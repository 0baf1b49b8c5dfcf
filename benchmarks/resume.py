"""Does a run that was cut and gone on with do what it would have done?

The trainer and any of the libraries train the same small model on the same samples: shuffled, with dropout,
random augmentation, AdamW and a schedule. A checkpoint is taken on the way, in files. A second run, with
everything new as in a new process, goes on from them; each of its steps is compared with the first run's.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.against import Judged, blamed, chosen, print_judged
from benchmarks.array_task import ArrayTask
from benchmarks.cut_run import BATCH, BATCHES, EPOCHS, FEATURES, RATE, Resumed, Steps, arrays, small_model
from trainer.checkpoint.store import newest_good, write
from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.distributed.parallel import World
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED
from trainer.train.components.run import build
from trainer.train.state import Run, load_tensors, tensors_of
from trainer.train.step import train_step

CUTS = (7, 20, 33, 59)


class _Task(ArrayTask):
    """The same as the trainer takes it."""

    uniforms = FEATURES

    def __init__(self) -> None:
        super().__init__({name: array.numpy() for name, array in arrays().items()})
        self.seen = torch.empty(0)

    def model(self) -> nn.Module:
        """A new one."""
        return small_model()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy, summed."""
        self.seen, x = batch.fields["index"].clone(), batch.fields["x"]
        if batch.uniform is not None:
            x = x + batch.uniform - 0.5
        return F.cross_entropy(model(x), batch.fields["y"], reduction="sum")


def _started(seed: int) -> Run:
    torch.manual_seed(seed)  # as a process would have it; nothing may depend on it
    values: dict[str, Any] = {
        "epochs": EPOCHS,
        "data": {"global_batch_size": BATCH, "micro_batch_size": BATCH},
        "optim": {"lr": RATE},
        "parallel": {"threads": 1},
    }
    world = World(0, 1, 0, torch.device("cpu"), None)
    run = build(Recipe.model_validate(values), _Task(), world, workers=0)
    run.replica.train()
    return run


def _trained(run: Run, start: int, cut: int, folder: Path) -> Steps:
    steps = Steps()
    assert isinstance(run.task, _Task)
    batches = run.loader(run.share.batches(start))
    for step in range(start, run.plan.steps):
        run.state.loss.zero_()
        train_step(run, batches, step)
        steps.add(run.task.seen, run.state.loss)
        if step + 1 == cut:
            write(folder, cut, tensors_of(run.state), {})
    steps.end(run.state.model)
    return steps


def resume(cut: int) -> list[Resumed]:
    """The trainer's own step, state and files, cut after so many updates."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        whole = _trained(_started(1), 0, cut, folder)
        found, skipped = newest_good(folder)
        if found is None:
            raise RuntimeError(f"no checkpoint to go on from: {skipped}")
        run = _started(2)
        load_tensors(run.state, found.step, found.tensors)
        later = _trained(run, found.step, -1, folder)
    return [Resumed(whole, later, "tensors_of, store.write, newest_good, load_tensors; another global seed")]


class Score(NamedTuple):
    """Differences of the second run from the first after the cut.

    Attributes:
        due: Updates that the first run made after the cut.
        other_samples: Updates with other samples, or in another order, or that one run didn't make.
        other_loss: Updates whose loss isn't the same to the bit, or that one run didn't make.
        largest: Largest relative difference of a loss.
        weights: Whether the final weights are the same to the bit.
    """

    due: int
    other_samples: int
    other_loss: int
    largest: float
    weights: bool

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.other_samples and not self.other_loss and self.weights


def judge(resumed: Resumed, cut: int) -> Score:
    """Compares update with update."""
    whole, later = resumed.whole, resumed.later
    samples, losses = whole.samples[cut:], whole.losses[cut:]
    odd, pairs = abs(len(losses) - len(later.losses)), list(zip(losses, later.losses, strict=False))
    return Score(
        len(losses),
        odd + sum(a != b for a, b in zip(samples, later.samples, strict=False)),
        odd + sum(a != b for a, b in pairs),
        max((abs(a - b) / abs(a) for a, b in pairs), default=0.0),
        torch.equal(whole.weights, later.weights),
    )


def measure_cuts(
    name: str, measure: Callable[[int], list[Resumed]], cuts: tuple[int, ...]
) -> Iterator[Judged]:
    """A library's `resume`, or the trainer's, after each of some cuts."""
    for cut in cuts:
        with blamed(name):
            found = measure(cut)
        for resumed in found:
            yield Judged(name, resumed.variant, cut, judge(resumed, cut), resumed.way)


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument(
        "--against", default="", metavar="LIST", help="lightning,accelerate: which to measure too"
    )
    bench.set_defaults(run=lambda options: bench_resume(options.against))


def bench_resume(against: str = "") -> int:
    """Measures, prints a table and judges.

    Args:
        against: Libraries to measure beside the trainer, separated by commas.

    Returns:
        0 if every run of the trainer that was gone on with is the same to the bit (whatever those of the
        others are), 1 if not, 3 if there was no update to be judged.

    Raises:
        BadInputError: If a library isn't known or isn't there.
    """
    ways: dict[str, Callable[[int], list[Resumed]]] = {"trainer": resume, **chosen(against, "resume")}
    found = (one for name, measure in ways.items() for one in measure_cuts(name, measure, CUTS))
    scores = print_judged(found, _HEAD, _cells, _LEGEND)
    if not all(score.due for score in scores):
        print("nothing measured: the trainer made no update after a cut")
        return EXIT_NOT_MEASURED
    return EXIT_DONE if all(score.same for score in scores) else EXIT_FAILED


_HEAD = (
    *("library", "cut after update", "later updates", "of these with other samples", "with another loss"),
    *("largest relative difference of a loss", "final weights", "verdict"),
)

_LEGEND = f"""\
- {EPOCHS} epochs of {BATCHES} updates, float32, one process. Compared to the bit with the run that wrote the
  checkpoint and went on; an update that only one of the two made counts as different."""


def _cells(judged: Judged) -> tuple[str, ...]:
    score = judged.score
    return (
        judged.label,
        str(judged.case),
        str(score.due),
        str(score.other_samples),
        str(score.other_loss),
        f"{score.largest:.1e}" if score.largest else "0",
        "same" if score.weights else "other",
        "same" if score.same else "DIFFERENT",
    )
