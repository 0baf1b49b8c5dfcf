"""P1, P2: `make first-build` proves an image from its bases; only that is published; a failure is a line."""

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

from tests.container.rehearsal import (
    STACKS,
    commit,
    gateway,
    make_project,
    own_certificate,
    push_bases,
    served,
)
from tests.container.run import engine
from tests.helpers.waiting import until

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

    def run(self, *words: str, script: str = "first_build.py", code: int = 0, **env: str) -> str:
        """Runs a script of the project; returns what it said, of a failure only the last line of stderr."""
        done = subprocess.run(
            [sys.executable, "-B", self.project / "scripts" / script, *words],
            env={**os.environ, **env},
            cwd=self.project,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout[-4000:] + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def refused(self, **env: str) -> str:
        """What the first build says in the one line with which it fails."""
        said = self.run("--need-gb=1", code=2, **env)
        assert said.count("\n") == 1, said
        assert said.endswith("; log: build/first-build/log.txt\n")
        log = (self.project / "build/first-build/log.txt").read_text()
        assert said in log
        assert not (self.project / f"build/first-build/{STACK}.json").exists()
        return said

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
        pytest.skip(
            "needs docker-registry (a package of Debian's) and the engine of tests/container/engine.sh"
        )
    folder = tmp_path_factory.mktemp("registry")
    storage = f"{{filesystem: {{rootdirectory: {folder}/blobs}}}}"
    text = f"version: 0.1\nstorage: {storage}\nhttp: {{addr: '{REGISTRY}'}}\n"
    (folder / "config.yml").write_text(text)
    with subprocess.Popen(
        [program, "serve", folder / "config.yml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: engine("buildx", "imagetools", "inspect", f"{REGISTRY}/no:no", code=1, expected=[".*"])
              .endswith(": not found\n"))  # fmt: skip
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
    with served(folder / "channel", gateway()) as address:
        project = make_project(folder / "project", digests, folder / "channel", address)
        yield Rehearsal(project, folder / "channel", address, digests)
    engine("rmi", "--force", *(f"trainer:{STACK}-{target}" for target in ("train", "dev")), code=None)


@pytest.fixture
def copied(first: Rehearsal, tmp_path: Path) -> Rehearsal:
    """A copy of it, to be broken."""
    project = shutil.copytree(first.project, tmp_path / "project", symlinks=True)
    shutil.rmtree(project / "build", ignore_errors=True)
    return Rehearsal(project, first.channel, first.address, first.digests)


def test_it_proves_itself_and_only_that_is_published(first: Rehearsal, tmp_path: Path) -> None:
    said = first.run("push", "--registry", f"{REGISTRY}/ours", script="publish.py", code=2)
    assert "nothing was tested" in said
    out = first.run("--need-gb=1", "--page=build/page.md")
    about = json.loads((first.project / f"build/first-build/{STACK}.json").read_text())
    assert list(about["images"]) == ["train", "dev"]
    assert about["bases"] == first.digests
    page = (first.project / "build/page.md").read_text()
    saw = {name: step["saw"] for name, step in about["steps"].items()}
    for name, digest in first.digests.items():
        assert saw[f"pull {name}"] == f"{name}@{digest}"
        assert f"| pull {name} | {name}@{digest} |" in page
    for stack in STACKS:
        assert re.match(r"\d+ packages, hashes checked", saw[f"conda locks of {stack}"])
    for target, digest in about["images"].items():
        assert saw[f"build {target}, twice"] == f"two builds gave {digest} (gzip layers)"
    assert saw["docker compose up"].startswith("healthy") and saw["advisories"].startswith("off")
    assert out.splitlines()[-1].startswith("first-build: all of it passed")
    published(first, about["images"], tmp_path)


def published(first: Rehearsal, images: dict[str, str], tmp_path: Path) -> None:
    """Pushes, signs, tags, pulls and runs what was tested."""
    ours = ("--registry", f"{REGISTRY}/ours")
    first.run("push", *ours, script="publish.py")
    key: dict[str, Any] = {"COSIGN_PASSWORD": ""}
    subprocess.run(["cosign", "generate-key-pair"], cwd=tmp_path, env={**os.environ, **key}, check=True)
    for target, digest in images.items():
        component = {"component": {"type": "container", "name": target, "version": digest}}
        (tmp_path / f"{target}.cdx.json").write_text(
            json.dumps({"bomFormat": "CycloneDX", "metadata": component})
        )
    sign = ("sign", *ours, "--bills", str(tmp_path), "--key", str(tmp_path / "cosign.key"))
    first.run(*sign, script="publish.py", **key)
    for digest in images.values():
        ref = f"{REGISTRY}/ours/trainer@{digest}"
        words = ["--insecure-ignore-tlog=true", "--key", str(tmp_path / "cosign.pub"), ref]
        subprocess.run(["cosign", "verify", *words], check=True, capture_output=True)
        for kind in ("cyclonedx", "slsaprovenance1"):
            subprocess.run(
                ["cosign", "verify-attestation", "--type", kind, *words], check=True, capture_output=True
            )
    (tmp_path / "train.cdx.json").write_text("{}")
    assert "is the bill of no image" in first.run(*sign, script="publish.py", code=2, **key)
    tag = ("tag", *ours, "--day", "20261126", "--version")
    for _ in range(2):  # the second time there is nothing to do
        out = first.run(*tag, "v0.2.0", script="publish.py")
        assert out.count("publish: ") == 4
        assert f"{REGISTRY}/ours/trainer:{STACK}-dev-v0.2.0 is {images['dev']}" in out
    assert "trainer/version.py says" in first.run(*tag, "v9.9.9", script="publish.py", code=2)
    ref = f"{REGISTRY}/ours/trainer:{STACK}-20261126"
    packages = (first.project / f"stacks/{STACK}/conda.lock").read_text().count("#")
    engine("rmi", "--force", images["train"])
    assert images["train"] in engine("pull", ref)
    assert engine("run", "--rm", "--network=none", ref, "cat", "/opt/env/packages") == f"{packages}\n"
    another_commit(first, images, tag)


def another_commit(first: Rehearsal, images: dict[str, str], tag: tuple[str, ...]) -> None:
    """Of the same day and version: its day's name gets a number, and the version's isn't moved."""
    (first.project / "README.md").write_text("another\n")
    commit(first.project)
    assert "first-build" in first.run(*tag, "", script="publish.py", code=2)  # another was tested
    first.run("--need-gb=1", "--page=build/page.md")
    first.run("push", "--registry", f"{REGISTRY}/ours", script="publish.py")
    refused = first.run(*tag, "v0.2.0", script="publish.py", code=2)
    assert f"{STACK}-v0.2.0 is {images['train']} already and is never moved" in refused
    out = first.run(*tag, "", script="publish.py")
    assert f"trainer:{STACK}-20261126-2 is " in out and images["train"] not in out


def test_a_digest_that_is_gone(copied: Rehearsal) -> None:
    name, digest = list(copied.digests.items())[1]
    copied.edit("Dockerfile", f"{re.escape(name)}@{digest}", f"{name}@sha256:{'0' * 64}")
    said = copied.refused()
    assert f"{name} is there, but no longer as sha256:000" in said and f"it is {digest} now" in said


def test_a_package_that_is_another(copied: Rehearsal) -> None:
    copied.edit(f"stacks/{STACK}/conda.lock", r"#[0-9a-f]{64}", f"#{'1' * 64}")
    said = copied.refused()
    assert f"conda locks of {STACK}: a package is another file than the locked one (" in said
    assert "libgomp" in said


def test_a_package_that_is_gone(copied: Rehearsal) -> None:
    copied.edit(f"stacks/{STACK}/conda.lock", "/libgomp-", "/libgomp-0.")
    said = copied.refused()
    assert "what is pinned is gone from its server (conda_env: " in said and "make lock" in said


def test_a_certificate_that_nobody_knows(copied: Rehearsal, tmp_path: Path) -> None:
    host = gateway()
    with served(copied.channel, host, own_certificate(tmp_path, host)) as address:
        for lock in copied.project.glob("stacks/*/conda*.lock"):
            lock.write_text(lock.read_text().replace(copied.address, address))
        assert "network and certificates: a certificate's authority is unknown here (" in copied.refused()
        # Known, it goes on to the builds: their certificates are those. The rest is as it was.
        copied.edit("Dockerfile", "FROM stack AS uv", "FROM stack AS uv\nRUN exit 3")
        said = copied.refused(SSL_CERT_FILE=str(tmp_path / "ca.pem"))
        assert said.startswith("first-build: index of wheels: ")


def test_no_network(copied: Rehearsal) -> None:
    for lock in copied.project.glob("stacks/*/conda.lock"):
        lock.write_text(lock.read_text().replace(copied.address, "http://127.0.0.1:9"))
    assert "network and certificates: a server can't be reached (" in copied.refused()
    copied.edit("Dockerfile", "continuumio/", "example.invalid/")
    for lock in copied.project.glob("stacks/*/conda.lock"):
        lock.write_text(lock.read_text().replace("http://127.0.0.1:9", copied.address))
    assert "pull example.invalid/miniconda3:" in (said := copied.refused())
    assert "a server can't be reached" in said


def test_a_full_disk(copied: Rehearsal) -> None:
    said = copied.run("--need-gb=1000000", code=2)
    assert said.startswith("first-build: engine and disk: a build needs about 1e+06 GB and ")
    fill = "RUN --mount=type=tmpfs,target=/full,size=65536 dd if=/dev/zero of=/full/file bs=100k count=9"
    copied.edit("Dockerfile", "FROM stack AS uv", f"FROM stack AS uv\n{fill}")
    assert "index of wheels: the disk is full (" in copied.refused()


def test_builds_that_differ(copied: Rehearsal) -> None:
    copied.edit("Dockerfile", "RUN ls /opt/env", "RUN head -c 20 /dev/urandom > /opt/env/random; ls /opt/env")
    said = copied.refused()
    assert "build train, twice: two builds gave sha256:" in said and "layer " in said
