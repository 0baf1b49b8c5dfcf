"""Augmentation of a whole batch on its device; the numbers that it draws on are keyed, not carried."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

# ITU-R BT.601, as torchvision's rgb_to_grayscale.
_GRAY = (0.2989, 0.587, 0.114)
# Pixels times channels: from how many on memory is new pages each time, how many fit a CPU's cache as floats.
_NEW_PAGES, _IN_CACHE = 1 << 15, 1 << 19


class Normalization:
    """Bytes to floats: (pixel / 255 - mean) / std, as one multiplication and one addition.

    On a CPU a few images at a time, which stay in its cache, and into the memory of the batch before where
    that is free: new pages would cost more than what is written into them.

    Args:
        mean: Of each channel, on the scale 0 to 1.
        std: Likewise.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Puts nothing on a device yet."""
        self._scale = 1 / (255 * torch.tensor(std))
        self._shift = -torch.tensor(mean) / torch.tensor(std)
        self._there: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory = _Memory()

    def __call__(
        self, byte: torch.Tensor, channels_last: bool, flips: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Writes the floats of a batch.

        Args:
            byte: uint8 (n, h, w, c), contiguous.
            channels_last: Whether the result is channels last in memory, or contiguous.
            flips: Numbers (n, 1) in [0, 1) by which half of the images are mirrored, see `flip`.

        Returns:
            float32 (n, c, h, w).
        """
        n, height, width, channels = byte.shape
        last = channels_last or channels == 1  # where it is both in memory, by whole rows
        shape = (n, height, width, channels) if last else (n, channels, height, width)
        block = max(1, n)
        if byte.device.type != "cpu" or byte.numel() < _NEW_PAGES:
            image = torch.empty(shape, device=byte.device)
        else:
            image = self._memory.take(shape)
            if torch.get_num_threads() == 1:  # several would wait for each other after each block
                block = max(1, _IN_CACHE // byte[0].numel())
        parts = zip(image.split(block), byte.split(block), strict=True)
        for number, (floats, pixels) in enumerate(parts):
            numbers = None if flips is None else flips[number * block : (number + 1) * block]
            self._write(floats, pixels if numbers is None else flip(pixels, numbers), last)
        return image.permute(0, 3, 1, 2) if last else image

    def _write(self, image: torch.Tensor, byte: torch.Tensor, last: bool) -> None:
        """uint8 (n, h, w, c) into float32 of the same shape, or (n, c, h, w)."""
        if last:  # whole rows of pixels: along three channels alone no processor gets into its stride
            scale, shift = self._rows(byte.device, byte.shape[2])
            rows = image.flatten(2)
            torch.addcmul(shift, rows.copy_(byte.flatten(2)), scale, out=rows)
        else:
            scale, shift = (row.view(-1, 1, 1) for row in self._rows(byte.device, 1))
            torch.addcmul(shift, byte.float().permute(0, 3, 1, 2), scale, out=image)

    def _rows(self, device: torch.device, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (device, width) not in self._there:
            scale, shift = self._scale.repeat(width), self._shift.repeat(width)
            self._there[device, width] = (scale.to(device), shift.to(device))
        return self._there[device, width]


class _Memory:
    """Memory of a float tensor on the CPU, used again once no view, graph or array holds it."""

    def __init__(self) -> None:
        self._base = torch.empty(0)
        self._holder: Callable[[], object] = lambda: None

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """float32, contiguous; what is in it is anything."""
        count = math.prod(shape)
        if self._holder() is not None or len(self._base) < count:
            self._base = torch.empty(count)
        # torch keeps the array for as long as anything of the tensor lives, and says so to nobody else.
        array = self._base.numpy()[:count]
        self._holder = weakref.ref(array)
        return torch.from_numpy(array).view(*shape)


def flip(image: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Mirrors half of the images: any dtype (n, h, w, c), numbers (n, 1) in [0, 1)."""
    mirrored = random.view(-1, 1, 1, 1) < 0.5
    flipped = image.flip(2)
    if image.device.type != "cpu" or image.dtype != torch.uint8:
        return torch.where(mirrored, flipped, image)
    # The same by bits, a quarter of the time: a CPU chooses byte by byte.
    flipped ^= image
    flipped *= mirrored.view(torch.uint8)
    flipped ^= image
    return flipped


def crop(image: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Shifts each image by up to an eighth of its side each way; what comes from outside mirrors the border.

    As a cut of a padded image (He et al., 2016, for CIFAR), with one gather for the whole batch.

    Args:
        image: Any dtype (n, h, w, c).
        random: (n, 2) in [0, 1): down, right.

    Returns:
        (n, h, w, c).
    """
    count, height, width, _ = image.shape
    rows, columns = _shifted(height, random[:, :1]), _shifted(width, random[:, 1:])
    which = torch.arange(count, device=image.device).view(-1, 1, 1)
    return image[which, rows[:, :, None], columns[:, None, :]]


def _shifted(side: int, random: torch.Tensor) -> torch.Tensor:
    """Returns source indexes of the pixels along a side: (n, 1) in [0, 1) to int64 (n, side)."""
    most = side // 8
    index = torch.arange(side, device=random.device) + (random * (2 * most + 1)).floor().long() - most
    return (side - 1) - ((side - 1) - index.abs()).abs()


def affine(image: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Turns by up to 12 degrees, scales by up to 15 % and shifts by up to an eighth of the side.

    Args:
        image: float (n, c, h, w).
        random: (n, 5) in [0, 1): angle, width, height, shift right, shift down.

    Returns:
        float (n, c, h, w); what comes from outside repeats the border.
    """
    angle, width, height, right, down = random.mul(2).sub(1).view(-1, 5, 1, 1).unbind(1)
    cos, sin = (angle * 0.21).cos(), (angle * 0.21).sin()
    rows, columns = image.shape[2:]
    # The middle of each pixel on a scale from -1 to 1. By products and sums of each element and not by
    # affine_grid, whose matrix product autocast would round to bf16: half a pixel of 224.
    x = torch.arange(1 - columns, columns, 2, device=image.device) / columns
    y = (torch.arange(1 - rows, rows, 2, device=image.device) / rows)[:, None]
    across = cos * (1 + width * 0.15) * x - sin * y + right * 0.25
    down = sin * x + cos * (1 + height * 0.15) * y + down * 0.25
    grid = torch.stack((across, down), 3)
    return F.grid_sample(image, grid, padding_mode="border", align_corners=False)


def jitter(byte: torch.Tensor, random: torch.Tensor, strength: float) -> torch.Tensor:
    """Changes brightness, contrast and saturation of each image by a factor of its own, in this order.

    As torchvision's ColorJitter with three equal strengths and no hue, which draws the order as well.

    Args:
        byte: uint8 (n, c, h, w).
        random: (n, 3) in [0, 1).
        strength: Factors lie between 1 - strength and 1 + strength.

    Returns:
        uint8 (n, c, h, w).
    """
    factors = 1 + strength * random.mul(2).sub(1)
    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(1)
    # In place: on a CPU new pages of memory cost more than the arithmetic.
    image = byte.float().mul_(brightness).clamp_(0, 255)
    middle = _gray(image).mean((1, 2, 3), keepdim=True)
    image.sub_(middle).mul_(contrast).add_(middle).clamp_(0, 255)
    if image.shape[1] == 3:
        gray = _gray(image)
        image.sub_(gray).mul_(saturation).add_(gray).clamp_(0, 255)
    return image.round_().to(torch.uint8)


def _gray(image: torch.Tensor) -> torch.Tensor:
    """float (n, c, h, w) to (n, 1, h, w)."""
    if image.shape[1] != 3:
        return image[:, :1]
    red, green, blue = image.unbind(1)
    return (red * _GRAY[0] + green * _GRAY[1] + blue * _GRAY[2])[:, None]


def make_policy(name: str, magnitude: int = 9) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """RandAugment (Cubuk et al., 2020) or TrivialAugment (Müller and Hutter, 2021), from torchvision.

    It draws from torch's CPU generator, which is seeded anew for each micro-batch.
    """
    if name == "none":
        return None
    from torchvision.transforms import v2  # here: it takes seconds

    policy: Any = v2.RandAugment(magnitude=magnitude) if name == "randaugment" else v2.TrivialAugmentWide()
    return policy  # type: ignore[no-any-return]


def by_policy(byte: torch.Tensor, policy: Callable[[torch.Tensor], torch.Tensor], group: int) -> torch.Tensor:
    """Applies a policy to groups of a batch: the images of a group share what is drawn.

    Args:
        byte: uint8 (n, c, h, w).
        policy: From `make_policy`.
        group: Images that share a draw; 1 is the policy as published, and the slowest on a GPU.

    Returns:
        uint8 (n, c, h, w).
    """
    if byte.is_meta:  # shapes only, which no policy changes
        return byte
    # autocast would round the grid of a rotation to bf16.
    with torch.autocast(byte.device.type, enabled=False):
        return torch.cat([policy(part) for part in byte.split(group)])
