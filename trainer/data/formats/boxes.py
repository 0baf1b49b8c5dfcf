"""Data set of images with boxes, resized to one size and augmented together with their boxes."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.config.data import OnCorrupt
from trainer.data.corrupt import Bad, Corrupt, fill_rows
from trainer.data.dataset import Arrays, Field
from trainer.data.left_out import LeftOut
from trainer.rng import Float32, Ints

IMAGE, BOXES, LABEL, CROWD, COUNT = "image", "boxes", "label", "crowd", "count"
AREA, PIXEL = "area", "pixel"  # of evaluation images: areas of boxes and of a pixel, in pixels of the file
WRONG_BOX = "box{es} that can't be meant"
BACKGROUND = (124, 116, 104)  # ImageNet's mean, so that pixels outside an image are 0 once normalized

_PLACE = 4  # random numbers of one image: flip, scale, down, right
_MOSAIC = 3 + 3 * (1 + _PLACE)  # whether, the middle, and the other three images

Pixels = npt.NDArray[np.uint8]


class Picture(NamedTuple):
    """An image with its boxes.

    Attributes:
        image: uint8 (height, width, channels).
        boxes: float32 (k, 4): left, top, right, bottom in pixels; right and bottom are exclusive.
        label: int64 (k,).
        crowd: bool (k,): boxes around groups of objects, which aren't trained on.
        area: float32 (k,): areas of the objects by the annotations, in pixels of the file; None: of the
            boxes.
    """

    image: Pixels
    boxes: Float32
    label: Ints
    crowd: npt.NDArray[np.bool_]
    area: Float32 | None = None


class Pictures(Protocol):
    """Images of any size with their boxes.

    Attributes:
        classes: Names of the classes.
        channels: Channels of all images.
        most: Largest number of boxes of an image.
        in_memory: True if images are in memory.
    """

    classes: Sequence[str]
    channels: int
    most: int
    in_memory: bool

    def __len__(self) -> int:
        """Number of images."""

    def fingerprint(self) -> str:
        """See `Dataset.fingerprint`."""

    def name(self, sample: int) -> str:
        """Returns the path of an image, for people."""

    def read(self, sample: int) -> Picture:
        """Reads an image; raises Corrupt if it can't be decoded."""


class SomePictures:
    """Subset of pictures, renumbered."""

    def __init__(self, pictures: Pictures, samples: Ints) -> None:
        self._pictures, self._samples = pictures, samples
        self.classes, self.channels = pictures.classes, pictures.channels
        self.most, self.in_memory = pictures.most, pictures.in_memory

    def __len__(self) -> int:
        return len(self._samples)

    def fingerprint(self) -> str:
        """Returns the number of pictures and the fingerprint of the full set."""
        return f"{len(self)} evenly spaced of {self._pictures.fingerprint()}"

    def name(self, sample: int) -> str:
        """See `Pictures`."""
        return self._pictures.name(int(self._samples[sample]))

    def read(self, sample: int) -> Picture:
        """See `Pictures`."""
        return self._pictures.read(int(self._samples[sample]))


class BoxAugment(NamedTuple):
    """Augmentation of training images.

    Attributes:
        flip: Fraction of the images that are mirrored left to right.
        scale: Smallest and largest factor of an image's size, drawn log-uniformly. A larger image is cropped
            at a random position, a smaller one put at a random position.
        mosaic: Fraction of the images that are combined with three others around a random center.
    """

    flip: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    mosaic: float = 0.0

    @property
    def uniforms(self) -> int:
        """Random numbers per image."""
        if self == BoxAugment():
            return 0
        return _PLACE + (_MOSAIC if self.mosaic else 0)


class BoxedImages:
    """Images of one size with up to `most` boxes, for training or for evaluation.

    An image is resized to fit a square, keeping its aspect, and put at the top left. The fields are image,
    uint8 (size, size, channels); boxes, float32 (most, 4); label, int64 (most,); crowd, uint8 (most,); count,
    int64 (): the number of valid boxes, which come first. Training leaves crowds out. Evaluation has also
    `area`, float32 (most,), and `pixel`, float32 (), as COCO's size ranges refer to pixels of the file.

    Args:
        pictures: Source of the images.
        size: Height and width of the square, in pixels.
        most: Largest number of boxes; a mosaic that has more loses its smallest.
        augment: Augmentation of training images; None for evaluation.
        on_corrupt: data.on_corrupt, for images that can't be decoded.
    """

    def __init__(
        self,
        pictures: Pictures,
        size: int,
        most: int,
        augment: BoxAugment | None,
        on_corrupt: OnCorrupt = "fail",
    ) -> None:
        from trainer.data.formats import decode  # noqa: F401  (torchvision takes 3 s: imported before workers are forked)

        self.pictures, self._size, self._most, self._augment = pictures, size, most, augment
        self._on_corrupt = on_corrupt
        self.uniforms = augment.uniforms if augment else 0
        self.num_items = 1
        self.arrays: Arrays | None = None
        self.in_process = pictures.in_memory and not self.uniforms
        self.fields: Mapping[str, Field] = {
            IMAGE: Field((size, size, pictures.channels), np.dtype(np.uint8)),
            BOXES: Field((most, 4), np.dtype(np.float32)),
            LABEL: Field((most,), np.dtype(np.int64)),
            CROWD: Field((most,), np.dtype(np.uint8)),
            COUNT: Field((), np.dtype(np.int64)),
        }
        if augment is None:
            areas = {AREA: Field((most,), np.dtype(np.float32)), PIXEL: Field((), np.dtype(np.float32))}
            self.fields = {**self.fields, **areas}

    def __len__(self) -> int:
        return len(self.pictures)

    def number_by(self, classes: Sequence[str]) -> None:
        """Numbers the classes as a model does; the images are COCO's."""
        self.pictures = self.pictures.numbered_by(classes)  # type: ignore[attr-defined]

    def only(self, samples: Ints) -> "BoxedImages":
        """Returns the subset of some images, renumbered in this order."""
        part, only = copy.copy(self), getattr(self.pictures, "only", None)
        part.pictures = SomePictures(self.pictures, samples) if only is None else only(samples)
        return part

    @property
    def records(self) -> object:
        """Records of the pictures if they are files, else None."""
        return getattr(self.pictures, "records", None)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Images and boxes that aren't used, by reason."""
        left_out: tuple[LeftOut, ...] = getattr(self.pictures, "left_out", ())
        return left_out

    def fingerprint(self) -> str:
        """Returns the fingerprint of the pictures."""
        return self.pictures.fingerprint()

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> Sequence[Bad]:
        """See `Dataset.read`."""
        numbers = None if random is None or not self.uniforms else random[:, : self.uniforms].tolist()

        def fill(row: int, sample: int) -> None:
            image: Any = out[IMAGE][row]
            if self._augment is None:
                made = paste(picture := _with_areas(self.pictures.read(sample)), image, 1.0, 0.0, 0.0)
                out[PIXEL][row] = _pixel(picture.image, image)
            elif numbers is None:
                made = paste(self.pictures.read(sample), image, 1.0, 0.0, 0.0)
            else:
                made = self._augmented(self._augment, sample, numbers[row], image)
            if self._augment is not None:
                made = _without(made, made.crowd)
            if len(made.label) > self._most:
                made = _largest(made, self._most)
            count = len(made.label)
            for name, rows in ((BOXES, made.boxes), (LABEL, made.label), (CROWD, made.crowd)):
                out[name][row, :count], out[name][row, count:] = rows, np.zeros((), rows.dtype)
            if self._augment is None:
                assert made.area is not None
                out[AREA][row, :count], out[AREA][row, count:] = made.area, 0
            out[COUNT][row] = count

        return fill_rows(samples, fill, self.pictures.name, self._on_corrupt, len(self))

    def _augmented(self, augment: BoxAugment, sample: int, numbers: list[float], out: Pixels) -> Picture:
        own, rest = numbers[:_PLACE], numbers[_PLACE:]
        if not rest or rest[0] >= augment.mosaic:
            return moved(self.pictures.read(sample), out, augment, own)
        others = [rest[3 + i * (1 + _PLACE) :][: 1 + _PLACE] for i in range(3)]
        try:
            pictures = [self.pictures.read(int(other[0] * len(self))) for other in others]
        except Corrupt:  # it is reported when it is read as a sample itself
            return moved(self.pictures.read(sample), out, augment, own)
        draws = [own, *(other[1:] for other in others)]
        return mosaic([self.pictures.read(sample), *pictures], out, augment, (rest[1], rest[2]), draws)


def paste(picture: Picture, out: Pixels, scale: float, down: float, right: float) -> Picture:
    """Resizes an image, keeping its aspect, and draws it into another; a larger one is cropped.

    Args:
        picture: Image of any size with its boxes.
        out: uint8 (height, width, channels), to be filled; background around the image.
        scale: Scale of the image; 1: as large as fits.
        down: Vertical position of the crop or the image, in [0, 1); 0: at the top.
        right: Horizontal position in [0, 1); 0: at the left.

    Returns:
        `out` with the boxes whose center is visible, clipped to the visible area.
    """
    height, width = picture.image.shape[:2]
    factor = scale * min(out.shape[0] / height, out.shape[1] / width)
    rows, columns = (
        _along(side, room, factor, number)
        for side, room, number in ((height, out.shape[0], down), (width, out.shape[1], right))
    )
    cut = picture.image[rows.first : rows.first + rows.length, columns.first : columns.first + columns.length]
    if (rows.size, columns.size) != out.shape[:2]:
        # Row by row: broadcasting three bytes per pixel takes numpy ten times as long.
        out[...] = np.tile(np.asarray(BACKGROUND[: out.shape[2]], np.uint8), (out.shape[1], 1))
    out[rows.at : rows.at + rows.size, columns.at : columns.at + columns.size] = _resized(
        cut, rows.size, columns.size
    )
    begin = np.array([columns.first, rows.first] * 2, np.float64)
    end = begin + [columns.length, rows.length] * 2
    stretch = np.array([columns.size / columns.length, rows.size / rows.length] * 2)
    boxes = picture.boxes.astype(np.float64)
    center = (boxes[:, :2] + boxes[:, 2:]) / 2
    seen = ((center >= begin[:2]) & (center < end[:2])).all(1)
    moved_boxes = (np.clip(boxes, begin, end) - begin) * stretch + [columns.at, rows.at] * 2
    made = picture._replace(image=out, boxes=moved_boxes.astype(np.float32))
    # A sliver may be empty in float32.
    empty = (made.boxes[:, 2:] <= made.boxes[:, :2]).any(1)
    return _without(made, np.asarray(~seen | empty))


def scale_in_room(sides: Sequence[int], room: Sequence[int]) -> tuple[float, float]:
    """Returns the pixels that `paste` gives a pixel of an image at scale 1, across and down.

    Args:
        sides: Height and width of the image.
        room: Height and width of the output.
    """
    down, across = _fitted(sides, room)
    return across.size / across.length, down.size / down.length


def flipped(picture: Picture) -> Picture:
    """Mirrors an image and its boxes left to right."""
    image = torch.from_numpy(picture.image).flip(1).numpy()  # ten times as fast as numpy's
    boxes = picture.boxes.copy()
    boxes[:, [0, 2]] = image.shape[1] - picture.boxes[:, [2, 0]]
    return picture._replace(image=image, boxes=boxes)


def moved(picture: Picture, out: Pixels, augment: BoxAugment, numbers: Sequence[float]) -> Picture:
    """Flips, scales and pastes an image by four random numbers in [0, 1)."""
    flip, scale, down, right = numbers
    low, high = augment.scale
    picture = flipped(picture) if flip < augment.flip else picture
    if low == high == 1:
        down = right = 0.0
    return paste(picture, out, low * (high / low) ** scale, down, right)


def mosaic(
    pictures: Sequence[Picture],
    out: Pixels,
    augment: BoxAugment,
    middle: tuple[float, float],
    numbers: Sequence[Sequence[float]],
) -> Picture:
    """Combines four images around a center (Bochkovskiy et al., 2020), each at the scale that it has alone.

    Args:
        pictures: Four pictures.
        out: uint8 (height, width, channels), to be filled.
        augment: Augmentation of each picture.
        middle: Vertical and horizontal position of the center within the inner half, in [0, 1).
        numbers: Four random numbers in [0, 1) for each picture.
    """
    height, width, _ = out.shape
    row, column = (
        int(side * (0.25 + 0.5 * number)) for side, number in zip((height, width), middle, strict=True)
    )
    parts = []
    for index, (picture, own) in enumerate(zip(pictures, numbers, strict=True)):
        top, left = (0, row)[index // 2], (0, column)[index % 2]
        view = out[top : row if index < 2 else height, left : column if index % 2 == 0 else width]
        # Relative to the full square: relative to its quarter, everything would have half its size.
        alone = min(height / picture.image.shape[0], width / picture.image.shape[1])
        fits = min(view.shape[0] / picture.image.shape[0], view.shape[1] / picture.image.shape[1])
        low, high = (alone / fits * edge for edge in augment.scale)
        part = moved(picture, view, augment._replace(scale=(low, high)), own)
        parts.append(part._replace(boxes=part.boxes + np.array([left, top] * 2, np.float32)))
    boxes, label, crowd = (np.concatenate(rows) for rows in zip(*(part[1:4] for part in parts), strict=True))
    return Picture(out, boxes, label, crowd)


class _Span(NamedTuple):
    """Range of pixels of an image along one axis (`first`, `length`) and in the output (`at`, `size`)."""

    first: int
    length: int
    at: int
    size: int


def _along(side: int, room: int, factor: float, number: float) -> _Span:
    if side * factor > room + 0.5:
        length = max(1, min(side, round(room / factor)))
        return _Span(int(number * (side - length + 1)), length, 0, room)
    size = max(1, min(room, round(side * factor)))
    return _Span(0, side, int(number * (room - size + 1)), size)


def _fitted(sides: Sequence[int], room: Sequence[int]) -> tuple[_Span, _Span]:
    factor = min(most / side for side, most in zip(sides, room, strict=True))
    down, across = (_along(side, most, factor, 0.0) for side, most in zip(sides, room, strict=True))
    return down, across


def _resized(image: Pixels, height: int, width: int) -> Pixels:
    if image.shape[:2] == (height, width):
        return image
    from trainer.data.formats.decode import resize

    with torch.inference_mode():
        planes = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
        pixels: Pixels = resize(planes, height, width)[0].permute(1, 2, 0).numpy()
    return pixels


def _without(picture: Picture, which: npt.NDArray[np.bool_]) -> Picture:
    return _rows(picture, ~which) if which.any() else picture


def _largest(picture: Picture, count: int) -> Picture:
    area = (picture.boxes[:, 2:] - picture.boxes[:, :2]).prod(1)
    kept = np.sort(np.argsort(-area, kind="stable")[:count])
    return _rows(picture, kept)


def _rows(picture: Picture, which: npt.NDArray[Any]) -> Picture:
    area = None if picture.area is None else picture.area[which]
    return Picture(picture.image, picture.boxes[which], picture.label[which], picture.crowd[which], area)


def _with_areas(picture: Picture) -> Picture:
    if picture.area is not None:
        return picture
    return picture._replace(area=(picture.boxes[:, 2:] - picture.boxes[:, :2]).prod(1))


def _pixel(image: Pixels, out: Pixels) -> float:
    """Returns the pixels of an image per pixel of `out` that `paste` fits it into."""
    rows, columns = _fitted(image.shape[:2], out.shape[:2])
    return float(image.shape[0] * image.shape[1] / (rows.size * columns.size))
