"""Promise: others' files, named by TRAINER_CORPUS=DIR, are what PIL makes of them, or it is said why not."""

import os
import re
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from tests.helpers.image_folders import encoded, picture
from trainer.data.corrupt import Corrupt
from trainer.data.formats import decode

# What we refuse and PIL reads, by what our message says.
REFUSED = (
    r"would be \(nearly\) black",  # 16 bits of which few are in use: PIL clips at 255
    r"pixels of 32 bits",  # PIL clips at 255
    r"which isn't read; convert it",  # a format that PIL reads and we don't: ICO, PSD, TGA, …
)
# What we read and PIL refuses, by name, of Pillow's own Tests/images: damage beside the pixels.
READ = {
    "chunk_no_fctl.png": "an animation's frames without their header; the first image is whole",
    "png_decompression_dos.png": "a text of 64 MB, which we don't unpack",
    "truncated_end_chunk.png": "cut off within IEND, after the pixels",
    "unknown_compression_method.png": "a color profile packed in an unknown way",
}
_SHOWN = 40


def _ours(data: bytes) -> npt.NDArray[np.uint8] | str:
    try:
        return decode.decode_whole(bytearray(data))[0].permute(1, 2, 0).numpy()
    except Corrupt as error:
        return str(error)


def _pillows(file: Path) -> tuple[npt.NDArray[np.uint8] | str, str, npt.NDArray[np.uint8] | None]:
    """PIL's pixels or why it refuses, the format, and the upper 8 of 16 bits if there are as many."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file, formats=decode.formats()) as image:
                image.load()
                deep = None
                if image.mode.startswith("I"):
                    deep = (np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)
                return np.array(image.convert("RGB")), image.format or "", deep
    except Exception as error:
        return str(error), "", None


def odd(file: Path) -> str:
    """What differs from PIL without a reason; "" if nothing does."""
    ours, (theirs, kind, deep) = _ours(file.read_bytes()), _pillows(file)
    if isinstance(ours, str):
        if "\n" in ours or re.search(r"0x[0-9a-f]{6}", ours) or len(ours) > 250:
            return f"a message that isn't one line, or not the same in each run: {ours!r}"
        if isinstance(theirs, str) or any(re.search(reason, ours) for reason in REFUSED):
            return ""
        return f"PIL reads it, and we say: {ours}"
    if isinstance(theirs, str):
        return f"we read it, and PIL says: {theirs}"
    if deep is not None:
        theirs = np.repeat(deep[..., None], 3, 2)
    if ours.shape != theirs.shape:
        return f"{ours.shape} here, {theirs.shape} in PIL"
    most = int(np.abs(ours.astype(int) - theirs).max(initial=0))
    # torchvision's libjpeg and PIL's are two versions.
    return "" if most <= (2 if kind in ("JPEG", "MPO") else 0) else f"up to {most} levels apart"


@pytest.mark.slow
@pytest.mark.skipif("TRAINER_CORPUS" not in os.environ, reason="TRAINER_CORPUS=DIR: a folder of images")
def test_a_corpus_is_what_pillow_makes_of_it() -> None:
    folder = Path(os.environ["TRAINER_CORPUS"])
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    assert files, f"{folder} holds no files"
    found = {str(file.relative_to(folder)): odd(file) for file in files}
    wrong = [f"{name}: {what}" for name, what in found.items() if what and Path(name).name not in READ]
    assert not wrong, f"{len(wrong)} of {len(files)}:\n" + "\n".join(wrong[:_SHOWN])


def test_the_comparison_sees_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above rests on, with two files."""
    for name, kind in (("a.png", "PNG"), ("b.jpg", "JPEG"), ("c.webp", "WEBP")):
        (tmp_path / name).write_bytes(encoded(picture(), kind))
    (tmp_path / "d.txt").write_text("no image")
    monkeypatch.setenv("TRAINER_CORPUS", str(tmp_path))
    test_a_corpus_is_what_pillow_makes_of_it()
    decode_whole = decode.decode_whole
    monkeypatch.setattr(decode, "decode_whole", lambda data: torch.bitwise_xor(decode_whole(data), 8))
    assert odd(tmp_path / "a.png") == "up to 8 levels apart"
    with pytest.raises(AssertionError, match=r"3 of 4:\n +a.png: up to 8"):
        test_a_corpus_is_what_pillow_makes_of_it()
