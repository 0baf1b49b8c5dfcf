"""Promise: the loops of docs/from-other-trainers.md run as they stand: folds, a sweep, pruning."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "from-other-trainers.md"


class TrialPruned(Exception):  # noqa: N818
    """As optuna's: known to its study, and to nobody else."""


class Trial:
    """As optuna's: it prunes what is reported after the first of the even trials."""

    def __init__(self, number: int) -> None:
        self.number, self.reported = number, list[tuple[int, float]]()

    def suggest_float(self, _: str, low: float, high: float, log: bool) -> float:
        assert log
        return float(low * (high / low) ** ((self.number + 1) / 5))

    def report(self, value: float, step: int) -> None:
        self.reported.append((step, value))

    def should_prune(self) -> bool:
        return self.number % 2 == 0 and len(self.reported) == 2


class Study:
    """As optuna's."""

    best_params: Any = None

    def __init__(self) -> None:
        self.trials, self.pruned = list[Trial](), list[str]()

    def optimize(self, objective: Callable[[Trial], float], n_trials: int) -> None:
        values = {}
        self.trials = [Trial(number) for number in range(n_trials)]
        for trial in self.trials:
            try:
                values[trial.number] = objective(trial)
            except TrialPruned as pruned:
                self.pruned.append(str(pruned))
        self.best_params = max(values, key=values.__getitem__)


@pytest.mark.parametrize("turns", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_folds_a_sweep_and_pruning(turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, also a second time, which `.ci/run` runs."""
    monkeypatch.chdir(tmp_path)
    for turn in range(1, turns + 1):
        study, names = Study(), dict[str, Any]()
        pruners = SimpleNamespace(MedianPruner=lambda: None)
        made = {"create_study": lambda study=study, **_: study, "pruners": pruners}
        optuna: Any = SimpleNamespace(TrialPruned=TrialPruned, **made)
        monkeypatch.setitem(sys.modules, "optuna", optuna)
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
            exec(block.replace("EVERY = {", 'EVERY = {"parallel.threads": 1, '), names)
        files = tmp_path.glob("runs/[!l]*/manifest.json")
        manifests = {file.parent.name: json.loads(file.read_text()) for file in files}
        folds = [manifests[f"fold-{number}"] for number in (1, 2, 3)]
        assert len({one["config_hash"] for one in folds}) == 3, "each has a name of its own"
        assert len({json.dumps(one["fingerprint"]) for one in folds}) == 3, "and data of its own"
        assert min(names["accuracies"]) > 0.8
        assert len({run.folder for run in names["sweep"].values()}) == 4
        trials = [one["status"] for name, one in manifests.items() if not name.startswith(("fold-", "lr-"))]
        assert sorted(trials) == sorted(["finished", "stopped"] * 2 * turn)
        assert study.pruned == ["pruned after step 8"] * 2
        assert [len(trial.reported) for trial in study.trials] == [2, 4, 2, 4]
