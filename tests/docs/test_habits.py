"""Promise: the files beside the code name what is there, and the workflows' shell does what it says."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from locks import read_toml

from tests.helpers.programs import program, ran
from trainer.version import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROGRAMS = Path(sys.executable).parent


# Every step of the workflows, by file, job and name.
STEPS = {
    f"{path.stem}/{job}/{step.get('name', step.get('uses'))}": step
    for path in WORKFLOWS
    for job, about in yaml.safe_load(path.read_text())["jobs"].items()
    for step in about["steps"]
}
SCRIPTS = {name: step["run"] for name, step in STEPS.items() if "run" in step}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_steps_shell_passes_shellcheck(name: str) -> None:
    words = (PROGRAMS / "shellcheck", "--shell=bash", "-")
    ran(*words, code=0, input=f"#!/bin/bash\nset -e\n{SCRIPTS[name]}")


@pytest.mark.parametrize("path", [*WORKFLOWS], ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_with_their_version(path: Path) -> None:
    used = [line for line in path.read_text().splitlines() if re.search(r"^\s*-? *uses:", line)]
    assert used
    pinned = r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$"
    assert [line for line in used if not re.search(pinned, line)] == []
    about = yaml.safe_load(path.read_text())
    assert about["permissions"] == {}
    assert all("timeout-minutes" in job and "permissions" in job for job in about["jobs"].values())


def test_what_is_signed_is_named_and_by_a_version_where_a_tag_says_it(tmp_path: Path) -> None:
    """With a program in place of python3 that writes down how it was called."""
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    given = {"STACK": "small", "REGISTRY": "localhost:5000/ours", "PATH": f"{tools}:/usr/bin:/bin"}
    given |= {"GITHUB_REF_NAME": "v0.1.0", "GITHUB_STEP_SUMMARY": str(tmp_path / "told")}
    where = "--stack small --registry localhost:5000/ours"
    sign, tag = (f"python3 scripts/publish.py {what} {where}" for what in ("sign", "tag"))
    tags = {"branch": "", "tag": "v0.1.0"}
    for kind, code in (("branch", 0), ("tag", 0), ("branch", 2)):
        called = [sign, *([] if code else [f"{tag} --version {tags[kind]}"])]
        program(tools / "python3", f'#!/bin/bash\necho "python3 $*" >> "{calls}"\nexit {code}\n')
        words = ("bash", "-e", "-c", SCRIPTS["image/publish/Sign, attest, name by day and version"])
        done = ran(*words, cwd=tmp_path, env={**given, "GITHUB_REF_TYPE": kind})
        assert (done.returncode, calls.read_text().splitlines()) == (code, called)
        calls.unlink()


def test_the_image_workflow_offers_every_stack_and_publishes_what_was_built_first() -> None:
    about = yaml.safe_load((ROOT / ".github/workflows/image.yml").read_text())
    offered = about[True]["workflow_dispatch"]["inputs"]["stack"]["options"]  # YAML 1.1: `on` is true
    assert set(offered) == {path.parent.name for path in (ROOT / "stacks").glob("*/stack.toml")}
    jobs = about["jobs"]
    assert list(jobs) == ["first-build", "publish"] and jobs["publish"]["needs"] == "first-build"
    names = [step.get("name") for step in jobs["first-build"]["steps"]]
    assert names.index("Build twice, compare, test") < names.index("Push what was tested")
    assert "id-token" not in jobs["first-build"]["permissions"]


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    versions = re.findall(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == "Unreleased"
    assert [int(part) for part in versions[1].split(".")] <= [int(part) for part in __version__.split(".")]


def test_paths_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = r"trainer|tests|docs|scripts|stacks|\.github|\.devcontainer"
    named = set(re.findall(rf"`((?:{rooms})/[\w./-]*)`", text))
    assert len(named) > 15
    assert [name for name in named if not re.search(r"NAME|ROOM", name) and not (ROOT / name).exists()] == []


def test_every_file_of_the_package_is_in_its_wheel() -> None:
    package = ROOT / "trainer"
    patterns = read_toml(ROOT / "pyproject.toml")["tool"]["setuptools"]["package-data"]["trainer"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert package / "runs/report/templates/page.html" in packed
    there = {p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert {path for path in there - packed if path.suffix != ".py"} == set()


def test_tests_that_scripts_name_are_there() -> None:
    """A name that isn't ends pytest before it runs any."""
    text = "".join((ROOT / file).read_text() for file in (".ci/run", "Makefile", "scripts/maintain.mk"))
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text)
    assert named
    for file, name in named:
        assert (ROOT / file).exists(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
