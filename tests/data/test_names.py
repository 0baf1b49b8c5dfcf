"""Promise: a file that isn't there as it is written, but is there otherwise, is named."""

import codecs
import unicodedata
from pathlib import Path

import pytest

from tests.data.test_coco import told, written
from tests.helpers.refusals import named, refused
from trainer.data.audio_sets import split_by_lists
from trainer.data.check import CheckedData, check_data
from trainer.data.formats.boxes import BoxedImages
from trainer.data.formats.coco import CocoPictures
from trainer.data.formats.files import hint
from trainer.data.formats.tables import in_table

NFC, NFD = "é.jpg", unicodedata.normalize("NFD", "é.jpg")


def seen_in(root: Path, name: str) -> str:
    return hint(str(root).encode(), name.encode())


@pytest.mark.parametrize(
    ("there", "written_down"),
    [
        ("a/é.jpg", f"a/{NFD}"),
        ("a /b.jpg", "a/b.jpg"),
        ("a/b.jpg", "a\\b.jpg"),
        ("a/b.jpg", "./x/y/a/b.jpg"),
        ("b.jpg", "images/b.jpg"),
        ("b c.jpg", "b%20c.jpg"),
        ("b.jpg", "/data/upload/1/b.jpg"),
    ],
)
def test_a_name_that_is_written_otherwise(tmp_path: Path, there: str, written_down: str) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).touch()
    assert named(seen_in(tmp_path, written_down), f"{there!a}")


def test_names_that_nothing_is_like(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.jpg").touch()
    for name in ("a", "a/b.jpg", "c.jpg", "a/c.jpg", "..", "", "a/b.png", "x" * 5000):
        assert seen_in(tmp_path, name) == ""
    assert named(seen_in(tmp_path, "https://host/c.jpg"), "URL")
    assert hint(b"/nowhere", b"\xff") == ""


def test_each_place_that_looks_a_file_up_says_so(tmp_path: Path) -> None:
    root = written(tmp_path, told(**{"images.0.file_name": NFD}))
    (root / "train" / NFC).touch()
    (root / "train.csv").write_text(f"path,label\ntrain/{NFD},1\n")
    assert named(in_table(root / "train.csv").absent(), r"'train/\xe9.jpg'")
    data = BoxedImages(CocoPictures(root, "train", "fail"), 32, 4, None)
    with refused(r"'\xe9.jpg'"):
        check_data("fast", False, [CheckedData("training", data, 0)])


def commands(root: Path, listed: bytes) -> Path:
    for name in ("a/é_1.wav", "a/b_2.wav", "a/c_3.wav"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "validation_list.txt").write_bytes(listed)
    (root / "testing_list.txt").write_bytes(b"a/c_3.wav\n")
    return root


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
