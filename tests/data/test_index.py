"""Promise: an index gives what listing the set gives; it may lie anywhere, be shared, or be missing."""

import errno
import json
import multiprocessing
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_tars import archive
from tests.helpers.image_folders import as_shards
from tests.helpers.planted import put
from tests.helpers.privileges import permissions_count
from tests.helpers.refusals import named, refused
from trainer import cli
from trainer.config.data import DataConfig
from trainer.data.dataset import spread
from trainer.data.formats import index, tar_shards
from trainer.data.formats.coco import CocoPictures
from trainer.data.formats.files import in_folder
from trainer.data.formats.index import Index, index_of, kept
from trainer.data.formats.records import Records
from trainer.data.formats.sharded import COLUMNS, INDEX
from trainer.data.formats.tables import SeveralClasses, in_table
from trainer.data.formats.tar_shards import in_tars
from trainer.data.sources import open_records


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return index.index_folder(None)


def facts(records: Records) -> Any:
    names = [records.file_name(sample) for sample in range(len(records))]
    sets = None if records.sets is None else records.sets.tolist()
    return names, records.labels.tolist(), [*records.classes], records.left_out, records.fingerprint(), sets


def large_table(root: Path, label: str = "c{}") -> Path:
    """A table of 10,000 images, of which one is there, and one more that it doesn't name."""
    put(root, "i/7.png", "i/more.png", content=b"x")
    rows = (f"i/{number}.png,{label.format(number % 3)}\n" for number in range(10_000))
    (root / "train.csv").write_text("path,label\n" + "".join(rows))
    return root / "train.csv"


def large_coco(root: Path) -> Path:
    put(root, "train/more.png", content=b"x")
    numbers = range(10_001)
    told: dict[str, Any] = {
        "categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog", "difficult": 1}],
        "images": [{"id": n, "file_name": f"{n}.png", "width": 9, "height": 8} for n in numbers],
        "annotations": [
            {"id": n, "image_id": max(n, 1), "category_id": 3 + 2 * (n % 2), "bbox": [1, 1, 5, 1 + n % 7]}
            for n in numbers
        ],
    }
    return put(root, "annotations/instances_train.json", content=json.dumps(told).encode())


def broken(*_: object, **__: object) -> None:
    raise AssertionError("it is listed again")


def test_a_large_table_is_read_once(tmp_path: Path, indexes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = SeveralClasses("|")
    table = large_table(tmp_path / "d", "a|c{}")
    expected = facts(in_table(table, several))
    assert facts(in_table(table, several, indexes)) == expected and expected[3][0].count == 1
    with monkeypatch.context() as patch:
        patch.setattr("csv.reader", broken)
        assert facts(in_table(table, several, indexes)) == expected
    (tmp_path / "d" / "i" / "later.png").write_bytes(b"x")
    assert in_table(table, several, indexes).left_out[0].count == 2, "the folder of now is held against it"
    large_table(tmp_path / "d", "a|x{}")
    assert in_table(table, several, indexes).classes == ("a", "x0", "x1", "x2")


def test_a_large_coco_is_read_once(tmp_path: Path, indexes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = large_coco(tmp_path / "d")
    plain, made = CocoPictures(root, "train", "fail"), CocoPictures(root, "train", "fail", indexes=indexes)
    assert sorted(each.count for each in plain.left_out) == [1, 1, 1]
    monkeypatch.setattr("trainer.host.strict_json.parse_quickly", broken)
    again, some = CocoPictures(root, "train", "fail", indexes=indexes), np.array([5, 3])
    for one in (made, again):
        assert facts(one.records) == facts(plain.records)
        assert one.only(some).fingerprint() == plain.only(some).fingerprint()
        for name in ("left_out", "categories", "ids", "most", "boxes"):
            assert getattr(one, name) == getattr(plain, name)
        assert (one.fingerprint(), one.remarks(False)) == (plain.fingerprint(), plain.remarks(False))


def test_shards_without_index(photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d" / "train").mkdir(parents=True)
    folder = as_shards(photographs, tmp_path / "d" / "train")
    config = DataConfig(name="shards", path=tmp_path / "d")
    expected = open_records(config, tmp_path / "d", "train")
    for name in (INDEX, COLUMNS):
        (folder / name).unlink()
    (folder / "notes.txt").write_text("x")
    found = open_records(config, tmp_path / "d", "train")
    assert facts(found)[:3] == facts(expected)[:3] and found.fingerprint() == expected.fingerprint()
    assert [each.reason for each in found.left_out] == [".txt"]
    assert not list(folder.glob("*.json")), "nothing is written beside the data"
    last = found.read(6)
    with monkeypatch.context() as patch:
        patch.setattr(tar_shards, "members", broken)
        again = open_records(config, tmp_path / "d", "train")
        assert facts(again) == facts(found)
    shard = folder / "000.tar"  # with another byte of its last image, and of the same size and time
    data, before = bytearray(shard.read_bytes()), shard.stat()
    data[data.rindex(b"\xff\xd8\xff") + 20] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = open_records(config, tmp_path / "d", "train")
    assert other.fingerprint() != expected.fingerprint() and other.read(6) != last
    (folder / "001.tar").unlink()
    assert len(open_records(config, tmp_path / "d", "train")) == len(expected) - 7


def test_sets_with_shards_of_one_name_size_and_time_are_told_apart(tmp_path: Path, indexes: Path) -> None:
    made = []
    for label in ("one", "two"):
        put(tmp_path, f"{label}/0.tar", content=archive(("a.cls", label.encode()), ("a.png", b"x")))
        os.utime(tmp_path / label / "0.tar", ns=(0, 0))
        made.append(in_tars(tmp_path / label, indexes).classes)
    assert made == [("one",), ("two",)]


def some(count: int = 3) -> Index:
    names, labels = [b"%d" % number for number in range(count)], list(range(count))
    return index_of(names, labels, ["a"] * count)._replace(facts={"x": [1, "ü"]}, more={"of": np.arange(2.0)})


def same(one: Index, other: Index) -> bool:
    return all(
        np.array_equal(getattr(one, kind)[name], array)
        for kind in ("columns", "more")
        for name, array in getattr(other, kind).items()
    ) and (one.classes, [*one.left_out], one.facts) == (other.classes, [*other.left_out], other.facts)


def test_an_index_is_made_again_where_it_is_damaged(tmp_path: Path) -> None:
    assert same(kept(tmp_path, ["x"], some), some())
    assert same(kept(tmp_path, ["x"], broken), some())  # type: ignore[arg-type]
    assert same(kept(tmp_path, ["y"], lambda: some(5)), some(5)), "made from something else"
    for count, kept_bytes, more in ((4, -1, b"\x07"), (3, 0, b"")):
        for file in tmp_path.glob("*.index"):
            file.write_bytes(file.read_bytes()[:kept_bytes] + more)
        assert same(kept(tmp_path, ["x"], partial(some, count)), some(count))
    for _ in range(2):
        assert same(kept(Path("/proc/none"), ["x"], some), some()), "without a cache"


def photographs_of(folder: Path, count: int) -> Path:
    for number in range(count):
        put(folder, f"a/{number}.png", content=b"%d" % number * 9)
    return folder


def test_reading_compares_with_hashes_and_adds_them(tmp_path: Path) -> None:
    folder = photographs_of(tmp_path / "d", 40)
    records = in_folder(folder)
    mark = records.fingerprint()
    file = records.keep_hashes(tmp_path / "i")
    assert file and records.fingerprint() == mark, "no part of the fingerprint"
    seen = next(sample for sample in range(40) if sample not in spread(40, 32))
    part = records.only(np.array([39, seen, 3]))
    assert [part.read(sample) for sample in range(3)] and index.known_hashes(file) == 3
    again = in_folder(folder)
    again.keep_hashes(tmp_path / "i")
    Path(os.fsdecode(again.path(seen))).write_bytes(b"y" * len(again.read(seen)))
    assert in_folder(folder).fingerprint() == mark, "of the 32 contents it is none"
    with refused(os.fsdecode(again.path(seen)), file):
        again.read(seen)
    assert again.read(0) and index.known_hashes(file) == 4
    other = in_folder(folder)
    assert other.keep_hashes(tmp_path / "none" / "x") != file and other.read(seen)
    file.write_bytes(b"")
    other = in_folder(folder)
    assert other.keep_hashes(tmp_path / "i") is None and other.read(seen), "of another size, it isn't one"


def test_all_loose_files_are_verified(
    photographs: Path, tmp_path: Path, indexes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, count = tmp_path / "d", len(in_folder(photographs))
    for split in ("train", "val"):
        shutil.copytree(photographs, root / split)
    min((root / "val").rglob("*.jpg")).unlink()
    words = ["data", "verify", "digits", "--set", "data.name=folder", "--set", f"data.path={root}"]
    for new in (True, False):
        assert cli.main(words) == 0
        out = capsys.readouterr().out
        for each in (count, count - 1):
            assert f"{each} of {each}" in out and f"\n  {each * new} of them" in out
    (mine,) = indexes.glob(f"{count - 1}-*")  # another hash than that of the content
    mine.write_bytes(mine.read_bytes()[:-8] + bytes(range(1, 9)))
    assert cli.main(words) == 1
    assert named(capsys.readouterr().out, f"{count - 2} of {count - 1}", max((root / "val").rglob("*.jpg")))


def test_a_full_cache_holds_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", full)
        assert same(kept(tmp_path, ["x"], some), some())
    assert not list(tmp_path.iterdir())
    files = photographs_of(tmp_path / "d", 3)
    monkeypatch.setattr(os, "pwrite", full)
    records = in_folder(files)
    records.keep_hashes(tmp_path / "hashes")
    assert [records.read(sample) for sample in range(3)]


def test_read_only_data_have_an_index(tmp_path: Path, indexes: Path) -> None:
    table = large_table(tmp_path / "d")
    files = photographs_of(tmp_path / "d" / "f", 3)
    for folder in (files / "a", files, tmp_path / "d"):
        folder.chmod(0o555)
    with permissions_count():
        with pytest.raises(PermissionError):
            (tmp_path / "d" / "x").touch()
        in_table(table, indexes=indexes)
        records = in_folder(files)
        assert records.keep_hashes(None, make=True) and records.read(1)
    for folder in (tmp_path / "d", files, files / "a"):
        folder.chmod(0o755)
    assert sorted(file.suffix for file in indexes.iterdir()) == [".hashes", ".index"]


def _start(folder: Path, indexes: Path, at: Any, to: Any) -> None:
    at.wait()
    records = in_tars(folder, indexes)
    files = in_folder(folder.parent / "f")
    files.keep_hashes(indexes)
    to.put((records.fingerprint(), [bytes(files.read(sample)) for sample in range(len(files))]))


def test_two_starters_make_one_index(photographs: Path, tmp_path: Path, indexes: Path) -> None:
    (tmp_path / "t").mkdir()
    folder = as_shards(photographs, tmp_path / "t")
    photographs_of(tmp_path / "f", 20)
    context = multiprocessing.get_context("fork")
    at, to = context.Barrier(2), context.SimpleQueue()
    starters = [context.Process(target=_start, args=(folder, indexes, at, to)) for _ in range(2)]
    for starter in starters:
        starter.start()
    one, other = to.get(), to.get()
    for starter in starters:
        starter.join()
    assert one == other and [starter.exitcode for starter in starters] == [0, 0]
    assert sorted(file.suffix for file in indexes.iterdir()) == [".hashes", ".index"]
    assert index.known_hashes(next(indexes.glob("*.hashes"))) == 20


def test_hosts_share_an_index(photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, found = tmp_path / "shared", []
    (tmp_path / "a" / "t").mkdir(parents=True)
    as_shards(photographs, tmp_path / "a" / "t")
    large_table(tmp_path / "a")
    photographs_of(tmp_path / "a" / "f", 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # with the times
    for place in (tmp_path / "a", tmp_path / "b"):
        records = in_tars(place / "t", shared), in_table(place / "train.csv", indexes=shared)
        found.append([facts(one)[:3] for one in records])
        assert in_folder(place / "f").keep_hashes(shared)
        monkeypatch.setattr(tar_shards, "members", broken)
        monkeypatch.setattr("csv.reader", broken)
    assert found[0] == found[1] and len(list(shared.glob("*.hashes"))) == 1
