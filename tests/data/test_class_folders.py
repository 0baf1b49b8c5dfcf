"""Contract of class folders: files are read whatever they are called, counted, or named before the start."""

import codecs
import os
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.data.test_coco import told, written
from tests.helpers.image_folders import SIDE, encoded, picture
from tests.helpers.planted import put
from tests.helpers.refusals import named, refused
from trainer.config.data import DataConfig
from trainer.data.audio_sets import split_by_lists
from trainer.data.check import CheckedData, check_data, unreadable
from trainer.data.formats.boxes import BoxedImages
from trainer.data.formats.coco import CocoPictures
from trainer.data.formats.files import Files, hint, in_folder
from trainer.data.formats.images import ImageDataset
from trainer.data.formats.index import index_of
from trainer.data.formats.pack import PackSettings, pack
from trainer.data.formats.records import Records
from trainer.data.formats.sharded import in_shards
from trainer.data.formats.tables import in_table
from trainer.data.left_out import left_out_line, one, tally
from trainer.data.sources import common_classes, load_images

JPEG = bytes(encoded(picture(), "JPEG"))


def class_folder(root: Path, *names: str | bytes) -> Path:
    """A folder with one class, `a`, and files by paths relative to that."""
    (root / "a").mkdir(parents=True, exist_ok=True)
    return put(root / "a", *map(os.fsdecode, names), content=JPEG).parent


def test_the_line_of_what_is_left_out() -> None:
    assert left_out_line(()) == ""
    pairs = (".heic", "a/1.heic"), ("box{es}", "x"), (".heic", "a/2.heic"), ("categor{y}", "y")
    found = tally(one(*pair) for pair in pairs)
    assert named(left_out_line(tally([*found, *found])), "4 .heic a/1.heic 2 boxes x 2 categories y")
    assert named(left_out_line((one(".a\nb", b"\xff\n\x07"),)), "1 .a\\nb \\xff\\n\\x07")
    assert named(left_out_line(tally(one(f".{n}", f"x{n}") for n in range(999))), "743 x256 1 .0 x0 245")


@pytest.mark.parametrize(
    ("names", "samples", "told"),
    [
        (["0.jpg", "0.jfif", "1.JPE", "2.avif", "3.jp2"], 5, ""),
        (["0.jpg", "1.heic", "2.HEIC", "3.tga"], 1, "2 .heic a/1.heic 1 .tga a/3.tga"),
        (["0.jpg", "._0.jpg", ".DS_Store"], 1, "2 hidden a/.DS_Store"),
        (["0.jpg", ".ipynb_checkpoints/0.jpg"], 1, "1 hidden a/.ipynb_checkpoints"),
        (["0.jpg", "README", "below/1.jpg.part"], 1, "1 .part a/below/1.jpg.part a/README"),
        (["0.jpg", b"\xff.x"], 1, "1 .x a/\\xff.x"),
        (["0.jpg", "../x.png"], 1, "1 x.png"),
        (["0.jpg", "../.hidden/x.png"], 1, "1 hidden .hidden"),
    ],
)
def test_files_of_a_folder(names: list[str | bytes], samples: int, told: str, tmp_path: Path) -> None:
    found = in_folder(class_folder(tmp_path, *names))
    line = left_out_line(tuple(found.left_out))
    assert len(found) == samples and named(line, told) and bool(line) == bool(told)


def test_odd_names_are_read_and_packed(tmp_path: Path) -> None:
    names = [b"a b.jpg", b"line\nbreak.jpg", b"not-utf8-\xff.jpg", "ümläut.jpg".encode(), b"UPPER.JPEG"]
    records = in_folder(class_folder(tmp_path / "f", *names))
    assert len(records) == 5 and all(records.read(sample) == JPEG for sample in range(5))
    records.name(2).encode()  # can be printed
    pack(records, tmp_path / "packed", PackSettings())
    packed = in_shards(tmp_path / "packed")
    assert [packed.file_name(n) for n in range(5)] == [records.file_name(n) for n in range(5)]


@pytest.mark.parametrize("target", [".", "../.."])
def test_a_link_to_where_it_lies_counts_nothing_twice(target: str, tmp_path: Path) -> None:
    root = class_folder(tmp_path / "x" / "train", "0.jpg")
    class_folder(tmp_path / "x" / "val", "0.jpg")
    (root / "a" / "loop").symlink_to(target)
    found = in_folder(root)
    line = left_out_line(tuple(found.left_out))
    if target == ".":
        assert len(found) == 1 and named(line, "1 a/loop")
    assert line.count("link") == 1  # what a link outside leads back to is left out where it does


def two_parts(root: Path) -> Path:
    class_folder(root / "train", "0.jpg", "../b/0.jpg")
    return class_folder(root / "val", "0.jpg", "../b/0.jpg").parent


def only(part: str, *names: str) -> Callable[[Path], object]:
    """Whose class b has nothing in a part but such files."""

    def make(root: Path) -> None:
        (two_parts(root) / part / "b" / "0.jpg").unlink()
        put(root / part / "b", *names, content=JPEG)

    return make


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda _: None, ""),
        (lambda root: (root / "train").mkdir(), "train"),
        (lambda root: (two_parts(root) / "val" / "bird").mkdir(), "'bird' val"),
        (only("train", "0.heic"), "'b' train 1 .heic b/0.heic"),
        (lambda root: (two_parts(root) / "train" / "c").symlink_to("gone"), "train/c"),
        (lambda root: (two_parts(root) / "train" / "c").symlink_to("c"), "train/c"),
    ],
    ids=["nothing", "no classes", "class of val", "other files", "dead link", "link to itself"],
)
def test_a_folder_that_is_wrong(make: Callable[[Path], object], names: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    make(tmp_path / "data")
    with refused(tmp_path / "data", names):
        load_images(DataConfig(name="folder", path=tmp_path / "data"), 0)


def test_classes_that_are_odd_are_noted(tmp_path: Path) -> None:
    def note(root: Path) -> str:
        (line,) = load_images(DataConfig(name="folder", path=root), 0).notes
        return line

    for part in ("train", "val"):
        class_folder(tmp_path / "one" / part, "x.jpg")
        class_folder(tmp_path / "many" / part, *(f"../{n}/x.jpg" for n in range(11)))
        (tmp_path / "many" / part / "a").rmdir()
    assert named(note(tmp_path / "one"), "'a'")
    only("val")(tmp_path / "gap")
    assert named(note(tmp_path / "gap"), "'b' val")
    assert named(note(tmp_path / "many"), "2 '2' '10'"), "by number, unlike torchvision's ImageFolder"


def labeled(classes: Sequence[str], labels: list[int]) -> Files:
    return Files(Path("x"), index_of([b"%d" % number for number in range(len(labels))], labels, classes))


@pytest.mark.parametrize(
    ("train", "val", "names"),
    [
        (("ab", [0, 0]), ("ab", [0, 1]), "'b' train 1 val"),
        (("abc", [0, 0]), ("abc", [0, 0]), "'b' 1 train 0 val"),
        (("ab", [0, 1]), ("abcd", [0, 2, 3]), "'c' 1 val"),
        (("ab", [0, 1]), (("a", "b "), [0, 1]), "'b' 'b '"),
        (("012", [0, 2]), ("0123", [0, 3]), "'3' val"),
        ((("a", "a "), [0, 1]), (("a", "a "), [0, 1]), "'a' 'a '"),
    ],
)
def test_a_class_without_samples_to_learn_from(train: Any, val: Any, names: str) -> None:
    with refused("data", names):
        common_classes("data", labeled(*train), labeled(*val), gaps=True)


def checked(records: Records, how: Any = "fast", on_corrupt: Any = "fail", budget: int = 0) -> None:
    dataset = ImageDataset(records, SIDE, random_crop=True, on_corrupt=on_corrupt)
    check_data(how, False, [CheckedData("training", dataset, budget)])


@pytest.mark.parametrize("few", [3, 30])  # of few names each is asked for, of many the folder is listed
def test_what_is_no_file_is_named_before_it_is_read(few: int, tmp_path: Path) -> None:
    root = class_folder(tmp_path, *(f"{number}.jpg" for number in range(few)))
    (root / "a" / "is.jpg").mkdir()
    (root / "a" / "dead.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(root / "a" / "pipe.jpg")
    (root / "a" / "link.jpg").symlink_to("0.jpg")
    good = [b"a/link.jpg", b"a/../a/1.jpg", os.fsencode(root / "a" / "2.jpg"), b"a//1.jpg"]
    good += [b"a/%d.jpg" % number for number in range(few)]
    bad = [b"a/is.jpg", b"a/dead.jpg", b"a/pipe.jpg", b"a/no.jpg", b"b/0.jpg", b"a/0.jpg/x", b"a/", b"/0.jpg"]
    found = unreadable(os.fsencode(root), [*good, *bad])
    assert [number - len(good) for number, _ in found] == list(range(len(bad)))
    with refused("a/dead.jpg"):
        checked(in_folder(root))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
        assert len(unreadable(os.fsencode(root), [*good, *bad])) == len(bad)


def test_of_many_files_each_name_is_looked_up(tmp_path: Path) -> None:
    root, names = class_folder(tmp_path, "0.jpg"), [b"a/0.jpg"] * 30_000
    names[9:12] = [b"a/no.jpg"] * 3  # of three neighbors one is asked for its permissions
    assert [number for number, _ in unreadable(os.fsencode(root), names)] == [9, 10, 11]


def test_a_full_check_decodes_each_sample_and_counts(broken: Path, capfd: pytest.CaptureFixture[str]) -> None:
    records = in_folder(broken)
    checked(records)
    with refused("3 of 60 .jpg"):
        checked(records, "full")
    with refused("3 of 60 data.corrupt_budget 2 .jpg"):
        checked(records, "full", "quarantine", 2)
    capfd.readouterr()
    checked(records, "full", "skip", 3)
    assert named(capfd.readouterr().err, "3 of 60")


NFD = unicodedata.normalize("NFD", "é.jpg")


def seen_in(root: Path, name: str) -> str:
    return hint(str(root).encode(), name.encode())


@pytest.mark.parametrize(
    ("there", "written_down"),
    [
        *(("a/é.jpg", f"a/{NFD}"), ("a /b", "a/b"), ("a/b.jpg", "a\\b.jpg"), ("b c.jpg", "b%20c.jpg")),
        *(("a/b.jpg", "./x/y/a/b.jpg"), ("b.jpg", "images/b.jpg"), ("b.jpg", "/data/upload/1/b.jpg")),
    ],
)
def test_a_name_that_is_written_otherwise(tmp_path: Path, there: str, written_down: str) -> None:
    assert named(seen_in(put(tmp_path, there), written_down), f"{there!a}")


def test_names_that_nothing_is_like(tmp_path: Path) -> None:
    put(tmp_path, "a/b.jpg")
    for name in ("a", "a/b.jpg", "c.jpg", "a/c.jpg", "..", "", "a/b.png", "x" * 5000):
        assert seen_in(tmp_path, name) == ""
    assert named(seen_in(tmp_path, "https://host/c.jpg"), "URL")
    assert hint(b"/nowhere", b"\xff") == ""


def test_each_place_that_looks_a_file_up_says_so(tmp_path: Path) -> None:
    root = written(tmp_path, told(**{"images.0.file_name": NFD}))
    (root / "train" / "é.jpg").touch()
    (root / "train.csv").write_text(f"path,label\ntrain/{NFD},1\n")
    assert named(in_table(root / "train.csv").absent(), r"'train/\xe9.jpg'")
    data = BoxedImages(CocoPictures(root, "train", "fail"), 32, 4, None)
    with refused(r"'\xe9.jpg'"):
        check_data("fast", False, [CheckedData("training", data, 0)])


def commands(root: Path, listed: bytes) -> Path:
    put(root, "a/é_1.wav", "a/b_2.wav", "a/c_3.wav")
    put(root, "validation_list.txt", content=listed)
    return put(root, "testing_list.txt", content=b"a/c_3.wav\n")


@pytest.mark.parametrize(("mark", "times"), [(b"", 1), (codecs.BOM_UTF8, 1), (b"", 2)])
def test_lists_of_recordings(tmp_path: Path, mark: bytes, times: int) -> None:
    root = commands(tmp_path, mark + "a/é_1.wav\r\n\r\n".encode() * times)
    assert [len(part) for part in split_by_lists(root, "validation")] == [1, 1]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (unicodedata.normalize("NFD", "a/é_1.wav").encode(), r"line 1: 'a/\xe9_1.wav'"),
        (b"\na/B_2.WAV", "line 2: 'a/b_2.wav'"),
        ("a/b_2.wav".encode("utf-16"), "UTF-16 UTF-8"),
        (b"a/x.wav", "line 1: 'a/x.wav'"),
    ],
)
def test_lists_that_cant_be_meant(tmp_path: Path, content: bytes, names: str) -> None:
    with refused(names):
        split_by_lists(commands(tmp_path, content), "validation")
