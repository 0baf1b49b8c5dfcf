"""Promise: what of a data set isn't read is counted, by reason and with the first name, where people look."""

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.helpers.image_folders import encoded, picture
from tests.helpers.refusals import named
from trainer.cli import main
from trainer.config.data import DataConfig
from trainer.data.formats.coco import CocoPictures
from trainer.data.formats.files import in_folder
from trainer.data.formats.pack import PackSettings, pack
from trainer.data.formats.sharded import in_shards
from trainer.data.formats.tables import in_table
from trainer.data.formats.tar_shards import index_shards
from trainer.data.left_out import left_out_line, one, tally
from trainer.data.sources import load_images
from trainer.errors import BadInputError
from trainer.tasks.detection import Detection

JPEG = bytes(encoded(picture(), "JPEG"))


def told_of(found: Any) -> str:
    return left_out_line(tuple(found.left_out))


def test_the_line() -> None:
    assert left_out_line(()) == ""
    found = tally(
        [one(".heic", "a/1.heic"), one("box{es}", "x"), one(".heic", "a/2.heic"), one("categor{y}", "y")]
    )
    assert left_out_line(found) == "left out: 2 .heic (a/1.heic), 1 box (x), 1 category (y)"
    assert left_out_line(tally([*found, *found])).endswith(
        "4 .heic (a/1.heic), 2 boxes (x), 2 categories (y)"
    )
    assert left_out_line((one(".a\nb", b"\xff\n\x07"),)) == "left out: 1 .a\\nb (\\xff\\n\\x07)", (
        "one line, printable"
    )
    line = left_out_line(tally(one(f".{n}", f"x{n}") for n in range(999)))
    assert "743 files of other kinds (x256), 1 .0 (x0)" in line
    assert line.endswith(" and 245 of 245 other kinds")


def class_folder(root: Path, names: list[str | bytes]) -> Path:
    (root / "a").mkdir(parents=True)
    for name in names:
        path = os.path.join(os.fsencode(root / "a"), os.fsencode(name))  # noqa: PTH118
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        Path(os.fsdecode(path)).write_bytes(JPEG)
    return root


@pytest.mark.parametrize(
    ("names", "samples", "line"),
    [
        (["0.jpg", "0.jfif", "1.JPE", "2.avif", "3.jp2"], 5, ""),
        (["0.jpg", "1.heic", "2.HEIC", "3.tga"], 1, "left out: 2 .heic (a/1.heic), 1 .tga (a/3.tga)"),
        (["0.jpg", "._0.jpg", ".DS_Store"], 1, "left out: 2 hidden files (a/.DS_Store)"),
        (["0.jpg", ".ipynb_checkpoints/0.jpg"], 1, "left out: 1 hidden folder (a/.ipynb_checkpoints)"),
        (["0.jpg", "README"], 1, "left out: 1 file without a suffix (a/README)"),
        (["0.jpg", "below/1.jpg.part"], 1, "left out: 1 .part (a/below/1.jpg.part)"),
        (["0.jpg", b"\xff.x"], 1, "left out: 1 .x (a/\\xff.x)"),
        (["0.jpg", "../x.png"], 1, "left out: 1 file beside the class folders (x.png)"),
        (["0.jpg", "../.hidden/x.png"], 1, "left out: 1 hidden folder (.hidden)"),
    ],
)
def test_files_of_a_folder(names: list[str | bytes], samples: int, line: str, tmp_path: Path) -> None:
    found = in_folder(class_folder(tmp_path, names))
    assert (len(found), told_of(found)) == (samples, line)


@pytest.mark.parametrize("target", [".", "..", "../..", "../../.."])
def test_a_link_to_where_it_lies_counts_nothing_twice(target: str, tmp_path: Path) -> None:
    root = class_folder(tmp_path / "x" / "train", ["0.jpg"])
    class_folder(tmp_path / "x" / "val", ["0.jpg"])
    (root / "a" / "loop").symlink_to(target)
    found = in_folder(root)
    line = "left out: 1 link to a folder that it lies in (a/loop)"
    # What a link outside leads back to is left out where it does.
    assert told_of(found).startswith(line) or told_of(found).count("link") == 1
    assert len(found) == 1 if target in (".", "..") else found.file_name(0) == b"a/0.jpg"


def test_a_class_of_other_files_says_which(tmp_path: Path) -> None:
    for part in ("train", "val"):
        class_folder(tmp_path / part, ["0.jpg"])
        (tmp_path / part / "b").mkdir()
    (tmp_path / "train" / "b" / "0.heic").write_bytes(JPEG)
    (tmp_path / "val" / "b" / "0.jpg").write_bytes(JPEG)
    with pytest.raises(
        BadInputError, match=r"class 'b' has no samples in train.*left out: 1 \.heic \(b/0\.heic\)"
    ):
        load_images(DataConfig(name="folder", path=tmp_path), 0)


def test_samples_of_shards_with_two_labels_and_those_of_both_parts_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def member(name: str, label: str, data: bytes) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
        return (f"{name}.jpg", JPEG + data), (f"{name}.cls", label.encode())

    contents = {
        "train": [*member("1", "0", b"a"), *member("2", "1", b"a"), *member("3", "1", b"b")],
        "val": [*member("4", "0", b"c"), *member("5", "1", b"b")],
    }
    for part, members in contents.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "0.tar").write_bytes(archive(*members))
        index_shards(tmp_path / part)
    labels, both = load_images(DataConfig(name="shards", path=tmp_path), 0).notes
    assert named(labels, "1 train 1.jpg")
    assert named(both, "1 2 val 5.jpg")
    assert main(["data", "stats", str(tmp_path)]) == 0
    assert {labels, both} <= set(capsys.readouterr().out.splitlines())


def test_one_class_and_one_that_is_not_measured(tmp_path: Path) -> None:
    for part in ("train", "val"):
        class_folder(tmp_path / part, ["0.jpg"])
    (note,) = load_images(DataConfig(name="folder", path=tmp_path), 0).notes
    assert "one class only ('a')" in note
    (tmp_path / "train" / "b").mkdir()
    (tmp_path / "train" / "b" / "0.jpg").write_bytes(JPEG)
    (note,) = load_images(DataConfig(name="folder", path=tmp_path), 0).notes
    assert "class 'b' has no samples in val" in note


def archive(*members: tuple[str, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def sample(name: str) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    return (f"{name}.jpg", JPEG), (f"{name}.cls", b"0")


def indexed(folder: Path, data: bytes, image: str = "") -> str:
    """How many samples an index has, and what is left out; or the error."""
    (folder / "0.tar").write_bytes(data)
    try:
        about = index_shards(folder, image=image)
    except BadInputError as error:
        return str(error).removeprefix(f"{folder}/")
    return f"{about.samples} {told_of(in_shards(folder))}".strip()


A, B = sample("a"), sample("b")
BOTH = archive(*A, *B)
SECOND = BOTH.index(b"b.jpg")  # where the header of the second sample begins
LAST = BOTH.index(b"b.cls")
END = LAST + 1024
MARK = "which has no mark, as if it were cut off (0.tar, at byte"


def with_bytes(at: int, data: bytes, of: bytes = BOTH) -> bytes:
    return of[:at] + data + of[at + len(data) :]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (BOTH, "2"),
        (BOTH[: END + 512], "2"),
        (BOTH + bytes(5000), "2"),
        (BOTH[:END], f"2 left out: 1 end of an archive, {MARK} {END:,})"),
        (BOTH[:SECOND], f"1 left out: 1 end of an archive, {MARK} {SECOND:,})"),
        (BOTH[:LAST], f"1 left out: 1 end of an archive, {MARK} {LAST:,}), 1 sample without a label"),
        (BOTH[: SECOND + 100], f"cut off in a header at byte {SECOND:,}"),
        (BOTH[: LAST + 600], "not a readable tar file (unexpected end of data)"),
        (with_bytes(SECOND, b"B"), f"damaged header at byte {SECOND:,}"),
        (with_bytes(SECOND + 124, b"7"), f"damaged header at byte {SECOND:,}"),
        (with_bytes(SECOND + 148, b"7"), f"damaged header at byte {SECOND:,}"),
        (with_bytes(SECOND, bytes(512)), f"ends at byte {SECOND:,}, and goes on"),
        (with_bytes(SECOND, bytes(1024)), f"ends at byte {SECOND:,}, and goes on at byte"),
        (with_bytes(LAST, bytes(512)), f"ends at byte {LAST:,}, and goes on"),
        (BOTH[:SECOND] + BOTH[SECOND + 7 :], f"damaged header at byte {SECOND:,}"),
        (BOTH + archive(*sample("c")), f"ends at byte {END:,}, and goes on at byte {len(BOTH):,}"),
        (BOTH[:-9] + archive(*sample("c")), "and goes on at byte"),
        (BOTH + bytes(2 << 20) + b"\n", f"goes on at byte {len(BOTH) + (2 << 20):,}"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_the_end_of_an_archive_is_proven(data: bytes, told: str, tmp_path: Path) -> None:
    found = indexed(tmp_path, data)
    assert found == told if told == "2" else told in found, found


def header_of_size(name: bytes, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """As GNU writes a size that eleven digits can't hold, which may be any number."""
    block = bytearray(512)
    block[:100] = name.ljust(100, b"\0")
    block[124:136] = (b"\xff" if size < 0 else b"\x80") + size.to_bytes(11, "big", signed=True)
    block[148:157], block[257:265] = b" " * 8 + kind, b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("size", "kind", "told"),
    [
        (-512, tarfile.REGTYPE, f"damaged header at byte {END:,}"),
        (-512, b"V", f"damaged header at byte {END:,}"),
        (-1024, tarfile.REGTYPE, f"damaged header at byte {END:,}"),
        (1 << 86, tarfile.REGTYPE, "not a readable tar file ("),
        (1 << 60, tarfile.REGTYPE, "can't be read (Invalid argument)"),
        (1 << 60, tarfile.XHDTYPE, "not a readable tar file ("),
    ],
)
@pytest.mark.parametrize("name", [b"._c.jpg", b"c.jpg"])
def test_a_size_that_cant_be_meant(size: int, kind: bytes, told: str, name: bytes, tmp_path: Path) -> None:
    assert told in indexed(tmp_path, BOTH[:END] + header_of_size(name, size, kind) + bytes(1024))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (gzip.compress(BOTH, mtime=0), "not a readable tar file (gzip: unpack it)"),
        (b"<html>no such shard</html>", "(an HTML page)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "(a Git LFS pointer"),
        (b"samples\n", "(text that begins with 'samples')"),
    ],
)
def test_what_isnt_a_tar_is_named(data: bytes, told: str, tmp_path: Path) -> None:
    assert told in indexed(tmp_path, data)


@pytest.mark.parametrize(
    ("members", "image", "told"),
    [
        (
            [("._a.jpg", b"x"), A[0], ("._a.cls", b"x"), A[1]],
            "",
            "1 left out: 2 hidden members (0.tar: '._a.jpg')",
        ),
        ([("./a.jpg", JPEG), ("./a.cls", b"0")], "", "1"),
        ([("a.jfif", JPEG), A[1]], "", "1"),
        (
            [*A, ("b.heic", b"x"), B[1]],
            "",
            "1 left out: 1 .heic (0.tar: 'b.heic'), 1 sample without an image",
        ),
        ([*A, B[0]], "", "1 left out: 1 sample without a label (0.tar: 'b.jpg')"),
        (
            [*A, ("a.txt", b"x"), ("__worker__.json", b"{}")],
            "",
            "1 left out: 1 .txt (0.tar: 'a.txt'), 1 sample ",
        ),
        ([*A, *A], "", "'a.jpg' and 'a.jpg' are one name"),
        ([*A, ("./a.jpg", JPEG)], "", "'a.jpg' and './a.jpg' are one name"),
        ([A[0], ("a.JPG", JPEG), A[1]], "", "'a.jpg' and 'a.JPG' are one name"),
        ([*A, *B, *A], "", "'a.jpg' lies apart from the rest of its sample, or is there twice"),
        ([A[0], B[0], A[1], B[1]], "", "'a.cls' lies apart"),
        ([*A, *B, ("a.npy", b"x")], "", "2 left out: 1 .npy (0.tar: 'a.npy')"),
        (
            [A[0], ("a.png", JPEG), A[1]],
            "",
            "'a.jpg' and 'a.png' are two images of one sample; choose by its suffix",
        ),
        ([A[0], ("a.png", JPEG), A[1]], "jpg", "1 left out: 1 .png (0.tar: 'a.png')"),
        ([A[0], ("a.png", JPEG), A[1]], ".PNG", "1 left out: 1 .jpg (0.tar: 'a.jpg')"),
        ([("a.left.jpg", JPEG), ("a.right.jpg", JPEG), A[1]], "left.jpg", "1 left out: 1 .right.jpg"),
        ([("/etc/x.jpg", JPEG), ("/etc/x.cls", b"1")], "", "'/etc/x.jpg' leads out"),
        ([("a/../../x.jpg", JPEG)], "", "'a/../../x.jpg' leads out"),
        ([A[0]], "", "left out: 1 sample without a label (0.tar: 'a.jpg')"),
        ([("x.txt", b"words")], "", "hold no sample"),
        *(([A[0], ("a.cls", label)], "", "the label of 'a.jpg'") for label in (b"\xff", b" ")),
        *(
            ([A[0], ("a.json", b'{"label": %s}' % label)], "", "the label of 'a.jpg'")
            for label in (b"null", b"-1", b"1.5", b"[1]")
        ),
        ([A[0], ("a.json", b"[1]")], "", "the label of 'a.jpg'"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_members_of_shards(members: list[tuple[str, bytes]], image: str, told: str, tmp_path: Path) -> None:
    assert told in indexed(tmp_path, archive(*members), image)


def test_what_lies_beside_shards_and_who_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "left out: 1 hidden file (._0.tar), 1 compressed shard (1.tgz), 1 folder beside the shards (more), "
    )
    for part in ("train", "val"):
        folder = tmp_path / "d" / part
        (folder / "more").mkdir(parents=True)
        for name in ("1.tgz", "._0.tar", "x.txt"):
            (folder / name).write_bytes(b"x")
        (folder / "0.TAR").write_bytes(BOTH)
    assert main(["data", "index", str(tmp_path / "d")]) == 0
    assert capsys.readouterr().out.count(line) == 2
    assert main(["data", "index", str(tmp_path / "d")]) == 0, (
        "again: its own index is nothing that lies beside"
    )
    assert capsys.readouterr().out.count("1 .txt (x.txt)\n") == 2
    assert main(["data", "stats", str(tmp_path / "d")]) == 0
    assert f"train: {line}" in capsys.readouterr().out
    assert main(["data", "stats", "--json", str(tmp_path / "d")]) == 0
    assert json.loads(capsys.readouterr().out)["val"]["left_out"][0]["first"] == "._0.tar"
    pack(in_shards(tmp_path / "d" / "train"), tmp_path / "p", PackSettings())
    assert told_of(in_shards(tmp_path / "p")).startswith(line)


def coco(root: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    """Two images of each part; of their six boxes two have no area."""
    (root / "annotations").mkdir(parents=True)
    for part in ("train", "val"):
        (root / part).mkdir()
        for name in "xy":
            Image.new("RGB", (40, 30)).save(root / part / f"{name}.jpg")
        told: dict[str, Any] = {
            "categories": [{"id": 1, "name": "cat", "supercategory": "animal"}],
            "images": [{"id": n, "file_name": f"{'xy'[n]}.jpg", "width": 40, "height": 30} for n in (0, 1)],
            "annotations": [
                {"id": n, "image_id": n % 2, "category_id": 1, "iscrowd": 0, "bbox": [1, 1, 9 * (n > 1), 9]}
                for n in range(6)
            ],
        }
        change(told)
        (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(told))
    return root


def detection(root: Path, on_corrupt: str, budget: float) -> Detection:
    from trainer.config.recipe import Recipe

    data = {"name": "coco", "path": root, "on_corrupt": on_corrupt, "corrupt_budget": budget}
    recipe = Recipe.model_validate({"task": "detection", "epochs": 1, "data": data})
    return Detection(recipe.data, recipe.model, recipe.detection, 0)


@pytest.mark.parametrize("on_corrupt", ["skip", "quarantine"])
def test_boxes_that_are_left_out_are_counted(on_corrupt: str, tmp_path: Path) -> None:
    coco(tmp_path)
    with pytest.raises(
        BadInputError, match=r"2 of 6 boxes can't be meant, .*allows 1; the first: instances_train"
    ):
        detection(tmp_path, on_corrupt, 0.1)
    task = detection(tmp_path, on_corrupt, 0.3)
    for part, data in (("train", task.train_data), ("val", task.evaluation_data)):
        where = rf"instances_{part}.json: annotation 0 of image 0: [1, 1, 0, 9] has no area"
        assert told_of(data) == f"left out: 2 boxes that can't be meant ({where})"


def no_box_of_y(told: dict[str, Any]) -> None:
    told["annotations"] = [
        {**a, "id": n} for n, a in enumerate(told["annotations"]) if a["image_id"] == 0 and a["id"]
    ]


def crowded(told: dict[str, Any]) -> None:  # as CVAT exports masks
    told["annotations"] = told["annotations"][2:]
    told["annotations"][0]["iscrowd"] = 1


def of_roboflow(told: dict[str, Any]) -> None:
    told["annotations"] = told["annotations"][2:]
    told["categories"].insert(0, {"id": 0, "name": "things", "supercategory": "none"})
    told["categories"][1]["supercategory"] = "things"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (no_box_of_y, "left out: 1 image without a box (instances_train.json: y.jpg)"),
        (crowded, "left out: 1 box around a crowd (instances_train.json: x.jpg)"),
        (of_roboflow, "left out: 1 supercategory without a box (instances_train.json: 'things')"),
    ],
)
def test_what_training_on_coco_leaves_out(
    change: Callable[[dict[str, Any]], object], line: str, tmp_path: Path
) -> None:
    found = CocoPictures(coco(tmp_path, change), "train", "fail")
    assert (told_of(found), found.classes) == (line, ("cat",))


def only_crowds(told: dict[str, Any]) -> None:
    for one_box in told["annotations"]:
        one_box |= {"bbox": [1, 1, 9, 9], "iscrowd": 1}


def test_a_class_of_crowds_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"category 1 \('cat'\) has no box .* but around crowds"):
        CocoPictures(coco(tmp_path, only_crowds), "train", "fail")


def count_of(found: Any, word: str) -> int:
    """Of what is left out, how many for the one reason with this word."""
    counts = [each.count for each in found.left_out if word in each.reason]
    assert len(counts) < 2
    return sum(counts)


def flagged(**flags: Any) -> Callable[[dict[str, Any]], object]:
    """Sets keys of annotations 2 and 4, which are image 0's; no box is without area."""

    def change(told: dict[str, Any]) -> None:
        for each in told["annotations"]:
            each["bbox"] = [1, 1, 9, 9]
        for number in (2, 4):
            told["annotations"][number] |= flags

    return change


@pytest.mark.parametrize("value", [1, True, 1.0])
def test_boxes_to_ignore_are_not_trained_on(value: Any, tmp_path: Path) -> None:
    coco(tmp_path, flagged(ignore=value))
    train = CocoPictures(tmp_path, "train", "fail")
    assert (count_of(train, "ignore"), count_of(train, "crowd")) == (2, 0)
    assert [train.read(n).crowd.tolist() for n in (0, 1)] == [[False, True, True], [False] * 3]
    # To pycocotools they are objects like others, so that evaluation counts them, of any split.
    for measured in (
        CocoPictures(tmp_path, "val", "fail"),
        CocoPictures(tmp_path, "train", "fail", training=False),
    ):
        assert not measured.left_out
        assert not measured.read(0).crowd.any()
        assert "2 boxes" in measured.remarks(everything=True)


@pytest.mark.parametrize("value", [0, False, None, 0.0])
def test_boxes_with_ignore_0_are_objects(value: Any, tmp_path: Path) -> None:
    train = CocoPictures(coco(tmp_path, flagged(ignore=value)), "train", "fail")
    assert not train.left_out and train.remarks(everything=True).startswith("4 boxes")


@pytest.mark.parametrize("value", ["1", "0", 2, -1, [1], {"a": 1}])
def test_an_ignore_that_is_neither_0_nor_1_is_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="annotation 2 of image 0: ignore is"):
        CocoPictures(coco(tmp_path, flagged(ignore=value)), "train", "skip")


def test_a_crowd_to_ignore_is_counted_once(tmp_path: Path) -> None:
    coco(tmp_path, flagged(ignore=1, iscrowd=1))
    train, val = (CocoPictures(tmp_path, part, "fail") for part in ("train", "val"))
    assert (count_of(train, "ignore"), count_of(train, "crowd")) == (0, 2)
    assert val.read(0).crowd.tolist() == [False, True, True]


def all_ignored(told: dict[str, Any]) -> None:
    for each in told["annotations"]:
        each |= {"bbox": [1, 1, 9, 9], "ignore": 1}


def of_image_0_ignored(told: dict[str, Any]) -> None:
    for each in told["annotations"]:
        each |= {"bbox": [1, 1, 9, 9], "ignore": int(each["image_id"] == 0)}


def test_an_image_and_a_class_of_boxes_to_ignore(tmp_path: Path) -> None:
    train = CocoPictures(coco(tmp_path / "some", of_image_0_ignored), "train", "fail")
    assert (len(train), count_of(train, "ignore"), count_of(train, "without a box")) == (1, 3, 1)
    with pytest.raises(BadInputError, match=r"category 1 \('cat'\) has no box"):
        CocoPictures(coco(tmp_path / "all", all_ignored), "train", "fail")
    assert len(CocoPictures(tmp_path / "all", "val", "fail")) == 2


def sized(*sizes: tuple[float, float], **more: Any) -> Callable[[dict[str, Any]], object]:
    def change(told: dict[str, Any]) -> None:
        del told["annotations"][len(sizes) :]
        for each, size in zip(told["annotations"], sizes, strict=True):
            each |= {"bbox": [0.2, 0.1, *size], **more}

    return change


@pytest.mark.parametrize("on_corrupt", ["fail", "skip"])
@pytest.mark.parametrize(
    "change",
    [
        sized(*[(0.5, 0.25)] * 6),
        sized((0.5, 0.25)),
        sized((0.5, 0.25), (1, 1), (1.0000001, 0.3)),
        sized((0.5, 0.25), (0.5, 0.25), iscrowd=1),
        sized((0.5, 0.25), (0, 0)),
        sized((0.5, 0.25), (1e-9, 1e-9)),
    ],
    ids=["six", "one", "whole", "crowds", "empty", "tiny"],
)
def test_boxes_as_fractions_of_the_image_are_refused(change: Any, on_corrupt: Any, tmp_path: Path) -> None:
    coco(tmp_path, change)
    for part in ("train", "val"):
        with pytest.raises(BadInputError, match=rf"instances_{part}.json: no box is wider"):
            CocoPictures(tmp_path, part, on_corrupt)


def test_small_boxes_beside_a_larger_one_are_read(tmp_path: Path) -> None:
    assert CocoPictures(coco(tmp_path, sized((0.5, 0.25), (0.5, 3))), "train", "fail").most == 1


@pytest.mark.parametrize(
    ("where", "keys", "counts"),
    [
        ("annotations", {"difficult": 1}, {"'difficult'": 2}),
        (
            "annotations",
            {"attributes": {"occluded": True, "rotation": 45.0, "keyframe": False}},
            {"'attributes.occluded'": 2, "'attributes.rotation'": 2},
        ),
        ("images", {"neg_category_ids": [3], "not_exhaustive_category_ids": []}, {"'neg_category_ids'": 2}),
        ("categories", {"ignore": 1}, {"'ignore'": 1}),
        ("annotations", {"bbox_mode": "XYXY", "isCrowd": 1}, {"'bbox_mode'": 2, "'isCrowd'": 2}),
        ("", {"videos": [{"id": 1}]}, {"'videos'": 1}),
        (
            "annotations",
            {"odd": 0, "other": "", "third": [], "fourth": {}, "fifth": None, "at": {"x": 0}},
            {},
        ),
        ("annotations", {"segmentation": [[1, 2]], "keypoints": [1], "caption": "a", "score": 1.0}, {}),
        ("images", {"license": 1, "date_captured": "today", "extra": {"name": "x"}}, {}),
        ("", {"info": {"year": 1}, "licenses": [{"id": 1}], "type": "instances"}, {}),
    ],
)
def test_keys_that_nothing_reads_are_counted(
    where: str, keys: dict[str, Any], counts: dict[str, int], tmp_path: Path
) -> None:
    def change(told: dict[str, Any]) -> None:
        sized((9, 9), (9, 9))(told)
        for each in told[where] if where else [told]:
            each.update(keys)

    for part in ("train", "val"):
        found = CocoPictures(coco(tmp_path / part, change), part, "fail")
        assert sum(each.count for each in found.left_out) == sum(counts.values())
        assert {name: count_of(found, name) for name in counts} == counts


def test_many_keys_that_nothing_reads_take_few_words(tmp_path: Path) -> None:
    many = flagged(**{f"key{n:03}": 1 for n in range(300)})
    found = CocoPictures(coco(tmp_path, many), "train", "fail").left_out
    assert len(found) < 12 and sum(each.count for each in found) == 600


def spare(root: Path, *names: str, data: bytes = JPEG) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_images_that_coco_doesnt_name_are_counted(tmp_path: Path) -> None:
    coco(tmp_path, sized((9, 9), (9, 9)))
    spare(tmp_path / "train", "z.jpg", "more/z.PNG", ".hidden.jpg", "._x.jpg", ".cache/a.jpg", "notes.txt")
    (tmp_path / "train" / "loop").symlink_to(".")
    (tmp_path / "train" / "linked").symlink_to("more")
    train, val = (CocoPictures(tmp_path, part, "fail") for part in ("train", "val"))
    assert (count_of(train, "doesn't name"), train.left_out[-1].first) == (2, "more/z.PNG")
    assert not val.left_out


@pytest.mark.parametrize("spelled", ["./x.jpg", "more/../x.jpg", ".//x.jpg"])
def test_a_name_in_another_spelling_is_named(spelled: str, tmp_path: Path) -> None:
    if ".." in spelled:
        table = spare(tmp_path, "x.jpg", "more/y.jpg") / "train.csv"
        table.write_text(f"path,label\n{spelled},a\nmore/y.jpg,b\n")
        assert not in_table(table).left_out
        return
    coco(tmp_path, lambda told: (sized((9, 9), (9, 9))(told), told["images"][0].update(file_name=spelled)))
    assert not CocoPictures(tmp_path, "train", "fail").left_out


def table_of(root: Path, name: str, *paths: str) -> Path:
    (root / name).write_text("path,label\n" + "".join(f"{path},a\n" for path in paths))
    return root / name


@pytest.mark.parametrize(
    ("files", "train", "others", "count"),
    [
        (["i/a.jpg", "i/b.jpg"], ["i/a.jpg"], {}, 1),
        (
            ["i/a.jpg", "i/b.jpg", "i/c.jpg"],
            ["i/a.jpg"],
            {"val.csv": ["i/b.jpg"], "test.csv": ["./i/c.jpg"]},
            0,
        ),
        (["i/a.jpg", "i/b.jpg", "i/c.jpg"], ["i/a.jpg"], {"val.csv": ["i/b.jpg"]}, 1),
        (
            ["train/x/a.jpg", "train/y/b.jpg", "train/z/c.jpg", "val/a.jpg"],
            ["train/x/a.jpg", "train/y/b.jpg"],
            {},
            1,
        ),
        (["a.jpg", "b.jpg", "deep/c.jpg"], ["a.jpg"], {}, 2),
        (["i/a.jpg", "i/b.txt", "i/c.heic", "i/.d.jpg"], ["i/a.jpg"], {}, 0),
        (["i/a.jpg", "j/b.jpg"], ["i/a.jpg"], {}, 0),
        (["i/a.jpg", "i/b.jpg"], ["{root}/i/a.jpg"], {}, 1),
        (["i/a.jpg", "i/b.jpg"], ["i/a.jpg"], {"notes.csv": [], "broken.csv": ["", "x"]}, 1),
    ],
)
def test_images_that_no_table_names_are_counted(
    files: list[str], train: list[str], others: dict[str, list[str]], count: int, tmp_path: Path
) -> None:
    root = spare(tmp_path / "d", *files)
    for name, paths in others.items():
        table_of(root, name, *paths)
    found = in_table(table_of(root, "train.csv", *(path.format(root=root) for path in train)))
    assert (count_of(found, "doesn't name"), len(found)) == (count, len(train))


def test_images_elsewhere_on_the_disk_are_looked_for_in_their_folders_only(tmp_path: Path) -> None:
    spare(tmp_path, "one/a.jpg", "one/b.jpg", "one/deep/c.jpg", "two/a.jpg", "three/a.jpg")
    (tmp_path / "d").mkdir()
    table = table_of(tmp_path / "d", "train.csv", f"{tmp_path}/one/a.jpg", "../two/a.jpg")
    assert count_of(in_table(table), "doesn't name") == 1


def indexed_splits(root: Path) -> Path:
    for part in ("train", "val"):
        spare(root / part, "0.tar", data=BOTH)
    assert main(["data", "index", str(root)]) == 0
    return root


@pytest.mark.parametrize(
    ("names", "word", "count"),
    [
        (["1.tar"], "doesn't name", 1),
        (["1.tar", "2.TAR"], "doesn't name", 2),
        (["1.tar.gz", "1.tgz"], "compressed", 2),
        (["._1.tar", "notes.txt", "more/1.tar"], "doesn't name", 0),
    ],
)
def test_a_shard_that_came_after_the_index_is_counted(
    names: list[str], word: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indexed_splits(tmp_path)
    assert not in_shards(tmp_path / "train").left_out
    spare(tmp_path / "train", *names, data=BOTH)
    data = load_images(DataConfig(name="shards", path=tmp_path), 0)
    assert (count_of(data.train, word), count_of(data.evaluation, word)) == (count, 0)
    capsys.readouterr()
    assert main(["data", "verify", str(tmp_path)]) == 0
    assert (names[0] in capsys.readouterr().out) is bool(count)
    assert main(["data", "index", str(tmp_path)]) == 0
    assert not count_of(in_shards(tmp_path / "train"), "doesn't name"), "the new index knows it"


def test_compressed_shards_that_are_gone_are_not_counted(tmp_path: Path) -> None:
    spare(tmp_path, "1.tgz")
    (tmp_path / "0.tar").write_bytes(BOTH)
    index_shards(tmp_path)
    assert count_of(in_shards(tmp_path), "compressed") == 1
    (tmp_path / "1.tgz").unlink()
    assert not in_shards(tmp_path).left_out


def test_a_file_beside_a_pack_is_counted(tmp_path: Path) -> None:
    pack(in_folder(class_folder(tmp_path / "f", ["0.jpg"])), tmp_path / "p", PackSettings())
    assert not in_shards(tmp_path / "p").left_out
    spare(tmp_path / "p", "00001.bin", data=b"x")
    assert count_of(in_shards(tmp_path / "p"), "doesn't name") == 1
