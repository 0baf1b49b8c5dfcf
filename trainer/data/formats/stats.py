"""Statistics of a data set on disk, and verification against its index."""

import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from trainer.data.corrupt import Corrupt
from trainer.data.dataset import spread
from trainer.data.formats.orientation import UPRIGHT, orientation
from trainer.data.formats.records import Records
from trainer.data.left_out import LeftOut
from trainer.errors import BadInputError

LOOKED_AT = 1000


def damaged(records: Records, advance: Callable[[int], object] = lambda _: None) -> Iterator[str]:
    """Reads every sample and compares it with its hash.

    Yields:
        A line for each sample that differs from its hash, or can't be read.
    """
    for sample in range(len(records)):
        try:
            records.read(sample)
        except BadInputError as error:
            yield str(error)
        except Corrupt as error:
            yield f"{records.name(sample)}: {error}"
        advance(1)


class Spread(NamedTuple):
    """Minimum, median and maximum."""

    least: float
    median: float
    most: float


class Statistics(NamedTuple):
    """Statistics of a data set; pixel statistics are of at most 1000 evenly spaced images.

    Attributes:
        samples: Number of samples.
        classes: Number of classes.
        per_class: Samples per class.
        empty_classes: Classes without a sample.
        looked_at: Number of images that were decoded.
        bytes: Stored size.
        height: Height in pixels.
        width: Width in pixels.
        decode_us: CPU time of reading and decoding an image, in microseconds.
        mean: Mean of each channel over all pixels, on the scale 0 to 1.
        std: Standard deviation of each channel on the same scale.
        exif_orientation: Images with an EXIF orientation other than upright.
        unreadable: Names of images that can't be decoded, with the reason.
        left_out: Files that aren't read, by reason.
    """

    samples: int
    classes: int
    per_class: Spread
    empty_classes: int
    looked_at: int
    bytes: Spread
    height: Spread
    width: Spread
    decode_us: Spread
    mean: list[float]
    std: list[float]
    exif_orientation: int
    unreadable: list[str]
    left_out: Sequence[LeftOut]


def statistics(records: Records, advance: Callable[[int], object] = lambda _: None) -> Statistics:
    """Decodes some images and counts all labels.

    Raises:
        BadInputError: If an image can't be read, or none can be decoded.
    """
    from trainer.data.formats import decode  # torchvision takes 3 s, which isn't to count as decoding

    rows, unreadable = list[tuple[float, float, float, float]](), list[str]()
    total, squares, pixels, turned = np.zeros(3), np.zeros(3), 0, 0
    chosen = spread(len(records), LOOKED_AT).tolist()
    for sample in chosen:
        began = time.process_time_ns()
        try:
            stored, image, turn = _decoded(decode, records, sample)
        except Corrupt as error:
            unreadable.append(f"{records.name(sample)}: {error}")
            continue
        finally:
            advance(1)
        turned += turn != UPRIGHT
        rows.append((stored, image.shape[0], image.shape[1], (time.process_time_ns() - began) / 1e3))
        flat = image.reshape(-1, 3) / 255.0
        total, squares, pixels = total + flat.sum(0), squares + (flat**2).sum(0), pixels + len(flat)
    if not rows:
        raise BadInputError(f"none of {len(chosen)} images can be decoded: {unreadable[0]}")
    counts = records.counts()
    mean = total / pixels
    size, height, width, cost = (_spread(column) for column in np.array(rows).T)
    return Statistics(
        len(records),
        len(records.classes),
        _spread(counts),
        int((counts == 0).sum()),
        len(rows),
        size,
        height,
        width,
        cost,
        mean.round(4).tolist(),
        np.sqrt(np.maximum(squares / pixels - mean**2, 0)).round(4).tolist(),
        turned,
        unreadable,
        records.left_out,
    )


def _decoded(decode: ModuleType, records: Records, sample: int) -> tuple[int, np.ndarray[Any, Any], int]:
    """Returns stored bytes, pixels and EXIF orientation of an image."""
    data = records.read(sample)
    height, width = records.shape(sample)
    if records.raw and height:
        return len(data), np.frombuffer(data, np.uint8).reshape(height, width, 3), UPRIGHT
    image = decode.decode_whole(data, records.upright)[0].permute(1, 2, 0).numpy()
    if records.raw:
        raise Corrupt("was not a readable image when it was packed")
    return len(data), image, orientation(data, decode.formats())


def _spread(values: Any) -> Spread:
    least, median, most = np.percentile(np.asarray(values, np.float64), (0, 50, 100)).round(1).tolist()
    return Spread(least, median, most)
