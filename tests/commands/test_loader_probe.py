"""Promise: a probe of the loader trains real steps, and leaves nothing behind however it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.few_pictures import recipe_of, write_pictures
from tests.helpers.waiting import until
from trainer.data.fit import Loading
from trainer.host import limits
from trainer.host.limits import Limits, keep_to_share, read_limits, workers_per_rank
from trainer.train.tune import loader_probe as probe
from trainer.train.tune.loader_probe import Prober, Timed, Turn


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def processes_of(folder: Path) -> list[int]:
    """Processes that were started for something in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(folder) in command and state != "Z":
            found.append(int(process.name))
    return found


def test_a_probe_trains_real_steps_and_says_what_is_wrong(pictures: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "0").mkdir(parents=True)
        (tmp_path / part / "0" / "bad.png").write_bytes(b"nothing")
    # It forks, from a process that has one thread and OpenMP's threads asleep.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    preloaded.call(_probe, pictures, tmp_path, env=environment)


def _probe(pictures: str, spoiled: str) -> None:
    recipe = recipe_of(Path(pictures))
    with Prober(recipe, 1, 1, {}) as prober:
        for setting in (Loading(1, 2), Loading(0, 1), Loading(2, 4)):
            timed = prober.time(Turn(setting, 1, 6, 600.0), 120)
            assert isinstance(timed, Timed), timed
            assert timed.steps == 6
            assert timed.seconds > 0
        child = prober._process.pid
        # Cut by its own limit.
        timed = prober.time(Turn(Loading(1, 2), 1, 10**6, 0.3), 120)
        assert isinstance(timed, Timed)
        assert 0 < timed.steps < 10**6
        # It hangs: killed, and another one is started for the next setting.
        os.kill(child, signal.SIGSTOP)
        assert prober.time(Turn(Loading(1, 2), 1, 6, 1.0), 0.5) == "did not end within 0 s"
        assert isinstance(prober.time(Turn(Loading(1, 2), 1, 6, 600.0), 120), Timed)
        os.kill(prober._process.pid, signal.SIGKILL)
        assert prober.time(Turn(Loading(1, 2), 1, 6, 1.0), 120) == "ended with exit code -9"
    with Prober(recipe_of(Path(spoiled)), 1, 1, {}) as prober:
        assert "bad.png" in str(prober.time(Turn(Loading(1, 2), 1, 6, 1.0), 120))


def test_a_probe_leaves_the_cpus_of_other_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[frozenset[int]] = []
    monkeypatch.setattr(limits, "_before_binding", None)  # and as it was, afterwards
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: taken.append(cpus))
    for ranks in (1, 2, 3):
        keep_to_share(Limits(4, 0, 0, None), ranks)
    assert taken == [{0, 1}, {0, 1}]


RECIPE = """
epochs: 1000000
evaluate_every: 0
data: {{name: folder, path: {path}, image_size: 16, global_batch_size: 4, micro_batch_size: 4,
eval_batch_size: 4}}
model: {{width: 4}}
parallel: {{threads: 1}}
log: {{to: [], every: 1}}
checkpoint: {{minutes: 0, best: false}}
"""
# A data set that is waited for, as over a network; in the launcher and in what it forks.
SLOW = """
import sys, time
from trainer.data.formats.images import ImageDataset
from trainer.train.tune import loader
read = ImageDataset.read
def slow(self, *arguments):
    time.sleep(0.05)
    return read(self, *arguments)
ImageDataset.read = slow
loader._MOST_SECONDS = 15
from trainer.cli import main
if __name__ == '__main__':
    sys.exit(main())
"""


def start(pictures: Path, tmp_path: Path) -> "subprocess.Popen[str]":
    recipe, script = tmp_path / "pictures.yaml", tmp_path / "slow.py"
    recipe.write_text(RECIPE.format(path=pictures))
    script.write_text(SLOW)
    return subprocess.Popen(
        [sys.executable, str(script), "train", str(recipe), "--out", str(tmp_path / "run")],
        cwd=tmp_path,
        env={
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",  # the script imports torch before the command line can say so
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": str(Path(probe.__file__).parents[2]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def loader_line(pictures: Path, tmp_path: Path) -> str:
    """Starts the run, or goes on with it, and stops it; returns what it said of its loader."""
    process = start(pictures, tmp_path)
    said = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if "  step " in line:
                break
        process.send_signal(signal.SIGTERM)
        said += process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 75, said
    return next(line for line in said.splitlines() if "loader: " in line)


@pytest.mark.slow
def test_a_search_its_manifest_and_going_on(pictures: Path, tmp_path: Path) -> None:
    line = loader_line(pictures, tmp_path)
    assert "(searched: " in line
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    chosen = manifest["config"]["data"]
    # Waiting for data that takes no CPU: the more at once, the better.
    assert chosen["workers"] == workers_per_rank(read_limits(), 1, quarters=4)
    assert line.strip() in manifest["notes"]
    (kept,) = (tmp_path / "cache" / "trainer" / "loader").iterdir()
    assert json.loads(kept.read_text())["workers"] == chosen["workers"]
    again = loader_line(pictures, tmp_path)
    assert again.endswith("(as the run was begun)")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["config"]["data"] == chosen
    (tmp_path / "run").rename(tmp_path / "before")
    assert "(from the search of " in loader_line(pictures, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_during_the_search_ends_it_and_leaves_nothing(
    pictures: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(pictures, tmp_path)
    try:
        assert process.stdout is not None
        assert "looking for workers" in process.stdout.readline()
        # The probe and its workers carry the command line.
        until(lambda: len(processes_of(tmp_path)) > 1)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == (1 if number is signal.SIGTERM else -number)
    assert rest.count("\n") == (number is signal.SIGTERM)
    until(lambda: not processes_of(tmp_path), lambda: processes_of(tmp_path))
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()
