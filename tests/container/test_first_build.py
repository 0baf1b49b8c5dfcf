"""P1, P2: `make first-build` proves an image from its bases; only that is published; it ends at an error."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.container.project import free_ports
from tests.container.rehearsal import STACKS, gateway, make_project, push_bases
from tests.container.run import engine
from tests.helpers.programs import folder_served, ran
from tests.helpers.waiting import until
from trainer.version import __version__

pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.xdist_group("first-build")]

STACK = STACKS[0]
PORT = int(os.environ.get("TRAINER_MIRROR_PORT", "5055"))  # where engine.sh has the engine look first
REGISTRY = f"127.0.0.1:{PORT}"


@dataclass
class Rehearsal:
    """A small project, and what serves it."""

    project: Path
    channel: Path
    address: str
    digests: dict[str, str]

    def publish(self, *words: str, code: int = 0, **env: str) -> str:
        """Runs publish.py in the project; returns what it said, of a failure what stderr has."""
        script, more = self.project / "scripts/publish.py", {**os.environ, **env}
        done = ran(sys.executable, "-B", script, *words, code=code, env=more, cwd=self.project)
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def build(self, code: int = 0) -> list[str]:
        """Runs the first build; returns its lines, which its log has, too."""
        names = ("JUPYTER_PORT", "TENSORBOARD_PORT", "SSH_PORT")
        ports = dict(zip(names, free_ports(3), strict=True))
        more = {**os.environ, "PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1", **ports}
        done = ran(self.project / "scripts/first_build", STACK, "--need-gb=1", code=code, env=more)
        assert not done.stderr, done.stderr
        assert done.stdout == (self.project / "build/first-build/log.txt").read_text()
        assert (self.project / f"build/first-build/{STACK}.json").exists() == (code == 0)
        return done.stdout.splitlines()

    def refused(self, step: str) -> str:
        """What the first build says last before it names the step at which it failed."""
        *lines, last = self.build(code=2 if step.startswith("build") else 1)
        assert last.startswith(f"first-build: failed: {step} ("), last
        return "\n".join(lines[-40:])

    def edit(self, name: str, old: str, new: str) -> None:
        """Replaces a text of a file, which must be there."""
        file = self.project / name
        text = file.read_text()
        assert re.search(old, text), name
        file.write_text(re.sub(old, lambda _: new, text, count=1))


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's registry, where the engine looks first for images of its default registry."""
    program = shutil.which("docker-registry")
    mirrors = engine("info", "--format", "{{json .RegistryConfig.Mirrors}}")
    if program is None or REGISTRY not in mirrors:
        pytest.skip("needs docker-registry (of Debian's) and the engine of tests/container/engine.sh")
    folder = tmp_path_factory.mktemp("registry")
    storage = f"{{filesystem: {{rootdirectory: {folder}/blobs}}}}"
    text = f"version: 0.1\nstorage: {storage}\nhttp: {{addr: '{REGISTRY}'}}\n"
    (folder / "config.yml").write_text(text)
    silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    nothing = ("buildx", "imagetools", "inspect", f"{REGISTRY}/no:no")
    with subprocess.Popen([program, "serve", folder / "config.yml"], **silent) as process:
        until(lambda: engine(*nothing, code=1, expected=[".*"]).endswith(": not found\n"))
        yield REGISTRY
        process.terminate()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def first(registry: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """The project whose first build passes."""
    stand_in = os.environ.get("TRAINER_STAND_IN")
    if stand_in is None:
        pytest.skip("where the real bases can be had, make first-build is the test")
    folder = tmp_path_factory.mktemp("first")
    digests = push_bases(stand_in, registry, folder / "base")
    (folder / "channel").mkdir()
    with folder_served(folder / "channel", gateway()) as address:
        project = make_project(folder / "project", digests, folder / "channel", address)
        yield Rehearsal(project, folder / "channel", address, digests)
    names = (f"trainer:{STACK}-{target}" for target in ("train", "dev"))  # the test removes one itself
    engine("rmi", "--force", *names, code=None, expected=("No such image",))


@pytest.fixture
def copied(first: Rehearsal, tmp_path: Path) -> Rehearsal:
    """A copy of it, to be broken."""
    project = shutil.copytree(first.project, tmp_path / "project", symlinks=True)
    shutil.rmtree(project / "build", ignore_errors=True)
    return Rehearsal(project, first.channel, first.address, first.digests)


def test_it_proves_itself_and_only_that_is_published(first: Rehearsal, tmp_path: Path) -> None:
    ours = ("--registry", f"{REGISTRY}/ours")
    assert "first-build" in first.publish("push", *ours, code=2)
    lines = first.build()
    about = json.loads((first.project / f"build/first-build/{STACK}.json").read_text())
    assert list(about["images"]) == ["train", "dev"] and about["bases"] == first.digests
    for digest in about["images"].values():
        assert any(f"two builds gave {digest} (" in line for line in lines)
    # Pushed, signed, tagged, pulled and run, as the workflow image does it.
    images = about["images"]
    first.publish("push", *ours)
    key: dict[str, Any] = {"COSIGN_PASSWORD": ""}
    subprocess.run(["cosign", "generate-key-pair"], cwd=tmp_path, env={**os.environ, **key}, check=True)
    for target, digest in images.items():
        component = {"component": {"type": "container", "name": target, "version": digest}}
        bill = {"bomFormat": "CycloneDX", "metadata": component}
        (tmp_path / f"{target}.cdx.json").write_text(json.dumps(bill))
    sign = ("sign", *ours, "--bills", str(tmp_path), "--key", str(tmp_path / "cosign.key"))
    first.publish(*sign, **key)
    for digest in images.values():
        ref = f"{REGISTRY}/ours/trainer@{digest}"
        words = ["--insecure-ignore-tlog=true", "--key", str(tmp_path / "cosign.pub"), ref]
        subprocess.run(["cosign", "verify", *words], check=True, capture_output=True)
        for kind in ("cyclonedx", "slsaprovenance1"):
            asked = ["cosign", "verify-attestation", "--type", kind, *words]
            subprocess.run(asked, check=True, capture_output=True)
    (tmp_path / "train.cdx.json").write_text("{}")
    assert images["train"] in first.publish(*sign, code=2, **key)
    tag = ("tag", *ours, "--day", "20261126", "--version")
    for _ in range(2):  # the second time only the name that moves is given again
        out = first.publish(*tag, f"v{__version__}")
        for name in (f"{STACK}-dev-v{__version__}", f"{STACK}-dev-20261126", f"{STACK}-dev"):
            assert f"{REGISTRY}/ours/trainer:{name} is {images['dev']}" in out
    assert __version__ in first.publish(*tag, "v9.9.9", code=2)
    ref = f"{REGISTRY}/ours/trainer:{STACK}-20261126"
    packages = (first.project / f"stacks/{STACK}/conda.lock").read_text().count("#")
    engine("rmi", "--force", images["train"])
    assert images["train"] in engine("pull", ref)
    assert engine("run", "--rm", "--network=none", ref, "cat", "/opt/env/packages") == f"{packages}\n"


def test_a_package_that_is_another(copied: Rehearsal) -> None:
    copied.edit(f"stacks/{STACK}/conda.lock", r"#[0-9a-f]{64}", f"#{'1' * 64}")
    said = copied.refused("build train, twice")
    assert "libgomp" in said and "sha256 differs" in said


def test_builds_that_differ(copied: Rehearsal) -> None:
    copied.edit("Dockerfile", "RUN ls /opt/env", "RUN head -c 20 /dev/urandom > /opt/env/random; ls /opt/env")
    *_, said, last = copied.build(code=1)
    assert "layer " in said and "build train, twice" in last
