"""P1, pinned by hash: the lock names every wheel of every supported Python and platform by its hash."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bootstrap import NEWEST, OLDEST, PLATFORMS
from lock import wanted
from locks import Wheel, read_toml, read_wheels
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = read_toml(ROOT / "pyproject.toml")
GROUPS = wanted(PROJECT)
LOCKS = sorted([*ROOT.glob("stacks/*/wheels.lock"), *ROOT.glob("tests/compat/*/wheels.lock")])
STACKS = {path: read_toml(path.parent / "stack.toml") for path in LOCKS}
PYTHONS = [f"3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
HOST = re.compile(r"://|[a-z0-9-]+\.(org|com|io|net|dev)\b|--(extra-)?index-url|--find-links")


def environment(python: str, platform: tuple[str, str]) -> dict[str, str]:
    about = {"python_version": python, "python_full_version": f"{python}.7", "platform_machine": platform[1]}
    about |= {"platform_system": platform[0], "sys_platform": platform[0].lower()}
    return {**about, "implementation_name": "cpython", "platform_python_implementation": "CPython"}


def installed(wheels: list[Wheel], group: str, where: dict[str, str]) -> dict[str, str]:
    """What the group installs there; asserts that the version is unique."""
    found: dict[str, str] = {}
    for wheel in wheels:
        if group in wheel.groups and (not wheel.marker or Marker(wheel.marker).evaluate(where)):
            assert wheel.name not in found, f"two versions of {wheel.name} for {where}"
            found[wheel.name] = wheel.version
    return found


def served(stack: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each group and environment that a stack's lock of wheels is for."""
    markers = [Marker(text) for text in stack.get("environments", PROJECT["tool"]["uv"]["environments"])]
    for group in sorted(stack.get("groups", GROUPS)):
        for platform in sorted(PLATFORMS):
            for where in (environment(python, platform) for python in PYTHONS):
                if any(marker.evaluate(where) for marker in markers):
                    yield group, where


@pytest.fixture(scope="module", params=LOCKS, ids=lambda path: path.parent.name)
def lock(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module")
def wheels(lock: Path) -> list[Wheel]:
    return read_wheels(lock.read_text())


def test_every_requirement_is_pinned_and_hashed(wheels: list[Wheel]) -> None:
    for wheel in wheels:
        first, *hashes = wheel.text.split(" \\\n    ")
        requirement = Requirement(first)
        assert str(requirement.specifier) == f"=={wheel.version}", wheel
        assert requirement.name == wheel.name == canonicalize_name(wheel.name)
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes), wheel


def test_nothing_else_is_in_the_lock(lock: Path, wheels: list[Wheel]) -> None:
    """No address of an index above all: the lock must work with any mirror."""
    text = lock.read_text()
    header = text.partition("# groups: ")[0]
    assert header.splitlines()[-1] == "--only-binary :all:"
    assert all(line.startswith("#") for line in header.splitlines()[:-1])
    assert text == header + "".join(f"# groups: {' '.join(w.groups)}\n{w.text}\n" for w in wheels)
    assert not HOST.search(re.sub(r"==\S+", "", text)), "an address"
    found, asked = {group for wheel in wheels for group in wheel.groups}, STACKS[lock].get("groups", GROUPS)
    # Of a group that conda holds whole, nothing is left.
    assert found == set(asked) if STACKS[lock]["kind"] == "wheels" else found <= set(asked)
    assert all(wheel.groups for wheel in wheels)


def test_the_pins_are_those_of_the_stack(lock: Path, wheels: list[Wheel]) -> None:
    stack = STACKS[lock]
    assert stack["name"] == lock.parent.name
    if stack["kind"] == "conda":  # whose packages test_stacks.py compares
        return
    linux = installed(wheels, "train", environment(PYTHONS[0], ("Linux", "x86_64")))
    assert {name: linux[name] for name in stack["pins"]} == stack["pins"]
    if lock.is_relative_to(ROOT / "tests"):
        return
    brings, cuda = stack["brings"], stack["brings"]["cuda"].split(".")[0]
    found = [linux[name] for name in ("triton", f"nvidia-cudnn-cu{cuda}", f"nvidia-nccl-cu{cuda}")]
    assert found == [brings[name] for name in ("triton", "cudnn", "nccl")]
    # From CUDA 13 on the toolkit's wheels carry no suffix.
    runtime = linux.get(f"nvidia-cuda-runtime-cu{cuda}") or linux["nvidia-cuda-runtime"]
    assert runtime.startswith(f"{brings['cuda']}.")


def test_one_lock_serves_every_python_and_platform(lock: Path, wheels: list[Wheel]) -> None:
    stack = STACKS[lock]
    if stack["kind"] == "conda":
        return
    # PyTorch's wheels for Linux on Arm carry CUDA from 2.11 on.
    arm = int(stack["pins"]["torch"].split(".")[1]) >= 11
    machines, count = {"x86_64", "aarch64"} if arm else {"x86_64"}, 0
    for group, where in served(stack):
        here = installed(wheels, group, where)
        for requirement in map(Requirement, {**GROUPS, **stack.get("requires", {})}[group]):
            if requirement.marker is None or requirement.marker.evaluate(where):
                assert requirement.specifier.contains(here[canonicalize_name(requirement.name)]), where
        cuda = [name for name in here if name.startswith("nvidia-") and "-cu1" in name]
        carries = where["sys_platform"] == "linux" and where["platform_machine"] in machines
        assert bool(cuda) == (carries and group in ("train", "bench", "oracles")), (group, where)
        count += 1
    whole = len(stack.get("groups", GROUPS)) * len(PLATFORMS) * len(PYTHONS)
    assert count == whole or "environments" in stack


def test_the_project_and_bootstrap_name_the_same_platforms() -> None:
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    markers = [Marker(text) for text in PROJECT["tool"]["uv"]["environments"]]
    candidates = {*PLATFORMS, ("Darwin", "x86_64"), ("Windows", "AMD64"), ("Linux", "ppc64le")}
    for platform in candidates:
        for python in [*PYTHONS, f"3.{NEWEST[1] + 1}"]:
            covered = any(marker.evaluate(environment(python, platform)) for marker in markers)
            assert covered == (platform in PLATFORMS and python in PYTHONS)
