"""Classes of images: of files, or of the evaluation data with the mistakes first."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.commands.predict.classes import show_files
from trainer.data.corrupt import Corrupt
from trainer.data.formats.crop import Box, middle_cut
from trainer.data.formats.files import LARGEST_FILE
from trainer.data.formats.records import is_upright
from trainer.data.sources import IMAGE, in_files
from trainer.errors import EXIT_BAD_INPUT
from trainer.host.files import read_bounded
from trainer.train.model_of_run import OpenedRun

_Pixels = npt.NDArray[np.uint8]


def show_images(run: OpenedRun, options: argparse.Namespace) -> int:
    """Prints predictions for images; returns the exit code."""
    code = show_files(run, options, IMAGE, as_evaluated)
    if options.files and code != EXIT_BAD_INPUT and run.recipe.data.name == "digits":
        print("each was made 8 x 8 gray with 17 levels, ink light on dark; a digit should fill its image")
    return code


def content(path: Path) -> bytearray:
    """Reads the content of a file.

    Raises:
        Corrupt: If it can't be read.
    """
    try:
        return bytearray(read_bounded(path, LARGEST_FILE))
    except OSError as error:
        raise Corrupt(f"can't be read ({error.strerror})") from error


def upright_of_run(run: OpenedRun) -> bool:
    """Returns whether the run's evaluation applies the EXIF orientation of images."""
    records = getattr(run.task.evaluation_data, "records", None)
    upright: bool | None = getattr(records, "upright", None)
    return is_upright(run.recipe.data) if upright is None else upright


def as_evaluated(path: Path, run: OpenedRun) -> _Pixels:
    """Reads an image file as evaluation would: uint8 (height, width, channels).

    Raises:
        Corrupt: If it can't be read or isn't an image.
    """
    from trainer.data.formats.decode import cut_out, resize, resized_middle

    height, width, channels = run.task.evaluation_data.fields[IMAGE].shape
    data, upright = content(path), upright_of_run(run)
    if channels == 1:
        return _as_digit(cut_out(data, whole_box, upright=upright), height, width)
    # Photographs lose their margins in evaluation; what lies in memory at its size was never cut.
    config = run.recipe.data
    if in_files(config):
        pixels = resized_middle(cut_out(data, middle_cut, upright=upright), height, config.eval_crop)
    else:
        pixels = resize(cut_out(data, _square, upright=upright), height, width)
    return pixels[0].permute(1, 2, 0).contiguous().numpy()


def _as_digit(image: torch.Tensor, height: int, width: int) -> _Pixels:
    """Converts an image to the digits' form: block means in steps of 15 from 0 (background) to 240 (ink)."""
    from PIL import Image

    picture = Image.fromarray(image[0].permute(1, 2, 0).contiguous().numpy()).convert("L")
    gray: npt.NDArray[Any] = np.asarray(picture, np.float32)
    border = np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])
    low, high = float(gray.min()), float(gray.max())
    if border.mean() > (low + high) / 2:  # ink on paper
        low, high = high, low
    ink = Image.fromarray((gray - low) / ((high - low) or 1.0))
    small = np.asarray(ink.resize((width, height), Image.Resampling.BOX))
    return (np.round(small * 16) * 15).astype(np.uint8)[:, :, None]


def whole_box(height: int, width: int) -> Box:
    """Returns the box of a whole image."""
    return Box(0, 0, height, width)


def _square(height: int, width: int) -> Box:
    side = min(height, width)
    return Box((height - side) // 2, (width - side) // 2, side, side)
