"""Images to classes: of files, or of the evaluation data with the mistakes first."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.corrupt import Corrupt
from trainer.data.crop import Box, central_cut
from trainer.data.dataset import spread
from trainer.data.images import ImageDataset
from trainer.data.sources import IMAGE, LABEL
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from trainer.export.model_of_run import OpenedRun, read_samples
from trainer.predict.classes import Guess, guesses, probabilities, show_table
from trainer.predict.command import check_picture
from trainer.predict.grid import write_grid
from trainer.redact import redact_text
from trainer.report.text import plain

Pixels = npt.NDArray[np.uint8]

_LOOKED_AT = 1000  # samples of the evaluation data, of which some are shown


def show_images(run: OpenedRun, options: argparse.Namespace) -> int:
    """Prints what the model takes images for, and draws them; returns the exit code."""
    check_picture(options.out)
    if not options.files:
        return _of_evaluation(run, options)
    images, names, unread = list[Pixels](), list[str](), 0
    for path in options.files:
        try:
            images.append(as_evaluated(path, run))
            names.append(str(path))
        except Corrupt as error:
            unread += 1
            line = " ".join(redact_text(f"{path}: {error}").split())
            print(f"trainer: {plain(line, 400)}", file=sys.stderr)
    if not images:
        return EXIT_BAD_INPUT
    fields = {IMAGE: torch.from_numpy(np.stack(images)), LABEL: torch.zeros(len(images), dtype=torch.int64)}
    found = guesses(names, probabilities(run, fields), run.task.describe()["classes"], options.top)
    show_table("file", found)
    if run.recipe.data.name == "digits":
        print("each was made 8 x 8 grey with 17 levels, ink light on dark; a digit should fill its image")
    _draw(options.out, images, found)
    return EXIT_FAILED if unread else EXIT_DONE


def _of_evaluation(run: OpenedRun, options: argparse.Namespace) -> int:
    """Samples from all over the evaluation data, those first of which the model is wrong and sure."""
    dataset, classes = run.task.evaluation_data, run.task.describe()["classes"]
    samples = spread(len(dataset), max(_LOOKED_AT, options.samples))
    fields: Mapping[str, torch.Tensor] = read_samples(dataset, samples).fields
    found = probabilities(run, fields)
    label = fields[LABEL]
    names = [f"sample {number}" for number in samples.tolist()]
    told = guesses(names, found, classes, options.top, label.tolist())
    order = sorted(range(len(told)), key=lambda n: (not told[n].mistaken, -told[n].probabilities[0]))
    wrong = sum(guess.mistaken for guess in told)
    # After the mistakes those from all over, not the surest alone.
    rest = order[wrong:]
    room = max(0, options.samples - wrong)
    order = [*order[:wrong][: options.samples], *(rest[place] for place in spread(len(rest), room).tolist())]
    show_table("evaluation data", [told[n] for n in order])
    print(f"{len(told) - wrong:,} of {len(told):,} samples looked at are right ({1 - wrong / len(told):.2%})")
    pixels = fields[IMAGE].numpy()
    _draw(options.out, [pixels[n] for n in order], [told[n] for n in order])
    return EXIT_DONE


def as_evaluated(path: Path, run: OpenedRun) -> Pixels:
    """An image file as evaluation would see it: uint8 (height, width, channels).

    Raises:
        Corrupt: If it can't be read or isn't an image.
    """
    from trainer.data.decode import cut_out, resize

    height, width, channels = run.task.evaluation_data.fields[IMAGE].shape
    try:
        data = bytearray(path.read_bytes())
    except OSError as error:
        raise Corrupt(f"can't be read ({error.strerror})") from error
    if channels == 1:
        return _as_digit(cut_out(data, _whole), height, width)
    # Photographs lose their margins in evaluation; what lies in memory at its size was never cut.
    cut = central_cut if isinstance(run.task.evaluation_data, ImageDataset) else _square
    pixels = resize(cut_out(data, cut, height), height, width)
    return pixels[0].permute(1, 2, 0).contiguous().numpy()


def _as_digit(image: torch.Tensor, height: int, width: int) -> Pixels:
    """The means of as many fields, in steps of 15 from 0 (ground) to 240 (ink), as the digits have them."""
    from PIL import Image

    picture = Image.fromarray(image[0].permute(1, 2, 0).contiguous().numpy()).convert("L")
    grey: npt.NDArray[Any] = np.asarray(picture, np.float32)
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    low, high = float(grey.min()), float(grey.max())
    if border.mean() > (low + high) / 2:  # ink on paper
        low, high = high, low
    ink = Image.fromarray((grey - low) / ((high - low) or 1.0))
    small = np.asarray(ink.resize((width, height), Image.Resampling.BOX))
    return (np.round(small * 16) * 15).astype(np.uint8)[:, :, None]


def _whole(height: int, width: int) -> Box:
    return Box(0, 0, height, width)


def _square(height: int, width: int) -> Box:
    side = min(height, width)
    return Box((height - side) // 2, (width - side) // 2, side, side)


def _draw(out: Path | None, images: list[Pixels], found: list[Guess]) -> None:
    if out is None:
        return
    captions = [
        (
            f"{guess.classes[0]}  {guess.probabilities[0]:.0%}",
            Path(guess.name).name if guess.truth is None else f"is {guess.truth}",
            guess.mistaken,
        )
        for guess in found
    ]
    write_grid(out, images, captions)
