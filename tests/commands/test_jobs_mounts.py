"""Promise: what a recipe names on this machine is mounted, or refused, or warned of."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_jobs_launch import CLUSTER, ENGINE, refused
from tests.helpers import job_files
from tests.helpers.job_tools import Tools
from trainer.cli import main
from trainer.commands.submit import carried
from trainer.config.recipe import Recipe
from trainer.config.section import describe


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
