"""Checks before a container is built or started; each raises BadInputError, with the remedy.

The standard library is enough. Shared by `runtime.py`, `image.py` and `publish.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.config.suggest import nearest  # noqa: E402
from trainer.errors import BadInputError  # noqa: E402
from trainer.host.stacks import Stack, read_stacks  # noqa: E402


def call(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs a program and captures its output; exit code 127 if it doesn't exist, 124 after the timeout."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout)
    except OSError as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", f"no answer within {timeout:g} s")


def last_line(text: str) -> str:
    """Returns the last line of a program's output that isn't blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no word why"


def check_engine(plugin: str) -> None:
    """Checks that an engine answers, and that it has a plugin: buildx or compose."""
    done = call("docker", "version", "--format", "{{.Server.Version}}")
    if done.returncode:
        raise BadInputError(f"the container engine doesn't answer: {last_line(done.stderr)}")
    if call("docker", plugin, "version").returncode:
        raise BadInputError(
            f"this engine has no {plugin}: install docker-{plugin}, docker-{plugin}-plugin of Docker"
        )


def check_disk(need_gb: float) -> None:
    """Checks the space where the engine keeps images, if that is on this machine."""
    folder = Path(call("docker", "info", "--format", "{{.DockerRootDir}}").stdout.strip() or "/no/where")
    local = os.environ.get("DOCKER_HOST", "unix:").startswith("unix:")
    if not local or not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free / 1e9
    if free < need_gb:
        raise BadInputError(
            f"a build needs about {need_gb:g} GB and {folder} has {free:.1f} free: free some "
            "(docker system prune removes what is unused)"
        )


def check_ports(ports: Mapping[str, str]) -> None:
    """Checks that nobody listens on the ports of 127.0.0.1 that variables (JUPYTER_PORT) give."""
    for variable, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", int(port)))
            except PermissionError:
                continue  # below 1024; the engine may
            except OSError:
                other = int(port) + 1
                raise BadInputError(
                    f"port {port} of 127.0.0.1 is taken: stop what uses it, or give {variable}={other}"
                ) from None


def check_stack(name: str) -> Stack:
    """Finds a stack."""
    stacks = read_stacks()
    if name not in stacks:
        raise BadInputError(f"no stack {name!r}{nearest(name, stacks) or '; there are ' + ', '.join(stacks)}")
    return stacks[name]


def container_gpus(image: str) -> tuple[list[str], str]:
    """Returns the names of the GPUs that a container of an image sees, and the reason if it sees none."""
    options = ["--rm", "--pull=never", "--network=none", "--gpus=all", "--entrypoint=nvidia-smi"]
    done = call("docker", "run", *options, image, "-L")
    if names := re.findall(r"^GPU \d+: (.+) \(UUID", done.stdout, re.MULTILINE):
        return names, ""
    if "could not select device driver" in done.stderr:
        return [], "the engine has no NVIDIA runtime; install nvidia-container-toolkit and restart the engine"
    return [], last_line(done.stderr or done.stdout)


def image_digest(image: str) -> str:
    """Returns the engine's digest of an image; "" if the engine doesn't have it."""
    found = call("docker", "image", "inspect", "--format", "{{.Id}}", image).stdout.strip()
    return found if found.startswith("sha256:") else ""
