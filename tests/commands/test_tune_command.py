"""Promise: `trainer tune`, its file, and `data.micro_batch_size: auto`: chosen once, before ranks."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.helpers import preloaded
from tests.helpers.manifests import least_manifest
from tests.helpers.waiting import until
from trainer.cli import main
from trainer.commands.tune import tune as command
from trainer.config.recipe_file import load_recipe
from trainer.launch import worker
from trainer.train.request import Request
from trainer.train.start import resolve as start
from trainer.train.start.tune import job
from trainer.train.start.tune.job import Interrupted, Job
from trainer.train.start.tune.search import Probe, ProbeFailed, SizeSearchResult

GIB = 1 << 30
FITS = Probe(16, True, 2 * GIB, 4 * GIB, GIB, "memory (planted)", 100.0, 3.0)
SMALL = ["--set", "model.width=4", "--set", "device=cpu", "--set", "log.to=[jsonl]"]
AUTO = ["--set", "data.micro_batch_size=auto"]


class Starts:
    """What was asked of the launcher and of the search, neither of which does anything."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.jobs: list[Job] = []
        self.found: SizeSearchResult | Exception = SizeSearchResult(FITS, [FITS])
        self.probe = FITS

    def launch(self, _: str, request: dict[str, Any], *__: Any, **___: Any) -> int:
        self.requests.append(request)
        return 0

    def choose(self, job: Job, *_: Any) -> SizeSearchResult:
        self.jobs.append(job)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def run_probe(self, job: Job, micro_batch_size: int, *_: Any) -> Probe:
        self.jobs.append(job)
        return replace(self.probe, micro_batch_size=micro_batch_size)

    def data(self) -> dict[str, Any]:
        """What the ranks of the last start are to load."""
        data: dict[str, Any] = self.requests[-1]["recipe"]["data"]
        return data


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Starts:
    fake = Starts()
    monkeypatch.setattr(start, "launch", fake.launch)
    monkeypatch.setattr(job, "choose", fake.choose)
    monkeypatch.setattr(command, "run_probe", fake.run_probe)
    monkeypatch.chdir(tmp_path)
    return fake


def stored(folder: Path, micro_batch_size: int) -> None:
    """A run that was stopped."""
    from trainer.train.components.task import data_of, make_task

    recipe = load_recipe("digits", [*SMALL[1::2], f"data.micro_batch_size={micro_batch_size}"])
    folder.mkdir()
    manifest = least_manifest(
        config=recipe.model_dump(mode="json"), threads=2, fingerprint=data_of(recipe, make_task(recipe))
    )
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_auto_is_chosen_once_and_handed_to_the_ranks(
    starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits", *SMALL, *AUTO, "--nproc-per-node", "2"]) == 0
    assert len(starts.jobs) == 1
    assert (starts.jobs[0].ranks, starts.jobs[0].recipe.data.global_batch_size) == (2, 64)
    assert starts.data()["micro_batch_size"] == 16
    said = capsys.readouterr().out
    assert "2.00 GiB beside 1.00 GiB of others, of 4.00 GiB of memory (planted)" in said
    assert "accumulation 2 keeps data.global_batch_size=64" in said


def test_a_recipe_may_say_auto(starts: Starts, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("epochs: 1\ndata: {micro_batch_size: auto}\ndevice: cpu\n")
    assert main(["train", "mine.yaml"]) == 0
    assert starts.data()["micro_batch_size"] == 16
    assert main(["train", "mine.yaml", "--set", "data.micro_batch_size=32"]) == 0
    assert len(starts.jobs) == 1
    assert starts.data()["micro_batch_size"] == 32


def test_a_run_goes_on_with_what_it_was_begun_with(
    starts: Starts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path / "run", 8)
    request = ["train", "digits", *SMALL, "--out", "run"]
    for mode in ("auto", "force"):
        assert main([*request, *AUTO, "--resume", mode]) == 0
        assert starts.data()["micro_batch_size"] == 8
    assert starts.jobs == []
    assert main([*request, "--set", "data.micro_batch_size=16"]) == 2
    assert "data.micro_batch_size: 8, now 16" in capsys.readouterr().err
    assert main([*request, "--set", "data.micro_batch_size=16", "--resume", "force"]) == 0
    assert starts.data()["micro_batch_size"] == 16


def test_ranks_of_torchrun_take_what_is_stored_or_say_what_to_do(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[int] = []
    monkeypatch.setattr(worker, "Worker", lambda: nullcontext(SimpleNamespace(exit_code=0)))  # it is no rank

    def train_rank(request: Request, _: Any) -> int:
        trained.append(request.recipe.data.micro_batch_size)
        return 0

    monkeypatch.setattr(start, "train_rank", train_rank)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    stored(tmp_path / "run", 8)
    assert main(["train", "digits", *SMALL, *AUTO, "--out", "run"]) == 0
    assert trained == [8]
    assert main(["train", "digits", *SMALL, *AUTO, "--out", "other"]) == 2
    told = capsys.readouterr().err
    assert "use `trainer train` without it, or `trainer tune RECIPE` and then --tuned" in told
    assert not (tmp_path / "other").exists()
    assert starts.jobs == []


@pytest.mark.parametrize(
    ("found", "code", "line"),
    [
        (
            SizeSearchResult(
                None,
                [
                    replace(
                        FITS, micro_batch_size=1, fits=False, note="it grew; weights: 1.5 GiB on each rank"
                    )
                ],
            ),
            2,
            "not even data.micro_batch_size=1 fits: 2.00 GiB beside",
        ),
        (
            ProbeFailed("rank 0 of 1 failed:\nTraceback\n  File x\nZeroDivisionError: oh"),
            2,
            "ZeroDivisionError: oh",
        ),
        (Interrupted("SIGTERM"), 1, "stopped by SIGTERM before it began"),
    ],
)
def test_what_ends_the_search_is_one_line(
    found: Any, code: int, line: str, starts: Starts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts.found = found
    assert main(["train", "digits", *SMALL, *AUTO]) == code
    said = capsys.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
    assert starts.requests == []


def test_help_shows_auto(starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", *AUTO, "--help-config"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "data.micro_batch_size " in line)
    assert "int | auto" in line
    assert line.endswith("(digits: auto)")
    assert main(["train", "digits", "--set", "data.micro_batch_size=most"]) == 2
    assert "allowed: a whole number or auto" in capsys.readouterr().err
    assert starts.jobs == []


def test_commands_that_need_a_number_say_so(starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "digits", *SMALL, *AUTO, "--check"]) == 2
    assert "there is nothing to check" in capsys.readouterr().err
    assert starts.jobs == []


def tuned(starts: Starts, *more: str) -> dict[str, Any]:
    assert main(["tune", "digits", *SMALL, *more]) == 0
    found: dict[str, Any] = yaml.safe_load(Path("tuned.yaml").read_text())
    assert len(starts.jobs) == 1
    return found


def test_what_was_tuned_is_written_with_its_evidence_and_used(
    starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tuned(starts)
    assert file["settings"] == {"data": {"micro_batch_size": 16}}
    assert (file["recipe"], file["ranks"], file["device"]) == ("digits", 1, "cpu")
    assert file["evidence"]["probes"][0]["peak_bytes"] == 2 * GIB
    assert file["evidence"]["limits"]["memory_bytes"] > 0
    (written,) = [line for line in capsys.readouterr().out.splitlines() if "written to tuned.yaml" in line]
    printed = shlex.split(written.partition(": trainer ")[2])  # it can be typed as it stands
    assert main(printed) == 0
    assert (starts.data()["micro_batch_size"], starts.requests[-1]["recipe"]["model"]["width"]) == (16, 4)
    # What a user gives wins, and what changes no memory may differ.
    more = [
        "--set",
        "data.micro_batch_size=8",
        "--set",
        "optim.lr=0.5",
        "--set",
        "seed=7",
        "--set",
        "epochs=2",
    ]
    assert main(["train", "digits", *SMALL, "--tuned", "tuned.yaml", *more]) == 0
    asked = starts.requests[-1]["recipe"]
    assert (starts.data()["micro_batch_size"], asked["optim"]["lr"], asked["epochs"]) == (8, 0.5, 2)
    assert len(starts.jobs) == 1
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["runs", "tuned.yaml"]


def _edit(change: Callable[[dict[str, Any]], object]) -> None:
    values = yaml.safe_load(Path("tuned.yaml").read_text())
    change(values)
    Path("tuned.yaml").write_text(yaml.safe_dump(values))


REFUSED: list[tuple[Callable[[dict[str, Any]], object], list[str], str]] = [
    (lambda _: None, ["--set", "model.width=64"], "another recipe, digits (model.width: 4, now 64)"),
    (lambda _: None, ["--set", "memory.allocator=async"], 'memory.allocator: the default, now "async"'),
    (lambda _: None, ["--set", "optim.name=sgd"], 'optim.name: the default, now "sgd"'),
    (lambda _: None, ["--set", "data.global_batch_size=128"], "data.global_batch_size: the default, now 128"),
    (lambda _: None, ["--nproc-per-node", "2"], "was made for 1 rank, not for 2"),
    (lambda file: file.update(device="cuda"), [], "was made on cuda, and this is cpu"),
    (lambda file: file.update(rank=1), [], "unknown key 'rank'; did you mean 'ranks'?"),
    (lambda file: file["settings"]["data"].update(worker=1), [], "did you mean 'settings.data.workers'?"),
    (lambda file: file["settings"].update(optim={"lr": 1}), [], "unknown key 'settings.optim'"),
    (
        lambda file: file["settings"]["data"].update(micro_batch_size="auto"),
        [],
        "settings.data.micro_batch_size=auto",
    ),
    (lambda file: file["differs"].update({"model.width": 64}), [], "model.width: 64, now 4"),
    (lambda file: file.pop("differs"), [], "differs"),
]


@pytest.mark.parametrize(("change", "more", "line"), REFUSED)
def test_a_file_that_does_not_belong_here_is_refused(
    change: Callable[[dict[str, Any]], object],
    more: list[str],
    line: str,
    starts: Starts,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuned(starts)
    _edit(change)
    assert main(["train", "digits", *SMALL, "--tuned", "tuned.yaml", *more]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert "--tuned tuned.yaml" in said
    assert starts.requests == []


@pytest.mark.parametrize("text", ["", "[1]", "recipe: [", "x" * (1 << 20), "\0"])
def test_a_file_of_something_else_is_one_line(
    text: str, starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tuned.yaml").write_text(text)
    assert main(["train", "digits", *SMALL, "--tuned", "tuned.yaml"]) == 2
    assert main(["train", "digits", *SMALL, "--tuned", "no/such.yaml"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert starts.requests == []


def test_a_folder_that_cannot_be_written_is_one_line(
    starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "digits", *SMALL, "--out", "no/such/tuned.yaml"]) == 2
    assert "--out no/such/tuned.yaml: can't be written" in capsys.readouterr().err
    assert len(starts.jobs) == 0  # before the probes


def test_check_tells_by_how_much(starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    request = ["tune", "digits", *SMALL, "--check"]
    assert main(request) == 0
    said = capsys.readouterr().out
    assert "data.micro_batch_size=64 fits" in said
    assert "819 MiB below the 95% that may be used" in said  # 0.95 x 4 GiB - 1 - 2
    starts.probe = replace(FITS, fits=False, peak_bytes=3 * GIB)
    assert main(request) == 1
    said = capsys.readouterr().out
    assert "data.micro_batch_size=64 doesn't fit" in said
    assert "205 MiB above the 95% that may be used" in said
    starts.probe = replace(FITS, fits=False, note="out of memory on cuda:0")
    assert main([*request, "--set", "data.micro_batch_size=32"]) == 1
    assert "(out of memory on cuda:0)" in capsys.readouterr().out
    starts.probe = replace(
        FITS, fits=False, peak_bytes=3 * GIB, note="more was wanted"
    )  # it was stopped there
    assert main(request) == 1
    assert (
        "of memory (planted), at least 205 MiB above the 95% that may be used (more was"
        in capsys.readouterr().out
    )
    assert not Path("tuned.yaml").exists()


def test_check_takes_what_was_tuned(starts: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    tuned(starts)
    assert main(["tune", "digits", *SMALL, "--check", "--tuned", "tuned.yaml"]) == 0
    assert "data.micro_batch_size=16 fits" in capsys.readouterr().out
    assert main(["tune", "digits", *SMALL, "--tuned", "tuned.yaml"]) == 2
    assert "--tuned is for --check" in capsys.readouterr().err
    assert main(["tune", "digits", *SMALL, "--check", "--set", "data.micro_batch_size=48"]) == 2
    assert "is not a multiple of data.micro_batch_size=48" in capsys.readouterr().err


# A rank that trains until it is told to stop.
HELD = """
import os, time
from pathlib import Path
if "RANK" in os.environ:
    from trainer.train.start.tune import trial
    def train_step(*_):
        Path(__file__).with_name("held").touch()
        while not trial.requested():
            time.sleep(0.01)
    trial.train_step = train_step
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    code, here, folder = (tmp_path / name for name in ("code", "here", "tmp"))
    for one in (code, here, folder):
        one.mkdir()
    (code / "sitecustomize.py").write_text(HELD)
    process = preloaded.Popen(
        [sys.executable, "-m", "trainer", "tune", "digits", *SMALL, "--set", "parallel.threads=1"],
        cwd=here,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": f"{code}:{Path(__file__).parents[2]}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: (code / "held").exists() or process.poll() is not None)
        (file,) = folder.glob("trainer-tune-*/rank-0.pid")
        pid = int(file.read_text())
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1
    assert errors == f"trainer: stopped by {number.name}: nothing was chosen, and nothing is left behind\n"
    assert not Path(f"/proc/{pid}").exists()
    assert [*folder.iterdir(), *here.iterdir()] == []
