"""What the tests of the image share."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.engine_box import Machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    root, tools = tmp_path / "project", tmp_path / "tools"
    tools.mkdir()
    for name in ("runtime.py", "engine_checks.py"):
        (root / "scripts").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, root / "scripts")
    for room in ("", "config", "host", "commands", "commands/doctor"):
        (root / "trainer" / room).mkdir(parents=True)
        shutil.copy(ROOT / "trainer" / room / "__init__.py", root / "trainer" / room)
    doctor = ("host/stacks.py", "host/stacks.json")
    for name in ("errors.py", "version.py", "config/suggest.py", "host/environment.py", *doctor):
        shutil.copy(ROOT / "trainer" / name, root / "trainer" / name)
    shutil.copy(ROOT / "scripts/maintain.mk", root / "scripts")
    for name in ("bootstrap.py", "image.py"):
        (root / "scripts" / name).write_text(f"import sys; print('{name}', *sys.argv[1:], flush=True)\n")
    trainer = root / ".venv/bin/trainer"
    trainer.parent.mkdir(parents=True)
    trainer.write_text('#!/bin/sh\necho "in .venv:" "$@"\nexit 75\n')
    trainer.chmod(0o755)
    # Nothing else on PATH: this machine may have an engine or GPUs.
    return Machine(root, tools, {"PATH": str(tools), "HOME": str(tmp_path)})
