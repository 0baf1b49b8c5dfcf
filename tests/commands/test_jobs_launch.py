"""Promise: `trainer submit` says what is wrong before anything is submitted, and what it submitted."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from tests.helpers import job_files
from tests.helpers.job_tools import Tools
from trainer.cli import main
from trainer.commands.submit import CONTAINERS, PLACES, add_parser, submit
from trainer.commands.submit.launching import job_fields
from trainer.commands.submit.spec import JobPlace, JobSpec, Site

DIGEST = f"registry.example/trainer@sha256:{64 * 'a'}"
ENGINE = ["--image", DIGEST]
SMALL = ["--set", "data.micro_batch_size=16"]
CLUSTER = ["--image", DIGEST, "--runs", "pvc:runs"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line on stderr of a launch that doesn't happen."""
    try:
        assert main(["submit", *words]) == code
    except SystemExit as error:
        assert error.code == code
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = [line for line in said.err.splitlines() if "warning" not in line]
    assert line.startswith("trainer: error: ")
    return line.removeprefix("trainer: error: ")


CASES = [
    (["digitz", "--on", "docker", *ENGINE], "no recipe 'digitz'; did you mean 'digits'?"),
    (["digits", "--on", "dokcer", *ENGINE], "argument --on: invalid choice: 'dokcer'"),
    (["digits", "--on", "docker"], "--image is missing"),
    (
        ["digits", "--on", "docker", *ENGINE, "--set", "optm.lr=1"],
        "unknown key 'optm'; did you mean 'optim'?",
    ),
    (["digits", "--on", "docker", *ENGINE, "--set", "optim.lr=fast"], "optim.lr=fast: "),
    (["digits", "--on", "docker", *ENGINE, "--set", "optim.lr"], "--set optim.lr: give KEY=VALUE"),
    (["digits", "--on", "docker", *ENGINE, "--nnodes", "2"], "--nnodes 2: docker run starts one container"),
    (["digits", "--on", "slurm", *ENGINE, "--nnodes", "two"], "--nnodes two: give a number, or MIN:MAX"),
    (["digits", "--on", "slurm", *ENGINE, "--nnodes", "0"], "--nnodes 0: input should be greater"),
    (["digits", "--on", "slurm", *ENGINE, "--nnodes", "3:2"], "--nnodes: 3 is more than the 2 nodes"),
    (["digits", "--on", "docker", *ENGINE, "--time", "soon"], "--time soon: give minutes, HH:MM, HH:MM:SS"),
    (["digits", "--on", "docker", *ENGINE, "--time", "0"], "--time 0: give at least a minute"),
    (["digits", "--on", "docker", *ENGINE, "--grace", "0"], "--grace 0: input should be greater"),
    (["digits", "--on", "docker", *ENGINE, "--shm", "16"], "--shm: /dev/shm counts as memory"),
    (["digits", "--on", "docker", *ENGINE, "--name", "My_run"], "--name: 'My_run' must be of a-z"),
    (["digits", "--on", "docker", *ENGINE, "--user", "me"], "--user me: "),
    (["digits", "--on", "docker", *ENGINE, "--env", "A"], "--env A: give NAME=VALUE"),
    (["digits", "--on", "docker", *ENGINE, "--env", "NNODES=1"], "--env: NNODES is set by what starts"),
    (["digits", "--on", "docker", *ENGINE, "--data", "/nowhere"], "--data /nowhere: no such folder here"),
    (["digits", "--on", "docker", *ENGINE, "--data", "pvc:x"], "--data pvc:x: docker has no claims"),
    (
        ["digits", "--on", "docker", *ENGINE, "--gpus-per-node", "1", "--nproc-per-node", "2"],
        "--nproc-per-node: with GPUs there is a rank for each",
    ),
    (["digits", "--on", "kubernetes", *ENGINE], "--runs runs: pods on Kubernetes don't see this machine's"),
    (["digits", "--on", "kubernetes", *CLUSTER, "--user", "0:0"], "--user 0:0: these pods never run as root"),
    (
        ["digits", "--on", "kubernetes", *CLUSTER, "--data", "pvc:-"],
        "--data pvc:-: '-' is no name of a claim: a name there has",
    ),
    (
        ["digits", "--on", "kubeflow", *CLUSTER, "--nnodes", "1:2"],
        "--nnodes 1:2: a TrainJob has a fixed number",
    ),
    (["digits", "--on", "kubeflow", *CLUSTER, "--port", "3000"], "--port 3000: a TrainJob's nodes meet at"),
    (
        ["digits", "--on", "kubernetes", *CLUSTER],
        "no kubectl on PATH, which --on kubernetes needs; --dry-run",
    ),
    (["digits", "--on", "docker", *ENGINE], "no docker on PATH, which --on docker needs; --dry-run prints"),
    (
        ["digits", "--on", "kubernetes", *CLUSTER, "--nnodes", "3"],
        "data.global_batch_size=64 is not a multiple of data.micro_batch_size=64 x 3 ranks",
    ),
    # What --data sets is checked, too.
    (["digits", "--on", "kubernetes", *CLUSTER, "--data", "pvc:d"], "data.name=digits doesn't read it"),
    (["mine.yaml", "--on", "docker", *ENGINE], "mine.yaml: can't be read"),
    (["list.yaml", "--on", "docker", *ENGINE], "list.yaml: a recipe is a mapping"),
]


@pytest.mark.parametrize(("words", "wanted"), CASES, ids=[" ".join(words) for words, _ in CASES])
def test_bad_input_is_one_line(
    words: list[str], wanted: str, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("list.yaml").write_text("[1, 2]")
    assert wanted in refused(words, capsys)
    assert tools.calls() == []
    assert sorted(path.name for path in Path().iterdir()) == ["list.yaml"]


def test_gpus_that_this_machine_lacks(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.add("nvidia-smi", "echo 'GPU 0: x (UUID: a)'; echo 'GPU 1: x (UUID: b)'")
    tools.add("docker")
    words = ["digits", "--on", "docker", *ENGINE, *SMALL, "--gpus-per-node"]
    assert "--gpus-per-node 4: nvidia-smi shows 2" in refused([*words, "4"], capsys)
    assert main(["submit", *words, "2", "--dry-run"]) == 0


def test_a_dry_run_prints_and_does_nothing(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "digits", "--on", "kubernetes", *CLUSTER, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert set(job_files.documents(said.out)) == {"NetworkPolicy", "Job"}
    assert tools.calls() == []
    assert not list(Path().iterdir())


def test_a_micro_batch_may_be_chosen_there(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    del tools
    words = ["--nnodes", "3", "--set", "data.micro_batch_size=auto", "--dry-run"]
    assert main(["submit", "digits", "--on", "kubernetes", *CLUSTER, *words]) == 0
    assert "data.micro_batch_size=auto" in capsys.readouterr().out


def test_a_tag_is_warned_of(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    del tools
    assert main(["submit", "digits", "--on", "docker", "--image", "trainer:x", "--dry-run"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "trainer: warning: --image trainer:x is not a digest: the tag may be another image"
    )


def test_docker_is_given_the_words(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.add("docker")
    words = ["digits", "--on", "docker", *ENGINE, "--name", "mine", "--env", "WORDS=a b$c", "--set", "seed=3"]
    assert main(["submit", *words]) == 0
    removed, ran = tools.calls()
    assert removed == ["docker", "rm", "mine"]
    file = Path("runs/.jobs/mine.sh")
    read = job_files.read_docker(file.read_text())
    assert ran[:2] == ["docker", "run"]
    assert "--detach" in ran
    assert "WORDS=a b$c" in ran
    assert read["environment"]["WORDS"] == "a b$c"
    assert read["user"] == f"{os.getuid()}:{os.getgid()}"
    assert read["command"][-2:] == ["--set", "seed=3"]
    assert file.stat().st_mode & 0o777 == 0o600  # variables may be secrets
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "submitted  sh runs/.jobs/mine.sh",
        "follow     docker logs --follow mine",
        "stop       docker stop mine",
    ]


@pytest.mark.parametrize("place", ["kubernetes", "kubeflow"])
def test_kubectl_is_given_the_file(place: str, tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.add("kubectl", "echo job.batch/mine created")
    words = ["--on", place, *CLUSTER, "--name", "mine", "--namespace", "lab", "--nnodes", "2", *SMALL]
    assert main(["submit", "digits", *words]) == 0
    file = "runs/.jobs/mine.yaml"
    assert tools.calls() == [["kubectl", "apply", "--filename", file]]
    assert capsys.readouterr().out.splitlines() == [
        f"submitted  kubectl apply --filename {file}",
        "follow     kubectl logs --namespace lab --follow --max-log-requests 2 --prefix --selector "
        "app.kubernetes.io/instance=mine",
        f"stop       kubectl delete --filename {file}",
    ]


@pytest.mark.parametrize(
    ("said", "kind"), [("job.batch/mine", "kubernetes"), ("trainjob.trainer.kubeflow.org/mine", "kubeflow")]
)
def test_a_job_that_is_there_already_is_not_submitted(
    said: str, kind: str, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.add("kubectl", f"echo networkpolicy.networking.k8s.io/mine unchanged; echo {said} unchanged")
    line = refused(["digits", "--on", kind, *CLUSTER, "--name", "mine"], capsys, code=1)
    assert "kubectl delete -f runs/.jobs/mine.yaml first" in line


def test_what_a_tool_refuses_is_one_line(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.add("kubectl", "printf 'error: no\\n  such cluster\\n' >&2; exit 5")
    line = refused(["digits", "--on", "kubernetes", *CLUSTER], capsys, code=1)
    assert line == "kubectl: error: no such cluster"


def test_a_recipe_of_ones_own_comes_along(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    del tools
    Path("mine.yaml").write_text("epochs: 3 # of them\n")
    assert main(["submit", "mine.yaml", "--on", "kubernetes", *CLUSTER, "--dry-run"]) == 0
    objects = job_files.documents(capsys.readouterr().out)
    assert objects["ConfigMap"]["data"] == {"mine.yaml": "epochs: 3 # of them\n"}
    assert (
        job_files.read_kubernetes(yaml.safe_dump_all(objects.values()))["command"][2] == "/recipe/mine.yaml"
    )


def test_a_recipe_in_the_container_is_only_warned_of(
    tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    del tools
    assert main(["submit", "/data/r.yaml", "--on", "kubernetes", *CLUSTER, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "trainer: warning: /data/r.yaml can't be read here" in said.err
    assert "ConfigMap" not in said.out


def test_every_option_reaches_the_specification() -> None:
    options = _options()
    fields = job_fields(options, "slurm")
    assert set(fields) == set(JobSpec.model_fields) - {"recipe_text", "files"}
    spec, plain = JobSpec.model_validate(fields), JobSpec(recipe="digits")
    same = {name for name in JobSpec.model_fields if getattr(spec, name) == getattr(plain, name)}
    assert same == {
        "recipe",
        "nproc_per_node",
        "recipe_text",
        "files",
    }  # with GPUs there are no ranks to give
    site = {name: getattr(options, name) for name in Site.model_fields}
    assert all(value != getattr(Site(), name) for name, value in site.items())
    assert Site.model_validate(site)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    words = (
        "submit digits --on slurm --set seed=1 --name mine --image x:y --nnodes 2:3 --gpus-per-node 2 "
        "--cpus-per-node 5 --memory 30 --shm 3 --time 1:00 --grace 40 --data d --runs r --cache c "
        "--port 3000 --user 1:2 --env A=b --nproc-per-node 1 --partition p --account a --qos q "
        "--container venv --venv v --namespace n --jobset --sbatch-arg=--nice --queue q "
        "--service-account s --env-from file:f --rdma host"
    )
    return parser.parse_args(shlex.split(words))


def test_choices_are_those_of_the_specification() -> None:
    assert get_args(JobPlace) == PLACES == tuple(submit.JOB_PLACES)
    assert set(get_args(Site.model_fields["container"].annotation)) == set(CONTAINERS)


def test_the_other_commands_pay_nothing_for_it() -> None:
    code = "import sys, trainer.commands.submit\nsys.exit(bool({'pydantic', 'yaml'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_slurm_job_is_followed_by_its_number() -> None:
    spec, text = JobSpec(recipe="digits"), "#!/bin/sh\n#SBATCH --output=runs/.jobs/x-%j.log\n"
    said = "Submitted batch job 4711 on cluster b"
    follow, stop = submit._afterwards("slurm", spec, Site(), Path("x"), text, said)
    assert follow == ["tail", "-F", "runs/.jobs/x-4711.log"]
    assert stop == ["scancel", "4711"]
