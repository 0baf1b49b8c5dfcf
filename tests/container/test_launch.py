"""P4, P8: what `trainer launch` gives to an engine trains, stops with a checkpoint, and goes on."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.container.run import engine
from tests.helpers import job_files
from trainer.cli import main
from trainer.commands.submit import container, docker, kubeflow
from trainer.commands.submit.spec import JobSpec, Site

pytestmark = pytest.mark.container

NAME = f"trainer-launch-{os.getpid()}"
LONG = ("epochs=100000", "log.every=20")


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
    return "  window " in engine("logs", name, code=None, expected=(".*",))


def until(happened: Callable[[], bool]) -> None:
    """Waits for up to two minutes."""
    for _ in range(240):
        if happened():
            return
        time.sleep(0.5)
    raise AssertionError("it didn't happen")


def exit_code(name: str) -> int:
    return int(engine("wait", name, timeout=150))


def start(spec: JobSpec, words: list[str] | None = None) -> None:
    """Starts the container of a job, with other words in it if they are given."""
    line = docker.words(spec)
    inside = len(container.timed(spec))
    engine(*line[1:-inside], *(words or line[-inside:]))


def test_docker_stops_with_a_checkpoint_and_goes_on(spec: JobSpec) -> None:
    words = ["launch", spec.recipe, "--on", "docker", "--image", spec.image, "--name", NAME]
    words += ["--user", spec.user, "--cpus-per-node", "2", "--memory", "6"]
    assert main([*words, *(word for setting in LONG for word in ("--set", setting))]) == 0
    until(lambda: has_begun(NAME))
    engine("stop", NAME, timeout=150)
    assert exit_code(NAME) == 75
    engine("start", NAME)
    until(lambda: engine("logs", NAME, expected=(".*",)).count("run folder") == 2)
    time.sleep(1)
    engine("stop", NAME, timeout=150)
    assert exit_code(NAME) == 75
    run = Path("runs") / NAME
    assert {path.stat().st_uid for path in run.rglob("*")} == {12345}


def test_the_time_limit_of_an_engine_leaves_a_checkpoint(spec: JobSpec) -> None:
    words = container.timed(spec)
    assert words[5] == "86400"
    start(spec, [*words[:5], "40", *words[6:]])
    assert exit_code(NAME) == 75
    assert "stopped by SIGUSR1" in engine("logs", NAME, expected=(".*",))


def test_the_shell_of_a_pytorch_job_behind_the_real_init(spec: JobSpec) -> None:
    pods = spec.model_copy(update={"runs": "pvc:runs", "user": "1000:1000"})
    objects = job_files.documents(kubeflow.render(pods, Site(kubeflow="v1")))
    ((_, template),) = job_files.templates(objects)
    words = [job_files.single(word) for word in template["spec"]["containers"][0]["args"]]
    start(spec, words)
    until(lambda: has_begun(NAME))
    engine("stop", NAME, timeout=150)
    assert exit_code(NAME) == 128 + 75
