"""Promise: boxes stay on what they frame, whatever an image goes through."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.batches import arrays_of
from trainer.data.builtin.boxes import DigitsCanvas
from trainer.data.corrupt import Corrupt
from trainer.data.formats import boxes as module
from trainer.data.formats.boxes import BOXES, COUNT, CROWD, BoxAugment, BoxedImages, Picture, mosaic
from trainer.data.sources import digits

UNIT = st.floats(0, 1, exclude_max=True, width=32)


@st.composite
def pictures(draw: Any) -> Picture:
    """A gray picture, black but for white rectangles that are its boxes, each with its own label."""
    height, width = draw(st.integers(12, 90)), draw(st.integers(12, 90))
    image = np.zeros((height, width, 1), np.uint8)
    boxes = []
    for _ in range(count := draw(st.integers(0, 3))):
        left, top = draw(st.integers(0, width - 6)), draw(st.integers(0, height - 6))
        right, bottom = draw(st.integers(left + 5, width)), draw(st.integers(top + 5, height))
        boxes.append([left, top, right, bottom])
        image[top:bottom, left:right] = 255
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


@pytest.mark.compat
@given(pictures(), st.tuples(UNIT, UNIT, UNIT, UNIT), st.floats(0.3, 2.0))
def test_boxes_stay_on_what_they_frame(picture: Picture, numbers: Any, scale: float) -> None:
    out = np.full((64, 64, 1), 7, np.uint8)
    made = module.moved(picture, out, BoxAugment(flip=0.5, scale=(scale, scale)), numbers)
    assert made.image is out
    assert_inside(made, 64, 64)
    factor = min(64 / picture.image.shape[0], 64 / picture.image.shape[1])
    assert_white_inside(made, factor * scale)
    everything = module.paste(picture, out, 1.0, 0.0, 0.0)
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
    made = module.paste(picture, np.zeros((40, 40, 1), np.uint8), 2.0, 0.5, 0.5)
    assert made.label.tolist() == [1, 2]
    np.testing.assert_array_equal(made.boxes, [[10, 10, 30, 30], [0, 0, 40, 40]])


class Some:
    classes: Sequence[str] = ("a", "b", "c")
    channels = 1
    in_memory = True
    most = 3

    def __len__(self) -> int:
        return 12

    def fingerprint(self) -> str:
        return "some"

    def name(self, sample: int) -> str:
        return f"picture {sample}"

    def read(self, sample: int) -> Picture:
        boxes = np.array([[3, 4, 20, 30], [10, 10, 15, 16], [30, 30, 50, 44]], np.float32)
        image = np.random.default_rng(sample).integers(0, 255, (50, 60, 1), np.uint8)
        crowd = np.array([False, sample % 2 == 1, False])
        return Picture(image, boxes, np.array([0, 1, sample % 3]), crowd)


def read(data: BoxedImages, random: float | None) -> dict[str, Any]:
    out, bad = arrays_of(data, random=random)
    assert not bad
    return out


def test_training_leaves_crowds_out_and_evaluation_tells_them() -> None:
    training, evaluation = (BoxedImages(Some(), 60, 5, augment) for augment in (BoxAugment(), None))
    learned, measured = read(training, 0.5), read(evaluation, None)
    assert learned[COUNT].tolist() == [3, 2] * 6
    assert learned[module.LABEL][1].tolist() == [0, 1, 0, 0, 0]
    assert not learned[CROWD].any()
    assert measured[COUNT].tolist() == [3] * 12
    assert measured[CROWD].sum(1).tolist() == [0, 1] * 6
    assert not measured[BOXES][:, 3:].any(), "what isn't valid is 0"
    np.testing.assert_array_equal(measured[module.IMAGE], learned[module.IMAGE])


def test_a_mosaic_with_too_many_boxes_keeps_the_largest() -> None:
    many, few = (read(BoxedImages(Some(), 60, most, BoxAugment(mosaic=1.0)), 0.4) for most in (12, 2))
    assert many[COUNT].max() > 2
    for number in range(12):
        count = int(many[COUNT][number])
        sizes = (many[BOXES][number, :count, 2:] - many[BOXES][number, :count, :2]).prod(1)
        kept = (few[BOXES][number, :, 2:] - few[BOXES][number, :, :2]).prod(1)
        assert sorted(kept[: few[COUNT][number]]) == sorted(sizes)[-2:]


def test_a_corrupt_partner_in_a_mosaic_is_not_this_images_fault() -> None:
    pictures: Any = Some()
    whole = pictures.read

    def torn(sample: int) -> Any:
        if sample == 3:
            raise Corrupt("is torn")
        return whole(sample)

    pictures.read = torn
    data = BoxedImages(pictures, 60, 12, BoxAugment(mosaic=1.0), "quarantine")
    _, bad = arrays_of(data, random=np.random.default_rng(0).random((12, data.uniforms), np.float32))
    assert [one.sample for one in bad] == [3]


def test_a_canvas_is_the_same_in_every_process() -> None:
    canvases = DigitsCanvas(0, 4)
    digest = hashlib.sha256()
    for picture in map(canvases.read, range(4)):
        for array in (picture.image, picture.boxes, picture.label, picture.crowd):
            digest.update(array.tobytes())
    assert canvases.fingerprint() == f"4 samples {digest.hexdigest()[:16]}"


def test_training_canvases_show_no_test_digit() -> None:
    (train, _), (test, _) = digits()
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in test}
    assert DigitsCanvas(0, 8).fingerprint() != DigitsCanvas(1, 8).fingerprint()
