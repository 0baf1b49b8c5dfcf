"""Statistics of a data set on disk, and a comparison with its index."""

import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from trainer.data.corrupt import Corrupt
from trainer.data.dataset import spread
from trainer.data.formats.orientation import UPRIGHT, orientation
from trainer.data.formats.records import Records
from trainer.data.formats.sharded import ShardedRecords
from trainer.data.left_out import LeftOut
from trainer.errors import BadInputError

LOOKED_AT = 1000


def damaged(records: ShardedRecords, advance: Callable[[int], object] = lambda _: None) -> Iterator[str]:
    """Reads every sample and compares it with its hash.

    Yields:
        A line for each sample that isn't what was indexed.
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
    """Smallest, median and largest of some numbers."""

    least: float
    median: float
    most: float


class Statistics(NamedTuple):
    """Statistics of a data set; of pixels in at most 1000 images, evenly spaced.

    Attributes:
        samples: Number of samples.
        classes: Number of classes.
        per_class: Samples of a class.
        empty_classes: Classes without a sample.
        looked_at: Number of images that were decoded.
        bytes: As stored.
        height: In pixels.
        width: In pixels.
        decode_us: CPU time of reading and decoding one, in microseconds.
        mean: Of each channel over all pixels, on the scale 0 to 1.
        std: Likewise.
        exif_orientation: Images whose EXIF says that they are to be turned or mirrored.
        unreadable: Names and reasons of those that can't be decoded.
        left_out: What lies beside them and isn't read.
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
        BadInputError: If one can't be read, or none can be decoded.
    """
    from trainer.data.formats import decode  # here: torchvision takes three seconds, which no image costs

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
    counts = np.bincount(records.labels, minlength=len(records.classes))
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
    """Bytes, pixels and orientation of an image."""
    data = records.read(sample)
    height, width = records.shape(sample)
    if records.raw and height:
        return len(data), np.frombuffer(data, np.uint8).reshape(height, width, 3), UPRIGHT
    image = decode.decode_whole(data, records.reading)[0].permute(1, 2, 0).numpy()
    if records.raw:
        raise Corrupt("was not a readable image when it was packed")
    return len(data), image, orientation(data, decode.formats())


def _spread(values: Any) -> Spread:
    least, median, most = np.percentile(np.asarray(values, np.float64), (0, 50, 100)).round(1).tolist()
    return Spread(least, median, most)
