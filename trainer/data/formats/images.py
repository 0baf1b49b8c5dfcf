"""Images as a data set: decoded, cut and resized to uint8, channels last, straight into the batch."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from trainer.config.data import EVAL_CROP, OnCorrupt
from trainer.data.corrupt import Bad, Corrupt
from trainer.data.dataset import Arrays, Field
from trainer.data.formats.crop import Box, middle_cut, random_cut
from trainer.data.formats.records import Records, RecordsDataset
from trainer.rng import Float32, Ints


class ImageDataset(RecordsDataset):
    """Images of one size from records of any size.

    Training images are cut by a random area and aspect ratio and resized, evaluation images resized and cut
    at the center, with antialiasing. The cut draws from the four random numbers that the loader keys by
    sample and epoch.

    Args:
        records: Where the images come from.
        size: Height and width of the images that are returned, in pixels.
        random_crop: True for training.
        on_corrupt: What becomes of images that can't be decoded.
        crop_area: Smallest and largest share of the area that training cuts out.
        eval_crop: Share of the short side that evaluation sees.
    """

    def __init__(
        self,
        records: Records,
        size: int,
        random_crop: bool,
        on_corrupt: OnCorrupt = "fail",
        crop_area: tuple[float, float] = (0.08, 1.0),
        eval_crop: float = EVAL_CROP,
    ) -> None:
        # Here: torchvision takes three seconds, and not every run needs it; but before workers are forked,
        # of which each would take 150 MB for it.
        from trainer.data.formats import decode

        self._cut_out, self._resize, self._resized_middle = (
            decode.cut_out,
            decode.resize,
            decode.resized_middle,
        )
        super().__init__(records, {"image": Field((size, size, 3), np.dtype(np.uint8))}, on_corrupt)
        self._size, self._crop_area, self._eval_crop = size, crop_area, eval_crop
        self.uniforms = 4 if random_crop else 0

    def read(self, samples: Ints, random: Float32 | None, out: Arrays) -> Sequence[Bad]:
        """See `Dataset.read`."""
        rows = torch.from_numpy(out["image"]).permute(0, 3, 1, 2).unsqueeze(1).unbind(0)
        numbers = None if random is None else random[:, : self.uniforms].tolist()

        def fill(row: int, sample: int) -> None:
            with torch.inference_mode():
                if numbers is None:
                    image = self._resized_middle(self._cut(sample, middle_cut), self._size, self._eval_crop)
                else:
                    cut = self._cut(sample, partial(_by_numbers, numbers[row], self._crop_area), scaled=True)
                    image = self._resize(cut, self._size, self._size)
                rows[row].copy_(image)

        return self._filled(samples, fill, out)

    def _cut(self, sample: int, choose: Callable[[int, int], Box], scaled: bool = False) -> torch.Tensor:
        """uint8 (1, 3, height, width)."""
        records, side = self.records, self._size if scaled else 0
        if not records.raw:
            return self._cut_out(records.read(sample), choose, side, scaled, records.reading)
        height, width = records.shape(sample)
        if not height:
            # It is stored as it was: says why.
            self._cut_out(records.read(sample), choose, reading=records.reading)
            raise Corrupt("was not a readable image when it was packed")
        box = choose(height, width)
        # Only the rows of the cut: they lie one after another.
        rows = torch.from_numpy(records.rows(sample, box.top, box.height))
        return rows[:, box.left : box.left + box.width].permute(2, 0, 1)[None]


def _by_numbers(numbers: list[float], shares: tuple[float, float], height: int, width: int) -> Box:
    return random_cut(height, width, *numbers, shares=shares)
