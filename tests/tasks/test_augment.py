"""Promise: what is drawn for an image is its own, and comes back after a resume."""

from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from trainer.tasks.augment import Normalization, by_policy, crop, jitter, make_policy


def images(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


def test_jitter_is_torchvisions() -> None:
    byte, random = images(6, 3, 16, 16), numbers(6, 3)
    before = byte.clone()
    found = jitter(byte, random, 0.4)
    assert torch.equal(byte, before)
    for row, (image, factors) in enumerate(zip(byte, 1 + 0.4 * (2 * random - 1), strict=True)):
        expected = image.float() / 255
        for name, factor in zip(("brightness", "contrast", "saturation"), factors.tolist(), strict=True):
            expected = getattr(v2.functional, f"adjust_{name}")(expected, factor)
        assert (found[row].float() - expected * 255).abs().max() <= 1


@pytest.mark.parametrize(
    ("name", "magnitude", "torchvisions", "shape"),
    [
        ("randaugment", 9, v2.RandAugment(), (3, 16, 16)),
        ("randaugment", 30, v2.RandAugment(magnitude=30), (1, 4, 80)),
        ("trivialaugment", 9, v2.TrivialAugmentWide(), (3, 1, 20)),
    ],
)
def test_a_policy_of_each_image_is_torchvisions_to_the_bit(
    name: str, magnitude: int, torchvisions: Any, shape: tuple[int, ...]
) -> None:
    byte, policy = images(60, *shape), make_policy(name, magnitude)
    assert policy is not None
    torch.manual_seed(3)
    found = by_policy(byte, policy, 1)
    torch.manual_seed(3)
    assert torch.equal(found, torch.stack([torchvisions(image) for image in byte]))


@pytest.mark.parametrize(
    ("shape", "threads"), [((5, 31, 33, 1), 1), ((9, 151, 149, 3), 1), ((3, 5, 7, 3), 2)]
)
def test_flip_and_normalization_in_one_go_have_the_bits_of_one_after_the_other(
    shape: tuple[int, ...], threads: int
) -> None:
    """In blocks and in memory that was written before, for any layout."""
    byte, random = images(*shape), numbers(shape[0], 1)
    mean, std = torch.tensor([0.4, 0.5, 0.6])[: shape[3]], torch.tensor([0.2, 0.3, 0.4])[: shape[3]]
    normalize = Normalization(mean.tolist(), std.tolist())
    planes = torch.where(random.view(-1, 1, 1, 1) < 0.5, byte.flip(2), byte).permute(0, 3, 1, 2)
    scale, shift = (row.view(-1, 1, 1) for row in (1 / (255 * std), -mean / std))
    torch.set_num_threads(threads)  # each test begins with one
    for layout in (torch.channels_last, torch.contiguous_format) * 2:
        floats = planes.contiguous(memory_format=layout).float()
        expected = torch.addcmul(shift, floats, scale, out=floats)
        found = normalize(byte, layout == torch.channels_last, random)
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_memory_is_written_again_only_once_nothing_holds_what_was_in_it() -> None:
    first, second = images(2, 2, 128, 128, 3)
    normalize = Normalization((0.5,) * 3, (0.3,) * 3)
    place = normalize(first, True).data_ptr()
    assert normalize(second, True).data_ptr() == place

    weight = torch.ones((), requires_grad=True)
    holders: list[Any] = [
        lambda image: image[1:, 0],
        lambda image: image.numpy(),
        lambda image: image * weight,
    ]
    for held in holders:
        expected = normalize(first, True).sum()
        kept = held(normalize(first, True))
        content = torch.as_tensor(kept).detach().clone()
        normalize(second, True).zero_()
        assert torch.equal(torch.as_tensor(kept).detach(), content)
        if isinstance(kept, torch.Tensor) and kept.requires_grad:  # by the graph alone
            (gradient,) = torch.autograd.grad(kept.sum(), weight)
            assert torch.equal(gradient, expected)
        del kept
    place = normalize(first, True).data_ptr()
    assert normalize(first[:1], True).data_ptr() == place, "a smaller batch"
    with torch.inference_mode():
        assert normalize(second, True).data_ptr() == place
    assert not normalize(second, True).is_inference()
    torch.set_default_dtype(torch.float64)  # as `trainer check` does, for a while
    try:
        assert normalize(second, True).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert normalize(second, True).dtype == torch.float32


def test_a_crop_is_the_image_shifted_by_up_to_an_eighth() -> None:
    """As a cut of the image padded by its mirrored border, at a place of its own for each."""
    byte, random = images(6, 16, 16, 3), numbers(6, 2)
    random[0] = 0.5
    found = crop(byte, random)
    padded = v2.functional.pad(byte.permute(0, 3, 1, 2), [2], padding_mode="reflect")
    places = set()
    for row, (down, right) in enumerate((random * 5).floor().int().tolist()):
        assert torch.equal(found[row].permute(2, 0, 1), padded[row, :, down : down + 16, right : right + 16])
        places.add((down, right))
    assert torch.equal(found[0], byte[0]) and len(places) > 3
