"""Augmentation of a whole batch on its device, from random numbers keyed by sample or micro-batch."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

# ITU-R BT.601, as torchvision's rgb_to_grayscale.
_GRAY = (0.2989, 0.587, 0.114)
# In pixels times channels: batches from the first on are allocated as new pages each time; the second fit a
# CPU's cache as floats.
_NEW_PAGES, _IN_CACHE = 1 << 15, 1 << 19


class Normalization:
    """Normalizes uint8 images to floats: (pixel / 255 - mean) / std, as one multiplication and one addition.

    On a CPU it writes a few images at a time, which stay in the cache, into the previous batch's memory where
    that is free: page faults of new memory would cost more than the arithmetic.

    Args:
        mean: Mean of each channel, on the scale 0 to 1.
        std: Standard deviation of each channel, on the same scale.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Prepares the constants on the CPU; a device gets its own at the first call."""
        self._scale = 1 / (255 * torch.tensor(std))
        self._shift = -torch.tensor(mean) / torch.tensor(std)
        self._constants: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory = _Memory()

    def __call__(
        self, byte: torch.Tensor, channels_last: bool, flips: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalizes a batch.

        Args:
            byte: uint8 (n, h, w, c), contiguous.
            channels_last: True for a result in channels-last memory format, False for a contiguous one.
            flips: Random numbers (n, 1) in [0, 1) to mirror half of the images by, see `flip`.

        Returns:
            float32 (n, c, h, w).
        """
        n, height, width, channels = byte.shape
        last = channels_last or channels == 1  # one channel is both formats at once
        shape = (n, height, width, channels) if last else (n, channels, height, width)
        block = max(1, n)
        if byte.device.type != "cpu" or byte.numel() < _NEW_PAGES:
            image = torch.empty(shape, device=byte.device)
        else:
            image = self._memory.take(shape)
            if torch.get_num_threads() == 1:  # several threads would synchronize after each block
                block = max(1, _IN_CACHE // byte[0].numel())
        for start in range(0, n, block):
            pixels = byte[start : start + block]
            if flips is not None:
                pixels = flip(pixels, flips[start : start + block])
            self._write(image[start : start + block], pixels, last)
        return image.permute(0, 3, 1, 2) if last else image

    def _write(self, image: torch.Tensor, byte: torch.Tensor, last: bool) -> None:
        """Writes uint8 (n, h, w, c) into float32 of the same shape (`last`), or (n, c, h, w)."""
        if last:  # by rows of pixels: vector instructions need more than three channels
            scale, shift = self._rows(byte.device, byte.shape[2])
            rows = image.flatten(2)
            torch.addcmul(shift, rows.copy_(byte.flatten(2)), scale, out=rows)
        else:
            scale, shift = (row.view(-1, 1, 1) for row in self._rows(byte.device, 1))
            torch.addcmul(shift, byte.float().permute(0, 3, 1, 2), scale, out=image)

    def _rows(self, device: torch.device, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (device, width) not in self._constants:
            scale, shift = self._scale.repeat(width), self._shift.repeat(width)
            self._constants[device, width] = (scale.to(device), shift.to(device))
        return self._constants[device, width]


class _Memory:
    """CPU memory for float tensors, reused once no view, graph or array refers to it."""

    def __init__(self) -> None:
        self._base = torch.empty(0)
        self._holder: Callable[[], object] = lambda: None

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """Returns an uninitialized, contiguous tensor of the default dtype."""
        count = math.prod(shape)
        usable = len(self._base) >= count and self._base.dtype == torch.get_default_dtype()
        if self._holder() is not None or not usable:
            self._base = torch.empty(count)
        # A tensor made of an array refers to it for as long as its storage lives; torch has no other signal.
        array = self._base.numpy()[:count]
        self._holder = weakref.ref(array)
        return torch.from_numpy(array).view(*shape)


def flip(image: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Mirrors images (n, h, w, c) of any dtype whose random number, (n, 1) in [0, 1), is below 0.5."""
    mirrored = random.view(-1, 1, 1, 1) < 0.5
    flipped = image.flip(2)
    if image.device.type != "cpu" or image.dtype != torch.uint8:
        return torch.where(mirrored, flipped, image)
    # Bitwise, in a quarter of the time: `where` on a CPU selects byte by byte.
    flipped ^= image
    flipped *= mirrored.view(torch.uint8)
    flipped ^= image
    return flipped


def crop(image: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Shifts each image by up to an eighth of its side in each direction, with reflected borders.

    Like a random crop of a padded image (He et al., 2016, for CIFAR), by one gather for the whole batch.

    Args:
        image: (n, h, w, c) of any dtype.
        random: (n, 2) in [0, 1): the shifts down and right.

    Returns:
        (n, h, w, c).
    """
    count, height, width, _ = image.shape
    rows, columns = _shifted(height, random[:, :1]), _shifted(width, random[:, 1:])
    which = torch.arange(count, device=image.device).view(-1, 1, 1)
    return image[which, rows[:, :, None], columns[:, None, :]]


def _shifted(side: int, random: torch.Tensor) -> torch.Tensor:
    """Returns the source index of each pixel along a side: (n, 1) in [0, 1) to int64 (n, side)."""
    most = side // 8
    index = torch.arange(side, device=random.device) + (random * (2 * most + 1)).floor().long() - most
    return (side - 1) - ((side - 1) - index.abs()).abs()


def affine(image: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Rotates by up to 12 degrees, scales by up to 15 % and shifts by up to an eighth of the side.

    Args:
        image: float (n, c, h, w).
        random: (n, 5) in [0, 1): angle, width, height, shift right, shift down.

    Returns:
        float (n, c, h, w); pixels from outside repeat the border.
    """
    angle, width, height, right, down = random.mul(2).sub(1).view(-1, 5, 1, 1).unbind(1)
    cos, sin = (angle * 0.21).cos(), (angle * 0.21).sin()
    rows, columns = image.shape[2:]
    # Pixel centers on a scale from -1 to 1. Elementwise, not by affine_grid, whose matrix product autocast
    # would round to bf16: half a pixel of 224.
    x = torch.arange(1 - columns, columns, 2, device=image.device) / columns
    y = (torch.arange(1 - rows, rows, 2, device=image.device) / rows)[:, None]
    across = cos * (1 + width * 0.15) * x - sin * y + right * 0.25
    down = sin * x + cos * (1 + height * 0.15) * y + down * 0.25
    grid = torch.stack((across, down), 3)
    return F.grid_sample(image, grid, padding_mode="border", align_corners=False)


def jitter(byte: torch.Tensor, random: torch.Tensor, strength: float) -> torch.Tensor:
    """Changes brightness, contrast and saturation of each image by random factors, in this order.

    Like torchvision's ColorJitter with three equal strengths and no hue, but with a fixed order.

    Args:
        byte: uint8 (n, c, h, w).
        random: (n, 3) in [0, 1).
        strength: Factors lie between 1 - strength and 1 + strength.

    Returns:
        uint8 (n, c, h, w).
    """
    factors = 1 + strength * random.mul(2).sub(1)
    brightness, contrast, saturation = factors.view(-1, 3, 1, 1, 1).unbind(1)
    # In place: on a CPU page faults of new memory cost more than the arithmetic.
    image = byte.float().mul_(brightness).clamp_(0, 255)
    middle = _gray(image).mean((1, 2, 3), keepdim=True)
    image.sub_(middle).mul_(contrast).add_(middle).clamp_(0, 255)
    if image.shape[1] == 3:
        gray = _gray(image)
        image.sub_(gray).mul_(saturation).add_(gray).clamp_(0, 255)
    return image.round_().to(torch.uint8)


def _gray(image: torch.Tensor) -> torch.Tensor:
    """Grayscale of images: float (n, c, h, w) to (n, 1, h, w)."""
    if image.shape[1] != 3:
        return image[:, :1]
    red, green, blue = image.unbind(1)
    return (red * _GRAY[0] + green * _GRAY[1] + blue * _GRAY[2])[:, None]


def make_policy(name: str, magnitude: int = 9) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns torchvision's RandAugment (Cubuk et al., 2020) or TrivialAugment (Müller and Hutter, 2021).

    It draws from torch's CPU generator, which is keyed by the micro-batch. None for the name "none".
    """
    if name == "none":
        return None
    from torchvision.transforms import v2  # slow to import

    policy: Any = v2.RandAugment(magnitude=magnitude) if name == "randaugment" else v2.TrivialAugmentWide()
    return policy  # type: ignore[no-any-return]


def by_policy(byte: torch.Tensor, policy: Callable[[torch.Tensor], torch.Tensor], group: int) -> torch.Tensor:
    """Applies a policy to groups of a batch; the images of a group share its random parameters.

    Args:
        byte: uint8 (n, c, h, w).
        policy: From `make_policy`.
        group: Images in a group; 1 is the policy as published, and the slowest on a GPU.

    Returns:
        uint8 (n, c, h, w).
    """
    if byte.is_meta:  # no policy changes shapes
        return byte
    # autocast would round the grid of a rotation to bf16.
    with torch.autocast(byte.device.type, enabled=False):
        return torch.cat([policy(images) for images in byte.split(group)])


# --- mixup and CutMix: torchvision's draw one fraction for a whole micro-batch, on the CPU ---


class Mixed(NamedTuple):
    """Mixed images.

    Attributes:
        image: float (n, c, h, w).
        other: int64 (n,): index of the image that was mixed into each.
        fraction: float (n,): fraction of each image that is its own.
    """

    image: torch.Tensor
    other: torch.Tensor
    fraction: torch.Tensor


def mix(image: torch.Tensor, mixup: float, cutmix: float) -> Mixed:
    """Mixes each image with its neighbor, by mixup (Zhang et al., 2018) or CutMix (Yun et al., 2019).

    Fractions are drawn for each image from the device's default generator, which is keyed by the micro-batch.

    Args:
        image: float (n, c, h, w).
        mixup: Parameter of mixup's symmetric Beta distribution; 0: no mixup.
        cutmix: Parameter of CutMix's; 0: no CutMix. If both are positive, each image gets one, at random.
    """
    count, device = len(image), image.device
    other = torch.arange(count, device=device).roll(1)
    blend = torch.full((count,), mixup > 0, device=device)
    if mixup and cutmix:
        blend = torch.rand(count, device=device) < 0.5
    own = torch.ones(count, device=device)
    if mixup:
        own = torch.where(blend, _beta(mixup, count, device), own)
    box = torch.zeros((), dtype=torch.bool, device=device)
    if cutmix:
        box, outside = _box(_beta(cutmix, count, device), image.shape[2], image.shape[3])
        box = box & ~blend.view(-1, 1, 1, 1)
        own = torch.where(blend, own, outside)
    partner = image[other]
    weight = torch.where(blend, own, 1.0).view(-1, 1, 1, 1).to(image.dtype)
    return Mixed(torch.where(box, partner, torch.lerp(partner, image, weight)), other, own)


def _beta(parameter: float, count: int, device: torch.device) -> torch.Tensor:
    """Draws from the symmetric Beta distribution: float (count,)."""
    both = torch.full((count, 2), parameter, device=device)
    return torch._sample_dirichlet(both)[:, 0]


def _box(fraction: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws rectangles that leave about `fraction` of an image; the image's border may clip them.

    Returns:
        bool (n, 1, height, width), and the fraction of the pixels outside of it, float (n,).
    """
    side = (1 - fraction).sqrt()
    inside = []
    for pixels in (height, width):
        center = torch.rand(len(fraction), device=fraction.device) * pixels
        half = side * pixels / 2
        position = torch.arange(pixels, device=fraction.device) + 0.5
        low, high = (center - half)[:, None], (center + half)[:, None]
        inside.append((position >= low) & (position < high))
    rows, columns = inside
    box = rows[:, None, :, None] & columns[:, None, None, :]
    return box, 1 - box.float().mean((1, 2, 3))
