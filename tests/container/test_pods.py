"""P3, P4, P8: the pods of a printed job, run: one that comes late, and one that is drained."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.container.pods import Job
from tests.helpers.job_files import printed

pytestmark = [pytest.mark.container, pytest.mark.xdist_group("pods")]

SETTINGS = (
    *("parallel.threads=1", "parallel.reduction=tree", "data.workers=0", "model.width=8"),
    *("data.global_batch_size=64", "data.micro_batch_size=32", "max_steps=400", "log.every=20"),
)
# However slow the machine is, the run doesn't end before the signal is there.
HOLD = """
import pathlib, time
class Hold:
    def after_step(self, row):
        print("holds", row["step"], flush=True)
        while not pathlib.Path("runs/signalled").exists(): time.sleep(0.1)
"""


def job(name: str, image: str, folder: Path, *more: str) -> Job:
    limits = ("--nodes", "2", "--cpus-per-task", "1", "--mem", "3G", "--shm-size", "1G")
    place = ("--image", image, "--volume", "runs:/workspace/runs", "--out", f"runs/{name}{os.getpid()}")
    return Job(printed("kubernetes", *place, *limits, *SETTINGS, *more), folder)


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


def test_a_drained_pod_stops_the_job_which_goes_on_alike(
    whole: Job, train_image: str, tmp_path: Path
) -> None:
    """Hosts that die are in tests/launch."""
    with closing(job("hit", train_image, tmp_path, "hooks.use=[runs/hold.py:Hold]")) as pods:
        (pods.runs / "hold.py").write_text(HOLD)
        pods.start(1, 0)
        pods.until(0, "holds")
        pods.signal(1, "TERM")
        (pods.runs / "signalled").touch()
        assert pods.end(0, 1) == [75, 75], pods.log(0) + pods.log(1)
        assert "exit code 75: " in pods.message(1)
        pods.replaced(0, 1)
        assert pods.end(0, 1) == [0, 0], pods.log(0) + pods.log(1)
        assert "resumes after step" in pods.log(0)
        weights = [one.runs / one.name / "model.safetensors" for one in (whole, pods)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
