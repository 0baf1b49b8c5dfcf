"""What a process is started with: its streams, their encoding, and its current folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True, input=b"")
    assert (tmp_path / "file").read_text() == "True"


@pytest.mark.parametrize(
    ("environment", "written"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, rb"\xfc"),
        ({"PYTHONIOENCODING": "latin-1:surrogatepass"}, b"\xfc"),
        ({"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}, b"\xc3\xbc"),  # surrogateescape, too
    ],
)
def test_standard_output_takes_any_character(environment: dict[str, str], written: bytes) -> None:
    """Whatever its encoding and error handler: a class's name may hold an u with dots, or half an emoji."""
    code = (
        "from trainer.host.startup import print_anything; print_anything()\n"
        "for text in ('\\xfc', '\\udcff', '\\ud83d', '\\xfc\\udcff\\u0416'): print(text)"
    )
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("LC_", "LANG", "PYTHON"))}
    environment = {**inherited, "PYTHONPATH": str(ROOT), **environment}
    told = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    assert told.stdout.splitlines()[:3] == [written, b"\xff", rb"\ud83d"]


def test_a_current_folder_that_was_deleted_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")
    (tmp_path / "d").rmdir()
    assert main(["recipes"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer: error: the current folder: can't be read") and "it was deleted" in line
