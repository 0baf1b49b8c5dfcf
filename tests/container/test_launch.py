"""P4, P8: what `trainer job docker` gives to an engine trains, stops with a checkpoint, and goes on."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.run import engine, wait_for
from tests.helpers.job_files import printed

pytestmark = pytest.mark.container

NAME = f"trainer-launch-{os.getpid()}"
LONG = ("epochs=100000", "log.every=20", "parallel.threads=1")
# What coreutils' timeout gets from its own clock, a day later.
RING = "for p in /proc/[0-9]*; do [ $(cat $p/comm) != timeout ] || kill -ALRM ${p#/proc/}; done"


@pytest.fixture
def script(train_image: str, tmp_path: Path) -> Iterator[str]:
    """A job of somebody else's, whose folder is theirs."""
    if os.geteuid():
        pytest.skip("only root can give a folder to somebody else")
    (tmp_path / "runs").mkdir()
    os.chown(tmp_path / "runs", 12345, 12345)
    place = ("--image", train_image, "--volume", f"{tmp_path}/runs:/workspace/runs", "--out", f"runs/{NAME}")
    limits = ("--user", "12345:12345", "--cpus-per-task", "2", "--mem", "6G")
    yield printed("docker", *place, *limits, *LONG)
    engine("rm", "--force", NAME, code=None)


def test_docker_stops_with_a_checkpoint_goes_on_and_stops_at_the_limit(script: str, tmp_path: Path) -> None:
    subprocess.run(["sh"], input=script, text=True, check=True, capture_output=True)
    # Which row is the first depends on how fast the machine is.
    wait_for(lambda: "  step " in engine("logs", NAME, code=None, expected=(".*",)), "a row")
    engine("stop", NAME)
    assert engine("wait", NAME) == "75\n"
    engine("start", NAME)
    wait_for(lambda: engine("logs", NAME, expected=(".*",)).count("run folder") == 2, "a second start")
    wait_for(lambda: "resumes after step" in engine("logs", NAME, expected=(".*",)), "going on")
    assert " 86400 " in script
    assert "stopped by SIGUSR1" not in engine("logs", NAME, expected=(".*",))
    engine("exec", NAME, "sh", "-c", RING)
    assert engine("wait", NAME) == "75\n"
    assert "stopped by SIGUSR1" in engine("logs", NAME, expected=(".*",))
    run = tmp_path / "runs" / NAME
    assert {path.stat().st_uid for path in run.rglob("*")} == {12345}
