"""Detections in images: in files, or in the evaluation data beside the true boxes."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trainer.commands.predict.classes import code_for, read_each, show_rows
from trainer.commands.predict.images import content, upright_of_run, whole_box
from trainer.data.batch import Batch
from trainer.data.dataset import spread
from trainer.data.formats.boxes import BOXES, COUNT, CROWD, IMAGE, LABEL, Picture, paste, scale_in_room
from trainer.data.formats.coco import CocoPictures
from trainer.errors import EXIT_DONE, writing
from trainer.host.files import check_writable, written_whole
from trainer.host.here import path_shown
from trainer.models.detection import Detections, detections
from trainer.tasks.coco_results import Found, coco_pictures, results, write_results
from trainer.train.components.task import device_kind
from trainer.train.model_of_run import OpenedRun, inputs_of, read_samples

_Pixels = npt.NDArray[np.uint8]

_SIDE = 256  # least width or height of a picture
_TOGETHER = 16
_LONGEST_STEM = 200  # bytes of a picture's name that are its file's
_FOUND, _TRUE = (230, 80, 0), (0, 150, 90)


class ModelInput(NamedTuple):
    """An image as the model sees it.

    Attributes:
        name: Name of the file or the sample.
        pixels: uint8 (size, size, channels).
        scale: Of these pixels per pixel of the file, across and down.
        image: Id of the image, see `Found`.
        truth: The true boxes and labels, where they are known.
    """

    name: str
    pixels: _Pixels
    scale: tuple[float, float] = (1.0, 1.0)
    image: int | str = ""
    truth: tuple[npt.NDArray[Any], list[int]] | None = None


def show_boxes(run: OpenedRun, options: argparse.Namespace) -> int:
    """Prints and draws the detections; returns the exit code."""
    if options.out is not None:
        _make_folder(options.out)
    if options.files:
        there = read_each(options.files, lambda path: _as_evaluated(path, run))
        code, seen = code_for(there, options.files), [one for _, one in there]
    else:
        code, seen = EXIT_DONE, _of_evaluation(run, options.samples)
    if not seen:
        return code
    found = _found(run, seen, options.score)
    order = sorted(range(len(seen)), key=lambda n: not _mistaken(seen[n], found[n]))
    seen, found = [seen[n] for n in order], [found[n] for n in order]
    classes: Sequence[str] = run.task.describe()["classes"]
    pairs = list(zip(seen, found, strict=True))
    show_rows(
        ("file" if options.files else "evaluation data", "boxes", "best (left, top, right, bottom)"),
        [(one.name, _count(one, boxes), _best(one, boxes, classes, options.top)) for one, boxes in pairs],
    )
    if options.coco is not None:
        entries = (Found(one.image, one.scale, *boxes) for one, boxes in pairs)
        write_results(options.coco, results(coco_pictures(run.task), entries))
    if options.out is not None:
        for number, (one, boxes) in enumerate(pairs):
            name = _picture_name(number, one.name)
            with writing(f"--out {options.out}"), written_whole(options.out / name) as beside:
                drawn(one, boxes, classes).save(beside, format="PNG")
        print(f"{path_shown(options.out.absolute())}: {len(pairs)} pictures")
        true = "" if options.files else "; green: what is there"
        print(f"orange: found, with a score of at least {options.score:g}{true}")
    return code


def _picture_name(number: int, file: str) -> str:
    """Returns the name of a picture; a long one is cut, as the longest name of a file is 255 bytes."""
    stem = Path(file).stem
    if len(name := os.fsencode(stem)) > _LONGEST_STEM:
        stem = name[:_LONGEST_STEM].decode("utf-8", "ignore")
    return f"{number:03}-{stem}.png"


def _make_folder(out: Path) -> None:
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        check_writable(out)


def _as_evaluated(path: Path, run: OpenedRun) -> ModelInput:
    """Reads an image file as evaluation would: with its aspect ratio, at the top left of a square.

    Raises:
        Corrupt: If it can't be read or isn't an image.
    """
    from PIL import Image

    from trainer.data.formats.decode import cut_out

    height, width, channels = run.task.evaluation_data.fields[IMAGE].shape
    image: _Pixels = (
        cut_out(content(path), whole_box, upright=upright_of_run(run))[0]
        .permute(1, 2, 0)
        .contiguous()
        .numpy()
    )
    if channels == 1:
        image = np.array(Image.fromarray(image).convert("L"))[:, :, None]
    nothing = Picture(image, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), np.zeros(0, np.bool_))
    out = np.zeros((height, width, channels), np.uint8)
    paste(nothing, out, 1.0, 0.0, 0.0)
    identity = int(path.stem) if path.stem.isdecimal() else path.stem
    return ModelInput(str(path), out, scale_in_room(image.shape[:2], out.shape[:2]), identity)


def _of_evaluation(run: OpenedRun, count: int) -> list[ModelInput]:
    dataset = run.task.evaluation_data
    samples = spread(len(dataset), count)
    fields = {name: field.numpy() for name, field in read_samples(dataset, samples).fields.items()}
    seen = []
    for row, sample in enumerate(samples.tolist()):
        rows = np.arange(int(fields[COUNT][row]))
        rows = rows[fields[CROWD][row][rows] == 0]
        truth = (fields[BOXES][row][rows], fields[LABEL][row][rows].tolist())
        one = ModelInput(f"sample {sample}", fields[IMAGE][row], truth=truth)
        if isinstance(pictures := getattr(dataset, "pictures", None), CocoPictures):
            scale = scale_in_room(pictures.sizes[sample].tolist(), one.pixels.shape[:2])
            one = one._replace(scale=scale, image=pictures.ids[sample])
        seen.append(one)
    return seen


def _found(run: OpenedRun, seen: Sequence[ModelInput], score: float) -> list[Detections]:
    device = torch.device(device_kind(run.recipe))
    model, found = run.model.to(device), list[Detections]()
    with torch.no_grad():
        for start in range(0, len(seen), _TOGETHER):
            pixels = np.stack([one.pixels for one in seen[start : start + _TOGETHER]])
            batch = Batch({IMAGE: torch.from_numpy(pixels).to(device)}, None, None, len(pixels))
            (image,) = inputs_of(run, batch)
            found += [
                Detections(*(rows.cpu() for rows in one)) for one in detections(model, image, least=score)
            ]
    return found


def _mistaken(one: ModelInput, found: Detections) -> bool:
    """Returns True if the detected labels differ from the true ones, whatever the boxes."""
    return one.truth is not None and sorted(one.truth[1]) != sorted(found.labels.tolist())


def _count(one: ModelInput, found: Detections) -> str:
    true = "" if one.truth is None else f" of {len(one.truth[1])}"
    return f"{len(found.labels)}{true}"


def _best(one: ModelInput, found: Detections, classes: Sequence[str], top: int) -> str:
    parts = []
    for box, score, label in list(zip(found.boxes, found.scores, found.labels, strict=True))[:top]:
        corners = ", ".join(
            f"{edge / scale:.0f}" for edge, scale in zip(box.tolist(), one.scale * 2, strict=True)
        )
        parts.append(f"{classes[int(label)]} {float(score):.0%} ({corners})")
    return "; ".join(parts)


def drawn(one: ModelInput, found: Detections, classes: Sequence[str]) -> Any:
    """Draws detections and true boxes into the picture, as a PIL image; a small one is enlarged."""
    from PIL import Image, ImageDraw, ImageFont

    pixels = one.pixels
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).convert("RGB")
    factor = max(1, _SIDE // max(picture.size))
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default()
    for box in one.truth[0] if one.truth else ():
        draw.rectangle([float(edge) * factor for edge in box], outline=_TRUE, width=1)
    for box, label in zip(found.boxes.tolist(), found.labels.tolist(), strict=True):
        corners = [edge * factor for edge in box]
        draw.rectangle(corners, outline=_FOUND, width=2)
        name = classes[label].encode("latin-1", "replace").decode("latin-1")
        draw.text((corners[0] + 3, corners[1] + 1), name, fill=_FOUND, font=font)
    return picture
