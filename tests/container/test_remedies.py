"""A remedy that a container prints works when it is typed as it stands."""

import os
import re
from pathlib import Path

import pytest

from tests.container.run import engine, running, wait_for
from tests.helpers.programs import program, ran

pytestmark = pytest.mark.container

OWNER = 12345
QUICK = ("trainer", "train", "digits", "--set=max_steps=1", "--set=parallel.threads=1")


def typed(line: str, folder: Path, *more: str) -> str:
    """What a line says that this checkout's owner types in a folder; more words follow it."""
    tools = program(folder.parent / "tools/id", f"#!/bin/sh\necho {OWNER}\n").parent
    path = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = ran("sh", "-c", f'{line} "$@"', "sh", *more, code=0, cwd=folder, env=path)
    return done.stdout + done.stderr


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of somebody who isn't root and isn't the image's user."""
    if os.geteuid():
        pytest.skip("only root can give a folder to somebody else")
    folder = tmp_path / "my home"
    folder.mkdir()
    os.chown(folder, OWNER, OWNER)
    return folder


def test_a_run_that_would_go_with_its_container_is_kept(train_image: str, home: Path) -> None:
    out = "my r2"
    told = engine("run", "--rm", train_image, *QUICK, "--out", out)
    (line,) = re.findall(r"goes with it: (mkdir .*) keeps it", told)
    make, run = line.split(" && ")
    folder = home / make.removeprefix("mkdir -p ").strip("'")
    typed(make, home)
    os.chown(folder, OWNER, OWNER)  # whoever types it isn't root, as this test is
    said = typed(run, home, "--rm", train_image, *QUICK, "--out", out)
    assert "goes with it" not in said
    assert (folder / "manifest.json").stat().st_uid == OWNER


def test_root_without_the_right_to_become_the_owner(train_image: str, home: Path) -> None:
    run = ("run", "--rm", "--user=0:0", "--cap-drop=ALL", "--volume", f"{home}:/workspace")
    told = engine(*run, train_image, "id", "-u")
    named = re.findall(r"the capabilities (\w+) and (\w+)$", told, re.M)[0]
    assert "0" in told.splitlines()  # of two streams either may come first
    assert engine(*run, *(f"--cap-add={one}" for one in named), train_image, "id", "-u") == f"{OWNER}\n"


def test_the_lines_of_sshd(dev_image: str, home: Path) -> None:
    """A file that others can't read; none at all; a cache whose folder of keys is no folder of ours."""
    keygen = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/keys/key")
    engine("run", "--rm", "--user=0", "--volume", f"{home}:/keys", dev_image, *keygen)
    key = home / "key.pub"
    os.chown(key, 0, 0)
    key.chmod(0o600)
    mount = ("--volume", f"{key}:/run/authorized_keys:ro")
    told = engine("run", "--rm", *mount, dev_image, "sshd", code=2)
    assert "can't be read by uid 1000: chmod a+r it" in told
    typed(f"chmod a+r '{key}'", home)
    none = engine("run", "--rm", dev_image, "sshd", code=2)
    assert "-v FILE:/run/authorized_keys:ro with docker run" in none
    with running(f"trainer-test-{os.getpid()}-sshd", *mount, dev_image, "sshd", "-p", "2200") as name:
        wait_for(lambda: "listening on" in engine("logs", name), "sshd")
        assert "port 2200." in engine("logs", name) and "port 2222." not in engine("logs", name)
