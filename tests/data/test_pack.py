"""Promise: packs and shards are whole or absent, and say what was changed in them."""

import io
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from benchmarks.photographs import write_photographs
from tests.helpers.image_folders import SIZE
from tests.helpers.planted import put
from tests.helpers.refusals import named, refused
from tests.helpers.waiting import until
from trainer.cli import main
from trainer.data.formats.files import in_folder
from trainer.data.formats.pack import PackSettings, _work_off, pack
from trainer.data.formats.sharded import COLUMNS, INDEX, in_shards


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder, 150, SIZE)
    return folder


@pytest.fixture(scope="module")
def packed(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "p"
    pack(in_folder(photographs), folder, PackSettings(16))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.xdist_group("forkserver")
def test_the_number_of_processes_changes_no_byte(photographs: Path, tmp_path: Path) -> None:
    records = in_folder(photographs)
    for processes in (1, 2):
        told = list[int]()
        pack(records, tmp_path / str(processes), PackSettings(64, raw=True), processes, told.append)
        assert sorted(told) == [22, 64, 64], "shard by shard"
    assert content(tmp_path / "1") == content(tmp_path / "2")
    assert [*content(tmp_path / "1")] == ["00000.bin", "00001.bin", "00002.bin", INDEX, COLUMNS]


def test_images_are_shrunk_never_grown(photographs: Path, tmp_path: Path) -> None:
    records = in_folder(photographs)
    pack(records, tmp_path / "small", PackSettings(96))
    pack(records, tmp_path / "large", PackSettings(1000))
    small, large = in_shards(tmp_path / "small"), in_shards(tmp_path / "large")
    assert large.read(0) == records.read(0), "not encoded again where there is nothing to win"
    whole, found = (Image.open(io.BytesIO(one.read(0))) for one in (records, small))
    expected = np.asarray(whole.resize((128, 96), Image.Resampling.BILINEAR)).astype(int)
    assert found.size == (128, 96) and np.abs(np.asarray(found) - expected).mean() < 6, "JPEG at quality 90"
    assert small.about.source == records.fingerprint()
    settings = {"short_side": 96, "quality": 90, "raw": False}
    assert small.about.settings == {**settings, "reading": {"upright": False}}


def test_a_cut_pack_is_made_anew(photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, target, whole = in_folder(photographs), tmp_path / "cut", tmp_path / "whole"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("trainer.data.formats.pack.write_index", mock.Mock(side_effect=KeyboardInterrupt))
        pack(records.only(np.arange(140)), target, PackSettings(50))
    (target / "00007.bin").write_bytes(b"of more samples")
    with refused(INDEX, target):
        in_shards(target)
    for folder in (target, whole):
        pack(records, folder, PackSettings(100))
    assert content(target) == content(whole)


def test_two_at_once_is_one_too_many(photographs: Path, tmp_path: Path) -> None:
    records = in_folder(photographs)

    def second(_: int) -> None:
        with refused(tmp_path / "p"):
            pack(records, tmp_path / "p", PackSettings(32))

    pack(records, tmp_path / "p", PackSettings(32), advance=second)
    assert len(in_shards(tmp_path / "p")) == 150


@pytest.mark.xdist_group("forkserver")
def test_a_signal_ends_a_pack(photographs: Path, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """Killed by the signal, the parent would leave its semaphores to the resource tracker, which says so."""
    kill = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr("trainer.data.formats.pack.as_completed", kill)
    before, others = signal.getsignal(signal.SIGTERM), {*multiprocessing.active_children()}
    arguments = ["data", "pack", str(photographs), str(tmp_path / "p"), "--processes"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "2"])
    assert ended.value.code == 128 + signal.SIGTERM
    assert capfd.readouterr().err.splitlines() == ["trainer: stopped by SIGTERM"]
    assert {*multiprocessing.active_children()} == others
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.undo()
    assert main([*arguments, "1"]) == 0  # anew
    assert len(in_shards(tmp_path / "p")) == 150


def pack_slowly(folder: Path, number: int, _: range) -> None:
    (folder / f"begun {number}").touch()
    time.sleep(3600)
    (folder / f"done {number}").touch()


@pytest.mark.xdist_group("forkserver")
def test_a_pack_that_is_stopped_does_not_finish_what_it_has_begun(tmp_path: Path) -> None:
    others = {*multiprocessing.active_children()}

    def interrupt() -> None:
        until(lambda: len([*tmp_path.glob("begun *")]) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        _work_off(partial(pack_slowly, tmp_path), [range(1)] * 4, 2, lambda _: None)
    interrupter.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun 0", "begun 1"]
    assert {*multiprocessing.active_children()} == others


def test_what_is_in_the_way_is_left_alone(photographs: Path, packed: Path, tmp_path: Path) -> None:
    records, settings = in_folder(photographs), PackSettings(32, raw=True)
    put(tmp_path, "mine/thesis.tex")
    pack(records, tmp_path / "raw", settings)
    for target in (tmp_path / "mine", packed):
        with refused(target):
            pack(records, target, settings)
    with refused("pixels"):
        pack(in_shards(tmp_path / "raw"), tmp_path / "again", settings)


def test_verify_names_what_changed(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        shutil.copytree(packed, tmp_path / split)
    (tmp_path / "test").mkdir()
    assert main(["data", "verify", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert named(told.out, "150 of 150") and named(told.err, tmp_path / "test")
    shard = max((tmp_path / "val").glob("*.bin"))
    data = bytearray(shard.read_bytes())
    data[500] ^= 1
    shard.write_bytes(data)
    assert main(["data", "verify", str(tmp_path)]) == 1
    assert named(capsys.readouterr().out, "149 of 150", f"val/{shard.name}:")


def test_classes_that_look_like_several_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "cat|dog"):
        (tmp_path / "d" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "d" / name / "a.png")
    assert main(["data", "pack", str(tmp_path / "d"), str(tmp_path / "p"), "--processes", "1"]) == 0
    assert named(capsys.readouterr().out, "1 2 'cat|dog' data.label_separator='|'")


def test_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_photographs(tmp_path / "d", 20, SIZE)
    torn, *files = (tmp_path / "d").rglob("*.jpg")
    torn.write_bytes(b"\xff\xd8\xff")
    assert main(["data", "stats", str(tmp_path / "d"), "--json"]) == 0
    ((_, found),) = json.loads(capsys.readouterr().out).items()
    assert (found["samples"], found["classes"], found["looked_at"]) == (20, 10, 19)
    assert len(found["unreadable"]) == 1
    pixels = np.concatenate([np.asarray(Image.open(path)).reshape(-1, 3) / 255 for path in files])
    assert np.allclose(found["mean"], pixels.mean(0), atol=1e-4)
    assert np.allclose(found["std"], pixels.std(0), atol=1e-4)


def damage(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        about = json.loads((folder / INDEX).read_text())
        change(about)
        (folder / INDEX).write_text(json.dumps(about))

    return apply


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda folder: (folder / INDEX).unlink(), INDEX),
        (lambda folder: (folder / COLUMNS).unlink(), COLUMNS),
        (lambda folder: (folder / COLUMNS).write_bytes(b"\x80\x04pickle"), ""),
        (damage(lambda about: about.update(columns_sha256="0" * 64)), INDEX),
        (damage(lambda about: about["shards"][0].update(name="../../etc/passwd")), "shards.0.name"),
        (damage(lambda about: about["shards"][0].update(bytes=10)), "outside"),
        (damage(lambda about: about.update(classes=["a"])), "outside"),
        (damage(lambda about: about.update(samples=3)), ""),
    ],
)
def test_a_wrong_index(change: Callable[[Path], None], names: str, packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "p")
    change(tmp_path / "p")
    with refused(tmp_path / "p", names):
        in_shards(tmp_path / "p")
