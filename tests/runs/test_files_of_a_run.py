"""Promise: nothing in a run folder makes us write, read or remove outside of it, hang, or fill the memory."""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.commands import command
from tests.helpers.forked import attempt, small
from tests.helpers.planted import put
from tests.helpers.refusals import named, refused
from tests.helpers.run_folders import manifest
from trainer import cli
from trainer.commands.verify.recorded import read_recorded
from trainer.commands.verify.verify import altered_files
from trainer.data.corrupt import Bad, Quarantine
from trainer.errors import BadInputError
from trainer.host.files import (
    check_replaceable,
    copy_folder,
    hash_inside,
    lines_inside,
    open_inside,
    open_own,
    opened_file,
    opened_folder,
    own_folder,
    read_inside,
    written_whole,
)
from trainer.launch.nodes import LOGS
from trainer.observe.sinks import jsonl_sink, keep_rows, tensorboard_sink
from trainer.runs.folder import check_inside, lock

_MOST = 8  # attempts, each with more names that were refused put back
_SECONDS = 60  # a command that reads something endless never ends


# What stands in the place of a file or folder; `victim` is outside.


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name(f"absent-{victim.name}"))


def hard_link(path: Path, victim: Path) -> None:
    if victim.is_file():
        path.hardlink_to(victim)
    else:
        path.symlink_to(victim)


def fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, _: Path) -> None:
    path.mkdir()


Kind = Callable[[Path, Path], None]
LEADS: Sequence[Kind] = (link, dangling, hard_link, fifo)
ODD: Sequence[Kind] = (*LEADS, folder)


def _of_folder(path: Path) -> None:
    with opened_folder(path.parent) as inside, opened_file(inside, path.name):
        pass


def _whole(path: Path) -> None:
    with written_whole(path) as beside:
        beside.write_text("mine")


class Opens(NamedTuple):
    """What opens a file of a run folder: the file's name, and the kinds that it takes or replaces."""

    call: Callable[[Path], object]
    name: str = "rows.jsonl"
    takes: Sequence[Kind] = ()


OPENS = {
    "open_inside": Opens(lambda path: os.close(open_inside(path)), takes=[hard_link]),
    "read_inside": Opens(lambda path: read_inside(path, 100), takes=[hard_link]),
    "lines_inside": Opens(lambda path: list(lines_inside(path)), takes=[hard_link]),
    "hash_inside": Opens(hash_inside, takes=[hard_link]),
    "opened_file": Opens(_of_folder, takes=[hard_link]),
    "open_own": Opens(lambda path: os.close(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT))),
    "open_own, links": Opens(
        lambda path: os.close(open_own(path, os.O_RDONLY, alone=False, links=True)), takes=[link, hard_link]
    ),
    "written_whole": Opens(_whole, takes=LEADS),
    "own_folder": Opens(own_folder, "profile", [folder]),
    "jsonl_sink": Opens(lambda path: jsonl_sink(path.parent), "metrics.jsonl"),
    "tensorboard_sink": Opens(tensorboard_sink, "tensorboard", [folder]),
    "Quarantine": Opens(lambda path: Quarantine("training", 9, path).add([Bad(3, "x.png", "cut off")])),
    "keep_rows": Opens(lambda path: keep_rows(path, 1), takes=[hard_link]),
    "lock": Opens(lambda path: os.close(lock(path.parent)), ".lock", [hard_link]),
    "checkpoints_of": Opens(lambda path: check_inside(path.parent), "checkpoints", [folder]),
}


def _look(outside: Path) -> dict[str, Any]:
    """What lies there, and how: names, modes, times, contents."""
    found = {path.relative_to(outside): path for path in sorted(outside.rglob("*"))}
    times = {str(name): (path.lstat().st_mode, path.lstat().st_mtime_ns) for name, path in found.items()}
    return {**times, "": [path.read_bytes() for path in found.values() if path.is_file()]}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", OPENS)
def test_each_function_refuses_what_is_no_file_of_the_folder(tmp_path: Path, name: str, kind: Kind) -> None:
    opens, run, outside = OPENS[name], tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    (victim := outside / opens.name).write_text('{"kind": "train", "step": 1}\n')
    kind(run / opens.name, victim)
    before = _look(outside)
    if kind in opens.takes:
        opens.call(run / opens.name)
    else:
        with pytest.raises((OSError, BadInputError)) as found:
            opens.call(run / opens.name)
        assert named(str(found.value), opens.name) and "\n" not in str(found.value)
    assert _look(outside) == before


def test_what_is_read_has_a_bound(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("a\nb\nc")
    assert list(lines_inside(file)) == [b"a\n", b"b\n", b"c"]
    with refused(file, by=OSError):
        read_inside(file, 4)
    with (tmp_path / "holes").open("wb") as holes:
        holes.truncate(10 << 30)
    with refused("holes", by=OSError):
        list(lines_inside(tmp_path / "holes"))


def test_links_of_a_hugging_face_snapshot_are_read_and_no_others(tmp_path: Path) -> None:
    cache = tmp_path / "models--me--mine"
    run, blobs = cache / "snapshots" / "abc" / "run", cache / "blobs"
    run.mkdir(parents=True)
    put(blobs, "b1", content=b"{}\n")
    (run / "manifest.json").symlink_to("../../../blobs/b1")
    assert read_inside(run / "manifest.json", 100) == b"{}\n"
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(blobs / "fifo")
    (blobs / "on").symlink_to(tmp_path / "secret")
    up = "../../.."
    leads = {"out": f"{up}/../secret", "fifo": f"{up}/blobs/fifo", "on": f"{up}/blobs/on"}
    for name, to in {**leads, "up": f"{up}/blobs/../../secret"}.items():
        (run / name).symlink_to(to)
        with refused(name, by=OSError):
            open_inside(run / name)
    shutil.move(blobs, tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with refused("manifest.json", by=OSError):
        open_inside(run / "manifest.json")


def test_the_name_while_writing_cannot_be_foreseen(tmp_path: Path) -> None:
    seen = set[str]()
    for _ in range(3):
        with written_whole(tmp_path / "a.json.gz") as beside:
            assert beside.suffixes == [".json", ".gz"]
            seen.add(beside.name)
    assert len(seen) == 3


def test_a_pipe_that_a_user_names_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with refused("pipe", by=OSError):
        check_replaceable(tmp_path / "pipe")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_copy_of_a_folder_follows_nothing(tmp_path: Path) -> None:
    theirs = put(tmp_path / "theirs", "inner/file")
    for number, kind in enumerate((link, dangling, fifo)):
        kind(theirs / "inner" / str(number), theirs / "inner" / "file")
    copy_folder(theirs, tmp_path / "copy")
    assert [path.name for path in sorted((tmp_path / "copy").rglob("*"))] == ["inner", "file"]


TALKATIVE = small(log={"every": 2, "to": ["jsonl", "tensorboard"]})  # writes all that it can


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that was stopped after step 8, and the same one at its end, with what commands wrote there."""
    root = tmp_path_factory.mktemp("written")
    attempt(root / "half", TALKATIVE, stop_at=8, code=75)
    attempt(shutil.copytree(root / "half", root / "end"), TALKATIVE, code=0)
    command("report", root / "end")
    command("export", root / "end", "--to", "safetensors")
    return root / "half", root / "end"


MORE = ".writable profile anomalies.jsonl quarantine.jsonl trackers wandb mlflow begun-from"


def _names(*folders: Path) -> list[str]:
    """All names in run folders, but in checkpoints; and names beside each that could be guessed."""
    below = [path.relative_to(one) for one in folders for path in one.rglob("*")]
    found = {str(path) for path in below if "step-" not in str(path.parent)}
    beside = {f"{name}.tmp" for name in found} | {str(Path(name).with_suffix(".tmp")) for name in found}
    return sorted({*found, *MORE.split(), LOGS, "memory_summary.txt", "memory_snapshot.pickle", *beside})


def _take_away(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy(source: Path, to: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copy)(source, to)


def _plant(run: Path, outside: Path, sources: tuple[Path, ...]) -> list[str]:
    """Puts a link in the place of every name; victims have the contents that are looked for."""
    outside.mkdir()
    names = _names(*sources)
    tops = [name for name in names if not any(name.startswith(f"{other}/") for other in names)]
    for number, name in enumerate(tops):
        victim = outside / f"{number}-{Path(name).name}"
        source = next((one / name for one in sources if (one / name).exists()), None)
        if source is None:
            victim.write_text("somebody's\n")
        else:
            _copy(source, victim)
        _take_away(run / name)
        link(run / name, victim)
    return tops


def test_no_name_in_a_run_folder_leads_what_a_resumed_run_writes_outside(
    tmp_path: Path, written: tuple[Path, Path]
) -> None:
    """Every name at once; one that is refused is named in one line, put back, and the rest is tried again."""
    half, _ = written
    run, outside = shutil.copytree(half, tmp_path / "run"), tmp_path / "outside"
    left = _plant(run, outside, written)
    before = _look(outside)
    for _ in range(_MOST):
        ended = attempt(run, TALKATIVE)
        assert _look(outside) == before, (ended.line, ended.said)
        if ended.code == 0:
            break
        assert (ended.code, ended.said) == (2, ""), ended
        words = ended.line.replace(":", " ").split(" ")
        refused_now = [name for name in left if name in words or str(run / name) in words]
        assert refused_now, (ended.line, left)
        left = [name for name in left if name not in refused_now]
        for name in refused_now:
            _take_away(run / name)
            if (half / name).exists():
                _copy(half / name, run / name)
    assert ended.code == 0, ended
    assert manifest(run)["status"] == "finished"
    assert not (run / "model.safetensors").is_symlink()


@pytest.mark.parametrize("kind", [link, dangling])
def test_no_name_leads_what_commands_write_outside(
    tmp_path: Path, written: tuple[Path, Path], kind: Kind
) -> None:
    run, outside = shutil.copytree(written[1], tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    for name in ("report.html", "export", ".report.html.tmp", "report.tmp"):
        (victim := outside / name.strip(".")).write_text("somebody's\n")
        _take_away(run / name)
        kind(run / name, victim)
    before = _look(outside)
    for words in (["report", str(run)], ["export", str(run), "--to", "safetensors"]):
        assert cli.main(words) in (0, 2)
        assert _look(outside) == before


def test_no_name_in_a_run_folder_holds_a_command_up(written: tuple[Path, Path], tmp_path: Path) -> None:
    """A pipe that nobody writes to; one command that reads weights, where they are looked for."""
    whole, run, now = written[1], tmp_path / "run", tmp_path / "now"
    newest = max((whole / "checkpoints").iterdir())
    found = [path for path in whole.rglob("*") if newest in (path, *path.parents) or "step-" not in str(path)]
    more = {"anomalies.jsonl", "begun-from", "quarantine.jsonl"}
    report = ["report", str(run), "--out", str(tmp_path / "report.html")]

    def look() -> None:
        for name in sorted({str(path.relative_to(whole)) for path in found} | more):
            shutil.copytree(whole, run)
            _take_away(run / name)
            fifo(run / name, run)
            weights = name in ("model.safetensors", "ema.safetensors", "manifest.json")
            for words in (report, ["runs", str(run)], *[["evaluate", str(run)]] * weights):
                now.write_text(f"{words[0]}, {name}")
                signal.alarm(_SECONDS)
                assert cli.main(words) in (0, 1, 2)
            now.write_text(f"verify, {name}")
            with contextlib.suppress(BadInputError, OSError):
                list(altered_files(read_recorded(run)))
            signal.alarm(0)
            shutil.rmtree(run)

    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            look()
            os._exit(0)
        except BaseException as error:
            now.open("a").write(f": {type(error).__name__}: {error}")
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, now.read_text()
