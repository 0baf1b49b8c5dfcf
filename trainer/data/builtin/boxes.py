"""Built-in data sets for detection: handwritten digits on noisy canvases, and noise with boxes.

Each canvas follows from its number alone, by counter-based random numbers (`trainer.rng`).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.data.formats.boxes import Picture, Pixels
from trainer.data.sources import digits
from trainer.rng import Ints, Purpose, key, keys

SIZE = 96  # of a canvas, in pixels
SMALLEST, LARGEST = 16, 36  # side of a digit's image, in pixels
MOST = 6  # digits on a canvas; at least one
OVERLAP = 0.1  # largest intersection of two boxes, as a fraction of the smaller one's area
INK = 80  # gray level from which a pixel counts as ink; a digit's box is the bounding box of its ink
TRAIN, TEST = 4096, 512  # number of canvases

_LEVEL = _NOISE = 48  # highest gray level of the background, and of the noise added to each pixel
_BRIGHTEST = 255 - _LEVEL - _NOISE  # highest gray level of ink before it is added to the background
_TRIES = 8  # places that are tried for a digit; if it overlaps others at each, it is left out


class DigitsCanvas:
    """Canvases in memory, drawn with the digits of the training or of the test part; see `Pictures`.

    Args:
        part: 0 for training, 1 for testing.
        count: Number of canvases.
    """

    channels = 1
    most = MOST
    in_memory = True
    classes: Sequence[str] = tuple("0123456789")

    def __init__(self, part: int, count: int) -> None:
        image, label = digits()[part]
        self._pictures = [_draw(key(Purpose.DATA, part, number), image, label) for number in range(count)]

    def __len__(self) -> int:
        return len(self._pictures)

    def fingerprint(self) -> str:
        """Returns the number of canvases and a hash of all pixels and boxes."""
        digest = hashlib.sha256()
        for picture in self._pictures:
            for array in picture[:4]:  # the areas are None, which has no bytes but those of an address
                digest.update(np.ascontiguousarray(array).tobytes())
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def name(self, sample: int) -> str:
        """Returns "canvas N"."""
        return f"canvas {sample}"

    def read(self, sample: int) -> Picture:
        """Returns a canvas with its boxes."""
        return self._pictures[sample]


def _draw(own: int, images: npt.NDArray[np.uint8], labels: Ints) -> Picture:
    """Draws a canvas: digits one after another, each at a place where it overlaps the others little.

    Args:
        own: Key of the canvas's random numbers.
        images: Digits to choose from, uint8 (n, height, width, 1).
        labels: Their classes, int64 (n,).
    """
    canvas = _noise(own)
    uniform = (keys(key(own, 1), np.arange(2 + MOST * (3 + 2 * _TRIES))) >> np.uint64(11)) * 2.0**-53
    boxes = list[list[int]]()
    classes = list[int]()
    for draw in uniform[2:].reshape(MOST, -1)[: 1 + int(uniform[0] * MOST)]:
        which = int(draw[0] * len(labels))
        side = SMALLEST + int(draw[1] * (LARGEST - SMALLEST + 1))
        ink = enlarged(images[which, :, :, 0], side)
        rows, columns = (np.flatnonzero((ink >= INK).any(axis)) for axis in (1, 0))
        for down, right in draw[3:].reshape(_TRIES, 2):
            top, left = (int(fraction * (SIZE - side + 1)) for fraction in (down, right))
            box = [left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1]
            if all(_covered(box, other) <= OVERLAP for other in boxes):
                view = canvas[top : top + side, left : left + side]
                view += ink * (0.5 + 0.5 * draw[2]) * (_BRIGHTEST / 255)
                boxes.append(box)
                classes.append(int(labels[which]))
                break
    pixels = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)[:, :, None]
    return Picture(
        pixels,
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array(classes, np.int64),
        np.zeros(len(classes), np.bool_),
    )


def enlarged(image: Pixels, side: int) -> npt.NDArray[np.float64]:
    """Resizes a square image bilinearly, as torch with align_corners=False.

    Args:
        image: uint8 (n, n), n at least 2.
        side: Side of the result, n or more: a smaller one isn't antialiased.

    Returns:
        float64 (side, side).
    """
    middle = (np.arange(side) + 0.5) * len(image) / side - 0.5
    below = np.clip(np.floor(middle).astype(np.int64), 0, len(image) - 2)
    weight = np.clip(middle - below, 0, 1)
    matrix = np.zeros((side, len(image)))
    matrix[np.arange(side), below] = 1 - weight
    matrix[np.arange(side), below + 1] = weight
    return np.asarray(matrix @ image @ matrix.T)


def _noise(own: int) -> npt.NDArray[np.float64]:
    """Returns a background of one gray level with uniform noise on each pixel, float64 (SIZE, SIZE)."""
    bits = keys(key(own, 0), np.arange(SIZE * SIZE // 8 + 1))
    byte = bits.astype("<u8").view(np.uint8).astype(np.float64)
    return np.asarray(byte[: SIZE * SIZE].reshape(SIZE, SIZE) * (_NOISE / 255) + byte[-1] * (_LEVEL / 255))


def _covered(one: list[int], other: list[int]) -> float:
    """Returns the intersection of two boxes as a fraction of the smaller one's area."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    least = min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return max(0, width) * max(0, height) / least


class SyntheticPictures:
    """Square images of noise, each with 1 to 8 boxes.

    Args:
        size: Height and width of an image, in pixels.
        classes: Number of classes.
        count: Number of images.
        seed: Seed of the random numbers.
    """

    channels = 3
    most = 8
    in_memory = True

    def __init__(self, size: int, classes: int, count: int, seed: int) -> None:
        """Draws the boxes, and the noise that all images are slices of."""
        self.classes: Sequence[str] = tuple(str(number) for number in range(classes))
        self._size, self._count = size, count
        random = np.random.Generator(np.random.Philox(key(seed, Purpose.DATA)))
        self._noise = np.frombuffer(random.bytes(size * size * 3 + count), np.uint8).copy()
        corners = np.sort(random.random((count, self.most, 2, 2)), 2)
        side = np.maximum(corners[:, :, 1] - corners[:, :, 0], 0.1)
        begin = corners[:, :, 0] * (1 - side)
        self._boxes = (np.concatenate((begin, begin + side * 0.99), 2) * size).astype(np.float32)
        self._labels = random.integers(0, classes, (count, self.most), dtype=np.int64)
        self._counts = random.integers(1, self.most + 1, count)

    def __len__(self) -> int:
        return self._count

    def fingerprint(self) -> str:
        """Returns count, size and classes: the pixels are noise."""
        return f"{self._count} samples of noise, {self._size} pixels, {len(self.classes)} classes"

    def name(self, sample: int) -> str:
        """Returns "image N"."""
        return f"image {sample}"

    def read(self, sample: int) -> Picture:
        """Returns an image with its boxes; no two images are equal."""
        size, boxes = self._size, int(self._counts[sample])
        image = self._noise[sample : sample + size * size * 3].reshape(size, size, 3)
        crowd = np.zeros(boxes, np.bool_)
        return Picture(image, self._boxes[sample, :boxes], self._labels[sample, :boxes], crowd)
