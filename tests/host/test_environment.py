"""The environment variables of our own: few, in one module, with a table."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.host import environment

PACKAGE = Path(environment.__file__).parents[1]
NAME = re.compile(r"\bTRAINER_[A-Z_]+")


def test_one_module_names_them_all() -> None:
    found = {
        path.relative_to(PACKAGE): set(NAME.findall(path.read_text()))
        for path in PACKAGE.rglob("*.py")
        if NAME.search(path.read_text())
    }
    assert list(found) == [Path("host/environment.py")]
    table = re.findall(r"^\| `(\w+)` \|", environment.__doc__ or "", re.MULTILINE)
    assert set(table) == set.union(*found.values()) and len(table) <= 4


# What a process is started with


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_leads_nowhere(closed: str, tmp_path: Path) -> None:
    """Not to the next file that is opened, into which a library's lines would be written."""
    lines = [
        "import os, subprocess, sys",
        "from trainer.host.startup import print_anything",
        "print_anything()",
        "file = open('file', 'w')",
        "os.write(1, b'x'), os.write(2, b'x')",
        "sys.stdout.reconfigure(), sys.stderr.write(''), sys.stdin.read()",
        "subprocess.run(['sh', '-c', 'echo x; echo x >&2; cat'], check=True)",
        "file.write(f'{file.fileno() > 2}')",
    ]
    command = f"exec {sys.executable} -c '{chr(10).join(lines).replace(chr(39), chr(34))}' {closed}"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True, input=b"")
    assert (tmp_path / "file").read_text() == "True"


def test_a_current_folder_that_was_deleted_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")
    (tmp_path / "d").rmdir()
    assert main(["recipes"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer: error: the current folder: can't be read") and "it was deleted" in line
