"""All ways into a run do the same: the same data and bits, refusals, exit codes, lines and folders.

Ways differ in three exit codes alone: torchrun's own 1 for any failure, `fit`'s exception for a refusal, and
the signal that ends the process of `fit` (143: SIGTERM). A refusal is one line of all ranks together, with
all names of its case.
"""

import signal
from pathlib import Path

import pytest

from tests.helpers.planted import write
from tests.helpers.refusals import named
from tests.helpers.run_folders import manifest
from tests.helpers.waiting import until
from tests.helpers.ways import OWN, RAISED, RANKS, Ended, Job, Started

# How a case ends: its exit code, its lines on standard error, and its folder: `run` where a run is in it,
# `rest` where a folder without a run is left.
ENDS = {
    **dict.fromkeys(("own", "resume", "finished", "late"), (0, 0, "run")),
    "stop": (75, 0, "run"),
    "other": (2, 1, "run"),
    "full": (2, 1, "rest"),
    "signal": (1, 1, "none"),
    "requeue": (75, 1, "run"),
}
REFUSED = (2, 1, "none")

HOOK = """
class Watch:
    def after_step(self, row):
        with open("watched", "a") as file:
            print(row["step"], row["loss"], file=file)

class Failing(Watch):
    def __init__(self):
        raise KeyError("PASSWORD_FILE")
"""
ONCE = """
from pathlib import Path

class Once:
    def after_step(self, row):
        if row["step"] == 4 and not Path("failed").exists():
            Path("failed").touch()
            raise RuntimeError("once")
"""
# Its data never comes.
SLOW = """
import time
from pathlib import Path

class Slow(Own):
    def data(self):
        Path("prepares").touch()
        while True:
            time.sleep(0.01)

del Own
"""
# Once, in rank 0, which prepares first.
LATE = """
import os, time

def late():
    if os.environ["RANK"] == "0" and not os.path.exists("late"):
        open("late", "w").close()
        time.sleep(2.2)
"""
FILES = {
    "own.py": OWN,
    "once.py": ONCE,
    "watch.py": HOOK,
    "syntax.py": f"{OWN}\nclass :\n",
    "leaves.py": OWN.replace("x = np", "raise SystemExit(0)\n        x = np"),
    **dict.fromkeys(("table/train.csv", "table/val.csv"), "path,label" + "\ngone.png,a\ngone.png,b" * 8),
    "late.py": OWN.replace("x = np", "late()\n        x = np") + LATE,
    "slow.py": f"{OWN}\n{SLOW}",
}
WATCHED = {"data.limit": 24, "hooks.use": ["watch.py:Watch"]}
# Refusals: the job, and the names in its line.
TABLE = {"data.name": "table", "data.path": "table", "data.micro_batch_size": 4}
REFUSALS: dict[str, tuple[Job, str]] = {
    "syntax": (Job("syntax.py"), "syntax.py"),
    "key": (Job("own.py", {"optim.lr": -1}), "optim.lr"),
    "folder": (Job("digits", {"data.name": "folder", "data.path": "nowhere"}), "data.path nowhere"),
    "late hook": (Job("own.py", {"hooks.use": ["watch.py:Failing"]}), "watch.py:Failing PASSWORD_FILE"),
    "full": (Job("own.py"), "run"),
    "file": (Job("digits", TABLE), "gone.png"),
    "leaves": (Job("leaves.py"), "leaves.py"),
    "from": (Job("own.py", {}, {"init-from": "gone"}), "gone"),
}
# Each case by one way, in turns.
TURNS = [(case, [*RANKS][number % len(RANKS)]) for number, case in enumerate(REFUSALS)]


def wanted(case: str, way: str) -> tuple[int, int, str]:
    """How a case ends by a way."""
    code, lines, left = ENDS.get(case, REFUSED)
    if way == "fit" and case in ("signal", "requeue"):
        return 128 + signal.SIGTERM, 0, left
    if code and way.startswith("torchrun"):
        return 1, lines, left
    return RAISED if way == "fit" and code == 2 else code, lines, left


def place(folder: Path) -> Path:
    """A new folder with all files that a job needs."""
    return write(folder, FILES)


def check(case: str, way: str, folder: Path, ended: Ended, names: str = "") -> None:
    """Compares how a job ended with how its case ends."""
    run, text = folder / "run", "\n".join((*ended.lines, (folder / "stderr").read_text()))
    left = "run" if (run / "manifest.json").exists() else "rest" if run.exists() else "none"
    assert (ended.code, len(ended.lines), left) == wanted(case, way), f"{case}, {way}\n{text}"
    assert all(named(line, names) for line in ended.lines), f"{case}, {way}: {names}\n{text}"


def job(folder: Path, way: str, asked: Job) -> Ended:
    """Starts a job and waits for its end."""
    return Started(way, folder, asked).end()


def result_of(folder: Path) -> list[object]:
    """What the manifest says of the data, the numbers that the hook was given, and the model's bytes."""
    found = manifest(folder / "run")
    watched, model = (folder / name for name in ("watched", "run/model.safetensors"))
    hooked = watched.read_text() if watched.exists() else ""
    return [found["data"], found["fingerprint"], found["steps_done"], hooked, model.read_bytes()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A custom task: with fewer samples than it has, and a hook that wants rows."""
    folder = place(tmp_path_factory.mktemp("ways") / "whole")
    check("own", "launcher 2", folder, job(folder, "launcher 2", Job("own.py", WATCHED)))
    assert len((folder / "watched").read_text().splitlines()) == 3, "once for a job, not for a rank"
    assert "24" in manifest(folder / "run")["fingerprint"]["training data"].split()
    return folder


def test_a_custom_task_is_trained_and_resumed_to_the_same_bits(tmp_path: Path, whole: Path) -> None:
    """A part by each way, as the sums are the same for any number of ranks."""
    asked, folder = Job("own.py", WATCHED), place(tmp_path / "parts")
    steps = [("stop", "launcher 1", "2"), ("stop", "torchrun 2", "3"), ("stop", "slurm 2", "4")]
    for case, way, after in steps:
        check(case, way, folder, job(folder, way, asked._replace(options={"stop-after": after})))
        found = manifest(folder / "run")
        assert (found["status"], found["world_size"]) == ("stopped", RANKS[way])
    check("resume", "fit", folder, job(folder, "fit", asked))
    assert result_of(folder) == result_of(whole)
    before = (folder / "run" / "manifest.json").read_bytes()
    check("finished", "torchrun 1", folder, job(folder, "torchrun 1", asked))
    for way in ("launcher 2", "fit"):
        other = asked._replace(settings={**WATCHED, "seed": 7})
        check("other", way, folder, job(folder, way, other), "seed")
    assert (folder / "run" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(("case", "way"), TURNS)
def test_what_is_wrong_is_refused(case: str, way: str, tmp_path: Path) -> None:
    asked, names = REFUSALS[case]
    folder = place(tmp_path / "here")
    if case == "full":
        write(folder, {"run/config.yaml": "precious"})
    check(case, way, folder, job(folder, way, asked), names)


@pytest.mark.parametrize("way", ["torchrun 1", "slurm 2", "fit"])
def test_a_signal_while_it_prepares(way: str, tmp_path: Path) -> None:
    folder = place(tmp_path / "here")
    started = Started(way, folder, Job("slow.py"))
    until((folder / "prepares").exists)  # by rank 0; another one waits for it
    started.send(signal.SIGTERM)
    check("signal", way, folder, started.end(), "SIGTERM")


def test_a_signal_while_it_prepares_to_resume(tmp_path: Path) -> None:
    folder = place(tmp_path / "here")
    assert job(folder, "launcher 1", Job("own.py", {}, {"stop-after": "3"})).code == 75
    for way in ("launcher 2", "slurm 2"):
        (folder / "prepares").unlink(missing_ok=True)
        started = Started(way, folder, Job("slow.py"))
        until((folder / "prepares").exists)
        started.send(signal.SIGTERM)
        check("requeue", way, folder, started.end(), "SIGTERM")


def test_ranks_that_fail_are_started_again(tmp_path: Path, whole: Path) -> None:
    """By torchrun over the same store, in the same run folder."""
    settings = {"data.limit": 24, "hooks.use": ["once.py:Once"], "checkpoint.every": 1}
    folder = place(tmp_path / "here")
    assert job(folder, "torchrun 2", Job("own.py", settings, {"max-restarts": "1"})).code == 0
    assert manifest(folder / "run")["restarts"] == 1
    model = Path("run/model.safetensors")
    assert (folder / model).read_bytes() == (whole / model).read_bytes()


def test_data_that_take_longer_than_the_limits_of_a_step(tmp_path: Path) -> None:
    folder, asked = place(tmp_path / "here"), Job("late.py", {"parallel.timeout_s": 2, "parallel.hang_s": 1})
    check("late", "slurm 2", folder, job(folder, "slurm 2", asked))
