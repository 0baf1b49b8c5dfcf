"""Promise: what fails leaves its report and says where; messages speak of what was typed, or of `fit`."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn import functional as F

from tests.helpers.refusals import named, refused
from tests.helpers.small_task import Small
from trainer import BadInputError, fit
from trainer.runs.report.write import report_failure
from trainer.train import summary


class Failing:
    """A hook that fails."""

    def after_step(self, row: Any) -> None:  # noqa: ARG002
        """Fails at the first row."""
        raise ValueError("no more")


SETTINGS = {"epochs": 50, "data.samples": 9, "parallel.threads": 1, "log.every": 5}


def test_a_failed_run_has_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no more"):
        fit(Small, SETTINGS, out=tmp_path / "run", hooks=[Failing])
    assert "failed" in (tmp_path / "run/report.html").read_text()
    said = capsys.readouterr().err
    assert named(said, f"{tmp_path / 'run'}")
    assert "data.samples has no effect with data.name=own" in said
    (tmp_path / "run/report.html").unlink()
    assert report_failure(tmp_path / "run", 75) == 75 and report_failure(tmp_path / "run", 2) == 2
    assert not (tmp_path / "run/report.html").exists()
    assert report_failure(tmp_path / "run", 1) == 1
    assert (tmp_path / "run/report.html").exists()
    with refused("seed 0 1", tmp_path / "run"):
        fit(Small, {**SETTINGS, "seed": 1}, out=tmp_path / "run")


def test_what_has_no_weight_decay_is_told_and_a_name_that_there_isnt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {**SETTINGS, "epochs": 1, "optim.no_decay": ["*weigh?"]}
    fit(Small, few, out=tmp_path / "run")
    assert "without weight decay: 2 of 2 tensors, 3 of 3 parameters" in capsys.readouterr().out
    fit(Small, {**few, "optim.weight_decay": 0}, out=tmp_path / "none")
    assert "no_decay and decay_1d have no effect: optim.weight_decay=0" in capsys.readouterr().out
    fit(Small, {**SETTINGS, "epochs": 1}, out=tmp_path / "usual")
    assert "without weight decay" not in capsys.readouterr().out
    with refused("optim.no_decay wieght"):
        fit(Small, {**few, "optim.no_decay": ["wieght"]}, out=tmp_path / "wrong")
    with pytest.raises(BadInputError, match=r"optim.no_decay: .*weigh?.*, now"):
        fit(Small, {**few, "optim.no_decay": ["*"]}, out=tmp_path / "run")


class Tied(Small):
    """Its head is only read, and its first layer is called past `__call__`."""

    def model(self) -> Any:
        return nn.ModuleDict({"first": nn.Linear(2, 2), "head": nn.Linear(2, 1)})

    def loss(self, model: Any, batch: Any) -> Any:
        y = F.linear(model["first"].forward(batch.fields["x"]), model["head"].weight)
        return F.mse_loss(y + model["head"].bias, batch.fields["y"], reduction="none")


@pytest.mark.parametrize(
    ("kept", "said"),
    [("head", "float32"), ("first", "float32")],
)
def test_what_is_kept_in_fp32_and_never_called_is_told(
    kept: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bf16 = {"precision.mode": "bf16", "precision.keep_fp32": [kept]}
    fit(Tied, {**SETTINGS, **bf16, "epochs": 1}, out=tmp_path / "run")
    assert named(capsys.readouterr().out, said)


def test_a_program_that_isnt_there_is_named_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the sources are run by `python -m trainer`; another `trainer` on PATH isn't this one."""
    programs, others = tmp_path / "bin", tmp_path / "others"
    for file in (programs / "python", others / "trainer", others / "tensorboard"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{others}")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    assert summary._as_typed(programs / "trainer") == "python -m trainer"
    assert summary._as_typed(programs / "tensorboard") == "python -m tensorboard.main"
    (programs / "trainer").write_text("")
    (programs / "trainer").chmod(0o755)
    assert summary._as_typed(programs / "trainer") == "trainer"
    monkeypatch.setenv("PATH", str(others))
    assert summary._as_typed(programs / "trainer") == str(programs / "trainer")
