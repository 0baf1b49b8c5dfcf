"""Promise: nothing that a run folder holds makes us write, change or remove what lies outside of it."""

import json
import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forked
from tests.helpers.forked import attempt, replace, small
from trainer import cli
from trainer.config.recipe import Recipe
from trainer.data.corrupt import Bad, Quarantine
from trainer.errors import BadInputError
from trainer.host.files import (
    check_replaceable,
    copy_folder,
    open_own,
    open_regular_file,
    own_folder,
    written_whole,
)
from trainer.launch.meeting import TOKEN
from trainer.launch.nodes import LOGS
from trainer.observe.sinks import csv_sink, jsonl_sink, keep_rows, tensorboard_sink
from trainer.runs.folder import check_inside, claim_folder, lock
from trainer.train.request import Request

_MOST = 8  # attempts, each with more names that were refused put back


def talkative() -> Recipe:
    """A run that writes all that it can."""
    return small(log={"every": 2, "to": ["jsonl", "csv", "tensorboard"]})


def _profiled() -> None:
    replace(sys.modules[forked.__name__], "Request", partial(Request, profile="torch"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was stopped after step 8, and the same one at its end, with what commands wrote there."""
    folder = tmp_path_factory.mktemp("written")
    assert attempt(folder / "half", talkative(), stop_at=8, before=_profiled).code == 75
    shutil.copytree(folder / "half", folder / "end")
    ended = attempt(folder / "end", talkative(), before=_profiled)
    assert ended.code == 0, ended.said
    for words in (["report"], ["export", "--to", "safetensors"]):
        assert cli.main([words[0], str(folder / "end"), *words[1:]]) == 0
    return folder / "half", folder / "end"


def _names(*folders: Path) -> list[str]:
    """All names in run folders, but in checkpoints; and names beside each that could be guessed."""
    found = {
        str(path.relative_to(folder))
        for folder in folders
        for path in folder.rglob("*")
        if "step-" not in str(path.relative_to(folder).parent)
    }
    more = {".writable", "anomalies.jsonl", "quarantine.jsonl", "trackers", "wandb", "mlflow", "begun-from"}
    more |= {LOGS, TOKEN, "memory_summary.txt", "memory_snapshot.pickle"}
    beside = {f"{name}.tmp" for name in found} | {str(Path(name).with_suffix(".tmp")) for name in found}
    return sorted(found | more | beside)


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name(f"absent-{victim.name}"))


def folder_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim.parent / "folder")


def fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def hard_link(path: Path, victim: Path) -> None:
    if victim.is_file():
        path.hardlink_to(victim)
    else:
        path.symlink_to(victim)


KINDS = (link, dangling, folder_link, fifo, hard_link)


def _look(outside: Path) -> dict[str, Any]:
    """What lies there, and how: names, modes, times, contents."""
    return {
        str(path.relative_to(outside)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(outside.rglob("*"))
    }


def _plant(
    folder: Path, outside: Path, sources: tuple[Path, ...], kind: Callable[[Path, Path], None]
) -> list[str]:
    """Puts something else in the place of every name; victims have the contents that are looked for."""
    outside.mkdir()
    (outside / "folder").mkdir()
    (outside / "folder" / "theirs").write_text("theirs")
    names = _names(*sources)
    tops = [name for name in names if not any(name.startswith(f"{other}/") for other in names)]
    for number, name in enumerate(tops):
        victim = outside / f"{number}-{Path(name).name}"
        source = next((one / name for one in sources if (one / name).exists()), None)
        if source is None:
            victim.write_text("somebody's\n")
        elif source.is_dir():
            shutil.copytree(source, victim)
        else:
            shutil.copy(source, victim)
        if victim.is_file():
            victim.chmod(0o600)
        _take_away(folder / name)
        kind(folder / name, victim)
    return tops


def _take_away(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _put_back(folder: Path, name: str, original: Path) -> None:
    _take_away(folder / name)
    if (original / name).is_dir():
        shutil.copytree(original / name, folder / name)
    elif (original / name).exists():
        shutil.copy(original / name, folder / name)


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_in_a_run_folder_leads_what_a_resumed_run_writes_outside(
    tmp_path: Path, written: tuple[Path, Path], kind: Callable[[Path, Path], None]
) -> None:
    """Every name at once; one that is refused is named in one line, put back, and the rest is tried again."""
    half, _ = written
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(half, folder)
    left = _plant(folder, outside, written, kind)
    before = _look(outside)
    for _ in range(_MOST):
        ended = attempt(folder, talkative(), before=_profiled)
        assert _look(outside) == before, (ended.line, ended.said)
        if ended.code == 0:
            break
        assert (ended.code, ended.said) == (2, ""), ended
        words = ended.line.replace(":", " ").split(" ")
        refused = [name for name in left if name in words or str(folder / name) in words]
        assert refused, (ended.line, left)
        left = [name for name in left if name not in refused]
        for name in refused:
            _put_back(folder, name, half)
    assert ended.code == 0, ended
    assert json.loads((folder / "manifest.json").read_text())["status"] == "finished"
    assert not (folder / "model.safetensors").is_symlink()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_inside_of_folders_leads_nowhere_either(
    tmp_path: Path, written: tuple[Path, Path], kind: Callable[[Path, Path], None]
) -> None:
    half, end = written
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(half, folder)
    outside.mkdir()
    (outside / "folder").mkdir()
    names = [name for name in _names(half, end) if "/" in name and not name.endswith(".tmp")]
    newest = max(name for name in names if name.startswith("checkpoints/step") and (half / name).exists())
    for number, name in enumerate(names):
        if not (folder / name).parent.is_dir() or (folder / name).parent.is_symlink():
            continue
        victim = outside / f"{number}-{Path(name).name}"
        victim.write_text("somebody's\n")
        if name == newest:  # what it goes on from
            continue
        _take_away(folder / name)
        kind(folder / name, victim)
    before = _look(outside)
    ended = attempt(folder, talkative(), before=_profiled)
    assert _look(outside) == before
    assert ended.code in (0, 2) and "Traceback" not in ended.said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["report", "export"])
def test_no_name_leads_what_commands_write_outside(
    tmp_path: Path, written: tuple[Path, Path], kind: Callable[[Path, Path], None], command: str
) -> None:
    _, end = written
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(end, folder)
    outside.mkdir()
    (outside / "folder").mkdir()
    for name in ("report.html", "export", ".report.html.tmp", "report.tmp"):
        victim = outside / name.strip(".")
        victim.write_text("somebody's\n")
        _take_away(folder / name)
        kind(folder / name, victim)
    before = _look(outside)
    words = {"report": ["report", str(folder)], "export": ["export", str(folder), "--to", "safetensors"]}
    assert cli.main(words[command]) in (0, 2)
    assert _look(outside) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".lock", ".writable", LOGS, TOKEN, "begun-from", "x.tmp"])
def test_a_new_run_writes_nothing_outside_of_the_folder_it_is_given(
    tmp_path: Path, name: str, kind: Callable[[Path, Path], None]
) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    for made in (folder, outside, outside / "folder"):
        made.mkdir()
    victim = outside / "victim"
    victim.write_text("somebody's\n")
    kind(folder / name, victim)
    before = _look(outside)
    try:
        claim_folder(folder)
        check_inside(folder)
        os.close(lock(folder))
    except BadInputError as error:
        assert str(folder) in str(error)
    assert _look(outside) == before


@pytest.mark.parametrize("kind", KINDS)
def test_each_writer_refuses_a_name_that_leads_elsewhere(
    tmp_path: Path, kind: Callable[[Path, Path], None]
) -> None:
    """In case nothing looked before; with the name that is to be mended."""
    bad = Bad(3, "x.png", "cut off")
    row = {"kind": "train", "step": 1, "loss": 0.5}
    writers: dict[str, Callable[[Path], object]] = {
        "metrics.jsonl": lambda path: jsonl_sink(path.parent),
        "train.csv": lambda path: csv_sink(path.parent)[0](row),  # type: ignore[arg-type]
        "tensorboard": tensorboard_sink,
        "quarantine.jsonl": lambda path: Quarantine("training", 9, path).add([bad]),
        "rows.jsonl": lambda path: keep_rows(path, 1),
    }
    for name, write in writers.items():
        folder, outside = tmp_path / name / "run", tmp_path / name / "outside"
        for made in (folder, outside / "folder"):
            made.mkdir(parents=True)
        victim = outside / "victim"
        victim.write_text('{"kind": "train", "step": 1}\n')
        kind(folder / name, victim)
        before = _look(outside)
        if name == "rows.jsonl" and kind is hard_link:
            write(folder / name)  # copied
        else:
            with pytest.raises((OSError, BadInputError), match=name):
                write(folder / name)
        assert _look(outside) == before


def test_what_is_no_regular_file_is_refused_with_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    said = {"folder": "directory", "link": "symbolic link", "fifo": "regular", "device": "symbolic link"}
    for name, why in {**said, "socket": "regular"}.items():
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND | os.O_CREAT):
            with pytest.raises(OSError, match=f"(?i){why}.*{name}"):
                open_own(tmp_path / name, flags)
        if name != "socket":
            with pytest.raises(OSError, match=name):
                open_regular_file(tmp_path / name)
    with pytest.raises(OSError, match=r"is a symbolic link.*link"):
        own_folder(tmp_path / "link")
    with pytest.raises(OSError, match=r"isn't a folder.*fifo"):
        own_folder(tmp_path / "fifo")
    assert own_folder(own_folder(tmp_path / "new")).is_dir()


def test_a_run_folder_that_is_a_link_is_taken(tmp_path: Path, written: tuple[Path, Path]) -> None:
    shutil.copytree(written[0], tmp_path / "scratch")
    (tmp_path / "run").symlink_to("scratch")
    ended = attempt(tmp_path / "run", talkative())
    assert ended.code == 0, ended
    assert (tmp_path / "scratch" / "report.html").is_file()


def test_what_a_killed_write_left_goes_with_the_next_start(
    tmp_path: Path, written: tuple[Path, Path]
) -> None:
    shutil.copytree(written[0], tmp_path / "run")
    left = tmp_path / "run" / ".tmp-0123456789abcdef-model.safetensors"
    left.write_bytes(b"half of it")
    assert attempt(tmp_path / "run", talkative()).code == 0
    assert not left.exists()


def test_the_name_while_writing_cannot_be_foreseen(tmp_path: Path) -> None:
    seen = set[str]()
    for _ in range(3):
        with written_whole(tmp_path / "a.json.gz") as beside:
            assert beside.suffixes == [".json", ".gz"]
            seen.add(beside.name)
    assert len(seen) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices, and could replace them")
def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    null = tmp_path / "null"
    os.mknod(null, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    with pytest.raises(OSError, match="it is a device"), written_whole(null) as beside:
        beside.write_text("a report")
    assert null.is_char_device() and [path.name for path in tmp_path.iterdir()] == ["null"]


def test_a_pipe_that_a_user_names_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe or a socket"):
        check_replaceable(tmp_path / "pipe")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_copy_of_a_folder_follows_nothing(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "inner").mkdir(parents=True)
    (theirs / "inner" / "file").write_text("whole")
    for number, kind in enumerate(KINDS[:-1]):
        kind(theirs / "inner" / str(number), theirs / "inner" / "file")
    copy_folder(theirs, tmp_path / "copy")
    assert [str(path.relative_to(tmp_path / "copy")) for path in sorted((tmp_path / "copy").rglob("*"))] == [
        "inner",
        "inner/file",
    ]
