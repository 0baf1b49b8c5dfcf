"""What the tests of the image share."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.engine_box import Machine
from tests.helpers.ports import free_port
from tests.helpers.programs import program

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("scripts/runtime.py", "scripts/engine_checks.py", "scripts/maintain.mk")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    root, tools = tmp_path / "project", tmp_path / "tools"
    tools.mkdir()
    for room in ("", "config", "host", "commands", "commands/doctor"):
        (root / "trainer" / room).mkdir(parents=True)
        shutil.copy(ROOT / "trainer" / room / "__init__.py", root / "trainer" / room)
    (root / "scripts").mkdir()
    files = ("errors.py", "version.py", "config/suggest.py", "host/environment.py", "host/stacks.py")
    for name in (*(f"trainer/{one}" for one in (*files, "host/stacks.json")), *SCRIPTS):
        shutil.copy(ROOT / name, root / name)
    for name in ("bootstrap.py", "image.py"):
        (root / "scripts" / name).write_text(f"import sys; print('{name}', *sys.argv[1:], flush=True)\n")
    program(root / ".venv/bin/trainer", '#!/bin/sh\necho "in .venv:" "$@"\nexit 75\n')
    # Nothing else on PATH: this machine may have an engine or GPUs.
    port = free_port()  # the first of four
    ports = {"JUPYTER_PORT": str(port), "TENSORBOARD_PORT": str(port + 1)}
    return Machine(root, tools, {"PATH": str(tools), "HOME": str(tmp_path), **ports})
