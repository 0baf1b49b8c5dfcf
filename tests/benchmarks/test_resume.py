"""Promise: the bench compares a resumed run with an uninterrupted one, and fails if they differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import against, resume
from benchmarks.__main__ import main
from benchmarks.cut_run import BATCH, BATCHES, EPOCHS, UPDATES, Resumed, Steps
from benchmarks.resume import CUTS, judge
from tests.helpers.libraries import require
from tests.helpers.tables import table_rows
from trainer.checkpoint import store
from trainer.train.state import TrainState, load_tensors


def test_the_trainer_goes_on_with_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume"]) == 0
    table = table_rows(capsys.readouterr().out)
    assert [row[1:] for row in table] == [
        [str(cut), str(UPDATES - cut), "0", "0", "0", "same", "same"] for cut in CUTS
    ]


def test_each_epoch_has_every_sample_once() -> None:
    """What is noted is what was trained on."""
    (resumed,) = resume.resume(33)
    whole = resumed.whole.samples
    for epoch in range(EPOCHS):
        seen = [sample for update in whole[epoch * BATCHES :][:BATCHES] for sample in update]
        assert sorted(seen) == list(range(BATCHES * BATCH))
    assert whole[0] != whole[BATCHES]
    assert len(set(resumed.whole.losses)) == UPDATES


def forget_the_count(state: TrainState, step: int, saved: Any) -> None:
    optimizer = {**saved["optimizer"], "updates": state.lr.updates.clone()}
    load_tensors(state, step, {**saved, "optimizer": optimizer})


def forget_the_moments(state: TrainState, step: int, saved: Any) -> None:
    load_tensors(state, step, saved)
    for slots in state.optimizer.state.values():
        slots["exp_avg"].zero_()


def one_bit(state: TrainState, step: int, saved: Any) -> None:
    load_tensors(state, step, saved)
    # Not the lowest: the next updates may round it away, on some processors and not on others.
    next(state.model.parameters()).detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 15)


def a_step_late(folder: Path) -> Any:
    found, skipped = store.newest_good(folder)
    assert found is not None
    return found._replace(step=found.step + 1), skipped


@pytest.mark.parametrize(
    ("what", "mutant", "other_samples"),
    [
        ("load_tensors", forget_the_count, "0"),
        ("load_tensors", forget_the_moments, "0"),
        ("load_tensors", one_bit, "0"),
        ("load_tensors", lambda *_: None, "0"),
        ("newest_good", a_step_late, "27"),
    ],
    ids=["count", "moments", "bit", "nothing", "late"],
)
def test_a_run_that_goes_on_wrongly_fails_the_bench(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    mutant: Callable[..., Any],
    other_samples: str,
) -> None:
    monkeypatch.setattr(resume, what, mutant)
    monkeypatch.setattr(resume, "CUTS", (33,))
    assert main(["resume"]) == 1
    (row,) = table_rows(capsys.readouterr().out)
    assert row[3] == other_samples
    assert row[-2:] == ["other", "DIFFERENT"]


def steps(samples: list[list[int]], losses: list[float], weight: float = 1.0) -> Steps:
    made = Steps()
    made.samples, made.losses, made.weights = samples, losses, torch.tensor([weight])
    return made


@pytest.mark.parametrize(
    ("later", "score"),
    [
        (steps([[2], [3]], [2.0, 4.0]), (2, 0, 0, 0.0, True)),
        (steps([[2], [4]], [2.0, 4.0]), (2, 1, 0, 0.0, True)),
        (steps([[2], [3]], [2.0, 5.0]), (2, 0, 1, 0.25, True)),
        (steps([[2], [3]], [2.0, 4.0], 1.5), (2, 0, 0, 0.0, False)),
        (steps([[2]], [2.0]), (2, 1, 1, 0.0, True)),
        (steps([[2], [3], [1]], [2.0, 4.0, 1.0]), (2, 1, 1, 0.0, True)),
    ],
    ids=["same", "samples", "loss", "weights", "too few", "too many"],
)
def test_the_judge(later: Steps, score: tuple[Any, ...]) -> None:
    found = judge(Resumed(steps([[1], [2], [3]], [1.0, 2.0, 4.0]), later, ""), 1)
    assert found == score
    assert found.same == (score[1:] == (0, 0, 0.0, True))


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_what_a_library_is_given_and_what_is_read(library: str) -> None:
    """The run that isn't cut has every sample once in each epoch; the other one goes on to the end."""
    require(library)
    for resumed in against.chosen(library, "resume")[library](33):
        whole = resumed.whole.samples
        assert len(whole) == UPDATES
        for epoch in range(EPOCHS):
            seen = [sample for update in whole[epoch * BATCHES :][:BATCHES] for sample in update]
            assert sorted(seen) == list(range(BATCHES * BATCH))
        assert len(resumed.later.samples) == UPDATES - 33
