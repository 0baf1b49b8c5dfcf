"""Cost of each stage of preparing a sample: images, tokens, recordings, images with boxes; on one CPU.

The first row of each kind is the decoding, by which the others are judged: a stage that takes more CPU is
dear. What the device does in training is timed as a CPU does it.
"""

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from benchmarks.conditions import conditions
from benchmarks.options import add_rounds
from benchmarks.paired import interleaved, median_interval
from benchmarks.photographs import write_photographs
from trainer.config.recipe_file import make_recipe
from trainer.data.builtin.boxes import SyntheticPictures
from trainer.data.dataset import Dataset
from trainer.data.formats.audio import AUDIO, AudioFolder
from trainer.data.formats.boxes import BoxAugment, BoxedImages
from trainer.data.formats.crop import Box
from trainer.data.formats.decode import cut_out, decode_whole, resize
from trainer.data.formats.files import in_folder
from trainer.data.formats.tokens import TokenDataset, inputs_and_targets
from trainer.errors import EXIT_DONE
from trainer.tasks.audio import Audio
from trainer.tasks.augment import Normalization, affine, by_policy, crop, flip, jitter, make_policy

_BATCH, _SIDE, _PIXELS = 16, 224, 640
_RATE, _LENGTH = 16_000, 1024

Stages = Mapping[str, Callable[[], object]]


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    add_rounds(bench, 7)
    bench.set_defaults(run=lambda options: bench_stages(options.rounds))


def bench_stages(rounds: int) -> int:
    """Prints a table for each kind; exit code 0, as no stage has a target of its own."""
    torch.set_num_threads(1)
    print(f"{conditions()}\nbatches of {_BATCH}, 1 thread, {rounds} interleaved rounds")
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        for title, make in KINDS.items():
            folder = Path(name, title.split()[0])
            folder.mkdir()
            stages = make(folder)
            times = np.array(interleaved([partial(_seconds, stage) for stage in stages.values()], rounds))
            print(f"\n| {title} | CPU us of one (median) | of the first (95 % interval) |\n|---|---|---|")
            for stage, spent in zip(stages, times, strict=True):
                ratio, low, high = median_interval((spent / times[0]).tolist())
                middle = np.median(spent) * 1e6 / _BATCH
                print(f"| {stage} | {middle:,.1f} | {ratio:.2f} ({low:.2f} to {high:.2f}) |")
    return EXIT_DONE


def _seconds(stage: Callable[[], object]) -> float:
    began = time.process_time()
    stage()
    return time.process_time() - began


def image_stages(folder: Path) -> Stages:
    """Photographs of 500 x 375 to batches of 224 x 224."""
    write_photographs(folder, _BATCH)
    records = in_folder(folder)
    data = [records.read(sample) for sample in range(_BATCH)]
    cuts = [cut_out(each, lambda *_: Box(40, 60, 300, 300)) for each in data]
    byte = torch.cat([resize(cut, _SIDE, _SIDE) for cut in cuts]).permute(0, 2, 3, 1).contiguous()
    random = torch.rand(_BATCH, 5, generator=torch.Generator().manual_seed(0))
    planes, normalize = byte.permute(0, 3, 1, 2), Normalization((0.5,) * 3, (0.3,) * 3)
    floats, policy = normalize(byte, True).clone(), make_policy("randaugment")
    assert policy is not None
    return {
        "decode a JPEG": lambda: [decode_whole(each) for each in data],
        "cut 300 x 300 and resize": lambda: [resize(cut, _SIDE, _SIDE) for cut in cuts],
        "normalize": lambda: normalize(byte, True),
        "flip and normalize": lambda: normalize(byte, True, random[:, :1]),
        "flip and crop": lambda: crop(flip(byte, random[:, :1]), random[:, :2]),
        "affine": lambda: affine(floats, random),
        "jitter": lambda: jitter(planes, random[:, :3], 0.4),
        "RandAugment, a draw for each image": lambda: by_policy(planes, policy, 1),
    }


def token_stages(folder: Path) -> Stages:
    """Sequences of 1,024 tokens."""
    random = np.random.default_rng(0)
    random.integers(0, 50_257, (_BATCH + 1) * _LENGTH * 8, np.uint16).tofile(folder / "tokens.bin")
    data = TokenDataset(folder / "tokens.bin", _LENGTH, "uint16")
    read, out = _reading(data, random)
    return {
        "read": read,
        "cast into inputs and targets": lambda: inputs_and_targets(torch.from_numpy(out["tokens"])),
    }


def audio_stages(folder: Path) -> Stages:
    """Cuts of 1 s from recordings of 2 s, as in the recipe speech-commands."""
    random = np.random.default_rng(0)
    read = {}
    for suffix in ("flac", "wav"):
        (folder / suffix / "a").mkdir(parents=True)
        for number in range(_BATCH):
            noise = np.convolve(random.normal(0, 3000, 2 * _RATE), np.ones(8) / 8, "same").astype(np.int16)
            soundfile.write(folder / suffix / "a" / f"{number}.{suffix}", noise, _RATE)
        files = in_folder(folder / suffix, (f".{suffix}",))
        read[suffix], out = _reading(AudioFolder(files, 1.0, _RATE, True, "fail"), random)
    masks = {"time_masks": 2, "frequency_masks": 2, "frequency_mask": 5, "window": 0.03}
    config = {
        "name": "synthetic",
        "samples": _BATCH,
        "classes": 2,
        "micro_batch_size": 1,
        "global_batch_size": 1,
    }
    recipe = make_recipe({"task": "audio", "epochs": 1, "audio": masks, "data": config})
    task = Audio(recipe.data, recipe.model, recipe.audio, 0)
    sound = torch.from_numpy(out[AUDIO])
    features = task.features(sound)
    return {
        "decode a FLAC": read["flac"],
        "decode a WAV": read["wav"],
        "log-mel": lambda: task.features(sound),
        "SpecAugment": lambda: task._masked(features),
    }


def box_stages(folder: Path) -> Stages:
    """Images of 640 x 480 with up to 8 boxes on a square of 640."""
    write_photographs(folder, _BATCH)
    records = in_folder(folder)
    data = [records.read(sample) for sample in range(_BATCH)]
    pictures, random = SyntheticPictures(_PIXELS, 80, _BATCH, 0), np.random.default_rng(0)

    def with_boxes(augment: BoxAugment) -> Callable[[], object]:
        return _reading(BoxedImages(pictures, _PIXELS, 100, augment), random)[0]

    big = [_enlarged(each) for each in data]
    return {
        f"decode a JPEG of {_PIXELS} x 480": lambda: [decode_whole(each) for each in big],
        "place": with_boxes(BoxAugment()),
        "flip": with_boxes(BoxAugment(flip=1.0)),
        "scale, smaller": with_boxes(BoxAugment(scale=(0.5, 0.9))),
        "scale, cropped": with_boxes(BoxAugment(scale=(1.1, 2.0))),
        "mosaic, without reading the other three": with_boxes(BoxAugment(mosaic=1.0)),
    }


def _enlarged(data: bytearray) -> bytearray:
    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(data)).resize((_PIXELS, 480)).save(file, "JPEG", quality=90)
    return bytearray(file.getvalue())


def _reading(data: Dataset, random: np.random.Generator) -> tuple[Callable[[], object], Mapping[str, Any]]:
    """Reads a batch, and where to."""
    out = {name: np.zeros((_BATCH, *field.shape), field.dtype) for name, field in data.fields.items()}
    numbers = random.random((_BATCH, max(1, data.uniforms)), np.float32)
    samples = np.arange(_BATCH)

    def read() -> object:
        return data.read(samples, numbers if data.uniforms else None, out)

    read()
    return read, out


KINDS: Mapping[str, Callable[[Path], Stages]] = {
    "image of 500 x 375": image_stages,
    "sequence of 1,024 tokens": token_stages,
    "recording, 1 s at 16 kHz": audio_stages,
    f"boxes in an image of {_PIXELS}": box_stages,
}
