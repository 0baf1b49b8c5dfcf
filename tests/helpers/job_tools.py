"""Programs that stand in for kubectl, sbatch and docker, and what they were told."""

from pathlib import Path

import pytest

# A tool that writes down its words, says something, and ends with a code.
TOOL = """#!/bin/sh
for word in {name} "$@"; do printf '%s\\0' "$word"; done >> "{log}"; printf '\\n' >> "{log}"
{body}
"""


class Tools:
    """Programs that stand on PATH, and nothing else does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.log = folder / "bin", folder / "calls"
        self.folder.mkdir()
        monkeypatch.setenv("PATH", str(self.folder))

    def add(self, name: str, body: str = "") -> None:
        file = self.folder / name
        file.write_text(TOOL.format(name=name, log=self.log, body=body))
        file.chmod(0o755)

    def calls(self) -> list[list[str]]:
        """The words of every call, in order; settings here hold no line breaks."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split("\0")[:-1] for line in lines]
