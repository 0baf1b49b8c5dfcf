"""COCO's results file: detections as JSON with the ids of the annotations, in pixels of the image files.

See https://cocodataset.org/#format-results.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.data.formats.boxes import scale_in_room
from trainer.data.formats.coco import CocoPictures
from trainer.errors import BadInputError, writing
from trainer.host.files import check_replaceable, write_whole
from trainer.tasks import Task


class Found(NamedTuple):
    """Detections in an image.

    Attributes:
        image: Id of the image; a file's name, or its number where that is the name, as others have it.
        scale: Pixels of the boxes per pixel of the file, across and down.
        boxes: Left, top, right, bottom (n, 4).
        scores: Scores (n,).
        labels: Classes (n,).
    """

    image: int | str
    scale: tuple[float, float]
    boxes: Any
    scores: Any
    labels: Any


def coco_pictures(task: Task) -> CocoPictures:
    """Returns the evaluation images of a task, whose file of instances has the ids.

    Raises:
        BadInputError: If the data isn't COCO's.
    """
    pictures = getattr(task.evaluation_data, "pictures", None)
    if not isinstance(pictures, CocoPictures):
        raise BadInputError(
            "--coco: a results file has ids of images and categories: it needs data.name=coco"
        )
    return pictures


def check_results(file: Path | None, task: Task) -> None:
    """Checks that a results file can be made and written.

    Raises:
        BadInputError: If it can't.
    """
    if file is not None:
        coco_pictures(task)
        with writing(f"--coco {file}"):
            check_replaceable(file)


def results_of_rows(task: Task, rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the entries of a results file for the rows of an evaluation, see `average_precision`."""
    pictures, size = coco_pictures(task), task.evaluation_data.fields["image"].shape[0]
    found = (
        Found(
            image,
            scale_in_room((height, width), (size, size)),
            *(rows[name][row][rows["scores"][row] >= 0] for name in ("boxes", "scores", "labels")),
        )
        for row, (image, (height, width)) in enumerate(
            zip(pictures.ids, pictures.sizes.tolist(), strict=True)
        )
    )
    return results(pictures, found)


def results(pictures: CocoPictures, found: Iterable[Found]) -> list[dict[str, Any]]:
    """Returns the entries of a results file; a class that the instances don't have gets a negative id."""
    number = {name: identity for identity, name in pictures.categories.items()}
    categories = [number.get(name, -1 - index) for index, name in enumerate(pictures.classes)]
    entries = []
    for image, scale, boxes, scores, labels in found:
        corners = np.asarray(boxes, np.float64).reshape(-1, 4) / [*scale, *scale]
        corners[:, 2:] -= corners[:, :2]
        entries += [
            {"image_id": image, "category_id": categories[label], "bbox": box, "score": score}
            for box, score, label in zip(corners.tolist(), scores.tolist(), labels.tolist(), strict=True)
        ]
    return entries


def write_results(file: Path, entries: list[dict[str, Any]]) -> None:
    """Writes a results file."""
    with writing(f"--coco {file}"):
        write_whole(file, json.dumps(entries))
