"""A folder of images by class, decoded to uint8: `root/<class>/<file>`."""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from trainer.data.dataset import Arrays, Field, spread
from trainer.errors import BadInputError
from trainer.keyed_rng import Float32, Ints

# Of how many files the fingerprint holds the size, and of how many the content.
_SIZES, _CONTENTS = 10_000, 32

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class FolderDataset:
    """Images below one folder for each class.

    Training images are cut by a random area and aspect ratio (Szegedy et al., "Going deeper with
    convolutions", 2015), evaluation images at the centre, and both resized with antialiasing. The
    cut draws from the four random numbers that the loader keys by sample and epoch.

    Args:
        root: The folder.
        size: Height and width of the images that are returned, in pixels.
        random_crop: True for training.

    Raises:
        BadInputError: If the folder is missing or holds no images.
    """

    def __init__(self, root: Path, size: int, random_crop: bool) -> None:
        """Lists the files."""
        if not root.is_dir():
            raise BadInputError(f"{root}: no such folder; data.path needs train/<class>/ and val/<class>/")
        self.classes = tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir()))
        names = [
            (number, os.fsencode(path.relative_to(root)))
            for number, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in _SUFFIXES
        ]
        if not names:
            raise BadInputError(f"{root}: no images ({', '.join(_SUFFIXES)}) below its class folders")
        # Here: torchvision takes three seconds, and other data sets do without it.
        from torchvision import io

        self._decode = io.decode_image
        self._mode = io.ImageReadMode.RGB
        self._root = root
        self._size = size
        self.uniforms = 4 if random_crop else 0
        # One array and not a list: a list of a million paths is copied page by page into every worker
        # as its reference counts are touched (pytorch#13246).
        self._paths = np.array([path for _, path in names])
        self._labels = np.array([number for number, _ in names], dtype=np.int64)
        self.units = 1
        self.arrays: Arrays | None = None
        self.in_process = False
        self.fields: Mapping[str, Field] = {
            "image": Field((3, size, size), np.dtype(np.uint8)),
            "label": Field((), np.dtype(np.int64)),
        }

    def __len__(self) -> int:
        """Number of images."""
        return len(self._labels)

    def fingerprint(self) -> str:
        """Of all names and labels, the sizes of some files and the content of a few.

        Asking for a size is a round trip on a network file system: not for each of a million files.
        """
        digest = hashlib.sha256(repr(self.classes).encode())
        digest.update(f"{self._paths.dtype}".encode() + self._paths.tobytes() + self._labels.tobytes())
        for sample in spread(len(self), _SIZES):
            digest.update(f"{_size(self._path(sample))} ".encode())
        for sample in spread(len(self), _CONTENTS):
            digest.update(_content(self._path(sample)))
        return f"{len(self)} samples {digest.hexdigest()[:16]}"

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> None:
        """Decodes and cuts images straight into the batch; see `Dataset.read`."""
        for row, sample in enumerate(samples):
            image = self._image(self._path(sample))
            height, width = image.shape[1:]
            if random is None:
                box = central_cut(height, width)
            else:
                box = random_cut(height, width, *random[row, : self.uniforms].tolist())
            cut = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
            size = (self._size, self._size)
            resized = torch.nn.functional.interpolate(cut[None], size, mode="bilinear", antialias=True)
            out["image"][row] = resized[0].numpy()
        out["label"][...] = self._labels[samples]

    def _path(self, sample: np.int64) -> Path:
        return self._root / os.fsdecode(self._paths[sample])

    def _image(self, path: Path) -> torch.Tensor:
        """Decodes a file: uint8 (3, height, width)."""
        try:
            # Read here and not by torchvision, which can't open names that aren't UTF-8.
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            image: torch.Tensor = self._decode(data, self._mode)
        except (RuntimeError, OSError, ValueError) as error:
            name = str(path).encode("utf-8", "replace").decode()
            raise BadInputError(f"{name}: not a readable image; mend or remove it") from error
        return image if image.dtype == torch.uint8 else (image.to(torch.int32) >> 8).to(torch.uint8)


# A file that can't be read has no part in the fingerprint: who trains on it says which it is.


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class Box(NamedTuple):
    """Part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def central_cut(height: int, width: int) -> Box:
    """The central square of 7/8 of the short side (224 of 256)."""
    side = max(1, round(min(height, width) * 0.875))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def random_cut(height: int, width: int, area: float, ratio: float, top: float, left: float) -> Box:
    """8 to 100 % of the area at 3:4 to 4:3, from four numbers in [0, 1).

    What doesn't fit is shortened to the image's side; torchvision draws ten times and then falls back
    to the centre.
    """
    target = height * width * (0.08 + 0.92 * area)
    aspect = math.exp(math.log(3 / 4) + ratio * math.log(16 / 9))
    cut_width = min(width, max(1, round(math.sqrt(target * aspect))))
    cut_height = min(height, max(1, round(math.sqrt(target / aspect))))
    return Box(
        int(top * (height - cut_height + 1)), int(left * (width - cut_width + 1)), cut_height, cut_width
    )
