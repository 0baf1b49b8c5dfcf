"""Audio data sets by data.name: embedded telephone tones, synthetic noise, and folders."""

import codecs
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.data import DataConfig
from trainer.data.builtin import dtmf
from trainer.data.dataset import ArrayDataset, Dataset
from trainer.data.formats.audio import AUDIO, SUFFIXES, AudioFolder
from trainer.data.formats.files import Files, hint, in_folder, readable, unlisted
from trainer.data.formats.records import LABEL
from trainer.data.formats.signatures import what_it_is
from trainer.data.left_out import one, tally
from trainer.data.sources import class_notes, common_classes, data_path
from trainer.errors import BadInputError, reading
from trainer.rng import Purpose, key

# Lists of Speech Commands (Warden, 2018): paths of recordings that aren't for training.
VALIDATION, TESTING = "validation_list.txt", "testing_list.txt"
_HEAD = 4096
_NOISE = "_background_noise_"  # Speech Commands' folder of long recordings, which isn't a class


class AudioData(NamedTuple):
    """Recordings for training and evaluation: fields audio, int16 (samples,), and label, int64 ()."""

    train: Dataset
    evaluation: Dataset
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def load_audio(config: DataConfig, seconds: float, sample_rate: int, part: str, seed: int) -> AudioData:
    """Opens the recordings that data.name and data.path say.

    Args:
        config: Data configuration.
        seconds: Length of a sample.
        sample_rate: Sample rate in Hz.
        part: "validation" or "testing": the list of Speech Commands that evaluation uses, if there are lists.
        seed: Seed of synthetic noise.

    Raises:
        BadInputError: If the data is missing or malformed.
    """
    length = round(seconds * sample_rate)
    if config.name == "dtmf":
        if (sample_rate, length) != (dtmf.RATE, dtmf.SAMPLES):
            raise BadInputError(
                f"data.name=dtmf is synthesized at {dtmf.RATE} Hz, {dtmf.SAMPLES / dtmf.RATE} s long: set "
                f"audio.sample_rate={dtmf.RATE} and audio.seconds={dtmf.SAMPLES / dtmf.RATE}"
            )
        learned, held = dtmf.recordings(0, dtmf.TRAIN), dtmf.recordings(1, dtmf.TEST)
        return AudioData(learned, held, tuple(dtmf.KEYS))
    if config.name == "synthetic":
        return _synthetic(config, length, seed)
    if config.name != "folder":
        raise AssertionError(f"data.name={config.name} is no sound")
    root = Path(data_path(config))
    # `train/` and `val/` by class, or one folder by class with the lists of Speech Commands.
    if (root / VALIDATION).exists() or (root / TESTING).exists():
        train, evaluation = split_by_lists(root, part)
    else:
        train, evaluation = (in_folder(root / split, SUFFIXES) for split in ("train", "val"))
    for files in (train, evaluation):
        files.keep_hashes(config.index)
    classes, measured = common_classes(root, train, evaluation)
    return AudioData(
        AudioFolder(train, seconds, sample_rate, True, config.on_corrupt),
        AudioFolder(measured, seconds, sample_rate, False, config.on_corrupt),
        classes,
        class_notes(classes, train, measured),
    )


def more_audio(
    config: DataConfig, seconds: float, sample_rate: int, split: str | None, seed: int
) -> tuple[Dataset, tuple[str, ...]]:
    """Opens one split of recordings for evaluation and returns it with its classes.

    Args:
        config: Data configuration.
        seconds: Length of a sample.
        sample_rate: Sample rate in Hz.
        split: Folder below data.path, or "validation" or "testing" if there are lists; None: "val", or
            "validation".
        seed: Seed of synthetic noise.

    Raises:
        BadInputError: If the split is missing or malformed.
    """
    if config.name in ("dtmf", "synthetic"):
        audio = load_audio(config, seconds, sample_rate, "validation", seed)
        return audio.evaluation, audio.classes
    root = Path(data_path(config))
    if (root / VALIDATION).exists() or (root / TESTING).exists():
        part = split or "validation"
        if part not in ("validation", "testing"):
            raise BadInputError(f"data.split={part}: {root} has lists, of validation and testing; name one")
        records = split_by_lists(root, part)[1]
    else:
        records = in_folder(root / (split or "val"), SUFFIXES)
    return AudioFolder(records, seconds, sample_rate, False, config.on_corrupt), tuple(records.classes)


def split_by_lists(root: Path, part: str) -> tuple[Files, Files]:
    """Splits one folder of classes by its lists: returns the files in neither list, and those in one.

    Args:
        root: Folder of classes, with both lists.
        part: "validation" or "testing", the second list that is returned.

    Raises:
        BadInputError: If a list is missing, names a missing file, or a split is empty.
    """
    files = in_folder(root, SUFFIXES, leave_out=(VALIDATION, TESTING, _NOISE))
    number = {files.file_name(sample): sample for sample in range(len(files))}
    lists = {name: _samples(root / name, number) for name in (VALIDATION, TESTING)}
    wanted = lists[VALIDATION if part == "validation" else TESTING]
    held_out = set(lists[VALIDATION]) | set(lists[TESTING])
    rest = [sample for sample in range(len(files)) if sample not in held_out]
    unused = TESTING if part == "validation" else VALIDATION
    others = sorted(set(lists[unused]) - set(wanted))
    files.left_out = tally(
        (
            *files.left_out,
            *(one(f"recording{{s}} of {unused}", files.file_name(sample)) for sample in others),
            *unlisted(f"recording{{s}} in {_NOISE}", root / _NOISE, SUFFIXES),
        )
    )
    if not rest or not wanted:
        raise BadInputError(f"{root}: its lists leave nothing {'to measure on' if rest else 'to train on'}")
    return files.only(np.array(rest)), files.only(np.array(sorted(set(wanted))))


def _samples(file: Path, number: dict[bytes, int]) -> list[int]:
    with reading(file, "both lists are needed, or neither"):
        text = file.read_bytes()
    if b"\0" in text:
        raise BadInputError(f"{file}: {what_it_is(text[:_HEAD]) or 'holds zero bytes'}; save it as UTF-8")
    samples = []
    for line, path in enumerate(text.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not path.strip():
            continue
        if path.strip() not in number:
            name = readable(path.strip())
            more = hint(os.fsencode(file.parent), path.strip())
            raise BadInputError(f"{file}: line {line}: no recording '{name}' below this folder{more}")
        samples.append(number[path.strip()])
    return samples


def _synthetic(config: DataConfig, length: int, seed: int) -> AudioData:
    """Returns white noise with random labels, to measure speed."""
    random = np.random.Generator(np.random.Philox(key(seed, Purpose.DATA)))

    def recordings(count: int) -> ArrayDataset:
        # A prime number of random values, repeated: quick to make, and no two recordings are the same.
        noise: Any = np.frombuffer(random.bytes(2 * 524_287), np.int16)
        label = random.integers(0, config.classes, count, dtype=np.int64)
        return ArrayDataset({AUDIO: np.resize(noise, (count, length)), LABEL: label})

    classes = tuple(str(number) for number in range(config.classes))
    return AudioData(recordings(config.samples), recordings(max(1, config.samples // 8)), classes)
