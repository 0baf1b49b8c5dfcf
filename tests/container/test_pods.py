"""P3, P4, P8: the pods of a printed job, run: one that comes late, is drained, is killed."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.container.pods import Job
from tests.container.run import wait_for
from tests.helpers.job_files import printed

pytestmark = [pytest.mark.container, pytest.mark.xdist_group("pods")]

SETTINGS = (
    *("parallel.threads=1", "parallel.reduction=tree", "data.workers=0", "model.width=8"),
    *("data.global_batch_size=64", "data.micro_batch_size=32", "max_steps=24", "checkpoint.every=5"),
)


def job(name: str, image: str, folder: Path) -> Job:
    limits = ("--nodes", "2", "--cpus-per-task", "1", "--mem", "3G", "--shm-size", "1G")
    place = ("--image", image, "--volume", "runs:/workspace/runs", "--out", f"runs/{name}{os.getpid()}")
    return Job(printed("kubernetes", *place, *limits, *SETTINGS), folder)


def steps(job: Job) -> list[int]:
    return sorted(int(path.name[5:]) for path in (job.runs / job.name / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def whole(train_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job of two pods, the second of which comes late, that nothing disturbs."""
    if os.geteuid():
        pytest.skip("only root can give a claim to the pods' group")
    with closing(job("whole", train_image, tmp_path_factory.mktemp("whole"))) as pods:
        pods.start(0)
        pods.until(0, "waits for node 1")
        pods.start(1)
        pods.end(0, 1)
        yield pods


def test_two_pods_are_one_job_and_one_that_comes_late_is_waited_for(whole: Job) -> None:
    assert whole.codes == [[0], [0]], whole.log(0) + whole.log(1)
    assert "starts ranks 0 to 0 of 2" in whole.log(0)
    assert "starts ranks 1 to 1 of 2" in whole.log(1)
    assert whole.message(0) == whole.message(1) == ""


def test_pods_that_are_drained_and_killed_go_on_to_the_same_bits(
    whole: Job, train_image: str, tmp_path: Path
) -> None:
    with closing(job("hit", train_image, tmp_path)) as pods:
        pods.hold(7, 13, 19)
        pods.start(1)
        pods.until(1, "waits: node 0")
        pods.start(0)
        pods.until_held(7)
        pods.signal(1, "TERM")  # its pod is drained
        wait_for(lambda: not pods.is_held(7, 1), "the signal")
        pods.go_on(7)
        assert pods.end(0, 1) == [75, 75], pods.log(0) + pods.log(1)
        due, stopped = steps(pods)  # the one that was due, and one for the stop
        assert (due, stopped in (7, 8, 9)) == (5, True)
        assert "exit code 75: " in pods.message(1)

        pods.replaced(0, 1)
        pods.until_held(13)
        pods.signal(1, "KILL")  # its host goes down
        assert pods.end(1) == [137]
        pods.go_on(13)
        assert pods.end(0) == [75], pods.log(0)
        assert "exit code 75: " in pods.message(0)

        pods.replaced(0, 1)
        pods.until_held(19)
        pods.signal(0, "KILL")
        assert pods.end(0) == [137]
        pods.go_on(19)
        assert pods.end(1) == [75], pods.log(1)
        pods.replaced(0, 1)
        assert pods.end(0, 1) == [0, 0], pods.log(0) + pods.log(1)
        weights = [one.runs / one.name / "model.safetensors" for one in (whole, pods)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
