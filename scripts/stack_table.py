#!/usr/bin/env python3
"""Writes trainer/host/stacks.json: what the doctor knows of each stack without a checkout."""

import hashlib
import json
from pathlib import Path
from typing import Any

from locks import read_toml, read_wheels

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "trainer/host/stacks.json"


def table(stacks: Path = ROOT / "stacks") -> dict[str, Any]:
    """Returns the facts of every stack by its name, with the wheels of the group train."""
    found = {}
    for folder in sorted(path.parent for path in stacks.glob("*/stack.toml")):
        stack, lock = read_toml(folder / "stack.toml"), (folder / "wheels.lock").read_bytes()
        wheels: dict[str, str] = {}
        for wheel in read_wheels(lock.decode()):
            if "train" in wheel.groups:  # several versions where they depend on the Python
                wheels[wheel.name] = " ".join([*wheels.get(wheel.name, "").split(), wheel.version])
        found[folder.name] = {
            "conda": stack["kind"] == "conda",
            **{"torchaudio": "", **stack["pins"]},
            "cuda": stack["brings"]["cuda"],
            "architectures": stack["gpu"]["architectures"],
            "native": stack["driver"]["native"],
            "floor": stack["driver"]["floor"],
            "supported_until": str(stack["supported_until"]),
            "lock": hashlib.sha256(lock).hexdigest(),
            "wheels": wheels,
        }
    return found


def main() -> None:
    """Writes the table, a line for each key."""
    lines = json.dumps(table(), indent=1)
    TABLE.write_text(lines + "\n")
    print(f"{TABLE.relative_to(ROOT)}: {len(lines):,} bytes")


if __name__ == "__main__":
    main()
