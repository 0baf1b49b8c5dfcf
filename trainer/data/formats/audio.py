"""A folder of recordings by class, wav or flac: `root/<class>/**/<file>`; int16 crops for the device."""

import io
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config.data import OnCorrupt
from trainer.data.corrupt import Bad, Corrupt
from trainer.data.dataset import Arrays, Field
from trainer.data.formats.files import Files, NotAFileError, open_regular, readable
from trainer.data.formats.records import RecordsDataset
from trainer.data.formats.signatures import what_it_is
from trainer.errors import BadInputError, first_line
from trainer.host.files import read_at
from trainer.rng import Float32, Ints

AUDIO = "audio"
LABEL = "label"

SUFFIXES = (".wav", ".flac")
_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC")
_LARGEST_TAGGED = 1 << 30
_CHUNKS = 64  # of a wav file that may come before its samples
_UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0x7FFFFFFE, 0xFFFFFFFE, 0xFFFFFFFF)  # of who wrote to a pipe
_BLOCK = 1 << 20
_HEAD = 4096  # bytes that tell what a file is
_LOUDEST = 16.0  # of floats: 24 dB above full scale; 16-bit values written as floats are in the thousands


class AudioFolder(RecordsDataset):
    """Recordings below one folder for each class, cut to one length and mixed to one channel.

    A cut of training starts at random (one random number, keyed by sample and epoch), one of evaluation
    is the center; a shorter recording is followed by zeros. Only the cut is read.

    The field `audio` is int16 (round(seconds * sample_rate),), `label` int64 ().

    Args:
        files: The recordings.
        seconds: Length of a cut.
        sample_rate: In Hz; a file with another one is an error, not resampled and not corrupt.
        random_crop: True for training.
        on_corrupt: What to do about a file that can't be decoded.
    """

    def __init__(
        self, files: Files, seconds: float, sample_rate: int, random_crop: bool, on_corrupt: OnCorrupt
    ) -> None:
        length = round(seconds * sample_rate)
        if length < 1:
            raise BadInputError(f"{seconds} s at {sample_rate} Hz hold no sample; raise one of them")
        try:
            import soundfile  # noqa: F401  (so that workers that are forked have it)
        except (ImportError, OSError) as error:
            raise BadInputError(f"audio needs the library soundfile ({error}); run make venv") from error
        super().__init__(files, {AUDIO: Field((length,), np.dtype(np.int16))}, on_corrupt)
        self._files, self._length, self._rate = files, length, sample_rate
        self.uniforms = 1 if random_crop else 0

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> list[Bad]:
        """Decodes cuts straight into the batch; see `Dataset.read`.

        Raises:
            BadInputError: If a file can't be read, has another sample rate, or is corrupt and not replaced.
        """
        audio = out[AUDIO]
        where = random[:, 0].tolist() if random is not None and self.uniforms else None

        def fill(row: int, sample: int) -> None:
            self._cut(self._files.path(sample), None if where is None else where[row], audio[row])

        return self._filled(samples, fill, out)

    def _cut(self, path: bytes, random: float | None, out: npt.NDArray[Any]) -> None:
        """Writes a cut, int16 (length,): the center if `random`, in [0, 1), is None."""
        try:
            # Opened here: soundfile doesn't tell a missing file from a corrupt one.
            file, facts = open_regular(path)
            try:
                try:
                    self._decode(path, file, facts.st_size, random, out)
                except Corrupt:
                    _read_all(file)  # or is it the disk?
                    raise
            finally:
                os.close(file)
        except NotAFileError as error:
            raise Corrupt("isn't a file") from error
        except OSError as error:
            raise BadInputError(
                f"{readable(path)}: can't be read ({error.strerror}); was it moved while the run goes on?"
            ) from error

    def _decode(self, path: bytes, file: int, size: int, random: float | None, out: npt.NDArray[Any]) -> None:
        import soundfile

        if size == 0:
            raise Corrupt("is empty")
        if wav_cut_short(file, size):
            raise Corrupt("is cut short")
        try:
            with soundfile.SoundFile(_without_tag(file, size), closefd=False) as sound:
                if sound.format not in _FORMATS:
                    raise Corrupt(f"is neither wav nor flac, but {sound.format}")
                if sound.samplerate != self._rate:
                    raise BadInputError(
                        f"{readable(path)}: has a sample rate of {sound.samplerate} Hz, and "
                        f"audio.sample_rate is {self._rate}: change that, or resample the file "
                        f"(ffmpeg -i IN -ar {self._rate} OUT)"
                    )
                frames = sound.frames
                if frames < 1 or frames > 1 << 60:
                    raise Corrupt("holds no samples" if frames < 1 else "doesn't say how long it is")
                if not sound.seekable():
                    raise Corrupt(
                        f"holds {sound.subtype}, in which no place can be looked up; convert it (ffmpeg -i "
                        "IN -c:a pcm_s16le OUT.wav)"
                    )
                if sound.format == "FLAC":
                    # Where a file is cut short, its end is missing: found for any cut, not only for some.
                    sound.seek(frames - 1)
                    if len(sound.read(1, "int16")) < 1:
                        raise Corrupt("is cut short")
                spare = max(0, frames - self._length)
                start = spare // 2 if random is None else int(random * (spare + 1))
                wanted = min(frames, self._length)
                sound.seek(start)
                # Of floats soundfile would only keep the whole part, which is 0.
                floats = sound.subtype in ("FLOAT", "DOUBLE")
                channels = sound.read(wanted, "float64" if floats else "int16", always_2d=True)
        except soundfile.SoundFileError as error:
            # Without its beginning, which names the descriptor, another one each time.
            what, said = (
                what_it_is(read_at(file, 0, _HEAD)),
                getattr(error, "error_string", first_line(error)),
            )
            reason = said if what.startswith("a recording") else what or said
            raise Corrupt(f"can't be decoded: {reason}") from error
        if len(channels) < wanted:
            raise Corrupt(f"is cut short: {len(channels)} samples of {wanted}")
        out[:wanted] = _mixed(channels)
        out[wanted:] = 0


def _mixed(channels: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """Mean of the channels, (samples, channels) to int16 (samples,); floats are in [-1, 1], or clipped to it.

    Raises:
        Corrupt: If a value isn't finite, or so large that another range was meant.
    """
    count = channels.shape[1]
    if channels.dtype == np.float64:
        mean = channels.mean(1)
        if not np.isfinite(mean).all():
            raise Corrupt("holds what isn't a number")
        if (largest := float(np.abs(channels).max())) > _LOUDEST:
            raise Corrupt(
                f"holds floats up to {largest:,.0f}, and full scale is 1.0: clipped to it, nothing would be "
                "left but a square wave; write it again, divided by 32768, say"
            )
        return np.asarray(np.clip(np.rint(np.clip(mean, -1, 1) * 32768), -32768, 32767), np.int16)
    mixed = channels[:, 0] if count == 1 else (channels.sum(1, dtype=np.int64) + count // 2) // count
    return np.asarray(mixed, np.int16)


def _without_tag(file: int, size: int) -> int | io.BytesIO:
    """The file, or what lies behind an ID3 tag at its beginning: libsndfile can't seek in FLAC with one."""
    header = read_at(file, 0, 10)
    if header[:3] != b"ID3" or len(header) < 10:
        return file
    # Four digits of seven bits; a footer repeats the header.
    length = sum(digit << shift for digit, shift in zip(header[6:10], (21, 14, 7, 0), strict=True))
    begin = 10 + length + 10 * bool(header[5] & 0x10)
    if size - begin > _LARGEST_TAGGED:
        raise Corrupt(f"has an ID3 tag before {size - begin:,} bytes, which are read at once: take it off")
    return io.BytesIO(read_at(file, begin, max(0, size - begin))) if begin < size else file


def wav_cut_short(file: int, size: int) -> bool:
    """Whether a wav file ends before its samples do; libsndfile would take it for a shorter one.

    Args:
        file: An open file.
        size: Its bytes.
    """
    header = read_at(file, 0, 12)
    if header[:4] != b"RIFF" or header[8:12] != b"WAVE":
        return False
    position = 12
    for _ in range(_CHUNKS):
        chunk = read_at(file, position, 8)
        if len(chunk) < 8:
            return True
        length = int.from_bytes(chunk[4:], "little")
        if chunk[:4] == b"data":
            return length not in _UNKNOWN_SIZES and position + 8 + length > size
        position += 8 + length + length % 2
    return False


def _read_all(file: int) -> None:
    position = 0
    while piece := os.pread(file, _BLOCK, position):
        position += len(piece)
