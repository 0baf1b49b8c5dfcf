"""Data set of images, decoded, cropped and resized into the batch: uint8, channels last."""

from collections.abc import Callable, Sequence

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

    Training takes a crop of random area and aspect ratio and resizes it, evaluation resizes and takes the
    center crop, with antialiasing. The random crop uses four random numbers, which the loader keys by sample
    and epoch.

    Args:
        records: Stored images.
        size: Height and width of the images that are returned, in pixels.
        random_crop: True for training.
        on_corrupt: data.on_corrupt, for images that can't be decoded.
        crop_area: Smallest and largest fraction of the area that training crops.
        eval_crop: Fraction of the short side that evaluation crops.
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
        # Imported here, as torchvision takes 3 s and not every run needs it; and before workers are forked,
        # which would take 150 MB each.
        from trainer.data.formats import decode

        self._cut_out, self._resize = decode.cut_out, decode.resize
        self._resized_middle = decode.resized_middle
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
                    own, area = numbers[row], self._crop_area
                    cut = self._cut(sample, lambda h, w: random_cut(h, w, *own, shares=area), scaled=True)
                    image = self._resize(cut, self._size, self._size)
                rows[row].copy_(image)

        return self._filled(samples, fill, out)

    def _cut(self, sample: int, choose: Callable[[int, int], Box], scaled: bool = False) -> torch.Tensor:
        """Returns the crop that `choose` takes of a sample, uint8 (1, 3, height, width)."""
        records, side = self.records, self._size if scaled else 0
        if not records.raw:
            return self._cut_out(records.read(sample), choose, side, scaled, records.upright)
        height, width = records.shape(sample)
        if not height:
            # It was stored as it was: decoding gives the reason.
            self._cut_out(records.read(sample), choose, upright=records.upright)
            raise Corrupt("was not a readable image when it was packed")
        box = choose(height, width)
        # Only the rows of the crop, which are contiguous.
        rows = torch.from_numpy(records.rows(sample, box.top, box.height))
        return rows[:, box.left : box.left + box.width].permute(2, 0, 1)[None]
