"""On a real Slurm of three nodes a job loses one, and ends on the two others with the same bits."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.cluster_slurm import PORT, THREE, Slurm, missing, running, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]
ROOT = Path(__file__).parents[2]
SETTINGS = (
    *("data.global_batch_size=96", "data.micro_batch_size=16", "epochs=20", "model.width=8"),
    *("parallel.threads=1", "parallel.reduction=tree", "checkpoint.every=10", "log.every=5"),
)
WORDS = ["train", "digits", *(word for setting in SETTINGS for word in ("--set", setting))]


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        if os.environ.get("TRAINER_REQUIRE_SLURM"):
            pytest.fail(why)
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm") / "three"
    for parent in folder.parents[:2]:  # munge wants its socket's folder to be seen by all
        parent.chmod(0o755)
    hosts, line = Path("/etc/hosts"), f"127.0.0.1 {' '.join(THREE)}\n"
    with hosts.open("a") as file:
        file.write(line)
    try:
        with running(folder, THREE) as started:
            yield started
    finally:
        hosts.write_text(hosts.read_text().replace(line, ""))


def test_a_job_of_two_or_three_nodes_outlives_one(slurm: Slurm, tmp_path: Path) -> None:
    run, log, script = tmp_path / "run", tmp_path / "log", tmp_path / "job.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2-3 --ntasks=6 --spread-job --mem=3G --requeue\n"
        f"#SBATCH --output={log} --open-mode=append\nexport MASTER_PORT={PORT}\n"
        "srun --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 --export=ALL "
        f"{sys.executable} -m trainer {' '.join(WORDS)} --out {run} "
        "--nproc-per-node $((6 / SLURM_JOB_NUM_NODES))\n"
    )
    job = slurm.tell("sbatch", "--parsable", str(script))
    until(lambda: any((run / "checkpoints").glob("step-*")), lambda: log.exists() and log.read_text())
    slurm.tell("scontrol", "update", f"nodename={THREE[2]}", "state=down", "reason=test")
    assert "starts ranks 4 to 5 of 6" in log.read_text()  # on three nodes
    until(lambda: slurm.state(job) == "PENDING")
    slurm.release(job)
    slurm.completes(job, log)
    assert "starts ranks 3 to 5 of 6" in log.read_text()  # on two
    whole = preloaded.run(
        [sys.executable, "-m", "trainer", *WORDS, "--nproc-per-node", "3", "--out", tmp_path / "whole"],
        cwd=ROOT,
    )
    assert whole.returncode == 0, whole.stderr
    weights = [folder / "model.safetensors" for folder in (run, tmp_path / "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
