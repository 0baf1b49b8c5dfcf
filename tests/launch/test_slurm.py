"""On a real Slurm a job is stopped, requeued, and ends with the bits of one that never stopped."""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.cluster_slurm import NODES, PORT, PREFIX, Slurm, missing, running, until
from tests.helpers.job_files import printed
from tests.helpers.programs import program
from tests.helpers.run_folders import manifest
from tests.helpers.ways import Ended, Job, Started
from tests.launch.test_ways_in import REFUSALS, WATCHED, check, place, result_of

# Without a Slurm: tests/commands/test_job_slurm.py (scripts), test_cluster.py (what srun says).
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]
ROOT = Path(__file__).parents[2]
VENV = Path(sys.executable).parent.parent
# Some seconds of training on two quiet cores; a checkpoint early, so that there is one to go on from.
SETTINGS = ("data.micro_batch_size=4", "epochs=6", "parallel.threads=1", "checkpoint.every=20", "log.every=5")
TWO = ("--nodes", "2", "--cpus-per-task", "2")
# The smallest job, where a second rank would only cost time.
ONE = ("--cpus-per-task", "2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        if os.environ.get("TRAINER_REQUIRE_SLURM"):
            pytest.fail(why)
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    for parent in folder.parents[:2]:  # munge wants its socket's folder to be seen by all
        parent.chmod(0o755)
    with running(folder) as started, _names():
        yield started


@pytest.fixture
def slurm(cluster: Slurm) -> Slurm:
    """The cluster, without what the test before left there: jobs, and nodes that are down."""
    cluster.tidy()
    return cluster


@contextmanager
def _names() -> Iterator[None]:
    """The nodes' names lead to this host while the tests run."""
    hosts, line = Path("/etc/hosts"), f"127.0.0.1 {' '.join(NODES)}\n"
    with hosts.open("a") as file:
        file.write(line)
    try:
        yield
    finally:
        hosts.write_text(hosts.read_text().replace(line, ""))


def _submit(
    slurm: Slurm, folder: Path, *words: str, settings: Iterable[str] = SETTINGS, **environment: str
) -> tuple[str, Path]:
    """Sends a job whose run folder is FOLDER/job; returns its number and its log."""
    own = ("--mem", "3G", "--time", "60", "--grace", "30", "--master-port", str(PORT), "--partition", "main")
    here = ("--out", str(folder / "job"), "--venv", str(VENV))
    script = folder / "job.sbatch"
    script.write_text(printed("slurm", *here, *own, *words, *settings, recipe="digits"))
    job = slurm.tell("sbatch", "--parsable", str(script), cwd=folder, **environment)
    return job, folder / f"job-{job}.out"


def _rows(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def test_a_job_that_is_preempted_cancelled_and_submitted_again_ends_with_the_same_bits(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Its site gives jobs another partition and no variable."""
    run, site = tmp_path / "job", {"SBATCH_EXPORT": "NONE", "SBATCH_PARTITION": "spare"}
    job, log = _submit(slurm, tmp_path, *TWO, **site)
    until(lambda: _rows(run) > 2)
    (line,) = [line for line in _text(log).splitlines() if line.startswith("warning: this job has")]
    assert "Partition=spare" in line and "main" in line and "TimeLimit" not in line
    wrapped = "--parsable --partition=urgent --nodes=2 --exclusive --wrap=true"
    urgent = slurm.tell("sbatch", *wrapped.split(), cwd=tmp_path)
    until(lambda: "requeued, number 1" in _text(log), lambda: _text(log))
    assert "the same command resumes from there" in _text(log)
    until(lambda: slurm.state(urgent) == "COMPLETED")
    slurm.release(job)
    until(lambda: _text(log).count("resumes after step") == 1 and manifest(run)["status"] == "running")
    (first, second) = [attempt["job"] for attempt in manifest(run)["attempts"]]
    assert first == {"slurm_job": job, "slurm_nodes": f"{PREFIX}[1-2]"}
    assert second == {**first, "slurm_restarts": "1"}
    slurm.tell("scancel", job)
    until(lambda: slurm.state(job) == "CANCELLED")
    until(lambda: not slurm.tell("squeue", "-h"))  # it still holds its port while it completes
    assert _text(log).count("requeued") == 1  # who cancels doesn't want it back
    assert manifest(run)["status"] == "stopped"
    again, log = _submit(slurm, tmp_path, *TWO)
    slurm.completes(again, log)
    assert "warning: this job has" not in _text(log)
    assert manifest(run)["status"] == "finished"
    assert [path.name for path in (run / "logs").iterdir()] == ["rank-1.log"]
    # One that never stopped, on one node.
    trained = [sys.executable, "-m", "trainer", "train", "digits", "--nproc-per-node", "2", *SETTINGS]
    whole = preloaded.run([*trained, "--out", tmp_path / "whole"], cwd=ROOT)
    assert whole.returncode == 0, whole.stderr
    weights = [folder / "model.safetensors" for folder in (run, tmp_path / "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_before_its_time_is_up_a_job_writes_a_checkpoint_and_comes_back(slurm: Slurm, tmp_path: Path) -> None:
    long = (*SETTINGS[:1], "epochs=1000", *SETTINGS[2:])
    job, log = _submit(slurm, tmp_path, *ONE, "--time", "2", "--grace", "10", settings=long)
    until(lambda: "requeued, number 1" in _text(log), lambda: _text(log))
    assert "stopped by SIGUSR1 after step" in _text(log)
    slurm.tell("scancel", job)


def test_variables_reach_each_node_where_the_site_passes_none(slurm: Slurm, tmp_path: Path) -> None:
    secrets, told = tmp_path / "secrets.env", "$TYPED $WANDB_API_KEY ${OF_SHELL-nothing} $MASTER_PORT"
    program(tmp_path / "venv/bin/trainer", f'#!/bin/sh\necho "got {told} $SLURM_PROCID"\n')
    secrets.write_text("# of the lab\nWANDB_API_KEY=a-b=c\nTYPED=file")
    words = ("--venv", str(tmp_path / "venv"), "--env", "TYPED=a  b", "--env-from", str(secrets))
    job, log = _submit(slurm, tmp_path, *TWO, *words, SBATCH_EXPORT="NONE", OF_SHELL="x")
    slurm.completes(job, log)
    said = [line for line in _text(log).splitlines() if line.startswith("got ")]
    port = PORT + int(job) % 1000
    assert sorted(said) == [f"got a  b a-b=c nothing {port} {rank}" for rank in (0, 1)]


def test_a_task_for_each_rank_ends_as_the_table_of_all_ways_says(slurm: Slurm, tmp_path: Path) -> None:
    """With srun's own exit code; and to the bits of the launcher's two ranks."""
    cases = {"own": (Job("own.py", WATCHED), ""), **{case: REFUSALS[case] for case in ("syntax", "folder")}}
    script = tmp_path / "ways.sbatch"
    lines = ["#!/bin/bash", f"#SBATCH --ntasks=2 --cpus-per-task=1 --mem=3G --output={tmp_path}/out"]
    for number, (case, (asked, _)) in enumerate(cases.items()):
        here = place(tmp_path / case)
        srun = f"MASTER_PORT={PORT + number} srun --chdir={here} --error={here}/stderr"
        lines.append(f"{srun} {VENV}/bin/trainer {shlex.join(asked.words)}; echo $? > {here}/code")
    script.write_text("\n".join([*lines, "exit 0", ""]))
    slurm.completes(slurm.tell("sbatch", "--parsable", str(script)), tmp_path / "out")
    for case, (_, names) in cases.items():
        said = (tmp_path / case / "stderr").read_text().splitlines()
        ended = Ended(int((tmp_path / case / "code").read_text()), said)
        check(case, "slurm 2", tmp_path / case, ended, names)
    alike = place(tmp_path / "launcher")
    assert Started("launcher 2", alike, cases["own"][0]).end().code == 0
    assert result_of(alike) == result_of(tmp_path / "own")


@pytest.mark.parametrize("name", ["it's a #b;c", 'say "x" $(id) `id`', "-x --uid=0"])
def test_sbatch_reads_a_directive_as_it_was_given(slurm: Slurm, tmp_path: Path, name: str) -> None:
    text = printed("slurm", "--out", str(tmp_path / "job"), "--account", name)
    (tmp_path / "job.sbatch").write_text(text)
    job = slurm.tell("sbatch", "--parsable", "--hold", str(tmp_path / "job.sbatch"), cwd=tmp_path)
    told = slurm.tell("scontrol", "show", "job", job)
    slurm.tell("scancel", job)
    assert f" Account={name} " in told.replace("\n", " ")
