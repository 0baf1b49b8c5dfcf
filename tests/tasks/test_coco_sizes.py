"""Promise: COCO's figures by size are of the files' pixels, as pycocotools gives them for the same files."""

import contextlib
import copy
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from trainer.data.formats.boxes import AREA, BOXES, COUNT, CROWD, LABEL, PIXEL, BoxedImages
from trainer.data.formats.coco import CocoPictures
from trainer.tasks.average_precision import average_precision, coco_figures
from trainer.tasks.coco_results import results_of_rows

SIZES = [(640, 480), (480, 640), (1000, 80), (90, 700), (160, 160), (33, 31)]


def a_set(root: Path, outlines: bool) -> Path:
    """Six pictures of unlike shapes, squares from 8 pixels to almost all of them, some of them crowds."""
    random = np.random.default_rng(3)
    images, boxes = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, (width, height) in enumerate(SIZES, 1):
        (root / "val").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (width, height)).save(root / "val" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": width, "height": height})
        for side in (8, 24, 31, 33, 60, 95, 97, 130):
            wide, high = min(side, width - 1), min(side, height - 1)
            at = [float(random.integers(0, width - wide)), float(random.integers(0, height - high))]
            entry: dict[str, Any] = {"id": len(boxes) + 1, "image_id": number, "category_id": 1 + side % 2}
            entry |= {"bbox": [*at, wide, high], "iscrowd": int(side == 60 and number == 1)}
            entry["area"] = wide * high * (0.6 if outlines else 1.0)
            entry["ignore"] = int(side in (24, 97))  # pycocotools doesn't read it
            boxes.append(entry)
    told = {"images": images, "annotations": boxes}
    told["categories"] = [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}]
    file = root / "annotations" / "instances_val.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(told))
    return file


@pytest.mark.parametrize(("size", "outlines"), [(64, True), (320, False)])
def test_the_twelve_are_those_of_pycocotools_on_the_files(tmp_path: Path, size: int, outlines: bool) -> None:
    file = a_set(tmp_path, outlines)
    data = BoxedImages(CocoPictures(tmp_path, "val", "fail"), size, 10, None)
    fields: Any = {name: np.zeros((len(data), *f.shape), f.dtype) for name, f in data.fields.items()}
    data.read(np.arange(len(data)), None, fields)
    rows, answers = answer(fields, size)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(file))
        oracle = COCOeval(truth, truth.loadRes(copy.deepcopy(answers)), "bbox")
        oracle.evaluate()
        oracle.accumulate()
        oracle.summarize()
    wanted = [None if value < 0 else pytest.approx(value, abs=1e-6) for value in oracle.stats]
    assert list(coco_figures(rows, 2).values()) == wanted
    assert list(average_precision(rows, 2).values()) == wanted[:2]
    told = results_of_rows(cast(Any, SimpleNamespace(evaluation_data=data)), rows)
    assert [{**each, "bbox": pytest.approx(each["bbox"])} for each in told] == answers
    assert oracle.stats[3] > 0 and oracle.stats[5] > 0  # there are small and large ones


def answer(fields: Any, size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Boxes that lie nearly where the true ones do, as rows and as pycocotools takes them."""
    random = np.random.default_rng(5)
    true, count = np.asarray(fields[BOXES], np.float64), np.asarray(fields[COUNT])
    n, most = true.shape[:2]
    found = true + random.normal(0, 0.03, true.shape) * (true[..., 2:] - true[..., :2]).max(-1)[..., None]
    found[..., 2:] = np.maximum(found[..., 2:], found[..., :2] + 0.01)
    scores = np.round(random.uniform(0.1, 1, (n, most)), 3)
    scores[np.arange(most) >= count[:, None]] = -1
    scores[random.random((n, most)) < 0.2] = -1
    labels = np.asarray(fields[LABEL])
    rows = {"boxes": found, "scores": scores, "labels": labels, "true_boxes": true, "true_labels": labels}
    rows |= {"true_crowd": fields[CROWD], "true_area": fields[AREA], "true_count": count}
    rows["pixel"] = np.asarray(fields[PIXEL])[:, None]
    told = []
    for i, (width, height) in enumerate(SIZES):
        factor = size / max(width, height)
        across, down = max(1, round(width * factor)) / width, max(1, round(height * factor)) / height
        for j in np.flatnonzero(scores[i] >= 0):
            left, top, right, bottom = found[i, j] / [across, down, across, down]
            box = [left, top, right - left, bottom - top]
            entry = {"image_id": i + 1, "category_id": int(labels[i, j]) + 1, "bbox": box}
            told.append({**entry, "score": float(scores[i, j])})
    return rows, told
