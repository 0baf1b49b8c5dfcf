"""Promise: a site's options reach its jobs, from a file or typed, and no secret is written down."""

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_jobs_kubernetes import PODS, check_all
from tests.commands.test_jobs_launch import CLUSTER, ENGINE, refused
from tests.helpers import job_files
from tests.helpers.job_files import PLACES, job
from trainer.cli import main
from trainer.commands.submit import slurm
from trainer.commands.submit.spec import JobPlace, Site
from trainer.commands.submit.submit import JOB_PLACES as HOW
from trainer.errors import BadInputError

# The schemas of Kubernetes build parsers for seconds, once in a process.
pytestmark = pytest.mark.xdist_group("json schema")

KINDS = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, from which jobs are submitted."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rendered(where: str, **words: Any) -> dict[str, Any]:
    place, site, _ = PLACES[where]
    text = HOW[place].render(job(where), Site.model_validate({**site.model_dump(), **words}))
    check_all(text)
    return job_files.documents(text)


def pods(objects: dict[str, Any]) -> list[Any]:
    return [template for _, template in job_files.templates(objects)]


@pytest.mark.parametrize("where", PODS)
def test_options_for_pods_reach_every_pod(where: str) -> None:
    words = {"queue": "team", "service_account": "reader", "rdma": "rdma/hca=2"}
    before, after = rendered(where), rendered(where, **words, env_from=("secret:wandb", "secret:hub"))
    assert len(pods(after)) == 1
    for template, old in zip(pods(after), pods(before), strict=True):
        spec, (container,) = template["spec"], template["spec"]["containers"]
        assert spec.pop("serviceAccountName") == "reader"
        assert spec["automountServiceAccountToken"] is False
        assert container.pop("envFrom") == [{"secretRef": {"name": name}} for name in ("wandb", "hub")]
        for amounts in container["resources"].values():
            assert amounts.pop("rdma/hca") == "2"
        assert template == old  # and nothing else of it
    labels = after[KINDS[where]]["metadata"]["labels"]
    assert labels.pop("kueue.x-k8s.io/queue-name") == "team"
    if where == "trainjob":  # it would put its own in the place of its runtime's
        amounts = after["TrainJob"]["spec"]["trainer"]["resourcesPerNode"]
        assert [one.pop("rdma/hca") for one in amounts.values()] == ["2", "2"]
    assert after == before


WRONG_PLACE = [
    ("docker", ["--queue", "q"], "--queue: docker has none; Slurm's are --partition and --qos"),
    ("slurm", ["--queue", "q"], "--queue: slurm has none; Slurm's are --partition and --qos"),
    ("slurm", ["--service-account", "s"], "--service-account: slurm has none"),
    (
        "kubernetes",
        ["--sbatch-arg=--nice"],
        "--sbatch-arg: kubernetes has none; change what --dry-run prints, as by kustomize",
    ),
    ("docker", ["--rdma", "host"], "--rdma: docker has none; its container is on this machine"),
    (
        "kubernetes",
        ["--rdma", "host"],
        "--rdma host: on kubernetes give RESOURCE=N, as rdma/hca_shared_devices",
    ),
    ("slurm", ["--rdma", "rdma/hca=1"], "--rdma rdma/hca=1: on slurm give host"),
    (
        "slurm",
        ["--rdma", "mlx5"],
        "--rdma mlx5: give host (Slurm), or a device plugin's resource and a number",
    ),
    ("slurm", ["--env-from", "secret:x"], "--env-from secret:x names no file: give --env-from file:PATH"),
    ("docker", ["--env-from", "x"], "--env-from x names no file: give --env-from file:PATH"),
    (
        "kubernetes",
        ["--env-from", "file:x"],
        "--env-from file:x names no Secret; give --env-from secret:NAME",
    ),
    (
        "kubeflow",
        ["--env-from", "secret:A_B"],
        "--env-from secret:A_B names no Secret; give --env-from secret:NAME",
    ),
    (
        "kubernetes",
        ["--queue", "Team A"],
        "--queue Team A: a name there has a-z, 0-9, '-' and '.', a letter or",
    ),
    ("kubernetes", ["--service-account", "A"], "--service-account A: a name there has"),
    ("kubernetes", ["--user", "me"], "--user me: give two numbers, UID:GID, as 1000:1000"),
]


@pytest.mark.parametrize(("place", "words", "wanted"), WRONG_PLACE)
def test_a_word_that_a_place_lacks_is_refused(
    place: str, words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = CLUSTER if place in ("kubernetes", "kubeflow") else ENGINE
    assert refused(["digits", "--on", place, *where, *words, "--dry-run"], capsys).startswith(wanted)


SECRETS = [
    "HF_TOKEN=abc",
    "WANDB_API_KEY=abc",
    "AWS_SECRET_ACCESS_KEY=abc",
    "HTTPS_PROXY=http://me:pw@proxy:80",
]


@pytest.mark.parametrize(("word", "place"), [*itertools.product(SECRETS, HOW)])
def test_a_secret_is_never_written_down(
    word: str, place: JobPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    where = CLUSTER if place in ("kubernetes", "kubeflow") else ENGINE
    line = refused(["digits", "--on", place, *where, "--env", word, "--dry-run"], capsys)
    name, _, value = word.partition("=")
    assert line.startswith(f"--env {name} looks like a secret, which isn't written down in plain text: ")
    assert value not in line
    assert ("--env-from secret:mine" in line) == (where is CLUSTER)
    assert ("--env-from file:PATH" in line) == (where is ENGINE)


def test_what_only_sounds_like_a_secret_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env", "TOKENIZERS_PARALLELISM=false", "--env", "HF_TOKEN=", "--dry-run"]
    assert main(["submit", "digits", "--on", "docker", *ENGINE, *words]) == 0
    environment = job_files.read_docker(capsys.readouterr().out)["environment"]
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert environment["HF_TOKEN"] == ""


VARIABLES = "# of the lab\nWANDB_API_KEY=a-b_c.d/e+f=\n\nHF_TOKEN=x:y"


def secret_file() -> str:
    file = Path("secrets.env")
    file.write_text(VARIABLES)
    file.chmod(0o600)
    return f"file:{file}"


def test_a_file_of_variables_is_named_and_not_read_into_the_job(here: Path) -> None:
    site = Site(env_from=(secret_file(),))
    path = str(here / "secrets.env")
    docker = HOW["docker"].render(job("docker"), site)
    assert f"--env-file {path}" in docker
    spec = job("slurm")
    scripts = [
        slurm.render(spec, site.model_copy(update={"container": how})) for how in ("pyxis", "apptainer")
    ]
    # Apptainer empties the environment: what the file sets must come through.
    assert "CUDA_VISIBLE_DEVICES|WANDB_API_KEY|HF_TOKEN)" in scripts[1]
    for text in (docker, *scripts):
        assert "a-b_c" not in text


def test_the_shell_reads_the_file_as_the_engines_do() -> None:
    text = slurm.render(job("slurm"), Site(env_from=(secret_file(),)))
    lines = text[text.index("while IFS") : text.index("|| exit 2") + len("|| exit 2")]
    show = f'{lines}\nprintf \'%s\\n\' "$WANDB_API_KEY" "$HF_TOKEN"'
    done = subprocess.run(["/bin/bash", "-uc", show], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a-b_c.d/e+f=", "x:y"]
    Path("secrets.env").unlink()
    assert subprocess.run(["/bin/bash", "-uc", show], capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize(
    ("text", "mode", "wanted"),
    [
        (VARIABLES, 0o640, "others may read it: chmod 600 "),
        ("A=b\nexport C=d\n", 0o600, "line 2: give NAME=VALUE"),
        ('A="b"', 0o600, "line 1: give NAME=VALUE"),
        ("A=$HOME", 0o600, "line 1: give NAME=VALUE"),
        ("A", 0o600, "line 1: give NAME=VALUE"),
    ],
)
def test_a_file_that_is_read_otherwise_elsewhere_is_refused(
    text: str, mode: int, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s").write_text(text)
    Path("s").chmod(mode)
    line = refused(["digits", "--on", "docker", *ENGINE, "--env-from", "file:s", "--dry-run"], capsys)
    assert line.startswith(f"--env-from file:s: {wanted}")


def options_of(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_options_of_sbatch_are_given_on() -> None:
    words = ("constraint=h100", "--nice", "--comment=a b", "--constraint=a100")
    text = slurm.render(job("slurm"), Site(sbatch_arg=words))
    assert options_of(text)[-3:] == ["--constraint=a100", "--nice", "--comment='a b'"]


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("--nodes=3", "give --nnodes"),
        ("--part=gpu", "give --partition"),
        ("gpus=8", "give --gpus-per-node"),
        ("no-requeue", "the script requeues the job after its checkpoint"),
        ("-C h100", "give a long option of sbatch, as --sbatch-arg=--constraint=h100"),
        ("--comment=it's", "quotes, \\ and line breaks can't be given on"),
        ("--comment=a\n#SBATCH --nice", "quotes, \\ and line breaks can't be given on"),
    ],
)
def test_options_that_the_script_has_are_refused(word: str, wanted: str) -> None:
    with pytest.raises(BadInputError) as raised:
        slurm.render(job("slurm"), Site(sbatch_arg=(word,)))
    assert str(raised.value) == f"--sbatch-arg {word}: {wanted}"


def test_every_option_that_the_script_has_is_refused() -> None:
    spec = job("slurm", min_nnodes=1)
    text = slurm.render(spec, Site(partition="p", account="a", qos="q"))
    names = {option[2:].partition("=")[0] for option in options_of(text)}
    assert names | {"array"} <= set(slurm._OURS)


@pytest.mark.parametrize("how", ["pyxis", "apptainer", "venv"])
def test_rdma_on_slurm_brings_the_devices_and_the_limit(how: str) -> None:
    text = slurm.render(job("slurm"), Site.model_validate({"container": how, "rdma": "host"}))
    assert ("/dev/infiniband:/dev/infiniband" in text) == (how != "venv")
    assert "ulimit -l unlimited" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--rdma", "rdma/hca=1"], "IB"),
        (["--rdma", "rdma/hca=1", "--env", "NCCL_NET=Socket"], "Socket"),
        (["--rdma", "vpc.amazonaws.com/efa=4"], None),  # the plugin has another name
        ([], None),
    ],
)
def test_with_rdma_nccl_never_takes_tcp_without_a_word(
    words: list[str], wanted: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "digits", "--on", "kubernetes", *CLUSTER, *words, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert job_files.read_kubernetes(said.out)["environment"].get("NCCL_NET") == wanted
    assert ("aws-ofi-nccl" in said.err) == ("vpc.amazonaws.com/efa=4" in words)


LAB = f"""\
--image {job_files.IMAGE} --namespace=lab   # of the lab
--queue team-a --runs pvc:lab-runs --memory 64

--env 'NCCL_DEBUG=INFO WARN' --env A=file --env-from secret:wandb --set seed=7
"""


def test_options_are_read_from_a_file_and_later_ones_win(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lab.txt").write_text(LAB)
    words = ["--memory", "8", "--env", "A=typed", "--dry-run"]
    assert main(["submit", "digits", "--on", "kubernetes", "@lab.txt", *words]) == 0
    text = capsys.readouterr().out
    check_all(text)
    objects, read = job_files.documents(text), job_files.read_kubernetes(text)
    assert (read["image"], read["memory"]) == (job_files.IMAGE, 8)
    assert read["environment"].items() >= {"NCCL_DEBUG": "INFO WARN", "A": "typed"}.items()
    assert objects["Job"]["metadata"]["namespace"] == "lab"
    assert objects["Job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    (template,) = pods(objects)
    assert "seed=7" in template["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "error: @lab.txt: can't be read (No such file or directory): give a file of options"),
        ("\udcff", "@lab.txt: can't be read (isn't text in UTF-8)"),
        ("x" * 2_000_000, "@lab.txt: can't be read (more than 1 MiB)"),
        ("--queue team-a\n@./lab.txt", "@./lab.txt: names itself"),
        ("--queu team-a", "unrecognized arguments: --queu team-a; did you mean '--queue'?"),
        ("--name 'a", "@lab.txt, line 1: --name 'a: No closing quotation"),
        ("--env HF_TOKEN=abc", "--env HF_TOKEN looks like a secret"),
    ],
)
def test_a_wrong_file_of_options_is_one_line(
    text: str | None, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path("lab.txt").write_text(text, errors="surrogateescape")
    try:
        code = main(["submit", "digits", "--on", "docker", *ENGINE, "@lab.txt", "--dry-run"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and wanted in line and "abc" not in line


@pytest.mark.parametrize("option", ["account", "partition", "qos"])
@pytest.mark.parametrize(
    "value",
    ["a\n#SBATCH --uid=0", "a\r#SBATCH --uid=0", "a --uid=0", "a\x0bb", "a\x1b[2J", "a\u2028b", "a'b", "#"],
)
def test_no_value_adds_a_directive(option: str, value: str) -> None:
    with pytest.raises(BadInputError, match=f"^--{option} .* can't stand in a line of #SBATCH") as raised:
        slurm.render(job("slurm"), Site(**{option: value}))
    assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


@pytest.mark.parametrize("where", ["runs", "a\x1bb", "comment=a\n#SBATCH --uid=0", "mail-user=a\u2028b"])
def test_paths_and_further_options_add_none_either(where: str) -> None:
    spec, site = job("slurm"), Site()
    if "=" in where:
        site = Site(sbatch_arg=(where,))
    else:
        spec = spec.model_copy(update={"runs": f"/x\x0b/{where}"})
    with pytest.raises(BadInputError, match=r"^--(runs|sbatch-arg) "):
        slurm.render(spec, site)


def test_a_step_takes_nothing_from_the_job_in_whose_shell_it_was_submitted(tmp_path: Path) -> None:
    """sbatch passes the shell's variables on: a step would be bound to one CPU, and see one GPU of eight."""
    left = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_GPUS_PER_TASK": "1", "SLURM_MEM_PER_CPU": "100"}
    left |= {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "SLURM_TRES_PER_TASK": "cpu:1"}
    script = tmp_path / "job"
    spec = job("slurm", runs=str(tmp_path / "runs"))
    script.write_text(slurm.render(spec, Site.model_validate({"container": "venv", "venv": "v"})))
    (tmp_path / "srun").write_text("#!/bin/sh\nenv")
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **left}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)
    assert "SLURM_JOB_ID=7" in done.stdout
    assert [name for name in left if f"{name}=" in done.stdout] == []
