"""Promise: a sample has one verdict and the decoder's pixels, however it is cut, turned or damaged."""

import io
import os
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageOps, features
from torchvision import io as tvio
from torchvision.transforms import v2
from torchvision.transforms.v2 import _geometry

from tests.helpers.image_folders import encoded, picture
from tests.helpers.refusals import named
from trainer.data.corrupt import Corrupt
from trainer.data.formats import crop, decode
from trainer.data.formats.crop import Box, middle_cut, random_cut, snapped_cut
from trainer.data.formats.decode import resized_middle
from trainer.data.formats.orientation import orientation as orientation_of_file
from trainer.rng import uniforms


def rows(image: torch.Tensor) -> npt.NDArray[np.uint8]:
    return image[0].permute(1, 2, 0).numpy()


def refused(data: bytes | bytearray, **options: Any) -> str:
    with pytest.raises(Corrupt) as raised:
        decode.decode_whole(bytearray(data), **options)
    return str(raised.value)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def noise(width: int, height: int, grain: int = 8) -> Image.Image:
    small = np.random.default_rng(0).integers(0, 256, (height // grain, width // grain, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_part_is_that_part_of_the_turned_image(orientation: int) -> None:
    data = encoded(picture(size=(41, 30)), "PNG", exif=exif(orientation))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(rows(decode.decode_whole(data, upright=True)), expected)
    cut = rows(decode.cut_out(data, lambda *_: Box(3, 5, 9, 20), upright=True))
    assert np.array_equal(cut, expected[3:12, 5:25])
    whole = decode.cut_out(data, lambda *size: Box(0, 0, *size), upright=True)
    assert whole.shape[2:] == expected.shape[:2]
    assert rows(decode.decode_whole(data)).shape[:2] == (30, 41), "not by itself"


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {"quality": 90}),
        ("JPEG", "RGB", {"quality": 90, "progressive": True}),
        ("JPEG", "CMYK", {"quality": 90}),
        *(("PNG", mode, {}) for mode in ("RGB", "RGBA", "P", "1")),
        ("WEBP", "RGB", {"lossless": True}),
        ("GIF", "P", {"save_all": True, "append_images": [Image.new("RGB", (40, 30), "red")]}),
        ("TIFF", "RGB", {}),
    ],
)
def test_every_kind_is_what_pillow_makes_of_it(kind: str, mode: str, options: dict[str, Any]) -> None:
    data = encoded(picture(mode), kind, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    for found in (decode.decode_whole(data), decode.cut_out(data, lambda *size: Box(0, 0, *size))):
        assert np.abs(rows(found).astype(int) - expected).max() <= (2 if kind == "JPEG" else 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_keep_their_upper_eight(kind: str) -> None:
    deep = np.linspace(0, 65535, 1200).astype(np.uint16).reshape(30, 40)
    found = rows(decode.decode_whole(encoded(Image.fromarray(deep), kind)))
    assert np.array_equal(found, np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, 2))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("JPEG", {"xmp": b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>', "exif": b""}),
        pytest.param("AVIF", {}, marks=pytest.mark.skipif(not features.check("avif"), reason="no AVIF")),
    ],
)
def test_every_kind_is_turned_as_pillow_does(kind: str, options: dict[str, Any]) -> None:
    data = encoded(picture(size=(40, 24)), kind, **({"exif": exif(6)} | options))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert expected.shape == (40, 24, 3)
    found = rows(decode.decode_whole(data, upright=True))
    assert np.abs(found.astype(int) - expected).max() <= (2 if kind == "JPEG" else 0)
    assert orientation_of_file(data, decode.formats()) == (1 if kind == "TIFF" else 6), "PIL turns a TIFF"


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
@pytest.mark.parametrize(("most", "shift"), [(255, 0), (694, 2), (4095, 4)])
def test_sixteen_bits_that_would_be_black_are_named(kind: str, most: int, shift: int) -> None:
    ramp = np.linspace(0, most, 1200).astype(np.uint16).reshape(30, 40)
    assert named(refused(encoded(Image.fromarray(ramp), kind)), f"{most:,} image >> {shift}")


@pytest.mark.parametrize(
    ("most", "maximum", "black"),
    [(65535, 65535, False), (4095, 4095, False), (655, 65535, True), (40, 4095, True), (4095, 65535, True)],
)
def test_twelve_bits_of_sixteen_in_a_ppm(most: int, maximum: int, black: bool) -> None:
    ppm = bytearray(b"P6 4 3 %d\n" % maximum + np.linspace(0, most, 36).astype(">u2").tobytes())
    if black:
        assert named(refused(ppm), "black")
    else:
        assert rows(decode.decode_whole(ppm)).max() == 255


@pytest.mark.parametrize(("mode", "channels"), [(2, 3), (4, 2)])
def test_sixteen_bits_of_a_png_that_only_pillow_reads(mode: int, channels: int) -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    row = b"\0" + np.linspace(0, 4095, 4 * channels).astype(">u2").tobytes()
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 3, 16, mode, 0, 0, 0))
    data += chunk(b"ABCD", b"") + chunk(b"IDAT", zlib.compress(3 * row)) + chunk(b"IEND", b"")
    assert "nearly) black" in refused(data)


@pytest.mark.parametrize("where", [b"\xff\xdb", b"\xff\xda"])
@pytest.mark.parametrize("junk", [b"\0\1\2\3\4", b"\xff\xff\xff"])
def test_bytes_before_a_marker_are_skipped_as_pillow_does(where: bytes, junk: bytes) -> None:
    data = encoded(picture(), "JPEG", quality=90).replace(where, junk + where, 1)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.abs(rows(decode.decode_whole(data)).astype(int) - expected).max() <= 2


def verdict(data: bytearray, side: int) -> str:
    try:
        decode.cut_out(data, lambda *size: Box(0, 0, *size), side, scaled=True)
    except Corrupt as error:
        return str(error)
    return ""


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_a_cut_off_jpeg_has_one_verdict_whatever_the_crop(options: dict[str, Any]) -> None:
    whole = encoded(noise(320, 240), "JPEG", quality=60, **options) + b"after its end"
    for end in (*range(len(whole) - 21, len(whole) + 1), *range(len(whole) // 2, len(whole), 977)):
        assert len({verdict(whole[:end], side) for side in (0, 100, 60, 30)}) == 1, len(whole) - end


def test_a_jpeg_that_torchvision_refuses_is_pillow_s() -> None:
    """Without its last bytes, of which no row needs any: PIL reads it, at every size."""
    data = encoded(noise(320, 240), "JPEG", restart_marker_rows=1)[:-2]
    with pytest.raises(RuntimeError, match="incomplete"):
        tvio.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(rows(decode.decode_whole(data)), expected)
    assert {verdict(data, side) for side in (0, 100, 60, 30)} == {""}


def test_a_size_that_the_decoder_does_not_give_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture(size=(40, 30)), "PNG")
    expected = rows(decode.decode_whole(data))
    monkeypatch.setattr(decode, "look", lambda _: decode.Header("png", 20, 30))
    assert np.array_equal(rows(decode.decode_whole(data)), expected)


def test_the_cut_of_a_scaled_decode_is_exact() -> None:
    data = encoded(noise(1203, 903), "JPEG", quality=95)
    random = np.random.default_rng(0)
    for side in (50, 110, 224) * 4:
        height, width = int(random.integers(460, 900)), int(random.integers(460, 1200))
        box = Box(int(random.integers(0, 904 - height)), int(random.integers(0, 1204 - width)), height, width)
        snapped, by = snapped_cut(box, side, 903, 1203)
        assert by == max(n for n in (1, 2, 4, 8) if n * side <= min(height, width))
        assert all(edge % by == 0 for edge in snapped) and min(snapped[2:]) >= side * by
        assert snapped.top + snapped.height <= 903 and snapped.left + snapped.width <= 1203
        for begin, length in (("top", "height"), ("left", "width")):
            assert abs(getattr(snapped, length) - getattr(box, length)) <= by
            middles = [getattr(one, begin) + getattr(one, length) / 2 for one in (box, snapped)]
            assert abs(middles[0] - middles[1]) <= by
        cut = decode.cut_out(data, lambda *_, box=box: box, side, scaled=True)
        file = Image.open(io.BytesIO(data))
        file.draft("RGB", (1203 // by, 903 // by))
        top, left, height, width = (edge // by for edge in snapped)
        small = np.asarray(file.convert("RGB"))[top : top + height, left : left + width]
        assert np.abs(rows(cut).astype(int) - small).max() <= (0 if by > 1 else 2)
    assert snapped_cut(Box(5, 7, 300, 301), 224, 903, 1203) == (Box(5, 7, 300, 301), 1)


def test_the_middle_of_scaled_cuts_is_that_of_what_was_drawn() -> None:
    random, apart = np.random.default_rng(1), []
    for _ in range(2000):
        box = Box(*random.integers(100, 600, 2).tolist(), *random.integers(800, 1200, 2).tolist())
        more = np.subtract(snapped_cut(box, 100, 2000, 2000)[0], box)
        apart.append(more[:2] + more[2:] / 2)
    assert np.abs(np.mean(apart, 0)).max() < 0.5, "not towards the top left"


def bomb(kind: str) -> bytearray:
    """Of 50,000 x 50,000 pixels, by its header."""
    data = encoded(picture(), kind)
    if kind == "PNG":
        data[16:24] = struct.pack(">II", 50_000, 50_000)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    else:
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", 50_000, 50_000)
    return data


def cut_off(kind: str, share: float, **options: Any) -> bytearray:
    data = encoded(picture(size=(200, 150)), kind, **options)
    return data[: int(len(data) * share)]


# id: the file, and what its line must say of it.
BAD: dict[str, tuple[bytes | bytearray, str]] = {
    "empty": (b"", ""),
    "zeros": (bytes(5000), "zeros"),
    "ones": (b"\xff" * 50, "50 bytes 0xff and nothing else"),
    "page": (b"\n<!DOCTYPE html><html><head><title>404</title>", "an HTML page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "a Git LFS pointer"),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML"),
    "svg": (b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG, which isn't read"),
    "json": (b'{"error": "not found"}', "text that begins with '{"),
    "base64": (b"/9j/4AAQSkZJRgABAQ", "an image as base64 text"),
    "gzip": (b"\x1f\x8b\x08\0" + b"abc", "gzip"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0heic" + b"\1" * 50, "HEIC, which isn't read"),
    "jpeg_begun": (b"\xff\xd8\xff", "a JPEG that is cut off or damaged"),
    "noise": (b"\1\x80\2\x81\3\x82" * 9, "it begins with 01 80 02"),
    "jpeg_nearly": (cut_off("JPEG", 0.95), ""),
    "progressive_half": (cut_off("JPEG", 0.5, progressive=True), ""),
    "png_half": (cut_off("PNG", 0.5), ""),
    "webp_half": (cut_off("WEBP", 0.5), ""),
    "float": (encoded(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"), ""),
    "bomb_png": (bomb("PNG"), ""),
    "bomb_jpeg": (bomb("JPEG"), ""),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n", ""),
}


@pytest.mark.parametrize("what", BAD)
def test_a_message_says_what_a_file_is(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no program is run: PIL would run Ghostscript for PostScript."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    data, says = BAD[what]
    line = refused(data)
    assert says in line and line == refused(data)
    assert "0x7" not in line and "\n" not in line and len(line) < 200
    assert not (tmp_path / "ran").exists()


def test_libraries_write_nothing_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """Of these files libjpeg, libpng and libtiff each say something."""
    jpeg = encoded(picture(size=(80, 60)), "JPEG")
    jpeg[-2:-2] = b"abcde"
    png = encoded(noise(80, 64), "PNG")
    png[90] ^= 1
    tiff = encoded(picture(size=(80, 60)), "TIFF", compression="tiff_lzw")
    tiff[40:70] = bytes(30)
    for data in (jpeg, png, tiff):
        try:
            decode.decode_whole(data)
        except Corrupt as error:
            assert "\n" not in str(error)
    os.write(2, b"ours\n")
    assert capfd.readouterr().err == "ours\n"
    tvio.decode_jpeg(torch.frombuffer(jpeg, dtype=torch.uint8))
    assert "extraneous" in capfd.readouterr().err, "else this test would see nothing"


# Height and width: squares, photographs, lines, columns, one pixel, and panoramas.
SHAPES = [(1, 20), (1, 500), (37, 740), (480, 640), (1080, 1920)]
SHAPES += [(1, 1), (224, 224), *(shape[::-1] for shape in SHAPES[1:4])]
SEEN = [(32, 0.875, 37), (224, 0.875, 256), (224, 0.95, 236), (224, 1, 224)]


def torchvisions_cut(patch: pytest.MonkeyPatch, height: int, width: int, numbers: list[float]) -> Box:
    """Its RandomResizedCrop with these numbers in place of what it draws."""
    cut = v2.RandomResizedCrop(224, scale=(0.08, 1.0))
    drawn = iter([numbers, *(crop._drawn_again(numbers, attempt) for attempt in range(1, 10))])
    left: list[float] = []

    def next_number() -> float:
        if not left:
            left.extend(next(drawn))
        return left.pop(0)

    def uniform(low: Any, high: Any) -> torch.Tensor:
        if high == 1.0:
            left.clear()  # a new attempt: places that weren't asked for are left out
        return torch.tensor(float(low) + (float(high) - float(low)) * next_number(), dtype=torch.float64)

    def integer(low: int, high: int, **_: Any) -> torch.Tensor:
        return torch.tensor(int(low + next_number() * (high - low)))

    empty = lambda _: SimpleNamespace(uniform_=uniform)  # noqa: E731
    cut._log_ratio = torch.log(torch.tensor(cut.ratio, dtype=torch.float64))
    with patch.context() as patched:
        patched.setattr(_geometry, "torch", SimpleNamespace(empty=empty, exp=torch.exp, randint=integer))
        patched.setattr(_geometry, "query_size", lambda _: (height, width))
        found = cut.make_params([])
    return Box(found["top"], found["left"], found["height"], found["width"])


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_a_random_cut_is_torchvisions(height: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for numbers in uniforms(0, np.zeros(60, np.int64), np.arange(60), 4).tolist():
        found = random_cut(height, width, *numbers)
        assert found == torchvisions_cut(monkeypatch, height, width, numbers)


@pytest.mark.parametrize(("height", "width"), SHAPES)
@pytest.mark.parametrize(("side", "share", "short"), SEEN)
def test_evaluation_sees_torchvisions(height: int, width: int, side: int, share: float, short: int) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8, generator=generator)
    cut = middle_cut(height, width)
    assert cut.height * cut.width == min(height, 32 * width) * min(width, 32 * height)
    seen = image[:, :, cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
    expected = v2.Compose([v2.Resize(short), v2.CenterCrop(side)])(seen)
    # Where a processor has no AVX2, torchvision resizes as floats.
    rounding = 0 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 1
    assert (resized_middle(seen, side, share).int() - expected.int()).abs().max() <= rounding


def test_what_is_drawn_again_is_uniform_and_of_its_own() -> None:
    numbers = uniforms(0, np.zeros(1000, np.int64), np.arange(1000), 4).astype(np.float64)
    again = np.array([[crop._drawn_again(row, attempt) for attempt in (1, 2)] for row in numbers.tolist()])
    columns = np.concatenate([numbers, again.reshape(1000, 8)], axis=1)
    assert ((columns >= 0) & (columns < 1)).all()
    assert abs(columns.mean(0) - 0.5).max() < 0.05
    assert abs(columns.std(0) - 12**-0.5).max() < 0.02
    assert abs(np.corrcoef(columns.T) - np.eye(12)).max() < 0.13
