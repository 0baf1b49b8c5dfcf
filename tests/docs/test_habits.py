"""Promise: the files beside the code name what is there, and the workflows' shell does what it says."""

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from conda_lock import read_toml
from wheels import canonical, read_lock

from trainer.version import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROGRAMS = Path(sys.executable).parent


def steps() -> dict[str, dict[str, Any]]:
    """Every step of the workflows, by file, job and name."""
    return {
        f"{path.stem}/{job}/{step.get('name', step.get('uses'))}": step
        for path in WORKFLOWS
        for job, about in yaml.safe_load(path.read_text())["jobs"].items()
        for step in about["steps"]
    }


STEPS = steps()
SCRIPTS = {name: step["run"] for name, step in STEPS.items() if "run" in step}


def test_the_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "image", "release"]
    assert len(SCRIPTS) > 8


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_steps_shell_passes_shellcheck(name: str) -> None:
    words = [str(PROGRAMS / "shellcheck"), "--shell=bash", "-"]
    text = f"#!/bin/bash\nset -e\n{SCRIPTS[name]}"
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_steps_only_call_targets_of_the_makefile() -> None:
    targets = set(
        re.findall(
            r"^([a-z-]+):", (ROOT / "Makefile").read_text() + (ROOT / "scripts/maintain.mk").read_text(), re.M
        )
    )
    called = {found for text in SCRIPTS.values() for found in re.findall(r"\bmake ([a-z-]+)\b", text)}
    assert called == {"first-build", "push", "sbom", "venv", "release"} & targets


@pytest.mark.parametrize("path", [*WORKFLOWS], ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_with_their_version(path: Path) -> None:
    used = [line for line in path.read_text().splitlines() if re.search(r"^\s*-? *uses:", line)]
    assert used
    for line in used:
        assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line
    about = yaml.safe_load(path.read_text())
    assert about["permissions"] == {}
    assert all("timeout-minutes" in job and "permissions" in job for job in about["jobs"].values())


def test_the_image_workflow_offers_every_stack() -> None:
    about = yaml.safe_load((ROOT / ".github/workflows/image.yml").read_text())
    offered = about[True]["workflow_dispatch"]["inputs"]["stack"]["options"]  # YAML 1.1: `on` is true
    assert set(offered) == {path.parent.name for path in (ROOT / "stacks").glob("*/stack.toml")}


def stand_ins(folder: Path, **scripts: str) -> dict[str, str]:
    """Programs that write down how they were called; returns an environment that has them first on PATH."""
    for name, text in scripts.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\necho "{name} $*" >> "{folder}/calls"\n{text}\n')
        program.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "STACK": "small", "REGISTRY": "localhost:5000/ours"}


def run_step(name: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    words = ["bash", "-e", "-c", SCRIPTS[name]]  # as the platform does
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_only_a_tag_of_a_release_names_a_version(tmp_path: Path) -> None:
    environment = stand_ins(tmp_path, python3="") | {"GITHUB_STEP_SUMMARY": str(tmp_path / "told")}
    for kind, version in (("branch", ""), ("tag", "v0.1.0")):
        (tmp_path / "calls").unlink(missing_ok=True)
        given = {"GITHUB_REF_TYPE": kind, "GITHUB_REF_NAME": "v0.1.0"}
        done = run_step(
            "image/publish/Sign, attest, name by day and version", tmp_path, **environment, **given
        )
        assert done.returncode == 0, done.stderr
        where = "--stack small --registry localhost:5000/ours"
        assert (tmp_path / "calls").read_text().splitlines() == [
            f"python3 scripts/publish.py sign {where}",
            f"python3 scripts/publish.py tag {where} --version {version}",
        ]


def test_nothing_is_named_where_signing_fails(tmp_path: Path) -> None:
    environment = stand_ins(tmp_path, python3="exit 2") | {"GITHUB_STEP_SUMMARY": str(tmp_path / "told")}
    step = "image/publish/Sign, attest, name by day and version"
    assert run_step(step, tmp_path, **environment, GITHUB_REF_TYPE="branch").returncode == 2
    assert "publish.py tag" not in (tmp_path / "calls").read_text()


def test_bills_are_of_both_images_on_the_dockerfiles_bases(tmp_path: Path) -> None:
    write = "mkdir -p build/sbom; echo $RANDOM > build/sbom/sbom.cdx.json"
    environment = stand_ins(tmp_path, make=write)
    shutil.copy(ROOT / "Dockerfile", tmp_path)
    done = run_step("image/first-build/Find the owner of every file", tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    train, dev = (tmp_path / "calls").read_text().splitlines()
    bases = re.findall(
        r"^FROM --platform=linux/amd64 (\S+@sha256:\w{64}) AS", (ROOT / "Dockerfile").read_text(), re.M
    )
    conda, debian = bases
    assert train == f"make sbom STACK=small IMAGE=trainer:small-train BASE={debian}"
    assert dev == f"make sbom STACK=small IMAGE=trainer:small-dev BASE={debian} {conda}"
    assert {path.name for path in (tmp_path / "build/sbom").iterdir()} == {"train.cdx.json", "dev.cdx.json"}


def test_publishing_needs_the_first_build() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/image.yml").read_text())["jobs"]
    assert list(jobs) == ["first-build", "publish"] and jobs["publish"]["needs"] == "first-build"
    names = [step.get("name") for step in jobs["first-build"]["steps"]]
    assert names.index("Build twice, compare, test") < names.index("Push what was tested")
    assert "id-token" not in jobs["first-build"]["permissions"]


def test_advisories_become_the_list_that_make_audit_reads(tmp_path: Path) -> None:
    records = [{"id": "A-1"}, {"id": "A-2"}]
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for record in records:
            archive.writestr(f"{record['id']}.json", json.dumps(record))
    environment = stand_ins(tmp_path, make="", curl='cp "${4#file://}" "$6"')
    step, told = "image/first-build/Get the advisories", tmp_path / "told"
    environment |= {"GITHUB_STEP_SUMMARY": str(told)}
    done = run_step(step, tmp_path, **environment, ADVISORIES=(tmp_path / "all.zip").as_uri())
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "build/advisories.json").read_text()) == records
    assert run_step(step, tmp_path, **environment, ADVISORIES="").returncode == 0
    assert told.read_text().endswith("Advisories are off: the variable ADVISORIES is empty.\n")


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    versions = re.findall(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == "Unreleased"
    assert [int(part) for part in versions[1].split(".")] <= [int(part) for part in __version__.split(".")]


def test_hooks_are_programs_of_the_lock() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    lock = read_lock((ROOT / "stacks/torch2.9-cu128/wheels.lock").read_text())
    locked = {wheel.name for wheel in lock if "test" in wheel.groups}
    owners = {
        file.name: canonical(distribution.name)
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or ()
        if "bin" in file.parts
    }
    for hook in local["hooks"]:
        assert hook["language"] == "system"
        program, *_ = shlex.split(hook["entry"])
        assert program.startswith(".venv/bin/"), program
        assert owners[Path(program).name] in locked, program


def test_the_devcontainer_opens_a_service_of_the_compose_file() -> None:
    about = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    compose = ROOT / ".devcontainer" / about["dockerComposeFile"]
    services = yaml.safe_load(compose.read_text())["services"]
    assert {about["service"], *about["runServices"]} <= set(services)
    mounts = [mount.split(":")[1] for mount in services[about["service"]]["volumes"]]
    assert about["workspaceFolder"] in mounts


def test_paths_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(
        re.findall(r"`((?:trainer|tests|docs|scripts|stacks|\.github|\.devcontainer)/[\w./-]*)`", text)
    )
    assert len(named) > 15
    assert [name for name in named if not re.search(r"NAME|ROOM", name) and not (ROOT / name).exists()] == []


def test_every_file_of_the_package_is_in_its_wheel() -> None:
    package = ROOT / "trainer"
    patterns = read_toml(ROOT / "pyproject.toml")["tool"]["setuptools"]["package-data"]["trainer"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert package / "runs/report/templates/page.html" in packed
    there = {p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert {path for path in there - packed if path.suffix != ".py"} == set()
