"""Cost of augmenting an image together with its boxes in a loader worker, in milliseconds of one CPU."""

import argparse
import time

import numpy as np
import torch

from trainer.data.builtin.digits_canvas import SIZE, DigitsCanvas
from trainer.data.builtin.synthetic_boxes import SyntheticPictures
from trainer.data.formats.boxes import BoxAugment, BoxedImages
from trainer.errors import EXIT_NOT_MEASURED
from trainer.observe.conditions import conditions

_IMAGES = 16
_KINDS = (
    ("none", BoxAugment()),
    ("flip", BoxAugment(flip=1.0)),
    ("scale, smaller", BoxAugment(scale=(0.5, 0.9))),
    ("scale, cropped", BoxAugment(scale=(1.1, 2.0))),
    ("mosaic", BoxAugment(mosaic=1.0)),
    ("all of them", BoxAugment(flip=0.5, scale=(0.5, 2.0), mosaic=1.0)),
)


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("--rounds", type=int, default=7, metavar="N", help="interleaved rounds (default: 7)")
    bench.set_defaults(run=lambda options: bench_boxes(options.rounds))


def bench_boxes(rounds: int) -> int:
    """Prints the median over interleaved rounds for each augmentation; exit code 0, 3 if there were none.

    Args:
        rounds: Of each.
    """
    if rounds < 1:
        print("nothing measured: --rounds must be at least 1")
        return EXIT_NOT_MEASURED
    torch.set_num_threads(1)
    print(conditions())
    for what, pictures, size in (
        (f"canvases of {SIZE} pixels", DigitsCanvas(0, _IMAGES), SIZE),
        ("images of 640 pixels, already decoded", SyntheticPictures(640, 80, _IMAGES, 0), 640),
    ):
        print(f"{what}: CPU time of an image, ms")
        datasets = [BoxedImages(pictures, size, 100, augment) for _, augment in _KINDS]
        spent = np.array([[_milliseconds(data, number) for data in datasets] for number in range(rounds + 1)])
        for (name, _), each in zip(_KINDS, spent[1:].T, strict=True):
            low, middle, high = np.quantile(each, (0.25, 0.5, 0.75))
            print(f"  {name:<16} {middle:8.3f}  (quartiles {low:.3f} to {high:.3f})")
    return 0


def _milliseconds(data: BoxedImages, number: int) -> float:
    random = np.random.default_rng(number).random((_IMAGES, max(1, data.uniforms)), np.float32)
    out = {name: np.empty((_IMAGES, *f.shape), f.dtype) for name, f in data.fields.items()}
    began = time.process_time()
    data.read(np.arange(_IMAGES), random if data.uniforms else None, out)
    return (time.process_time() - began) * 1000 / _IMAGES
