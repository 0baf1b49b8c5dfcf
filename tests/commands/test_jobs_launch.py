"""Promise: `trainer submit` says what is wrong before anything is submitted, and what it submitted."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from tests.helpers import job_files
from trainer.cli import main
from trainer.commands.submit import CONTAINERS, PLACES, add_parser, carried, places, submit
from trainer.commands.submit.launching import job_fields
from trainer.commands.submit.spec import JobPlace, JobSpec, Site
from trainer.config.recipe import Recipe
from trainer.config.section import describe

DIGEST = f"registry.example/trainer@sha256:{64 * 'a'}"
ENGINE = ["--image", DIGEST]
SMALL = ["--set", "data.micro_batch_size=16"]
CLUSTER = ["--image", DIGEST, "--runs", "pvc:runs"]
# A tool that writes down its words, says something, and ends with a code.
TOOL = """#!/bin/sh
for word in {name} "$@"; do printf '%s\\0' "$word"; done >> "{log}"; printf '\\n' >> "{log}"
{body}
"""


class Tools:
    """Programs that stand on PATH, and nothing else does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.log = folder / "bin", folder / "calls"
        self.folder.mkdir()
        monkeypatch.setenv("PATH", str(self.folder))

    def add(self, name: str, body: str = "") -> None:
        file = self.folder / name
        file.write_text(TOOL.format(name=name, log=self.log, body=body))
        file.chmod(0o755)

    def calls(self) -> list[list[str]]:
        """The words of every call, in order; settings here hold no line breaks."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split("\0")[:-1] for line in lines]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Tools(tmp_path, monkeypatch)


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


def rendered(words: list[str], place: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["submit", *words, "--on", place, *ENGINE, "--dry-run"]) == 0
    read = {"docker": job_files.read_docker, "slurm": job_files.read_slurm}
    return read[place](capsys.readouterr().out)


HERE = "task: mine.py\nepochs: 1\nmodel: {pretrained: w.safetensors}\n"


@pytest.mark.parametrize("place", ["docker", "slurm"])
def test_what_a_recipe_names_here_is_mounted(
    place: str, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    del tools
    Path("r.yaml").write_text(HERE)
    Path("pets").mkdir()
    for name in ("mine.py", "w.safetensors"):
        Path(name).touch()
    here = Path.cwd()
    job = rendered(["digits", "--set", "data={name: folder, path: pets}"], place, capsys)
    assert job["mounts"] == {"/workspace/runs": f"{here}/runs", "/data": f"{here}/pets"}
    assert job["command"][-1] == "data.path=/data"
    job = rendered(["r.yaml"], place, capsys)
    assert job["mounts"] == {
        "/workspace/runs": f"{here}/runs",
        "/recipe/r.yaml": f"{here}/r.yaml",
        "/recipe/mine.py": f"{here}/mine.py",
        "/recipe/w.safetensors": f"{here}/w.safetensors",
    }
    words = ["model.pretrained=/recipe/w.safetensors", "task=/recipe/mine.py"]
    assert [word for word in job["command"] if "=" in word] == words


def test_a_path_in_a_mounted_folder_is_given_as_it_is_there(
    tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    del tools
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/model.safetensors").touch()
    Path("text.txt").touch()
    job = rendered(["digits", "--set", "model.pretrained=runs/old/model.safetensors"], "docker", capsys)
    assert job["command"][-1] == "model.pretrained=/workspace/runs/old/model.safetensors"
    words = ["gpt-stdlib", "--set", "data.name=text", "--set", "data.path=text.txt"]
    job = rendered(words, "docker", capsys)  # a file: its folder is mounted
    assert job["command"][-1] == "data.path=/data/text.txt"
    assert job["mounts"]["/data"] == str(Path.cwd())


def test_the_folders_of_a_language_model_are_mounted(
    tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    del tools
    for name in ("smol", "other"):
        Path(name).mkdir()
    here, words = Path.cwd(), ["gpt-stdlib", "--set", "language.tokenizer=other", "--set"]
    job = rendered([*words, "model.name=hf/smol"], "docker", capsys)
    assert job["mounts"]["/recipe/smol"] == f"{here}/smol"
    assert job["mounts"]["/recipe/other"] == f"{here}/other"
    settings = [word for word in job["command"] if "=" in word]
    assert settings[-2:] == ["language.tokenizer=/recipe/other", "model.name=hf//recipe/smol"]
    mix = {"smol": 3, "/data/more": 1, "a/talks.jsonl": 2, "b/talks.jsonl": 0.5}
    for name in ("a/talks.jsonl", "b/talks.jsonl"):
        Path(name).parent.mkdir()
        Path(name).touch()
    mixed = f"data={{name: conversations, mix: {json.dumps(mix)}}}"
    Path("here").mkdir()
    mixed_words = ["gpt-stdlib", "--data", "here", "--set", mixed, "--set"]
    job = rendered([*mixed_words, "evaluation.sets.a={path: a/talks.jsonl}"], "docker", capsys)
    mounts = {there: file for there, file in job["mounts"].items() if there.startswith("/recipe/")}
    files = {"smol": "smol", "talks.jsonl": "a/talks.jsonl", "1-talks.jsonl": "b/talks.jsonl"}
    assert mounts == {f"/recipe/{name}": f"{here}/{file}" for name, file in files.items()}
    settings = [word for word in job["command"] if "=" in word]
    assert settings[-2] == "evaluation.sets.a.path=/recipe/talks.jsonl"
    given = ["/recipe/smol", "/data/more", "/recipe/talks.jsonl", "/recipe/1-talks.jsonl"]
    assert json.loads(settings[-1].removeprefix("data.mix=")) == dict(zip(given, mix.values(), strict=True))
    job = rendered([*words, "model.name=hf/someone/smol@main"], "docker", capsys)
    assert set(job["mounts"]) == {"/workspace/runs", "/recipe/other"}  # the hub's is fetched there


FOLDER = ["digits", "--set", "data.name=folder", "--set"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([*FOLDER, "data.path=/no/pets", "--on", "docker", *ENGINE], "data.path=/no/pets: no such file or"),
        ([*FOLDER, "data.path=/data/pets", "--on", "docker", *ENGINE], "data.path=/data/pets: no such file"),
        (
            [*FOLDER, "data.path=pets", "--data", ".", "--on", "docker", *ENGINE, "--runs", "/srv"],
            "no such file or folder here",
        ),
        (
            [*FOLDER, "data.path=/usr", "--data", "/etc", "--on", "docker", *ENGINE],
            "data.path=/usr: only --data /etc is mounted",
        ),
        (
            [*FOLDER, "data.path=pets", "--on", "kubernetes", *CLUSTER],
            "data.path=pets: pods don't see this machine's files: put it on a volume, give its claim by "
            "--data pvc:CLAIM, and its path there, --set data.path=/data/…",
        ),
        (
            ["digits", "--set", "model.pretrained=w.safetensors", "--on", "kubeflow", *CLUSTER],
            "model.pretrained=w.safetensors: pods don't see this machine's files",
        ),
        (
            ["digits", "--set", "data.cache=/scratch/copies", "--on", "docker", *ENGINE],
            "data.cache=/scratch/copies: containers don't see it; give --cache /scratch/copies",
        ),
        (
            ["digits", "--set", "checkpoint.folder=/scratch/one", "--on", "docker", *ENGINE],
            "checkpoint.folder=/scratch/one: containers don't see it; leave it out, or give one below",
        ),
    ],
)
def test_what_cannot_be_mounted_is_refused(
    words: list[str], wanted: str, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.add("docker")
    assert wanted in refused(words, capsys)
    assert tools.calls() == []


def test_every_key_with_a_path_is_looked_at() -> None:
    keys = {key.name for key in describe(Recipe) if "Path" in key.type}
    assert keys | {"task"} == set(carried.PATHS)


def test_on_slurm_without_containers_the_files_are_warned_of(tools: Tools, capsys: Any) -> None:
    del tools
    Path("r.yaml").write_text(HERE)
    words = ["r.yaml", "--on", "slurm", "--container", "venv", "--dry-run"]
    assert main(["submit", *words]) == 0
    warned = capsys.readouterr().err
    for name in ("the recipe r.yaml", "model.pretrained w.safetensors", "task mine.py"):
        assert f"{name} lies on a disk of this machine" in warned


SWEEP = "grid: {optim.lr: [0.1, 0.3], seed: [0, 1]}"


def test_a_sweep_submits_one_image_and_says_how_to_compare(
    tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.add("docker")
    Path("sweep.yaml").write_text(SWEEP)
    words = [
        "digits",
        "--on",
        "docker",
        *ENGINE,
        "--name",
        "lr",
        "--set",
        "epochs=1",
        "--sweep",
        "sweep.yaml",
    ]
    assert main(["submit", *words]) == 0
    ran = [call for call in tools.calls() if call[1] == "run"]
    assert [call[call.index("--name") + 1] for call in ran] == ["lr-0", "lr-1", "lr-2", "lr-3"]
    assert all(DIGEST in call for call in ran)
    assert [call[-6:] for call in ran] == [
        ["--set", "epochs=1", "--set", f"optim.lr={rate}", "--set", f"seed={seed}"]
        for rate in (0.1, 0.3)
        for seed in (0, 1)
    ]
    listed = json.loads(Path("runs/.jobs/lr-sweep.json").read_text())
    assert listed["image"] == DIGEST
    assert [run["folder"] for run in listed["runs"]] == [f"runs/lr-{number}" for number in range(4)]
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "compare    trainer report runs/lr-0 runs/lr-1 runs/lr-2 runs/lr-3"


def test_a_sweep_may_list_its_runs(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    del tools
    Path("sweep.yaml").write_text(
        'runs: [{optim.lr: 0.1}, {about: "it\'s: [x]", data: {micro_batch_size: 16}}]'
    )
    words = ["digits", "--on", "kubernetes", *CLUSTER, "--name", "x", "--sweep", "sweep.yaml", "--dry-run"]
    assert main(["submit", *words]) == 0
    jobs = [one for one in yaml.safe_load_all(capsys.readouterr().out) if one["kind"] == "Job"]
    args = [one["spec"]["template"]["spec"]["containers"][0]["args"] for one in jobs]
    assert [word[-4:] for word in args] == [
        ["--grace", "90", "--set", "optim.lr=0.1"],
        ["--set", 'about="it\'s: [x]"', "--set", 'data={"micro_batch_size": 16}'],
    ]


def test_a_sweep_on_slurm_is_one_array(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.add("sbatch", "echo Submitted batch job 7")
    Path("sweep.yaml").write_text(SWEEP)
    assert main(["submit", "digits", "--on", "slurm", *ENGINE, "--name", "lr", "--sweep", "sweep.yaml"]) == 0
    assert tools.calls() == [["sbatch", "runs/.jobs/lr.sbatch"]]
    text = Path("runs/.jobs/lr.sbatch").read_text()
    assert "#SBATCH --array=0-3" in text
    assert "#SBATCH --job-name=lr\n" in text  # of all tasks, so not the first run's
    assert "--out runs/lr-3" in text
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("follow     tail -F ")
    assert lines[1].endswith("runs/.jobs/lr-7_0.out")
    assert lines[-1] == "compare    trainer report runs/lr-0 runs/lr-1 runs/lr-2 runs/lr-3"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("grid: {optim.lr: [0.1, fast]}", "optim.lr=fast"),
        ("grid: {optm.lr: [0.1]}", "unknown key 'optm'"),
        ("runs: [{seed: 1}, {sed: 1}]", "unknown key 'sed'"),
        ("grid: {seed: 1}", "--sweep sweep.yaml: grid holds a list of values"),
        ("grid: {seed: []}", "--sweep sweep.yaml: 0 runs"),
        ("grid: {seed: [1, 1]}", "stands there twice"),
        ("runs: [1]", "--sweep sweep.yaml: runs holds a mapping"),
        ("runs: [{seed: 1}]\ngrid: {seed: [1]}", "--sweep sweep.yaml: give grid:"),
        ("[]", "--sweep sweep.yaml: give grid:"),
        ("grid: {a: [" + "1, " * 2000 + "], b: [" + "1, " * 2000 + "]}", "runs; give 1 to 1000"),
    ],
)
def test_a_sweep_is_checked_before_its_first_run(
    text: str, wanted: str, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.add("docker")
    Path("sweep.yaml").write_text(text)
    assert wanted in refused(["digits", "--on", "docker", *ENGINE, "--sweep", "sweep.yaml"], capsys)
    assert tools.calls() == []


def test_a_sweep_wants_a_digest(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.add("docker")
    Path("sweep.yaml").write_text(SWEEP)
    line = refused(["digits", "--on", "docker", "--image", "trainer:x", "--sweep", "sweep.yaml"], capsys)
    assert line.startswith("--image trainer:x: the runs of a sweep must have the same image")
    line = refused(["digits", "--on", "docker", *ENGINE, "--sweep", "none.yaml"], capsys)
    assert line.startswith("--sweep none.yaml: can't be read")


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
    assert get_args(JobPlace) == PLACES == tuple(places.JOB_PLACES)
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
