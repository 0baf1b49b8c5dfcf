"""Hosts for tests: network namespaces on a switch of their own, and processes that run within them."""

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import SECONDS

_CLONE_NEWNET = 0x40000000


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def in_host(name: str, *words: str) -> None:
    """Runs a command, such as tc or iptables, within a host; skips the test where the kernel refuses it."""
    try:
        run("ip", "netns", "exec", name, *words)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{words[0]} can't do it here: {getattr(error, 'stderr', error)!r}")


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


def on_each(names: list[str], function: Callable[[int], Any], seconds: float = SECONDS) -> list[Any]:
    """Returns the results of `function(number)` on each host, in a process forked from this one."""
    context = multiprocessing.get_context("fork")
    started = []
    for number, name in enumerate(names):
        ours, theirs = context.Pipe()
        process = context.Process(target=_within, args=(name, function, number, theirs))
        process.start()
        started.append((process, ours))
    answers = []
    for process, pipe in started:
        answers.append(pipe.recv() if pipe.poll(seconds) else None)
        process.join(5)
        process.kill()
    return answers


def _within(name: str, function: Callable[[int], Any], number: int, pipe: Any) -> None:
    with Path("/var/run/netns", name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    pipe.send(function(number))
    os._exit(0)
