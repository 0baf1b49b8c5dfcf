"""Promise: boxes stay on what they frame, whatever an image goes through; wrong annotations are found before
training, with the image's id.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from tests.helpers.batches import CPU, read_all, source
from tests.helpers.refusals import named, refused
from trainer.config.data import DataConfig, LoaderConfig
from trainer.config.model import ModelConfig
from trainer.config.tasks import DetectionConfig
from trainer.data.builtin.boxes import INK, LARGEST, OVERLAP, SIZE, SMALLEST, DigitsCanvas, enlarged
from trainer.data.check import CheckedData, check_data
from trainer.data.corrupt import Corrupt
from trainer.data.formats.boxes import (
    BOXES,
    COUNT,
    CROWD,
    IMAGE,
    LABEL,
    BoxAugment,
    BoxedImages,
    Picture,
    flipped,
    mosaic,
    moved,
    paste,
)
from trainer.data.formats.coco import CocoPictures
from trainer.data.loader import RingLoader
from trainer.data.sources import digits
from trainer.errors import BadInputError
from trainer.tasks.detection import Detection

UNIT = st.floats(0, 1, exclude_max=True, width=32)


@st.composite
def pictures(draw: Any) -> Picture:
    """A gray picture, black but for white rectangles that are its boxes, each with its own label."""
    height, width = draw(st.integers(12, 90)), draw(st.integers(12, 90))
    image = np.zeros((height, width, 1), np.uint8)
    boxes = []
    for _ in range(draw(st.integers(0, 3))):
        left, top = draw(st.integers(0, width - 6)), draw(st.integers(0, height - 6))
        box = [left, top, draw(st.integers(left + 5, width)), draw(st.integers(top + 5, height))]
        boxes.append(box)
        image[box[1] : box[3], box[0] : box[2]] = 255
    count = len(boxes)
    rows = np.array(boxes, np.float32).reshape(-1, 4)
    return Picture(image, rows, np.arange(count), np.zeros(count, np.bool_))


def assert_inside(picture: Picture, height: int, width: int) -> None:
    boxes = picture.boxes
    assert boxes.dtype == np.float32 and len(boxes) == len(picture.label) == len(picture.crowd)
    assert (boxes >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()


def assert_white_inside(picture: Picture, factor: float) -> None:
    # Resizing mixes in what is beside a pixel, of the smaller of the two images.
    rim = 2 + int(factor)
    for left, top, right, bottom in picture.boxes:
        rows = slice(int(np.ceil(top)) + rim, max(0, int(bottom) - rim))
        columns = slice(int(np.ceil(left)) + rim, max(0, int(right) - rim))
        assert (picture.image[rows, columns] > 250).all()


@given(pictures())
def test_twice_flipped_is_the_same(picture: Picture) -> None:
    once = flipped(picture)
    assert_inside(once, *picture.image.shape[:2])
    twice = flipped(once)
    np.testing.assert_array_equal(twice.image, picture.image)
    np.testing.assert_array_equal(twice.boxes, picture.boxes)


@pytest.mark.compat
@given(pictures(), st.tuples(UNIT, UNIT, UNIT, UNIT), st.floats(0.3, 2.0))
def test_boxes_stay_on_what_they_frame(picture: Picture, numbers: Any, scale: float) -> None:
    out = np.full((64, 64, 1), 7, np.uint8)
    made = moved(picture, out, BoxAugment(flip=0.5, scale=(scale, scale)), numbers)
    assert made.image is out
    assert_inside(made, 64, 64)
    factor = min(64 / picture.image.shape[0], 64 / picture.image.shape[1])
    assert_white_inside(made, factor * scale)
    everything = paste(picture, out, 1.0, 0.0, 0.0)
    assert everything.label.tolist() == picture.label.tolist(), "an image that fits loses no box"
    np.testing.assert_allclose(everything.boxes, picture.boxes * factor, atol=0.6)


@given(st.lists(pictures(), min_size=4, max_size=4), st.tuples(UNIT, UNIT), st.floats(0.5, 2.0), st.data())
def test_a_mosaics_boxes_lie_in_it(parts: list[Picture], middle: Any, scale: float, data: Any) -> None:
    numbers = [data.draw(st.tuples(UNIT, UNIT, UNIT, UNIT)) for _ in range(4)]
    out = np.full((64, 64, 1), 7, np.uint8)
    made = mosaic(parts, out, BoxAugment(flip=0.5, scale=(scale, scale)), middle, numbers)
    assert_inside(made, 64, 64)
    row, column = (int(64 * (0.25 + share / 2)) for share in middle)
    for left, top, right, bottom in made.boxes:
        assert right <= column or left >= column, "no box lies in two images"
        assert bottom <= row or top >= row
    factors = [min(64 / part.image.shape[0], 64 / part.image.shape[1]) for part in parts]
    assert_white_inside(made, max(factors) * scale)


def test_a_box_whose_middle_is_cropped_away_is_gone() -> None:
    image = np.zeros((40, 40, 1), np.uint8)
    boxes = np.array([[0, 0, 10, 10], [15, 15, 25, 25], [2, 2, 38, 38]], np.float32)
    picture = Picture(image, boxes, np.arange(3), np.zeros(3, np.bool_))
    made = paste(picture, np.zeros((40, 40, 1), np.uint8), 2.0, 0.5, 0.5)
    assert made.label.tolist() == [1, 2]
    np.testing.assert_array_equal(made.boxes, [[10, 10, 30, 30], [0, 0, 40, 40]])


class Listed:
    """Pictures in a list."""

    classes: Sequence[str] = ("a", "b", "c")
    channels = 1
    in_memory = True
    most = 3

    def __init__(self, made: list[Picture]) -> None:
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def fingerprint(self) -> str:
        return "listed"

    def name(self, sample: int) -> str:
        return f"picture {sample}"

    def read(self, sample: int) -> Picture:
        return self.made[sample]


def some(count: int = 12) -> Listed:
    random = np.random.default_rng(0)
    made = []
    for number in range(count):
        boxes = np.array([[3, 4, 20, 30], [10, 10, 15, 16], [30, 30, 50, 44]], np.float32)
        image = random.integers(0, 255, (50, 60, 1), np.uint8)
        crowd = np.array([False, number % 2 == 1, False])
        made.append(Picture(image, boxes, np.array([0, 1, number % 3]), crowd))
    return Listed(made)


def read(data: BoxedImages, random: float | None) -> dict[str, Any]:
    out: Any = {name: np.full((len(data), *f.shape), 99, f.dtype) for name, f in data.fields.items()}
    numbers = None if random is None else np.full((len(data), data.uniforms + 2), random, np.float32)
    assert not data.read(np.arange(len(data)), numbers, out)
    return dict(out)


def test_training_leaves_crowds_out_and_evaluation_tells_them() -> None:
    training, evaluation = (BoxedImages(some(), 60, 5, augment) for augment in (BoxAugment(), None))
    learned, measured = read(training, 0.5), read(evaluation, None)
    assert learned[COUNT].tolist() == [3, 2] * 6
    assert learned[LABEL][1].tolist() == [0, 1, 0, 0, 0]
    assert not learned[CROWD].any()
    assert measured[COUNT].tolist() == [3] * 12
    assert measured[CROWD].sum(1).tolist() == [0, 1] * 6
    assert not measured[BOXES][:, 3:].any(), "what isn't valid is 0"
    np.testing.assert_array_equal(measured[IMAGE], learned[IMAGE])


def test_a_mosaic_with_too_many_boxes_keeps_the_largest() -> None:
    augment = BoxAugment(mosaic=1.0)
    many, few = (read(BoxedImages(some(), 60, most, augment), 0.4) for most in (12, 2))
    assert many[COUNT].max() > 2
    for number in range(12):
        count = int(many[COUNT][number])
        sizes = (many[BOXES][number, :count, 2:] - many[BOXES][number, :count, :2]).prod(1)
        kept = (few[BOXES][number, :, 2:] - few[BOXES][number, :, :2]).prod(1)
        assert sorted(kept[: few[COUNT][number]]) == sorted(sizes)[-2:]


def test_a_corrupt_partner_in_a_mosaic_is_not_this_images_fault() -> None:
    """It is named when its own turn comes; till then the image stands alone."""
    pictures: Any = some()
    whole = pictures.read

    def torn(sample: int) -> Picture:
        if sample == 3:
            raise Corrupt("is torn")
        picture: Picture = whole(sample)
        return picture

    pictures.read = torn
    data = BoxedImages(pictures, 60, 12, BoxAugment(mosaic=1.0), "quarantine")
    out = {n: np.zeros((12, *f.shape), f.dtype) for n, f in data.fields.items()}
    random = np.random.default_rng(0).random((12, data.uniforms), np.float32)
    bad = data.read(np.arange(12), random, out)
    assert [one.sample for one in bad or ()] == [3]


def test_workers_and_resume_change_no_box() -> None:
    augment = BoxAugment(flip=0.5, scale=(0.5, 2.0), mosaic=0.5)
    what = source(BoxedImages(some(40), 48, 8, augment), "cross", uniforms=augment.uniforms)
    batches = what.share.batches()
    expected = read_all(RingLoader(what, CPU, 0, LoaderConfig()), batches)
    assert len({str(batch) for batch in expected}) == len(expected)
    config = LoaderConfig(start_method="fork")
    assert read_all(RingLoader(what, CPU, 2, config), batches) == expected
    assert read_all(RingLoader(what, CPU, 0, config), batches[3:]) == expected[3:]


def test_digits_lie_in_their_boxes_and_hide_little_of_each_other() -> None:
    canvases = DigitsCanvas(0, 60)
    again = DigitsCanvas(0, 40)
    counts = []
    for number in range(60):
        picture = canvases.read(number)
        assert picture.image.shape == (SIZE, SIZE, 1)
        assert_inside(picture, SIZE, SIZE)
        counts.append(len(picture.label))
        light = np.full((SIZE, SIZE), False)
        for left, top, right, bottom in picture.boxes.astype(int):
            assert max(right - left, bottom - top) <= LARGEST and bottom - top >= SMALLEST // 2
            light[top:bottom, left:right] = True
        gray = picture.image[:, :, 0].astype(float)
        # Noise is even and reaches 96; whatever is lighter is ink, and ink lies in a box, but for its rim.
        assert (gray[~light] > 160).mean() < 0.002
        for left, top, right, bottom in picture.boxes.astype(int):
            assert gray[top:bottom, left:right].mean() > gray[~light].mean() + 10
        for i, one in enumerate(picture.boxes):
            for other in picture.boxes[:i]:
                wide, high = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
                least = min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
                assert max(0, wide) * max(0, high) <= OVERLAP * least + 1e-4
        if number < 40:
            for one_, other_ in zip(picture, again.read(number), strict=True):
                np.testing.assert_array_equal(one_, other_)
    assert min(counts) == 1 and max(counts) >= 5


def test_a_box_is_the_least_around_the_ink() -> None:
    (image, _), _ = digits()
    ink = enlarged(image[3, :, :, 0], 24)
    assert ink.shape == (24, 24)
    np.testing.assert_allclose(enlarged(image[3, :, :, 0], 8), image[3, :, :, 0])
    assert (ink >= INK).any() and ink.max() <= 255
    ramp = np.tile(np.arange(8, dtype=np.uint8) * 10, (8, 1))
    np.testing.assert_allclose(enlarged(ramp, 16)[5, 1:-1], np.arange(1, 15) * 5 - 2.5)


def test_training_canvases_show_no_test_digit() -> None:
    (train, _), (test, _) = digits()
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in test}
    assert DigitsCanvas(0, 8).fingerprint() != DigitsCanvas(1, 8).fingerprint()


def told() -> dict[str, Any]:
    """Two images, three categories with gaps in their ids, a crowd, and an image without boxes."""
    images = [{"id": n, "file_name": f"{n}.png", "height": 20, "width": 30} for n in (7, 5, 9)]
    boxes = [(1, 7, 90, [2, 3, 10, 5]), (2, 7, 3, [0, 0, 30, 20]), (3, 5, 18, [20, 10, 10, 10])]
    annotations: list[dict[str, Any]] = [
        {"id": number, "image_id": image, "category_id": category, "bbox": box, "iscrowd": 0}
        for number, image, category, box in boxes
    ]
    annotations.append({"id": 4, "image_id": 5, "category_id": 3, "bbox": [1, 1, 3, 3], "iscrowd": 1})
    categories = [{"id": 90, "name": "brush"}, {"id": 3, "name": "car"}, {"id": 18, "name": "dog"}]
    return {"images": images, "annotations": annotations, "categories": categories}


def written(root: Path, what: Any, part: str = "train", year: str = "") -> Path:
    (root / "annotations").mkdir(exist_ok=True)
    (root / f"{part}{year}").mkdir(exist_ok=True)
    (root / "annotations" / f"instances_{part}{year}.json").write_text(json.dumps(what))
    for number in (5, 7, 9):
        pixels = np.full((20, 30, 3), number, np.uint8)
        Image.fromarray(pixels).save(root / f"{part}{year}" / f"{number}.png")
    return root


@pytest.mark.parametrize("year", ["", "2017"])
def test_coco_is_read_as_it_says(tmp_path: Path, year: str) -> None:
    written(tmp_path, told(), "train", year)
    written(tmp_path, told(), "val", year)
    train, val = (CocoPictures(tmp_path, part, "fail") for part in ("train", "val"))
    assert (tuple(train.classes), train.most) == (("car", "dog", "brush"), 2)
    assert (len(train), len(val)) == (2, 3), "nothing is learned from an image without boxes"
    first = val.read(0)
    assert first.image.shape == (20, 30, 3) and (first.image == 7).all()
    np.testing.assert_array_equal(first.boxes, [[2, 3, 12, 8], [0, 0, 30, 20]])
    assert (first.label.tolist(), first.crowd.tolist()) == ([2, 0], [False, False])
    assert val.read(1).crowd.tolist() == [False, True]
    assert val.read(2).boxes.shape == (0, 4)
    changed = told()
    changed["annotations"][0]["bbox"][0] = 3
    written(tmp_path, changed, "train", year)
    assert CocoPictures(tmp_path, "train", "fail").fingerprint() != train.fingerprint()


def test_val_is_numbered_by_the_names_of_train(tmp_path: Path) -> None:
    written(tmp_path, told())
    what = told()
    what["categories"] = [{"id": 1, "name": "dog"}, {"id": 90, "name": "brush"}]
    what["annotations"] = [what["annotations"][0], {**what["annotations"][2], "category_id": 1}]
    written(tmp_path, what, "val")
    config = DetectionConfig(max_boxes=4)
    task = Detection(DataConfig(name="coco", path=tmp_path), ModelConfig(), config, 0)
    val = cast(BoxedImages, task.evaluation_data).pictures
    assert task.classes == tuple(val.classes) == ("car", "dog", "brush")
    assert [val.read(number).label.tolist() for number in range(2)] == [[2], [1]]
    what["categories"][0]["name"] = "cat"
    written(tmp_path, what, "val")
    with refused("cat", tmp_path):
        Detection(DataConfig(name="coco", path=tmp_path), ModelConfig(), config, 0)


def test_images_of_both_parts_are_counted(tmp_path: Path) -> None:
    def notes() -> tuple[str, ...]:
        return Detection(
            DataConfig(name="coco", path=tmp_path), ModelConfig(), DetectionConfig(max_boxes=4), 0
        ).notes

    written(written(tmp_path, told()), told(), "val")
    assert notes() == ()
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "val").symlink_to("train")
    (note,) = notes()
    assert named(note, "2 of 3", "7.png")


def change(path: str, value: Any) -> Callable[[Any], None]:
    def change_it(what: Any) -> None:
        *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
        for step in way:
            what = what[step]
        what[last] = value

    return change_it


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        ("annotations.0.bbox", [25, 3, 10, 5], "annotation 1 image 7 7.png 30 20"),
        ("annotations.0.bbox", [-3, 3, 10, 5], "image 7 -3"),
        ("annotations.0.bbox", [2, 3, 10**400, 5], "image 7"),
        ("annotations.0.bbox", [2, 16, 10, 6], "image 7 16"),
        ("annotations.2.bbox", [2, 3, 0, 5], "image 5 area"),
        ("annotations.2.bbox", [2, 3, 4, -1], "image 5 area"),
        ("annotations.2.bbox", [30, 3, 0.5, 5], "image 5 0.5"),
        ("annotations.2.bbox", [2, 3, 4], "image 5 list"),
        ("annotations.2.bbox", [2, 3, 4, float("nan")], "image 5 nan"),
        ("annotations.2.bbox", "box", "image 5 list"),
        ("annotations.0.category_id", [1], "category [1]"),
        ("annotations.0.category_id", {"id": 1}, "category {'id': 1}"),
        ("annotations.0.category_id", "90", "annotation 1 image 7 category '90'"),
        ("annotations.0.category_id", True, "category True"),
        ("annotations.0.category_id", -1, "category -1"),
        ("annotations.1.category_id", 4, "annotation 2 image 7 category 4"),
        ("annotations.1.category_id", 18, "category 3 'car'"),
        ("annotations.0.image_id", "7", "annotation 1 image '7'"),
        ("annotations.1.image_id", 8, "annotation 2 image 8"),
        ("annotations.1.iscrowd", 2, "image 7 iscrowd 2"),
        ("annotations.1.id", 1, "id 1 'annotations'"),
        ("images.1.id", 7, "id 7 'images'"),
        ("images.0.id", 10**30, "0 'images' id"),
        ("images.0", 3, "0 'images' id"),
        ("images.0.file_name", "\ud800.png", "image 7 file_name"),
        ("images.1.file_name", "../x.png", "image 5 file_name '../x.png'"),
        ("images.0.file_name", "/data/upload/7.png", "image 7 file_name '/data/upload/7.png' '7.png'"),
        ("images.0.file_name", "../../images/7.png", "image 7 file_name '../../images/7.png' '7.png'"),
        ("images.1.file_name", "./7.png", "7 5 './7.png'"),
        ("images.0.width", 10**400, "image 7 width"),
        ("images.1.height", None, "image 5 height"),
        ("categories.0.name", None, "category 90 name"),
        ("categories.0.name", "\ud800", "category 90 name"),
        *(("categories.0.name", name, "category 90 3 'car'") for name in ("car", "car ", "ca\u200br")),
        ("categories.0.id", "90", "0 'categories' id '90'"),
        ("categories.1.id", True, "1 'categories' id True"),
        ("categories.1.id", 1.5, "1 'categories' id 1.5"),
        ("categories.1.id", None, "1 'categories' id None"),
        ("categories.1.id", -1, "category -1 0"),
        ("categories.1.id", 90.0, "id 90 'categories'"),
        ("categories", [], "categories"),
        ("annotations", 1, "'annotations'"),
    ],
)
def test_what_is_wrong_is_found_before_training(tmp_path: Path, path: str, value: Any, names: str) -> None:
    what = told()
    change(path, value)(what)
    with refused(tmp_path / "annotations" / "instances_train.json", names):
        CocoPictures(written(tmp_path, what), "train", "fail")


def test_images_that_are_not_there_are_counted(tmp_path: Path) -> None:
    what = told()
    change("images.1.file_name", "8.png")(what)
    data = BoxedImages(CocoPictures(written(tmp_path, what), "train", "fail"), 32, 4, None)
    (tmp_path / "train" / "7.png").unlink()
    (tmp_path / "train" / "7.png").symlink_to("gone.png")
    with pytest.raises(BadInputError, match=r"2 of 2 files named in .*json .* image 7: .*a link that leads"):
        check_data("fast", False, [CheckedData("training", data, 0)])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("annotations.0.area", 10**400),
        ("categories.0.supercategory", ["x"]),
        ("categories.0.supercategory", {}),
    ],
    ids=["area", "list", "dict"],
)
def test_what_nobody_needs_may_be_anything(tmp_path: Path, path: str, value: Any) -> None:
    what = told()
    change(path, value)(what)
    written(tmp_path, what)
    area = CocoPictures(tmp_path, "train", "fail").read(0).area
    assert area is not None and np.isfinite(area).all()


def test_wrong_boxes_may_be_left_out(tmp_path: Path) -> None:
    what = told()
    what["annotations"].append({"id": 9, "image_id": 7, "category_id": 3, "bbox": [2, 3, 0, 0]})
    written(tmp_path, what)
    with pytest.raises(BadInputError, match=r"data.on_corrupt=skip"):
        CocoPictures(tmp_path, "train", "fail")
    assert CocoPictures(tmp_path, "train", "skip").most == 2


def test_a_box_that_is_there_twice_is_told_of(tmp_path: Path) -> None:
    what = told()
    assert CocoPictures(written(tmp_path, what), "train", "fail").remarks(everything=True) == ""
    what["annotations"].append({**what["annotations"][0], "id": 9, "area": 1})
    line = CocoPictures(written(tmp_path, what), "train", "fail").remarks(everything=True)
    assert line == "1 boxes of instances_train.json are there twice, the first in 7.png"


def test_files_that_are_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no annotations/instances_train.json"):
        CocoPictures(tmp_path, "train", "fail")
    (written(tmp_path, told()) / "annotations" / "instances_train.json").rename(
        tmp_path / "annotations" / "instances_Train.json"
    )
    with refused("annotations/instances_Train.json"):
        CocoPictures(tmp_path, "train", "fail")
    written(tmp_path, told())
    (tmp_path / "annotations" / "instances_train.json").write_text("{")
    with pytest.raises(BadInputError, match="not readable JSON"):
        CocoPictures(tmp_path, "train", "fail")


def test_an_image_of_another_size_is_corrupt(tmp_path: Path) -> None:
    what = told()
    what["images"][0]["width"] = 31
    data = BoxedImages(CocoPictures(written(tmp_path, what), "train", "fail"), 32, 4, None)
    out: Any = {name: np.zeros((2, *f.shape), f.dtype) for name, f in data.fields.items()}
    with pytest.raises(BadInputError, match=r"7.png: has 30 x 20 pixels, and its annotations say 31 x 20"):
        data.read(np.arange(2), None, out)
