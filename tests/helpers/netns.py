"""Hosts for tests: network namespaces on a switch of their own."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Namespaces t…-1, t…-2 with the addresses 10.79.0.1, 10.79.0.2 and so on; skips where that can't be."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root, and ip")
    prefix = f"t{os.getpid() % 100000}"
    names, switch = [f"{prefix}-{n + 1}" for n in range(count)], f"{prefix}-s"
    try:
        try:
            for name in (*names, switch):
                run("ip", "netns", "add", name)
            run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(names, 1):
                ends = ("type", "veth", "peer", "name", f"port{number}", "netns", switch)
                run("ip", "link", "add", "eth0", "netns", name, *ends)
                run("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
                run("ip", "-n", name, "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr!r}")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
