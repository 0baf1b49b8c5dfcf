"""On a real Slurm a job is stopped, requeued, and ends with the bits of one that never stopped."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.cluster_slurm import NODES, PORT, PREFIX, Slurm, missing, running, until
from tests.helpers.ways import Ended, Job, Started
from tests.launch.test_ways_in import REFUSALS, WATCHED, bits_of, check, data_of, place
from trainer.commands.submit.slurm import render, render_array
from trainer.commands.submit.spec import JobSpec, Site

# Without a Slurm: tests/commands/test_jobs*.py (scripts), test_cluster.py (what srun says).
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]
ROOT = Path(__file__).parents[2]
VENV = Path(sys.executable).parent.parent
# Some seconds of training on two quiet cores; a checkpoint early, so that there is one to go on from.
SETTINGS = ("data.micro_batch_size=4", "epochs=6", "parallel.threads=1", "checkpoint.every=20", "log.every=5")
# The smallest job, where a second rank would only cost time.
ONE = {"nnodes": 1, "nproc_per_node": 1}


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


def _spec(folder: Path, **more: object) -> JobSpec:
    values: dict[str, object] = {
        **{"recipe": "digits", "settings": SETTINGS, "name": "job", "nnodes": 2, "nproc_per_node": 2},
        **{"cpus_per_node": 2, "memory_gib": 3, "shm_gib": 1, "minutes": 60, "grace_seconds": 30},
        **{"runs": str(folder), "port": PORT},
    }
    return JobSpec.model_validate({**values, **more})


def _submit(slurm: Slurm, spec: JobSpec) -> tuple[str, Path]:
    """The job's number and its log."""
    logs = Path(spec.runs) / ".jobs"
    logs.mkdir(parents=True, exist_ok=True)
    script = logs / f"{spec.name}.sbatch"
    script.write_text(render(spec, Site(container="venv", venv=str(VENV))))
    job = slurm.tell("sbatch", "--parsable", str(script))
    return job, logs / f"{spec.name}-{job}.out"


def _rows(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _manifest(run: Path) -> dict[str, object]:
    manifest: dict[str, object] = json.loads((run / "manifest.json").read_text())
    return manifest


def _text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def test_a_job_that_is_preempted_cancelled_and_submitted_again_ends_with_the_same_bits(
    slurm: Slurm, tmp_path: Path
) -> None:
    run, spec = tmp_path / "job", _spec(tmp_path, nproc_per_node=1)
    job, log = _submit(slurm, spec)
    until(lambda: _rows(run) > 2)
    slurm.tell("scancel", "--signal=USR1", job)  # as Slurm does before the time is up
    until(lambda: "requeued, number 1" in _text(log))
    assert "the same command resumes from there" in _text(log)
    slurm.release(job)
    until(lambda: _text(log).count("resumes after step") == 1 and _manifest(run)["status"] == "running")
    (first, second) = [attempt["job"] for attempt in _manifest(run)["attempts"]]  # type: ignore[attr-defined]
    assert first == {"slurm_job": job, "slurm_nodes": f"{PREFIX}[1-2]"}
    assert second == {**first, "slurm_restarts": "1"}
    slurm.tell("scancel", job)
    until(lambda: slurm.state(job) == "CANCELLED")
    until(lambda: not slurm.tell("squeue", "-h"))  # it still holds its port while it completes
    assert _text(log).count("requeued") == 1  # who cancels doesn't want it back
    assert _manifest(run)["status"] == "stopped"
    again, log = _submit(slurm, spec)
    slurm.completes(again, log)
    assert _manifest(run)["status"] == "finished"
    assert [path.name for path in (run / "logs").iterdir()] == ["rank-1.log"]
    # One that never stopped, on one node.
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    whole = preloaded.run(
        [
            sys.executable,
            "-m",
            "trainer",
            "train",
            "digits",
            "--nproc-per-node",
            "2",
            "--out",
            tmp_path / "whole",
            *words,
        ],
        cwd=ROOT,
    )
    assert whole.returncode == 0, whole.stderr
    weights = [folder / "model.safetensors" for folder in (run, tmp_path / "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_bad_input_ends_the_job_with_one_line_and_no_requeue(slurm: Slurm, tmp_path: Path) -> None:
    job, log = _submit(slurm, _spec(tmp_path, settings=("optim.lr=-1",)))
    until(lambda: slurm.state(job) == "FAILED")
    assert "optim.lr" in _text(log) and "requeued" not in _text(log)
    assert "Traceback" not in _text(log)
    assert "ExitCode=2:0" in slurm.tell("scontrol", "show", "job", "--oneliner", job)


def test_a_task_for_each_rank_works_too(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "tasks.sbatch"
    words = "digits --set data.micro_batch_size=16 --set epochs=1 --set parallel.threads=1"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --mem=3G\n"
        f"#SBATCH --output={tmp_path}/out\nexport MASTER_PORT={PORT}\n"
        f"srun {VENV}/bin/trainer train {words} --out {tmp_path}/run\n"
    )
    job = slurm.tell("sbatch", "--parsable", str(script))
    slurm.completes(job, tmp_path / "out")
    assert "(4 x CPU" in _text(tmp_path / "out")


def test_a_task_for_each_rank_ends_as_the_table_of_all_ways_says(slurm: Slurm, tmp_path: Path) -> None:
    """With srun's own exit code; and to the bits of the launcher's two ranks."""
    cases = {"own": (Job("own.py", WATCHED), ()), **{case: REFUSALS[case] for case in ("syntax", "folder")}}
    script = tmp_path / "ways.sbatch"
    lines = [
        "#!/bin/bash",
        "#SBATCH --ntasks=2 --cpus-per-task=1 --mem=3G",
        f"#SBATCH --output={tmp_path}/out",
    ]
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
    assert (bits_of(alike), data_of(alike)) == (bits_of(tmp_path / "own"), data_of(tmp_path / "own"))


def test_a_task_of_an_array_comes_back_by_itself(slurm: Slurm, tmp_path: Path) -> None:
    specs = [
        _spec(tmp_path, **ONE, name=f"job-{n}", settings=(*SETTINGS, "epochs=12", f"seed={n}"))
        for n in (0, 1)
    ]
    (tmp_path / ".jobs").mkdir()
    script = tmp_path / ".jobs" / "array.sbatch"
    script.write_text(render_array(specs, Site(container="venv", venv=str(VENV)), "job"))
    array = slurm.tell("sbatch", "--parsable", str(script))
    tasks = [(f"{array}_{n}", tmp_path / f"job-{n}", tmp_path / f".jobs/job-{array}_{n}.out") for n in (0, 1)]
    for task, run, _ in tasks:
        until(partial(_has_rows, run))
        slurm.tell("scancel", "--signal=USR1", task)
    for task, _, log in tasks:  # one of the two has the array's own number
        until(partial(_is_requeued, log))
        slurm.release(task)
    for _, run, log in tasks:
        until(partial(_is_finished, run))
        assert _text(log).count("resumes after step") == 1


def _has_rows(run: Path) -> bool:
    return _rows(run) > 0


def _is_requeued(log: Path) -> bool:
    return "requeued, number 1" in _text(log)


def _is_finished(run: Path) -> bool:
    return _manifest(run)["status"] == "finished"


def test_before_its_time_is_up_a_job_writes_a_checkpoint_and_comes_back(slurm: Slurm, tmp_path: Path) -> None:
    long = (*SETTINGS[:1], "epochs=1000", *SETTINGS[2:])
    job, log = _submit(slurm, _spec(tmp_path, **ONE, settings=long, minutes=2, grace_seconds=10))
    until(lambda: "requeued, number 1" in _text(log), lambda: _text(log))
    assert "stopped by SIGUSR1 after step" in _text(log)
    slurm.tell("scancel", job)


def test_a_node_that_is_down_gives_the_job_back(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "job"
    job, log = _submit(slurm, _spec(tmp_path, nproc_per_node=1))
    until(lambda: _rows(run) > 5)
    slurm.tell("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=test")
    until(lambda: slurm.state(job) == "PENDING")
    slurm.tell("scontrol", "update", f"nodename={NODES[1]}", "state=resume")
    slurm.release(job)
    slurm.completes(job, log)
    assert "resumes after step" in _text(log)
    assert _manifest(run)["status"] == "finished"


def test_a_node_that_is_drained_lets_the_job_end(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "job"
    job, log = _submit(slurm, _spec(tmp_path, settings=(*SETTINGS[:1], "epochs=3", *SETTINGS[2:])))
    until(lambda: _rows(run) > 1)
    slurm.tell("scontrol", "update", f"nodename={NODES[1]}", "state=drain", "reason=test")
    slurm.completes(job, log)
    assert "requeued" not in _text(log)


def test_what_the_doctor_tells_slurms_users_to_ask_for_can_be_asked_for(slurm: Slurm) -> None:
    source = "".join(
        path.read_text()
        for path in (Path(__file__).parents[2] / "trainer" / "commands" / "doctor").glob("*.py")
    )
    found = re.findall(r'(?:#SBATCH|srun|sbatch)((?: --[a-z-]+(?:=[^\s",]+)?)+)', source)
    options = {re.sub(r"\{[^}]*\}?|\b8\b", "2", text).replace("NODE", NODES[1]) for text in found}
    # Pyxis' options are a plugin's, and these nodes say nothing of GPUs and disks.
    asked = {option for option in options if not re.search("container|gpus-per-node|tmp", option)}
    assert len(asked) >= 4
    for option in asked:
        slurm.tell("srun", "--test-only", *option.split(), "true")


def test_options_of_sbatch_and_a_file_of_secrets_reach_the_job(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    trainer = tmp_path / "bin" / "trainer"
    trainer.write_text("#!/bin/sh\necho got $WANDB_API_KEY $PLAIN\n")
    trainer.chmod(0o755)
    secrets = tmp_path / "secrets.env"
    secrets.write_text("# of the lab\nWANDB_API_KEY=a-b=c\nPLAIN=file")
    secrets.chmod(0o600)
    site = Site(
        container="venv",
        venv=str(tmp_path),
        sbatch_arg=("comment=of # us", "--nice=7", f"exclude={NODES[1]}"),
        env_from=(f"file:{secrets}",),
        rdma="host",
    )
    spec = _spec(tmp_path, nnodes=1, environment={"PLAIN": "typed"})
    (tmp_path / ".jobs").mkdir()
    script = tmp_path / ".jobs" / "job.sbatch"
    script.write_text(render(spec, site))
    assert "a-b=c" not in script.read_text()
    job = slurm.tell("sbatch", "--parsable", str(script))
    until(lambda: "got a-b=c typed" in _text(tmp_path / ".jobs" / f"job-{job}.out"))
    told = slurm.tell("scontrol", "show", "job", job)
    assert "Comment=of # us" in told
    assert "Nice=7" in told
    assert f"ExcNodeList={NODES[1]}" in told
    script.write_text(render(spec, Site(container="venv", sbatch_arg=("--no-such=h100",))))
    with pytest.raises(AssertionError, match="unrecognized option '--no-such=h100'"):
        slurm.tell("sbatch", str(script))
