"""Promise: a file that isn't there as it is written, but is there otherwise, is named; exports of annotation
tools are read, or refused with the reason.
"""

import codecs
import gzip
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.test_coco import change, told, written
from tests.helpers.few_pictures import make_folder
from trainer.cli import main
from trainer.data.audio_sets import split_by_lists
from trainer.data.check import CheckedData, check_data
from trainer.data.formats.boxes import BoxedImages
from trainer.data.formats.coco import CocoPictures
from trainer.data.formats.names import hint
from trainer.data.formats.tables import in_table
from trainer.errors import BadInputError

NFC, NFD = "é.jpg", unicodedata.normalize("NFD", "é.jpg")


def seen_in(root: Path, name: str) -> str:
    return hint(str(root).encode(), name.encode())


@pytest.mark.parametrize(
    ("there", "written_down"),
    [
        ("a/é.jpg", f"a/{NFD}"),
        (f"a/{NFD}", "a/é.jpg"),
        ("a/é.jpg", "A/É.JPG"),
        ("a/b.jpg", "a/b.jpg "),
        ("a /b.jpg", "a/b.jpg"),
        ("a/b c.jpg", "a/b\u00a0c.jpg"),
        ("a/b.jpg", "a\\b.jpg"),
        ("a/b.jpg", "../../a\\b.jpg"),
        ("a/b.jpg", "./x/y/a/b.jpg"),
        ("b.jpg", "images/b.jpg"),
        ("b c.jpg", "b%20c.jpg"),
        ("b%20c.jpg", "b c.jpg"),
        ("b.jpg", "/data/upload/1/b.jpg"),
    ],
)
def test_a_name_that_is_written_otherwise(tmp_path: Path, there: str, written_down: str) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).touch()
    assert seen_in(tmp_path, written_down) == f"; there is {there!a}: write it so"


def test_names_that_nothing_is_like(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.jpg").touch()
    for name in ("a", "a/b.jpg", "c.jpg", "a/c.jpg", "..", "", "a/b.png", "x" * 5000):
        assert seen_in(tmp_path, name) == ""
    assert seen_in(tmp_path, "https://host/c.jpg").startswith("; this is a URL: fetch the files")
    assert hint(b"/nowhere", b"\xff") == ""


def test_each_place_that_looks_a_file_up_says_so(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / NFC).touch()
    table = tmp_path / "train.csv"
    table.write_text(f"path,label\ntrain/{NFD},1\n")
    assert r"there is 'train/\xe9.jpg'" in in_table(table).absent()
    what = told()
    change("images.0.file_name", NFD)(what)
    written(tmp_path, what, "train")
    with pytest.raises(BadInputError, match=r"there is '\\xe9.jpg'"):
        data = BoxedImages(CocoPictures(tmp_path, "train", "fail"), 32, 4, None)
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
    ("content", "message"),
    [
        (unicodedata.normalize("NFD", "a/é_1.wav").encode(), r"line 1: .*there is 'a/\\xe9_1.wav'"),
        (b"\na/B_2.WAV", r"line 2: .*there is 'a/b_2.wav'"),
        (b"speech/a/b_2.wav", r"line 1: .*there is 'a/b_2.wav'"),
        ("a/b_2.wav".encode("utf-16"), "text in UTF-16; save it as UTF-8"),
        ("a/b_2.wav".encode("utf-16-le"), "holds zero bytes; save it as UTF-8"),
        (b"a/x.wav", "line 1: no recording 'a/x.wav' below this folder$"),
    ],
)
def test_lists_that_cant_be_meant(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        split_by_lists(commands(tmp_path, content), "validation")


# Exports of annotation tools.


def test_roboflows_and_cvats_folders(tmp_path: Path) -> None:
    one, other = tmp_path / "roboflow", tmp_path / "cvat"
    one.mkdir()
    other.mkdir()
    for part, name in (("train", "train"), ("val", "valid")):
        file = written(one, told(), part) / "annotations" / f"instances_{part}.json"
        if name != part:
            (one / part).rename(one / name)
        file.rename(one / name / "_annotations.coco.json")
        written(other, told(), part)
        (other / "images").mkdir(exist_ok=True)
        (other / part).rename(other / "images" / part)
    (one / "annotations").rmdir()
    for root in (one, other):
        read = [CocoPictures(root, part, "fail") for part in ("train", "val")]
        assert [len(pictures) for pictures in read] == [2, 3]
        assert (read[0].read(0).image == 7).all()


def test_numbers_as_floats_are_numbers(tmp_path: Path) -> None:
    plain = CocoPictures(written(tmp_path, told()), "train", "fail")
    text = json.dumps(json.loads(json.dumps(told()), parse_int=float))
    (tmp_path / "annotations" / "instances_train.json").write_text(text)
    same = CocoPictures(tmp_path, "train", "fail")
    assert (same.categories, same.most, len(same)) == (plain.categories, plain.most, len(plain))
    assert same.read(0).label.tolist() == plain.read(0).label.tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (gzip.compress, "gzip: unpack it"),
        (lambda _: b"<!DOCTYPE html><html>404", "an HTML page"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
        (lambda data: data.decode().encode("utf-16"), "text in UTF-16"),
        (lambda data: data.decode().encode("utf-16-be"), "text in UTF-16 or UTF-32"),
        (lambda _: b"", "empty"),
        (lambda _: bytes(99), "zeros"),
        (lambda _: b"PK\3\4abc\xff", "a zip archive"),
        (lambda data: data[:-9], "line 1|delimiter|Unterminated|Expecting"),
        (lambda data: data[:-1] + b', "annotations": []}', "'annotations'"),
    ],
)
def test_annotations_that_are_no_json(tmp_path: Path, make: Callable[[bytes], bytes], message: str) -> None:
    file = written(tmp_path, told()) / "annotations" / "instances_train.json"
    file.write_bytes(make(file.read_bytes()))
    with pytest.raises(BadInputError, match=rf"not readable JSON \(.*({message})") as refused:
        CocoPictures(tmp_path, "train", "fail")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a[/b]", "[red]a", "a:dog:"])
def test_a_path_in_a_table_is_shown_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["data", "stats", f"{name}/train"]) == 0
    assert f"{name}/train" in capsys.readouterr().out
