"""P4, P8: what `trainer submit` gives to an engine trains, stops with a checkpoint, and goes on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.run import engine, wait_for
from trainer.cli import main
from trainer.commands.submit import container
from trainer.commands.submit.spec import JobSpec

pytestmark = pytest.mark.container

NAME = f"trainer-launch-{os.getpid()}"
LONG = ("epochs=100000", "log.every=20", "parallel.threads=1")
# What coreutils' timeout gets from its own clock, a day later.
RING = "for p in /proc/[0-9]*; do [ $(cat $p/comm) != timeout ] || kill -ALRM ${p#/proc/}; done"


@pytest.fixture
def spec(train_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSpec]:
    """A job of somebody else's, whose folder is theirs."""
    if os.geteuid():
        pytest.skip("only root can give a folder to somebody else")
    (tmp_path / "runs").mkdir()
    os.chown(tmp_path / "runs", 12345, 12345)
    monkeypatch.chdir(tmp_path)
    resources = {"cpus_per_node": 2, "memory_gib": 6}
    common = {"recipe": "digits", "name": NAME, "image": train_image, "user": "12345:12345"}
    yield JobSpec(**common, **resources, settings=LONG)
    engine("rm", "--force", NAME, code=None)


def has_begun(name: str) -> bool:
    """Whether a row was shown: which one the first is depends on how fast the machine is."""
    return "  step " in engine("logs", name, code=None, expected=(".*",))


def exit_code(name: str) -> int:
    return int(engine("wait", name))


def test_docker_stops_with_a_checkpoint_goes_on_and_stops_at_the_time_limit(spec: JobSpec) -> None:
    words = ["submit", spec.recipe, "--on", "docker", "--image", spec.image, "--name", NAME]
    words += ["--user", spec.user, "--cpus-per-node", "2", "--memory", "6"]
    assert main([*words, *(word for setting in LONG for word in ("--set", setting))]) == 0
    wait_for(lambda: has_begun(NAME), "a row")
    engine("stop", NAME)
    assert exit_code(NAME) == 75
    engine("start", NAME)
    wait_for(lambda: engine("logs", NAME, expected=(".*",)).count("run folder") == 2, "a second start")
    wait_for(lambda: "resumes after step" in engine("logs", NAME, expected=(".*",)), "going on")
    assert container.timed(spec)[5] == "86400"
    assert "stopped by SIGUSR1" not in engine("logs", NAME, expected=(".*",))
    engine("exec", NAME, "sh", "-c", RING)
    assert exit_code(NAME) == 75
    assert "stopped by SIGUSR1" in engine("logs", NAME, expected=(".*",))
    run = Path("runs") / NAME
    assert {path.stat().st_uid for path in run.rglob("*")} == {12345}
