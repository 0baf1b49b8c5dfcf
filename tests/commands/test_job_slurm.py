"""Promise: a batch script says what differs, starts its step alone, and goes on after 75 and 76 only."""

import re
from pathlib import Path

import pytest

from tests.helpers.job_files import IN_IMAGE, printed, run_script, words_of
from tests.helpers.programs import ran

SHOWN = "JobId=7 JobState={state} Requeue={requeue} TimeLimit={limit} Partition={partition} NumNodes={nodes} "
AS_PRINTED = {"state": "RUNNING", "requeue": "1", "limit": "1-00:00:00", "partition": "gpu", "nodes": "2"}


def slurm(**changed: str) -> str:
    """A scontrol that shows such a job, and writes down what is requeued."""
    shown = SHOWN.format(**{**AS_PRINTED, **changed})
    return f"scontrol() {{ [ $1 = requeue ] && echo $2 >>requeued || echo '{shown}'; }}; sleep() {{ :; }}"


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, []),
        ({"partition": "big", "nodes": "3"}, []),
        ({"partition": "debug", "limit": "00:10:00"}, ["Partition=debug", "gpu,big", "TimeLimit=00:10:00"]),
        ({"requeue": "0", "nodes": "4"}, ["Requeue=0", "NumNodes=4", "2-3"]),
        ({"nodes": "1", "limit": "UNLIMITED"}, ["NumNodes=1", "TimeLimit=UNLIMITED"]),
    ],
)
def test_what_differs_from_what_was_printed_is_one_line(
    changed: dict[str, str], names: list[str], tmp_path: Path
) -> None:
    text = printed("slurm", "--out", str(tmp_path / "run"), "--nodes", "2-3", "--partition", "gpu,big")
    said = run_script(text, tmp_path, slurm(**changed)).stderr.decode()
    assert said.count("\n") == bool(names) and all(name in said for name in names), said


def attempts(text: str, folder: Path, *codes: int, state: str = "RUNNING") -> list[bool]:
    """Whether each attempt of one job was requeued."""
    found, marks = [], folder / "requeued"
    for number, code in enumerate(codes):
        marks.unlink(missing_ok=True)
        count = {"SLURM_RESTART_COUNT": str(number)} if number else {}
        done = run_script(text, folder, slurm(state=state), CODE=str(code), **count)
        assert done.returncode == code
        found.append(marks.exists())
        assert not found[-1] or marks.read_text() == "7\n"
    return found


@pytest.mark.parametrize(
    ("codes", "again"),
    [
        ((0,), [False]),
        ((1,), [False]),
        ((137,), [False]),
        ((75,) * 4, [True] * 4),
        ((76, 76, 75, 76, 76, 76, 76), [True] * 6 + [False]),
    ],
)
def test_exit_codes_that_go_on(codes: tuple[int, ...], again: list[bool], tmp_path: Path) -> None:
    text = printed("slurm", "--out", str(tmp_path / "runs/x"))
    assert attempts(text, tmp_path, *codes) == again


def test_a_cancelled_job_stays_away_and_another_job_counts_its_own_hangs(tmp_path: Path) -> None:
    text = printed("slurm", "--out", str(tmp_path / "runs/x"))
    assert attempts(text, tmp_path, 75, 76, state="CANCELLED") == [False, False]
    (tmp_path / "runs/x.hangs").write_text("6 0 3\n")  # of another job
    assert attempts(text, tmp_path, 75, 76) == [True, True]


LEFT = {
    **{"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_GPUS_PER_TASK": "1", "SLURM_MEM_PER_CPU": "100"},
    **{"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "SLURM_TRES_PER_TASK": "cpu:1"},
}


def test_a_step_takes_nothing_from_the_job_in_whose_shell_it_was_sent(tmp_path: Path) -> None:
    """sbatch passes the shell's variables on: a step would be bound to one CPU, and see one GPU of eight."""
    done = run_script(printed("slurm", "--out", str(tmp_path / "x")), tmp_path, slurm(), **LEFT)
    _, environment = words_of(done)
    assert environment["SLURM_JOB_ID"] == "7" and environment["MASTER_PORT"] == "29507"
    assert not LEFT.keys() & environment


def test_a_file_of_variables_is_read_when_the_job_runs(tmp_path: Path) -> None:
    secrets = tmp_path / "of the lab"
    secrets.write_text("# of the lab\nWANDB_API_KEY=a-b=c $x 'y\n\nPLAIN=file\nLAST=z")
    text = printed("slurm", "--out", str(tmp_path / "x"), "--env-from", str(secrets), "--env", "PLAIN=typed")
    assert "a-b=c" not in text
    _, environment = words_of(run_script(text, tmp_path, slurm()))
    assert {"WANDB_API_KEY": "a-b=c $x 'y", "PLAIN": "typed", "LAST": "z"}.items() <= environment.items()
    secrets.unlink()
    assert run_script(text, tmp_path, slurm()).returncode == 2


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        ("registry.example/a/t:1@sha256:0", "registry.example#a/t@sha256:0"),
        ("team/trainer:1", "team/trainer:1"),
        ("/images/t:1.sqsh", "/images/t:1.sqsh"),
    ],
)
def test_pyxis_is_given_the_image(image: str, wanted: str, tmp_path: Path) -> None:
    volumes = ["--volume", f"{tmp_path}:/workspace/runs", "--volume", "/d:/data:ro"]
    text = printed("slurm", "--image", image, *volumes)
    words, _ = words_of(run_script(text, tmp_path, slurm()))
    assert f"--container-image={wanted}" in words
    assert f"--container-mounts={tmp_path}:/workspace/runs,/d:/data:ro" in words


def test_apptainer_passes_the_variables_and_the_code(tmp_path: Path) -> None:
    """Its shells call a function of the script; variables that merely begin alike stay outside."""
    image, volume = "/images/t.sif", f"{tmp_path}:/workspace/runs"
    text = printed("slurm", "--image", image, "--volume", volume, "--env", "A=b c", "--gpus-per-node", "1")
    stand_in = (
        f'{slurm()}; export -f said; apptainer() {{ said "$@"; env -0; return 75; }}; export -f apptainer; '
        'srun() { while [ "$1" != bash ]; do shift; done; "$@"; }'
    )
    done = run_script(text, tmp_path, stand_in, SLURM_PROCID="1", ANOTHER="x")
    assert done.returncode == 75
    given, environment = words_of(done)
    assert given[:3] == ["exec", "--nv", "--containall"]
    assert f"{tmp_path}:/workspace/runs" in given
    assert given[given.index(image) + 1 :][:3] == ["trainer", "train", "digits"]
    passed = {name for name in environment if name.startswith("APPTAINERENV_")}
    assert {"APPTAINERENV_A", "APPTAINERENV_SLURM_PROCID", "APPTAINERENV_MASTER_PORT"} <= passed
    assert environment["APPTAINERENV_A"] == "b c" and "APPTAINERENV_ANOTHER" not in passed


def test_directives_stand_at_the_top_one_on_a_line() -> None:
    words = ("--account", "it's a #b", "--partition", "p", "--qos", "q")
    for extra in ((), IN_IMAGE, ("--image", "a.sif", *IN_IMAGE[2:])):
        lines = printed("slurm", *words, *extra).splitlines()
        directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
        assert directives == list(range(2, 2 + len(directives)))
        names = [re.match(r"#SBATCH --([a-z-]+)(=|$)", lines[number]) for number in directives]
        assert all(names) and len({name[1] for name in names if name}) == len(names)
        ran("bash", "-n", input="\n".join(lines), code=0)
