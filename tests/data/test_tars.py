"""Contract of tar shards: what of a tar is read, what is counted, and what is refused with its place."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.batches import arrays_of
from tests.helpers.image_folders import encoded, opened, picture
from tests.helpers.planted import put
from tests.helpers.refusals import named, refused
from trainer.cli import main
from trainer.config.data import DataConfig
from trainer.data.check import CheckedData, check_data
from trainer.data.formats.images import ImageDataset
from trainer.data.formats.pack import PackSettings, pack
from trainer.data.formats.sharded import in_shards
from trainer.data.formats.tar_shards import index_shards
from trainer.data.left_out import left_out_line
from trainer.data.sources import load_images

JPEG = bytes(encoded(picture(), "JPEG"))


def archive(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def sample(name: str) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    return (f"{name}.jpg", JPEG), (f"{name}.cls", b"0")


A, B = sample("a"), sample("b")
BOTH = archive(*A, *B)
SECOND = BOTH.index(b"b.jpg")  # where the header of the second sample begins
LAST = BOTH.index(b"b.cls")
END = LAST + 1024


def with_bytes(at: int, data: bytes) -> bytes:
    return BOTH[:at] + data + BOTH[at + len(data) :]


def sized(name: bytes, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Ends with a header as GNU writes a size that eleven digits can't hold, which may be any number."""
    block = bytearray(512)
    block[:100] = name.ljust(100, b"\0")
    block[124:136] = (b"\xff" if size < 0 else b"\x80") + size.to_bytes(11, "big", signed=True)
    block[148:157], block[257:265] = b" " * 8 + kind, b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return BOTH[:END] + bytes(block) + bytes(1024)


# id: the tar, the suffix of its images, the samples, and what is told; of a refusal no samples.
TARS: dict[str, tuple[bytes, str, int | None, str]] = {
    "whole": (BOTH, "", 2, ""),
    "zeros behind": (BOTH + bytes(5000), "", 2, ""),
    "no mark": (BOTH[:END], "", 2, f"1 0.tar {END:,}"),
    "no mark after a member": (BOTH[:LAST], "", 1, f"1 0.tar {LAST:,} label"),
    "cut in a header": (BOTH[: SECOND + 100], "", None, f"0.tar {SECOND:,}"),
    "cut in a member": (BOTH[: LAST + 600], "", None, "0.tar"),
    "damaged header": (with_bytes(SECOND, b"B"), "", None, f"0.tar {SECOND:,}"),
    "zeros between": (with_bytes(SECOND, bytes(512)), "", None, f"0.tar {SECOND:,}"),
    "second archive": (BOTH + archive(*sample("c")), "", None, f"0.tar {END:,}"),
    "junk far behind": (BOTH + bytes(2 << 20) + b"\n", "", None, f"0.tar {END:,}"),
    "endless size": (sized(b"c.jpg", 1 << 86), "", None, "0.tar"),
    "gzip": (gzip.compress(BOTH, mtime=0), "", None, "0.tar gzip"),
    "page": (b"<html>no such shard</html>", "", None, "0.tar HTML"),
    "hidden": (archive(("._a.jpg", b"x"), A[0], ("._a.cls", b"x"), A[1]), "", 1, "2 0.tar '._a.jpg'"),
    "jfif below ./": (archive(("./a.jfif", JPEG), ("./a.cls", b"0")), "", 1, ""),
    "heic": (archive(*A, ("b.heic", b"x"), B[1]), "", 1, "1 .heic 'b.heic' image"),
    "no label": (archive(*A, B[0]), "", 1, "1 'b.jpg' label"),
    "unread kinds": (archive(*A, ("a.txt", b"x"), ("__worker__.json", b"{}")), "", 1, "1 .txt 'a.txt'"),
    "twice": (archive(*A, ("./a.jpg", JPEG)), "", None, "0.tar 'a.jpg' './a.jpg'"),
    "twice by case": (archive(A[0], ("a.JPG", JPEG), A[1]), "", None, "0.tar 'a.jpg' 'a.JPG'"),
    "apart": (archive(A[0], B[0], A[1], B[1]), "", None, "0.tar 'a.cls'"),
    "two images": (archive(A[0], ("a.png", JPEG), A[1]), "", None, "0.tar 'a.jpg' 'a.png'"),
    "one of two images": (archive(A[0], ("a.png", JPEG), A[1]), ".PNG", 1, "1 .jpg 'a.jpg'"),
    "left of two": (archive(("a.left.jpg", JPEG), ("a.r.jpg", JPEG), A[1]), "left.jpg", 1, "1 .r.jpg"),
    "no sample": (archive(("x.txt", b"words")), "", None, ".txt"),
    "label no text": (archive(A[0], ("a.cls", b"\xff")), "", None, "0.tar 'a.jpg'"),
    "label negative": (archive(A[0], ("a.json", b'{"label": -1}')), "", None, "0.tar 'a.jpg'"),
    "json a list": (archive(A[0], ("a.json", b"[1]")), "", None, "0.tar 'a.jpg'"),
}


@pytest.mark.parametrize("made", TARS)
def test_what_an_index_makes_of_a_tar(made: str, tmp_path: Path) -> None:
    data, image, samples, names = TARS[made]
    (tmp_path / "0.tar").write_bytes(data)
    if samples is None:
        with refused(tmp_path, names) as told:
            index_shards(tmp_path, image=image)
        assert len(str(told.value)) < 500 + len(str(tmp_path))
        return
    assert index_shards(tmp_path, image=image).samples == samples
    line = left_out_line(tuple(in_shards(tmp_path).left_out))
    assert named(line, names) and bool(line) == bool(names)


def test_folders_without_shards_and_links_in_shards(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s.tar")
    with refused(tmp_path, ".tar"):
        index_shards(tmp_path)
    (tmp_path / "s.tar").unlink()
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with refused(tmp_path, "a.tar.gz"):
        index_shards(tmp_path)
    (tmp_path / "0.tar").write_bytes(archive(*A))
    with tarfile.open(tmp_path / "0.tar", "a") as tar:
        entry = tarfile.TarInfo("y.jpg")
        entry.type, entry.linkname = tarfile.LNKTYPE, "a.jpg"
        tar.addfile(entry)
    assert named(left_out_line(tuple(index_shards(tmp_path).left_out)), "1 link 0.tar 'y.jpg'")


def test_labels_of_shards(tmp_path: Path) -> None:
    members = [("a/x.y.jpg", b"1"), ("a/x.cls", b"7\n"), ("b/x.json", b'{"label": 2}'), ("b/x.PNG", b"2")]
    (tmp_path / "0.tar").write_bytes(archive(*members))
    index_shards(tmp_path)
    shards = in_shards(tmp_path)
    assert (shards.labels.tolist(), [*shards.classes]) == ([2], ["0", "1", "2"])
    assert shards.read(0) == b"2"


def test_what_lies_beside_shards_and_who_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "more").mkdir(parents=True)
        put(tmp_path / part, "1.tgz", "._0.tar", "x.txt", content=b"x")
        put(tmp_path / part, "0.TAR", content=BOTH)
    beside = "._0.tar 1.tgz more x.txt"
    for command in ("index", "index", "stats"):  # again: its own index is nothing that lies beside
        assert main(["data", command, str(tmp_path)]) == 0
        assert named(capsys.readouterr().out, beside)
    pack(in_shards(tmp_path / "train"), tmp_path / "p", PackSettings())
    assert named(left_out_line(tuple(in_shards(tmp_path / "p").left_out)), beside)


@pytest.mark.parametrize(("names", "count"), [(["1.tar", "2.TAR"], 2), (["1.tar.gz"], 1)])
def test_a_shard_that_came_after_the_index_is_counted(names: list[str], count: int, tmp_path: Path) -> None:
    def counted() -> list[tuple[int, str]]:
        return [(each.count, each.first) for each in in_shards(tmp_path).left_out]

    (tmp_path / "0.tar").write_bytes(BOTH)
    index_shards(tmp_path)
    assert counted() == []
    put(tmp_path, *names, "._1.tar", "notes.txt", content=BOTH)
    assert counted() == [(count, names[0])]
    index_shards(tmp_path)
    assert ((count, names[0]) in counted()) == ("gz" in names[0]), "the new index knows a tar"


def test_samples_with_two_labels_and_those_of_both_parts_are_counted(tmp_path: Path) -> None:
    for part, samples in (("train", ("10a", "21a", "31b")), ("val", ("40c", "51b"))):  # name, label, content
        images = [(f"{one[0]}.jpg", JPEG + one[2].encode()) for one in samples]
        members = sorted(images + [(f"{one[0]}.cls", one[1].encode()) for one in samples])
        index_shards(put(tmp_path / part, "0.tar", content=archive(*members)))
    labels, both = load_images(DataConfig(name="shards", path=tmp_path), 0).notes
    assert named(labels, "1 train 1.jpg") and named(both, "1 2 val 5.jpg")


def test_shards_that_are_not_there_are_counted(photographs: Path, tmp_path: Path) -> None:
    records = opened("shards", photographs, tmp_path)
    checked = [CheckedData("training", ImageDataset(records, 32, random_crop=True), 0)]
    check_data("fast", False, checked)
    (tmp_path / "001.tar").unlink()
    os.truncate(tmp_path / "003.tar", 5000)
    with refused("2 of 5", tmp_path / "001.tar"):
        check_data("fast", False, checked)


@pytest.mark.parametrize("kind", ["swapped", "zeros"])
def test_what_was_written_anew_on_disk_at_the_same_size(tmp_path: Path, kind: str) -> None:
    images = [bytes(encoded(Image.new("L", (8, 8), value), "PNG", compress_level=0)) for value in (0, 255)]
    right, swapped = (
        archive(("0.png", one), ("0.cls", b"0"), ("1.png", other), ("1.cls", b"1"))
        for one, other in (images, images[::-1])
    )
    for part in ("train", "val"):
        index_shards(put(tmp_path / part, "0.tar", content=right))
    (tmp_path / "train" / "0.tar").write_bytes(swapped if kind == "swapped" else bytes(len(right)))
    assert len(swapped) == len(right)
    config = DataConfig.model_validate({"name": "shards", "path": tmp_path, "image_size": 8})
    with refused(tmp_path / "train" / "0.tar", ".png: changed"):
        arrays_of(load_images(config, 0).train, random=0.5)
    with refused(tmp_path / "train" / "0.tar", ".png: changed"):
        pack(in_shards(tmp_path / "train"), tmp_path / "pack", PackSettings())
