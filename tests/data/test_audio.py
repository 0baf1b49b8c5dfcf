"""Contract of recordings: a cut is the same bits in wav and flac; a corrupt file is found for every cut."""

import io
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from tests.helpers.batches import arrays_of
from tests.helpers.refusals import named, refused
from trainer.config.data import OnCorrupt
from trainer.data.check import CheckedData, check_data
from trainer.data.formats.audio import AUDIO, SUFFIXES, AudioFolder
from trainer.data.formats.files import in_folder
from trainer.data.formats.records import LABEL

soundfile = pytest.importorskip("soundfile")

RATE = 1000


def ramp(frames: int, first: int = 1) -> npt.NDArray[np.int16]:
    """A sound that says of each sample where it is."""
    return np.arange(first, first + frames).astype(np.int16)


def write(path: Path, sound: Any, rate: int = RATE, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, sound, rate, **how)
    return path


def folder(root: Path, seconds: float = 0.1, random_crop: bool = False, corrupt: Any = "fail") -> AudioFolder:
    return AudioFolder(in_folder(root, SUFFIXES), seconds, RATE, random_crop, corrupt)


class Read(list[Any]):
    """Batch of all samples, or of some: audio (n, samples), and what was replaced."""

    def __init__(self, data: AudioFolder, samples: Any = None, random: float | None = None) -> None:
        out, self.bad = arrays_of(data, samples, random)
        self.label = out[LABEL].tolist()
        super().__init__(out[AUDIO].tolist())


@given(
    frames=st.integers(1, 400),
    length=st.integers(1, 300),
    random=st.none() | st.floats(0, 1, exclude_max=True, width=32),
    suffix=st.sampled_from(["wav", "flac"]),
)
def test_a_cut_is_a_part(tmp_path: Path, frames: int, length: int, random: float | None, suffix: str) -> None:
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    write(tmp_path / "a" / f"x.{suffix}", ramp(frames))
    data = folder(tmp_path, length / RATE, random is not None)
    assert data.fields[AUDIO].shape == (length,)
    spare = max(0, frames - length)
    first = spare // 2 if random is None else int(random * (spare + 1))
    heard = ramp(min(frames, length), first + 1).tolist()
    assert list(Read(data, random=random)) == [heard + [0] * max(0, length - frames)], "and then silence"


WIDE = np.array([5 << 16, -(5 << 16)], np.int32)
ENDS = [32767, -32768]


@pytest.mark.parametrize(
    ("sound", "subtype", "expected"),
    [
        (np.array([[3, 4], [-3, -4], *([n, n] for n in ENDS)], np.int16), None, [4, -3, *ENDS]),
        (np.array([0.5, -1.0, 2.0, -2.0, 3 / 65536]), "FLOAT", [16384, -32768, 32767, -32768, 2]),
        (np.array([0.25, -0.25]), "DOUBLE", [8192, -8192]),
        (WIDE, "PCM_24", [5, -5]),
        (WIDE, "PCM_32", [5, -5]),
        (np.array([256, -512], np.int16), "PCM_U8", [256, -512]),
    ],
)
def test_channels_and_sample_formats(tmp_path: Path, sound: Any, subtype: Any, expected: list[int]) -> None:
    write(tmp_path / "a" / "x.wav", sound, subtype=subtype)
    assert list(Read(folder(tmp_path, len(expected) / RATE))) == [expected]


def pieces(*chunks: tuple[bytes, bytes], size: int | None = None) -> bytes:
    body = b"".join(struct.pack("<4sI", n, len(data)) + data + bytes(len(data) % 2) for n, data in chunks)
    return struct.pack("<4sI4s", b"RIFF", len(body) + 4 if size is None else size, b"WAVE") + body


FORMAT = (b"fmt ", struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16))
SOUND = ramp(100).tobytes()
RIFX, RF64 = io.BytesIO(), io.BytesIO()
soundfile.write(RIFX, ramp(9000), RATE, format="WAV", endian="BIG")
soundfile.write(RF64, ramp(9000), RATE, format="RF64")


def truncated(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def endless(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    path.write_bytes(content)


def one_float(value: float) -> Callable[[Path], object]:
    """Writes floats of which one, in one channel, has a value."""
    sound = np.zeros((3000, 2), np.float32)
    sound[2000, 1] = value
    return lambda path: write(path, sound, subtype="FLOAT")


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    ("wav", lambda path: truncated(path, 0.999), "short"),
    ("flac", lambda path: truncated(path, 0.5), "victim.flac:"),
    ("flac", endless, "long"),
    ("wav", content(b""), "empty"),
    ("flac", content(bytes(5000)), "decoded"),
    ("wav", lambda path: path.write_bytes(path.read_bytes()[:8]), "decoded"),
    ("wav", content(b"<html><body>404</body></html>"), "HTML"),
    ("flac", content(b"version https://git-lfs.github.com/spec/v1\n"), "LFS"),
    ("wav", lambda path: soundfile.write(path, np.zeros(20_000, np.int16), 16_000, format="MP3"), "MP3"),
    ("wav", lambda path: write(path, ramp(0)), "samples"),
    ("wav", lambda path: write(path, np.full(20_000, np.inf), subtype="DOUBLE"), "number"),
    ("wav", one_float(np.nan), "number"),
    ("wav", one_float(30_000.0), "1.0"),
    ("wav", lambda path: write(path, ramp(9000), subtype="GSM610"), "ffmpeg"),
    *(("wav", content(data.getvalue()[:-1]), "short") for data in (RIFX, RF64)),
]


def with_victim(root: Path, suffix: str) -> tuple[Path, Path]:
    sound = np.random.default_rng(0).integers(-9999, 9999, 20_000).astype(np.int16)
    victim = write(root / "a" / f"victim.{suffix}", sound)
    for number in range(3):
        write(root / "b" / f"{number}.wav", ramp(100, 100 * number + 1))
    return root, victim


@pytest.mark.parametrize("random", [None, 0.99])
@pytest.mark.parametrize(("suffix", "harm", "reason"), BROKEN)
def test_every_cut_finds_a_corrupt_file(
    tmp_path: Path, suffix: str, harm: Callable[[Path], object], reason: str, random: float | None
) -> None:
    root, victim = with_victim(tmp_path, suffix)
    data = folder(root, random_crop=random is not None)  # listed before the harm, as files that go bad later
    replacing = folder(root, random_crop=random is not None, corrupt="skip")
    harm(victim)
    with refused(f"{victim}: {reason}"):
        Read(data, random=random)
    read = Read(replacing, [2, 0, 1], random=random)
    assert {(bad.sample, bad.name) for bad in read.bad} == {(0, str(victim))}
    assert read[1] in Read(replacing, [1, 2, 3], random=random), "a whole sample stands in"
    assert read.label == [1, 1, 1], "with its own label"
    assert Read(replacing, [0], random=random) == [read[1]], "always the same"


def unread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truncated(path, 0.5)
    whole = os.pread

    def fail(file: int, count: int, at: int) -> bytes:
        if at + count > 10_000:
            raise OSError(5, "Input/output error")
        return whole(file, count, at)

    monkeypatch.setattr(os, "pread", fail)


@pytest.mark.parametrize("on_corrupt", ["fail", "skip"])
@pytest.mark.parametrize(
    ("suffix", "harm", "names"),
    [
        ("wav", lambda path, _: write(path, ramp(100), 8000), "8000 Hz audio.sample_rate 1000"),
        ("wav", lambda path, _: path.unlink(), "No such file"),
        ("flac", unread, "Input/output"),
    ],
)
def test_what_is_not_corrupt_is_never_replaced(
    tmp_path: Path, monkeypatch: Any, suffix: str, harm: Any, names: str, on_corrupt: OnCorrupt
) -> None:
    root, victim = with_victim(tmp_path, suffix)
    data = folder(root, corrupt=on_corrupt)
    harm(victim, monkeypatch)
    with refused(f"{victim}: {names}"):
        Read(data)


ODD = [
    pieces(FORMAT, (b"LIST", b"odd"), (b"data", SOUND), (b"LIST", b"after")) + b"rubbish",
    # As written to a pipe.
    pieces(FORMAT, (b"data", SOUND), size=0xFFFFFFFF).replace(b"data\xc8\0\0\0", b"data\xff\xff\xff\xff"),
]


@pytest.mark.parametrize("odd", range(len(ODD)))
def test_what_is_only_odd_is_read(tmp_path: Path, odd: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.wav").write_bytes(ODD[odd])
    assert list(Read(folder(tmp_path))) == [ramp(100).tolist()]


def test_another_sample_rate_is_found_by_the_headers_before_a_run(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / "a" / f"{number}.wav", ramp(9000))
    data = folder(tmp_path, 0.25)
    assert data.remarks(everything=False) == ""
    soundfile.write(tmp_path / "a" / "1.wav", ramp(9000), 22_050)
    soundfile.write(tmp_path / "a" / "3.flac", ramp(9000), 8000)
    write(tmp_path / "a" / "0.wav", np.full(9000, np.nan, np.float32), subtype="FLOAT")
    for everything in (False, True):
        with refused("audio.sample_rate 22050 Hz 2 5", tmp_path / "a" / "1.wav"):
            folder(tmp_path, 0.25).remarks(everything)
    (tmp_path / "a" / "1.wav").write_bytes(b"RIFF")  # corrupt, which quarantine may replace
    (tmp_path / "a" / "3.flac").unlink()
    assert folder(tmp_path, 0.25).remarks(everything=True) == ""


def test_floats_that_are_clipped_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a" / "0.wav", np.linspace(-1, 1, 500, dtype=np.float32), subtype="FLOAT")
    assert folder(tmp_path).remarks(False) == ""
    write(file, np.full(9000, 1.2), subtype="DOUBLE")
    assert set(Read(folder(tmp_path, 0.25))[0]) == {32767}
    for everything in (False, True):
        assert named(folder(tmp_path).remarks(everything), "1 1 1.0 1.2", file)
    check_data("fast", False, [CheckedData("training", folder(tmp_path), 0)])
    assert named(capsys.readouterr().err, "training 1 1.2")
