"""Promise: files, tables and shards of images are read whatever they are called; what is no image file, or
isn't there, is named before the start; classes are numbered alike in every format.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers.image_folders import SIDE, as_csv, encoded, opened, picture
from tests.helpers.privileges import permissions_count
from tests.helpers.refusals import named, refused
from trainer.config.data import DataConfig
from trainer.data.check import CheckedData, check_data, unreadable
from trainer.data.formats.files import Files, in_folder
from trainer.data.formats.images import ImageDataset
from trainer.data.formats.index import index_of
from trainer.data.formats.pack import PackSettings, pack
from trainer.data.formats.records import Records
from trainer.data.formats.sharded import in_shards
from trainer.data.formats.tables import in_table
from trainer.data.sources import check_alike, common_classes, load_images, more_images
from trainer.errors import BadInputError


def test_odd_names(tmp_path: Path) -> None:
    names = [b"a b.jpg", b"line\nbreak.jpg", b"not-utf8-\xff.jpg", "ümläut.jpg".encode(), b"UPPER.JPEG"]
    data = bytes(encoded(picture(), "JPEG"))
    (tmp_path / "class one").mkdir()
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path / "class one") + b"/" + name)).write_bytes(data)
    records = in_folder(tmp_path)
    assert len(records) == 5
    assert all(records.read(sample) == data for sample in range(5))
    records.name(2).encode()  # can be printed
    pack(records, tmp_path / "packed", PackSettings())
    packed = in_shards(tmp_path / "packed")
    assert [packed.file_name(n) for n in range(5)] == [records.file_name(n) for n in range(5)]


def checked(records: Records, how: Any = "fast", on_corrupt: Any = "fail", budget: int = 0) -> None:
    dataset = ImageDataset(records, SIDE, random_crop=True, on_corrupt=on_corrupt)
    check_data(how, False, [CheckedData("training", dataset, budget)])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_of_a_table_that_are_not_there_are_counted(
    kind: str, photographs: Path, tmp_path: Path
) -> None:
    records = opened(kind, photographs, tmp_path)
    checked(records)
    lines = [b"path,label", *(records.file_name(n) + b",1" for n in range(30))]
    lines[17] = b"a/gone.jpg,1"
    lines[5:5] = [b'"two\nlines.jpg",1', b""]
    table = tmp_path / "table.csv"
    table.write_bytes(b"\n".join(lines))
    place = f"the first: line 7: {tmp_path}/two\nlines.jpg (No such file"
    if kind == "parquet":
        from pyarrow import csv, parquet

        options = csv.ParseOptions(newlines_in_values=True)
        parquet.write_table(csv.read_csv(table, parse_options=options), tmp_path / "table.parquet")
        table, place = tmp_path / "table.parquet", place.replace("line 7", "row 5")
    with pytest.raises(BadInputError) as raised:
        checked(in_table(table))
    assert str(raised.value).startswith(f"2 of 31 files named in {table} can't be read; {place}")
    checked(in_table(table), "none")


def test_what_is_no_file_is_named_before_it_is_read(tmp_path: Path) -> None:
    """In folders with few names, which are asked for, and with many, which are listed."""
    for few in (3, 30):
        root = tmp_path / str(few)
        (root / "a" / "is.jpg").mkdir(parents=True)
        (root / "a" / "dead.jpg").symlink_to("nowhere.jpg")
        (root / "a" / "loop.jpg").symlink_to("loop.jpg")
        os.mkfifo(root / "a" / "pipe.jpg")
        for number in range(few):
            (root / "a" / f"{number}.jpg").touch()
        (root / "a" / "good.jpg").symlink_to("0.jpg")
        good = [b"a/0.jpg", b"a/good.jpg", b"a/../a/1.jpg", os.fsencode(root / "a" / "2.jpg"), b"a//1.jpg"]
        good += [b"a/%d.jpg" % number for number in range(few)]
        bad = [
            b"a/is.jpg",
            b"a/dead.jpg",
            b"a/loop.jpg",
            b"a/pipe.jpg",
            b"a/no.jpg",
            b"b/0.jpg",
            b"a/0.jpg/x",
        ]
        found = unreadable(os.fsencode(root), [*good, *bad, b"a/", b"a/..", b"/0.jpg"])
        assert [number for number, _ in found] == list(range(len(good), len(good) + len(bad) + 3))
        reasons = [reason.partition(":")[0] for _, reason in found[: len(bad)]]
        assert reasons[:4] == ["is a folder", *["a link that leads nowhere"] * 2, "is no regular file"]
        assert reasons[4:] == ["No such file or directory"] * 2 + ["Not a directory"]
    with pytest.raises(
        BadInputError, match=r"3 of 34 files below .* the first: .*dead.jpg \(a link that leads"
    ):
        checked(in_folder(tmp_path / "30"))


def test_a_class_that_is_a_dead_link_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.jpg").touch()
    for target in ("gone", "dog"):
        (tmp_path / "dog").unlink(missing_ok=True)
        (tmp_path / "dog").symlink_to(target)
        with pytest.raises(BadInputError, match="/dog: a link that leads nowhere"):
            in_folder(tmp_path)


def test_a_folder_that_may_not_be_listed_is_asked_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [b"a/%d.jpg" % number for number in range(10)]
    (tmp_path / "a").mkdir()
    for name in names[1:]:
        (tmp_path / os.fsdecode(name)).touch()

    def refuse(folder: bytes) -> Any:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert [number for number, _ in unreadable(os.fsencode(tmp_path), names)] == [0]


def test_a_file_that_may_not_be_read_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(30):
        (tmp_path / "a" / f"{number}.jpg").touch(0o600)
    (tmp_path / "a" / "7.jpg").chmod(0)
    with permissions_count(), pytest.raises(BadInputError, match=r"1 of 30 .*7.jpg \(Permission denied\)"):
        checked(in_folder(tmp_path))


def test_shards_that_are_not_there_are_counted(photographs: Path, tmp_path: Path) -> None:
    records = opened("shards", photographs, tmp_path)
    checked(records)
    (tmp_path / "001.tar").unlink()
    os.truncate(tmp_path / "003.tar", 5000)
    message = rf"2 of 5 shards of {tmp_path} can't be read; the first: {tmp_path}/001.tar \(No such file"
    with pytest.raises(BadInputError, match=message):
        checked(records)


def test_a_full_check_decodes_each_sample_and_counts(broken: Path, capfd: pytest.CaptureFixture[str]) -> None:
    records = in_folder(broken)
    checked(records)
    with pytest.raises(
        BadInputError, match=r"3 of 60 training samples can't be used; the first: .*\.jpg: not a"
    ):
        checked(records, "full")
    with pytest.raises(
        BadInputError, match=r"3 of 60 .* are corrupt, and data.corrupt_budget allows 2; .*\.jpg"
    ):
        checked(records, "full", "quarantine", 2)
    capfd.readouterr()
    checked(records, "full", "skip", 3)
    assert "3 of 60 training samples are corrupt" in capfd.readouterr().err


def labeled(classes: Sequence[str], labels: list[int]) -> Files:
    return Files(Path("x"), index_of([b"%d" % number for number in range(len(labels))], labels, classes))


@pytest.mark.parametrize(
    ("train", "val", "names"),
    [
        (("ab", [0, 0]), ("ab", [0, 1]), "'b' train 1 val"),
        (("abc", [0, 0]), ("abc", [0, 0]), "'b' 1 train 0 val"),
        (("ab", [0, 1]), ("abc", [0, 1, 2]), "'c' val"),
        (("ab", [0, 1]), ("abcd", [0, 2, 3]), "'c' 1 val"),
        (("ab", [0, 1]), (("a", "b "), [0, 1]), "'b' 'b '"),
        (("012", [0, 2]), ("0123", [0, 3]), "'3' val"),
        (("012", [0, 2]), ("012", [0, 1]), "'1' train 1 val"),
        ((("a", "a "), [0, 1]), (("a", "a "), [0, 1]), "'a' 'a '"),
    ],
)
def test_a_class_without_samples_to_learn_from(train: Any, val: Any, names: str) -> None:
    with refused("data", names):
        common_classes("data", labeled(*train), labeled(*val), gaps=True)


def test_class_folders_that_others_number_otherwise_are_noted(tmp_path: Path) -> None:
    for number in range(11):
        for part in ("train", "val"):
            (tmp_path / part / str(number)).mkdir(parents=True)
            (tmp_path / part / str(number) / "a.jpg").touch()
    data = load_images(DataConfig(name="folder", path=tmp_path), 0)
    assert data.classes == tuple(map(str, range(11)))
    (note,) = data.notes
    assert "output 2 is '2', and '10' in a model that was trained with torchvision's ImageFolder" in note


def test_a_number_that_is_nobodys_label_is_no_class_of_a_table(tmp_path: Path) -> None:
    parts = labeled("0123", [0, 2, 3]), labeled("012", [0, 2])
    assert common_classes("data", *parts, gaps=True)[0] == tuple("0123")
    with pytest.raises(BadInputError, match="class '1' has no samples in train, and 0 in val"):
        common_classes("data", *parts, gaps=False)
    for part in ("train", "val"):
        (tmp_path / f"{part}.csv").write_text(f"path,label\n{part}/a.jpg,0\n{part}/b.jpg,2\n")
    data = load_images(DataConfig(name="table", path=tmp_path), 0)
    assert data.notes == ("1 of 3 classes have no samples; the first is '1'",)


def tables(root: Path, train: Sequence[tuple[str, Any]], val: Sequence[tuple[str, Any]]) -> Any:
    for part, rows in (("train", train), ("val", val)):
        lines = "".join(f"{path},{label}\n" for path, label in rows)
        (root / f"{part}.csv").write_text(f"path,label\n{lines}")
    return load_images(DataConfig(name="table", path=root), 0)


@pytest.mark.parametrize(
    ("train", "val", "numbers"),
    [
        (["ant", "bee", "cat"], ["cat", "ant"], [2, 0]),
        (range(0, 1344, 28), [1260], [1260]),
        ([5, 100_000], [5, 5], [0, 0]),
        ([100_000, 5], [100_000], [1]),
    ],
)
def test_val_is_numbered_by_the_names_of_train(
    tmp_path: Path, train: Sequence[Any], val: Sequence[Any], numbers: list[int]
) -> None:
    data = tables(
        tmp_path,
        [(f"t{at}.jpg", each) for at, each in enumerate(train)],
        [(f"v{at}.jpg", each) for at, each in enumerate(val)],
    )
    assert data.evaluation.labels.tolist() == numbers
    named_ = [data.classes[number] for number in data.evaluation.labels]
    assert named_ == [str(each) for each in val]
    assert named(data.notes, "val")


def test_an_evaluation_set_is_numbered_by_the_names_of_train(tmp_path: Path) -> None:
    data = tables(tmp_path, [("a.jpg", "ant"), ("b.jpg", "bee")], [("c.jpg", "ant"), ("d.jpg", "bee")])
    (tmp_path / "more.csv").write_text("path,label\ne.jpg,bee\n")
    config = DataConfig(name="table", path=tmp_path)
    more, classes = more_images(config, "more", 0)
    check_alike(more, classes, data.evaluation, data.classes)
    assert cast(Any, more).labels.tolist() == [1]
    (tmp_path / "more.csv").write_text("path,label\ne.jpg,cat\n")
    more, classes = more_images(config, "more", 0)
    with refused("cat"):
        check_alike(more, classes, data.evaluation, data.classes)


def test_files_with_two_labels_and_files_of_both_parts_are_counted(tmp_path: Path) -> None:
    train = [("a.jpg", "ant"), ("./b.jpg", "bee"), ("b.jpg", "ant"), ("a.jpg", "ant"), ("b.jpg", "bee")]
    val = [("c.jpg", "ant"), (f"{tmp_path}/a.jpg", "ant"), ("d.jpg", "bee"), ("b.jpg", "bee")]
    labels, both = tables(tmp_path, train, val).notes
    assert named(labels, "1 train b.jpg")
    assert named(both, "2 4 val", tmp_path / "a.jpg")
    assert not tables(tmp_path, train[:2], [("c.jpg", "ant"), ("d.jpg", "bee")]).notes


def test_labels_are_names_or_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,label\nx.jpg,3\ny.jpg,0\n")
    numbers_, names = in_table(tmp_path / "a.csv"), tmp_path / "b.csv"
    assert (list(numbers_.classes), numbers_.labels.tolist()) == (["0", "1", "2", "3"], [3, 0])
    names.write_text("label,path\ndog,x.jpg\ncat,y.jpg\n")
    assert (list(in_table(names).classes), in_table(names).labels.tolist()) == (["cat", "dog"], [1, 0])


def test_classes_are_numbered_alike_in_every_format(tmp_path: Path) -> None:
    for name in map(str, range(12)):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "x.jpg").write_bytes(bytes(encoded(picture(), "JPEG")))
    folder = in_folder(tmp_path / "images")
    table = in_table(as_csv(tmp_path / "images", tmp_path))
    assert list(folder.classes) == list(table.classes) == list(map(str, range(12)))
    assert folder.labels.tolist() == table.labels.tolist() == list(range(12))


def test_dates_are_names_and_excels_mark_is_no_column(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xef\xbb\xbfpath,label\nx.jpg,20240201\ny.jpg,20240131\nz.jpg,007\n")
    assert list(in_table(file).classes) == ["007", "20240131", "20240201"]
    file.write_bytes(b"path,label\nx.jpg,caf\xe9\n")
    json.dumps(in_table(file).classes).encode()


def test_what_is_no_file_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "x.jpg")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    records = in_folder(tmp_path)
    assert len(records) <= 2
    records.fingerprint()
    with pytest.raises(BadInputError, match="isn't a file"):
        records.read(0)
