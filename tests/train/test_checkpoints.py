"""When a loop saves its state: by steps, by rank 0's clock, and behind the rows that came before."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.toys import TokenTask, build_alone, make_recipe, rows_to
from trainer.distributed.parallel import World
from trainer.train import saving as checkpoints
from trainer.train.anomaly import AnomalyDetector, Finding
from trainer.train.loop import train
from trainer.train.saving import Checkpoints
from trainer.train.state import Run, load_state, numbers_of, tensors_of


def small_run(**checkpoint: Any) -> Run:
    data = {"global_batch_size": 4, "micro_batch_size": 2}
    return build_alone(make_recipe(data=data, log={"every": 2}, checkpoint=checkpoint), TokenTask(32))


def test_only_rank_0_asks_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others hear of it; asked by clocks of their own, they would save again a moment later."""
    now = [0.0]
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = small_run(every=0, minutes=2)
    first = Checkpoints(run)
    second = Checkpoints(replace(run, world=World(1, 2, 1, torch.device("cpu"), None)))
    now[0] = 119.0
    assert not first.overdue()
    now[0] = 121.0
    assert first.overdue() and not second.overdue()
    first.save()
    assert not first.overdue()


def test_rows_are_written_before_the_checkpoint_that_counts_them() -> None:
    """A run that is killed in between has them once; the other way round it would lack them."""
    run, rows = small_run(every=3), list[Any]()
    saved: dict[int, tuple[int, list[Any]]] = {}

    class Recording(Checkpoints):
        def save(self) -> None:
            saved[run.state.step] = run.state.logged.step, rows.copy()

    out = rows_to(run, lambda row: rows.append(row["step"]) if "lr" in row else None)
    train(run, replace(out, checkpoints=Recording(run)))
    assert saved == {3: (2, [2]), 6: (6, [2, 4, 6]), 8: (8, [2, 4, 6, 8])}


def test_anomalies_are_looked_for_before_each_checkpoint() -> None:
    """So that none lies behind one that nobody knows of: the detector looks at all steps up to there."""
    run, looked, saved = small_run(every=3), list[int](), list[int]()

    class Looking(AnomalyDetector):
        def look(self, done: int, now: bool = False) -> list[Finding]:
            looked.extend([done] * now)
            return super().look(done, now)

    class Recording(Checkpoints):
        def save(self) -> None:
            assert looked[-1] == run.state.step
            saved.append(run.state.step)

    assert run.recent is not None
    detector = Looking(run.recipe.anomaly, run.recent, None, 0, run.state.history)
    train(run, replace(rows_to(run), checkpoints=Recording(run)), detector)
    assert saved == looked == [3, 6, 8]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("row", 8, "speaks of later ones"), ("best", [0.5, 8], "later ones"), ("losses", [], "losses")],
)
def test_odd_numbers_change_no_tensor(name: str, value: Any, said: str) -> None:
    run, other = small_run(), small_run()
    with torch.no_grad():
        run.gradients.parameters[0].fill_(9.0)
    with pytest.raises(ValueError, match=said):
        load_state(other, 7, tensors_of(run.state), {**numbers_of(run.state, [0.0]), name: value})
    assert not bool((other.gradients.parameters[0] == 9.0).any())
