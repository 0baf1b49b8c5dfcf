"""Data set of wav and flac recordings in class folders, `root/<class>/**/<file>`: int16 crops."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.config.data import OnCorrupt
from trainer.data.corrupt import Bad, Corrupt
from trainer.data.dataset import Arrays, Field, spread
from trainer.data.formats.files import Files, open_sample_file, readable, size_of
from trainer.data.formats.records import RecordsDataset
from trainer.data.formats.signatures import what_it_is
from trainer.errors import BadInputError, first_line
from trainer.host.files import read_at
from trainer.rng import Float32, Ints

AUDIO = "audio"

SUFFIXES = (".wav", ".flac")
_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC")
_FLOATS = ("FLOAT", "DOUBLE")
_BLOCK = 1 << 20
_LOOKED_AT, _BYTES, _THREADS = 1000, 1 << 30, 16  # recordings that are checked before a run
_HEAD = 4096  # bytes by which the kind of a file is recognized
_LOUDEST = 16.0  # largest float: 24 dB above full scale; 16-bit values stored as floats are in the thousands


class AudioFolder(RecordsDataset):
    """Recordings in class folders, cropped to one length and mixed to one channel.

    Training takes a random crop (one random number, keyed by sample and epoch), evaluation the center; a
    shorter recording is padded with zeros. Only the crop is read.

    The field `audio` is int16 (round(seconds * sample_rate),), `label` int64 ().

    Args:
        files: The recordings.
        seconds: Length of a crop.
        sample_rate: Sample rate in Hz; a file with another one is an error, neither resampled nor corrupt.
        random_crop: True for training.
        on_corrupt: data.on_corrupt, for files that can't be decoded.
    """

    records: Files

    def __init__(
        self, files: Files, seconds: float, sample_rate: int, random_crop: bool, on_corrupt: OnCorrupt
    ) -> None:
        length = round(seconds * sample_rate)
        if length < 1:
            raise BadInputError(f"{seconds} s at {sample_rate} Hz hold no sample; raise one of them")
        try:
            import soundfile  # noqa: F401  (imported before workers are forked)
        except (ImportError, OSError) as error:
            raise BadInputError(f"audio needs the library soundfile ({error}); run make venv") from error
        super().__init__(files, {AUDIO: Field((length,), np.dtype(np.int16))}, on_corrupt)
        self._length, self._rate = length, sample_rate
        self._measured = set[bytes]()  # recordings of floats whose peak this process has checked
        self.uniforms = 1 if random_crop else 0

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> list[Bad]:
        """Decodes crops into the batch; see `Dataset.read`.

        Raises:
            BadInputError: If a file can't be read, has another sample rate, or is corrupt and not replaced.
        """
        audio = out[AUDIO]
        starts = random[:, 0].tolist() if random is not None and self.uniforms else None

        def fill(row: int, sample: int) -> None:
            self._cut(self.records.path(sample), None if starts is None else starts[row], audio[row])

        return self._filled(samples, fill, out)

    def remarks(self, everything: bool) -> str:
        """Returns a line on recordings with clipped floats; "" if there are none.

        Args:
            everything: True to check every recording, not a part of them.

        Raises:
            BadInputError: If one has another sample rate.
        """
        chosen = spread(len(self), len(self) if everything else _LOOKED_AT).tolist()
        paths = [self.records.path(sample) for sample in chosen]
        with ThreadPoolExecutor(_THREADS) as pool:
            # A recording of floats is read whole.
            whole = np.cumsum(list(pool.map(size_of, paths))) <= (np.inf if everything else _BYTES)
            found = list(pool.map(_rate_and_peak, paths, whole.tolist()))
        other = [
            (path, rate) for path, (rate, _) in zip(paths, found, strict=True) if rate != self._rate and rate
        ]
        if other:
            count = f"{len(other):,} of {len(chosen):,} recordings that were looked at are so: "
            raise BadInputError(self._other_rate(*other[0], count if len(other) > 1 else ""))
        loud = [(sample, peak) for sample, (_, peak) in zip(chosen, found, strict=True) if peak > 1]
        chosen = chosen[: int(whole.sum())]
        if not loud:
            return ""
        return (
            f"{len(loud):,} of {len(chosen):,} recordings that were looked at hold floats beyond 1.0, which "
            f"are clipped; the first: {self.records.name(loud[0][0])} (up to {loud[0][1]:.4g})"
        )

    def _other_rate(self, path: bytes, rate: int, count: str = "") -> str:
        return (
            f"{readable(path)}: has a sample rate of {rate} Hz, and audio.sample_rate is {self._rate}: "
            f"{count}change that, or resample (ffmpeg -i IN -ar {self._rate} OUT)"
        )

    def _cut(self, path: bytes, random: float | None, out: npt.NDArray[Any]) -> None:
        """Writes a crop, int16 (length,), by a random number in [0, 1); None: the center."""
        try:
            # Opened here, as soundfile doesn't distinguish a missing file from a corrupt one.
            file, facts = open_sample_file(path)
            try:
                try:
                    self._decode(path, file, facts.st_size, random, out)
                except Corrupt:
                    _read_all(file)  # raises OSError if the disk is the cause
                    raise
            finally:
                os.close(file)
        except OSError as error:
            raise BadInputError(
                f"{readable(path)}: can't be read ({error.strerror}); was it moved while the run goes on?"
            ) from error

    def _decode(self, path: bytes, file: int, size: int, random: float | None, out: npt.NDArray[Any]) -> None:
        import soundfile

        if size == 0:
            raise Corrupt("is empty")
        if (span := samples_of_wav(file, size)) and span.end > size:
            raise Corrupt("is cut short")
        try:
            with soundfile.SoundFile(file, closefd=False) as sound:
                if sound.format not in _FORMATS:
                    raise Corrupt(f"is neither wav nor flac, but {sound.format}")
                if sound.samplerate != self._rate:
                    raise BadInputError(self._other_rate(path, sound.samplerate))
                frames = sound.frames
                if frames < 1 or frames > 1 << 60:
                    raise Corrupt("holds no samples" if frames < 1 else "doesn't say how long it is")
                if not sound.seekable():
                    raise Corrupt(
                        f"holds {sound.subtype}, in which no place can be looked up; convert it (ffmpeg -i "
                        "IN -c:a pcm_s16le OUT.wav)"
                    )
                if sound.format == "FLAC":
                    # The last sample is read so that a truncated file is found whatever the crop.
                    sound.seek(frames - 1)
                    if len(sound.read(1, "int16")) < 1:
                        raise Corrupt("is cut short")
                spare = max(0, frames - self._length)
                start = spare // 2 if random is None else int(random * (spare + 1))
                wanted = min(frames, self._length)
                # soundfile would convert floats to int16 by truncation, which gives 0.
                floats = sound.subtype in _FLOATS
                if floats and path not in self._measured:
                    _peak(sound)
                    self._measured.add(path)
                sound.seek(start)
                channels = sound.read(wanted, "float64" if floats else "int16", always_2d=True)
        except soundfile.SoundFileError as error:
            # The full message names the descriptor, which differs each time.
            text = getattr(error, "error_string", first_line(error))
            what = what_it_is(read_at(file, 0, _HEAD))
            reason = text if what.startswith("a recording") else what or text
            raise Corrupt(f"can't be decoded: {reason}") from error
        if len(channels) < wanted:
            raise Corrupt(f"is cut short: {len(channels)} samples of {wanted}")
        out[:wanted] = _mixed(channels)
        out[wanted:] = 0


def _mixed(channels: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """Averages channels, (samples, channels) to int16 (samples,); floats are clipped to [-1, 1]."""
    count = channels.shape[1]
    if channels.dtype == np.float64:
        mean = np.clip(channels.mean(1), -1, 1)
        return np.asarray(np.clip(np.rint(mean * 32768), -32768, 32767), np.int16)
    mixed = channels[:, 0] if count == 1 else (channels.sum(1, dtype=np.int64) + count // 2) // count
    return np.asarray(mixed, np.int16)


def _rate_and_peak(path: bytes, whole: bool) -> tuple[int, float]:
    """Returns the sample rate by the header, and the peak of floats if they are read; 0 of a corrupt file."""
    import soundfile

    rate, peak = 0, 0.0
    with contextlib.suppress(OSError, ValueError, soundfile.SoundFileError, Corrupt):
        file, facts = open_sample_file(path)
        try:
            span = samples_of_wav(file, facts.st_size)
            if facts.st_size and not (span and span.end > facts.st_size):
                with soundfile.SoundFile(file, closefd=False) as sound:
                    rate = sound.samplerate if sound.format in _FORMATS else 0
                    peak = _peak(sound) if rate and whole and sound.subtype in _FLOATS else 0.0
        finally:
            os.close(file)
    return rate, peak


def _peak(sound: Any) -> float:
    """Returns the peak of a recording of floats, over its full length: errors don't depend on the crop.

    Raises:
        Corrupt: If a value isn't finite, or too large for a full scale of 1.0.
    """
    largest = 0.0
    sound.seek(0)
    while len(block := sound.read(_BLOCK, "float64")):
        if not np.isfinite(block).all():
            raise Corrupt("holds what isn't a number")
        largest = max(largest, float(np.abs(block).max()))
    if largest > _LOUDEST:
        raise Corrupt(
            f"holds floats up to {largest:,.0f}, and full scale is 1.0: clipped to it, nothing would be "
            "left but a square wave; write it again, divided by 32768, say"
        )
    return largest


def _read_all(file: int) -> None:
    position = 0
    while piece := os.pread(file, _BLOCK, position):
        position += len(piece)


_ORDERS: dict[bytes, Literal["little", "big"]] = {
    b"RIFF": "little",
    b"RIFX": "big",
    b"RF64": "little",
    b"BW64": "little",
}
_CHUNKS = 64  # most chunks of a wav file before its samples
_UNKNOWN_SIZES = (0, 0x7FFFFFFF, 0x7FFFFFFE, 0xFFFFFFFE, 0xFFFFFFFF)  # sizes in files written to a pipe
_UNKNOWN_LONG = (0, (1 << 63) - 1, (1 << 64) - 1)


class Span(NamedTuple):
    """Range of a file's samples in bytes; if the file is truncated, `end` is beyond its size."""

    begin: int
    end: int


def samples_of_wav(file: int, size: int) -> Span | None:
    """Returns the range of a wav file's samples; None for other files.

    Args:
        file: Descriptor of an open file.
        size: Size of the file in bytes.
    """
    header = read_at(file, 0, 12)
    order = _ORDERS.get(header[:4])
    if order is None or header[8:12] != b"WAVE":
        return None
    position, long = 12, 0
    for _ in range(_CHUNKS):
        chunk = read_at(file, position, 8)
        if len(chunk) < 8:
            return Span(position, size + 1)
        length, begin = int.from_bytes(chunk[4:], order), position + 8
        if chunk[:4] == b"ds64":  # in files above 4 GB
            long = int.from_bytes(read_at(file, begin + 8, 8), "little")
        if chunk[:4] == b"data":
            if length == 0xFFFFFFFF and long not in _UNKNOWN_LONG:
                return Span(begin, begin + long)
            return Span(begin, size if length in _UNKNOWN_SIZES else begin + length)
        position = begin + length + length % 2
    return None
