"""Mean average precision as COCO defines it, by pycocotools, from arrays in memory."""

import contextlib
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class _Annotations:
    """Stand-in for pycocotools' COCO class that reads no files and prints nothing."""

    def __init__(self, entries: Iterable[dict[str, Any]], images: int, classes: int) -> None:
        self._entries = list(entries)
        self._images, self._classes = list(range(images)), list(range(classes))

    def getImgIds(self) -> list[int]:  # noqa: N802
        return self._images

    def getCatIds(self) -> list[int]:  # noqa: N802
        return self._classes

    def getAnnIds(self, imgIds: Collection[int], catIds: Collection[int]) -> list[int]:  # noqa: N802, N803, ARG002
        return list(range(len(self._entries)))

    def loadAnns(self, ids: Collection[int]) -> list[dict[str, Any]]:  # noqa: N802, ARG002
        return self._entries


def average_precision(rows: Mapping[str, Array], classes: int) -> dict[str, float]:
    """Mean average precision over the classes that have true boxes; 0 if there is no true box.

    Args:
        rows: For each image the detections, at most 100: `boxes` (n, d, 4), `scores` (n, d), below 0 for
            padding, and `labels` (n, d); the true boxes: `true_boxes` (n, m, 4), `true_labels` (n, m),
            `true_crowd` (n, m), `true_area` (n, m) in pixels of the file, and their number `true_count` (n,);
            `pixel` (n, 1), pixels of the file per pixel of the image. Crowds match any number of boxes, and
            count neither for nor against them.
        classes: Number of classes.

    Returns:
        `map`, the mean over the IoU thresholds 0.5, 0.55 to 0.95, and `map_50`, at 0.5.
    """
    evaluation = _evaluation(rows, classes)
    evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
    evaluation.params.maxDets = [100]
    _run(evaluation.evaluate, evaluation.accumulate)
    # (thresholds, recalls, classes); -1 where a class has no true box
    precision = evaluation.eval["precision"][:, :, :, 0, 0]
    return {name: _mean(values) for name, values in (("map", precision), ("map_50", precision[:1]))}


_COCO = (
    *("AP", "AP50", "AP75", "APsmall", "APmedium", "APlarge"),
    *("AR1", "AR10", "AR100", "ARsmall", "ARmedium", "ARlarge"),
)


def coco_figures(rows: Mapping[str, Array], classes: int) -> dict[str, float | None]:
    """Returns COCO's twelve metrics by name, in its order, from pycocotools' own summary.

    Small, medium and large are below 32 x 32 pixels of the file, below 96 x 96, and the rest: by the area in
    the annotations, and for detections by the area of the box.

    Args:
        rows: As for `average_precision`.
        classes: Number of classes.

    Returns:
        Values by name; None where there is no true box of that size.
    """
    evaluation = _evaluation(rows, classes)
    _run(evaluation.evaluate, evaluation.accumulate, evaluation.summarize)
    return {
        name: None if value < 0 else float(value) for name, value in zip(_COCO, evaluation.stats, strict=True)
    }


def _evaluation(rows: Mapping[str, Array], classes: int) -> Any:
    """Returns a COCOeval of boxes, with COCO's parameters."""
    from pycocotools.cocoeval import COCOeval

    n = len(rows["scores"])
    valid = np.arange(rows["true_labels"].shape[1]) < rows["true_count"][:, None]
    crowd, scores = rows["true_crowd"], rows["scores"]
    area = (rows["boxes"][..., 2:].astype(np.float64) - rows["boxes"][..., :2]).prod(-1) * rows["pixel"]
    true = _entries(rows["true_boxes"], rows["true_labels"], rows["true_area"], valid, "iscrowd", crowd)
    detected = _entries(rows["boxes"], rows["labels"], area, scores >= 0, "score", scores)
    return COCOeval(_Annotations(true, n, classes), _Annotations(detected, n, classes), "bbox")


def _run(*methods: Callable[[], object]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        for method in methods:
            method()


def _entries(
    boxes: Array, labels: Array, areas: Array, valid: Array, extra: str, values: Array
) -> Iterator[dict[str, Any]]:
    image, column = np.nonzero(valid)
    box = boxes[image, column].astype(np.float64)
    box[:, 2:] -= box[:, :2]
    # From 1 on: pycocotools takes an id of 0 for no match.
    for number, (i, b, label, area, value) in enumerate(
        zip(
            image.tolist(),
            box.tolist(),
            labels[image, column].tolist(),
            areas[image, column].tolist(),
            values[image, column].tolist(),
            strict=True,
        ),
        1,
    ):
        yield {"id": number, "image_id": i, "category_id": label, "bbox": b, "area": area, extra: value}


def _mean(precision: Array) -> float:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else 0.0
