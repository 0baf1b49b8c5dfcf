"""Mean average precision as COCO defines it, by pycocotools, from arrays in memory."""

import contextlib
import io
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class _Annotations:
    """Stand-in for pycocotools' own class of annotations, without files and without its printing."""

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
    """Mean over the classes that there are boxes of; 0 where there are none at all.

    Args:
        rows: For each image `boxes` (n, d, 4), `scores` (n, d), below 0 where there is no box, and `labels`
            (n, d) of what was found, at most 100; `true_boxes` (n, m, 4), `true_labels` (n, m), `true_crowd`
            (n, m), `true_area` (n, m), in pixels of the file, and `true_count` (n,) of what is there; `pixel`
            (n, 1), how many pixels of the file a pixel of the image is. Crowds match any number of boxes, and
            count neither for nor against them.
        classes: Their number.

    Returns:
        `map`, the mean over the overlaps 0.5, 0.55 to 0.95, and `map_50`, at 0.5.
    """
    evaluation = _evaluation(rows, classes)
    evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
    evaluation.params.maxDets = [100]
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, 0]  # (overlaps, recalls, classes), -1: nothing there
    return {name: _mean(part) for name, part in (("map", precision), ("map_50", precision[:1]))}


_COCO = (
    *("AP", "AP50", "AP75", "APsmall", "APmedium", "APlarge"),
    *("AR1", "AR10", "AR100", "ARsmall", "ARmedium", "ARlarge"),
)


def coco_figures(rows: Mapping[str, Array], classes: int) -> dict[str, float | None]:
    """The twelve figures that COCO publishes, in its order, by pycocotools' own summary.

    Small, medium and large are below 32 x 32 pixels of the file, below 96 x 96, and the rest: by the area
    that the annotations give, and for what was found by that of its box.

    Args:
        rows: As `average_precision` takes them.
        classes: Their number.

    Returns:
        By name; None where there is no box of that size.
    """
    evaluation = _evaluation(rows, classes)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {
        name: None if value < 0 else float(value) for name, value in zip(_COCO, evaluation.stats, strict=True)
    }


def _evaluation(rows: Mapping[str, Array], classes: int) -> Any:
    """A COCOeval of boxes, with COCO's parameters."""
    from pycocotools.cocoeval import COCOeval

    n = len(rows["scores"])
    valid = np.arange(rows["true_labels"].shape[1]) < rows["true_count"][:, None]
    crowd, scores = rows["true_crowd"], rows["scores"]
    area = (rows["boxes"][..., 2:].astype(np.float64) - rows["boxes"][..., :2]).prod(-1) * rows["pixel"]
    there = _entries(rows["true_boxes"], rows["true_labels"], rows["true_area"], valid, "iscrowd", crowd)
    true = _Annotations(there, n, classes)
    answers = _entries(rows["boxes"], rows["labels"], area, scores >= 0, "score", scores)
    found = _Annotations(answers, n, classes)
    with contextlib.redirect_stdout(io.StringIO()):
        return COCOeval(true, found, "bbox")


def _entries(
    boxes: Array, labels: Array, areas: Array, valid: Array, extra: str, values: Array
) -> Iterator[dict[str, Any]]:
    image, place = np.nonzero(valid)
    box = boxes[image, place].astype(np.float64)
    box[:, 2:] -= box[:, :2]
    # From 1: an id of 0 means to pycocotools that nothing matched.
    for number, (i, b, label, area, value) in enumerate(
        zip(
            image.tolist(),
            box.tolist(),
            labels[image, place].tolist(),
            areas[image, place].tolist(),
            values[image, place].tolist(),
            strict=True,
        ),
        1,
    ):
        yield {
            "id": number,
            "image_id": i,
            "category_id": label,
            "bbox": b,
            "area": area,
            extra: value,
        }


def _mean(precision: Array) -> float:
    there = precision[precision > -1]
    return float(there.mean()) if there.size else 0.0
