"""Promise: what lies behind a recording's end isn't heard, what is wrong is wrong for each cut."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_audio import FORMAT, RATE, SOUND, Read, folder, pieces, write
from tests.helpers.refusals import named
from trainer.data.check import CheckedData, check_data
from trainer.errors import BadInputError

soundfile = pytest.importorskip("soundfile")


NOISE = np.random.default_rng(0).integers(-9999, 9999, 9000).astype(np.int16)


def encoded(form: str, sound: Any, **how: Any) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, RATE, format=form, **how)
    return buffer.getvalue()


FLAC, WAV = encoded("FLAC", NOISE), encoded("WAV", NOISE)
RIFX, RF64 = encoded("WAV", NOISE, endian="BIG"), encoded("RF64", NOISE)


def one_file(root: Path, content: bytes, suffix: str = "wav") -> Path:
    (root / "a").mkdir(exist_ok=True)
    path = root / "a" / f"x.{suffix}"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [FLAC, WAV, RIFX, RF64], ids=["FLAC", "WAV", "RIFX", "RF64"])
@pytest.mark.parametrize("rest", [b"rubbish", FLAC, WAV], ids=["rubbish", "FLAC", "WAV"])
def test_what_lies_behind_the_end_is_not_heard(tmp_path: Path, content: bytes, rest: bytes) -> None:
    one_file(tmp_path, content)
    alone = Read(folder(tmp_path))
    one_file(tmp_path, content + rest)
    try:
        assert Read(folder(tmp_path)) == alone
    except BadInputError as error:  # libsndfile's word
        assert named(str(error), "x.wav")


def test_floats_that_are_clipped_are_warned_of_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "a" / "x.wav", np.linspace(-1.5, 1, 500), subtype="DOUBLE")
    check_data("fast", False, [CheckedData("training", folder(tmp_path), 0)])
    assert "training data: 1 of 1 recordings" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [RIFX, RF64, pieces(FORMAT, (b"data", SOUND))], ids=["RIFX", "RF64", "RIFF"]
)
def test_each_kind_of_wav_that_is_cut_short(tmp_path: Path, content: bytes) -> None:
    """libsndfile takes it for a shorter one."""
    for missing in (1, len(content) // 3):
        one_file(tmp_path, content[:-missing])
        with pytest.raises(BadInputError, match=r"x\.wav: is cut short"):
            Read(folder(tmp_path))


@pytest.mark.parametrize("random", [None, 0.0, 0.5, 0.99])
@pytest.mark.parametrize(
    ("value", "reason"), [(30_000.0, "full scale is 1.0"), (np.nan, "isn't a number"), (-np.inf, "a number")]
)
def test_floats_are_refused_whatever_the_cut(
    tmp_path: Path, value: float, reason: str, random: float | None
) -> None:
    sound = np.zeros((3000, 2), np.float32)
    sound[2000, 1] = value
    write(tmp_path / "a" / "x.wav", sound, subtype="FLOAT")
    data = folder(tmp_path, random_crop=random is not None)
    for _ in range(2):
        with pytest.raises(BadInputError, match=reason):
            Read(data, random=random)


def test_floats_that_are_clipped_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.wav", np.linspace(-1, 1, 500, dtype=np.float32), subtype="FLOAT")
    assert folder(tmp_path).remarks(False) == ""
    write(tmp_path / "a" / "x.wav", np.linspace(-1.5, 1, 500), subtype="DOUBLE")
    assert folder(tmp_path).remarks(True).endswith("beyond 1.0, which are clipped; the first: "
                                                  f"{tmp_path}/a/x.wav (up to 1.5)")  # fmt: skip
