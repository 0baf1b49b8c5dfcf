"""Random images with random boxes, to measure speed and to try a recipe."""

from collections.abc import Sequence

import numpy as np

from trainer.data.formats.boxes import Picture
from trainer.rng import Purpose, key


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
