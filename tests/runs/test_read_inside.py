"""Promise: whatever lies in a run folder, no command hangs, fills the memory or reads outside of it."""

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forked import attempt, small
from trainer import cli
from trainer.commands.verify.contradictions import contradictions
from trainer.commands.verify.recorded import read_recorded
from trainer.errors import BadInputError
from trainer.host.files import hash_inside, lines_inside, open_inside, read_inside
from trainer.runs.folder import read_rows
from trainer.train.anomaly import read_anomalies

_SECONDS = 60  # a command that reads something endless never ends


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    recipe = small(log={"every": 4, "to": ["jsonl", "csv"]}, checkpoint={"every": 10})
    ended = attempt(folder, recipe)
    assert ended.code == 0, ended.said
    return folder


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


def outside(path: Path) -> None:
    """What is outside is of the right kind, so that it would be read."""
    path.symlink_to(path.parents[1] / "outside" / path.name)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        short = Path(f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}")
        server.bind(str(short / path.name))


def unreadable(path: Path) -> None:
    """Nobody may read it, and the child has no right to all the same; a folder where a folder was."""
    _empty(path)
    path.chmod(0)


def failing(path: Path) -> None:
    """Each read of it fails with EIO, as on a broken disk; unreadable where nothing may be mounted."""
    _empty(path)
    if path.is_dir() or _LIBC.mount(b"/proc/self/mem", os.fsencode(path), None, _BIND, None):
        unreadable(path)


def _empty(path: Path) -> None:
    if path.name in ("checkpoints", "tensorboard", "begun-from", "export") or path.name.startswith("step-"):
        path.mkdir(exist_ok=True)
    else:
        path.touch()


KINDS = (zeros, fifo, folder, holes, outside, a_socket, unreadable, failing)
_LIBC = ctypes.CDLL(None, use_errno=True)
_BIND, _PRIVATE, _NEW_MOUNTS = 0x1000, 0x44000, 0x20000


def _names(whole: Path) -> list[str]:
    """Each name that a command reads or writes, one checkpoint's for all."""
    newest = max((whole / "checkpoints").iterdir())
    found = [path for path in whole.rglob("*") if newest in (path, *path.parents) or "step-" not in str(path)]
    more = {"anomalies.jsonl", "begun-from", "quarantine.jsonl", "train.csv", "export", "profile"}
    return sorted({str(path.relative_to(whole)) for path in found} | more)


def _commands(run: Path, name: str) -> dict[str, Callable[[], object]]:
    """Those that are quick; and those that read weights."""
    some: dict[str, Callable[[], object]] = {
        "report": lambda: cli.main(["report", str(run), "--out", str(run.parent / "report.html")]),
        "checkpoints": lambda: cli.main(["runs", str(run)]),
        "verify": lambda: contradictions(read_recorded(run)),
        "anomalies": lambda: read_anomalies(run),
        "rows": lambda: list(read_rows(run)),
    }
    if name.endswith((".safetensors", "manifest.json", "state.json")) or name.startswith("checkpoints"):
        export = ["export", str(run), "--to", "safetensors", "--streamed", "--force"]
        some["evaluate"] = lambda: cli.main(["evaluate", str(run)])
        some["export"] = lambda: cli.main([*export, "--out", str(run.parent / "exported")])
    return some


def _limited() -> None:
    """A child in which what is endless ends in an error of memory, or of time."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    if _LIBC.unshare(_NEW_MOUNTS) == 0:
        _LIBC.mount(None, b"/", None, _PRIVATE, None)
    head, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _LIBC.capget(head, rights)
    rights[0] &= ~0b110  # root's, to read and write what it may not
    assert _LIBC.capset(head, rights) == 0


def _walk(whole: Path, root: Path, chosen: Iterable[tuple[str, Callable[[Path], None]]]) -> None:
    shutil.copytree(whole, root / "outside")
    for name, kind in chosen:
        run = root / "run"
        run.mkdir()
        for one in whole.iterdir():
            (shutil.copytree if one.is_dir() else shutil.copy)(one, run / one.name)
        if (run / name).is_dir():
            shutil.rmtree(run / name)
        else:
            (run / name).unlink(missing_ok=True)
        kind(run / name)
        for command, does in _commands(run, name).items():
            (root / "now").write_text(f"{command}, {name}, {kind.__name__}")
            signal.alarm(_SECONDS)
            try:
                does()
            except (BadInputError, OSError) as error:
                assert "\n" not in str(error), error
        signal.alarm(0)
        if kind in (unreadable, failing):
            _LIBC.umount(os.fsencode(run / name))
            (run / name).chmod(0o700)
        shutil.rmtree(run)


@pytest.mark.parametrize(
    "kinds", ["in turn", *(pytest.param(n, marks=pytest.mark.slow) for n in range(len(KINDS)))]
)
def test_no_name_in_a_run_folder_holds_a_command_up(whole: Path, tmp_path: Path, kinds: Any) -> None:
    names = _names(whole)
    chosen = zip(names, cycle(KINDS) if kinds == "in turn" else cycle([KINDS[kinds]]), strict=False)
    if (child := os.fork()) == 0:
        code = 1
        try:
            _limited()
            _walk(whole, tmp_path, chosen)
            code = 0
        except BaseException as error:
            (tmp_path / "now").open("a").write(f": {type(error).__name__}: {error}")
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, (tmp_path / "now").read_text()


def test_links_of_a_hugging_face_snapshot_are_read_and_no_others(tmp_path: Path) -> None:
    cache = tmp_path / "models--me--mine"
    run, blobs = cache / "snapshots" / "abc" / "run", cache / "blobs"
    run.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "b1").write_text("{}\n")
    (run / "manifest.json").symlink_to("../../../blobs/b1")
    assert read_inside(run / "manifest.json", 100) == b"{}\n"
    (tmp_path / "secret").write_text("secret")
    leads: dict[str, Any] = {
        "out": "../../../../secret",
        "in": "manifest.json",
        "fifo": "../../../blobs/fifo",
    }
    os.mkfifo(blobs / "fifo")
    (blobs / "on").symlink_to(tmp_path / "secret")
    for name, to in {**leads, "on": "../../../blobs/on", "up": "../../../blobs/../../secret"}.items():
        (run / name).symlink_to(to)
        if name != "in":  # which leads to a blob in the end
            with pytest.raises(OSError, match=name):
                open_inside(run / name)
    shutil.move(blobs, tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        open_inside(run / "manifest.json")


def test_what_is_read_has_a_bound(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("a\nb\nc")
    assert list(lines_inside(file)) == [b"a\n", b"b\n", b"c"]
    with pytest.raises(OSError, match="larger"):
        read_inside(file, 4)
    holes(tmp_path / "holes")
    with pytest.raises(OSError, match="longer"):
        list(lines_inside(tmp_path / "holes"))
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic link"):
        hash_inside(tmp_path / "link")


def test_a_run_folder_that_is_a_link_is_read(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.symlink_to(whole)
    export = ["export", str(run), "--to", "safetensors", "--streamed", "--out", str(tmp_path / "x")]
    for words in (["evaluate", str(run), "--json"], ["runs", str(run)], export):
        assert cli.main(words) == 0, capsys.readouterr()
    assert json.loads((tmp_path / "x" / "model.json").read_text())["weights"] == "ema.safetensors"
