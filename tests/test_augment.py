"""Promise: what is drawn for an image is its own, and comes back after a resume."""

import pytest
import torch
from torchvision.transforms import v2

from trainer.augment import by_policy, flip, jitter, make_policy, normalised


def images(count: int = 6, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, 16, 16), dtype=torch.uint8, generator=generator)


def numbers(count: int = 6) -> torch.Tensor:
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(1))


def test_jitter_is_each_images_own() -> None:
    byte, random = images(), numbers()
    whole = jitter(byte, random, 0.4)
    assert torch.equal(whole[2:4], jitter(byte[2:4], random[2:4], 0.4))
    assert all(not torch.equal(after, before) for after, before in zip(whole, byte, strict=True))
    assert torch.equal(jitter(byte, torch.full((6, 3), 0.5), 0.4), byte), "in the middle nothing changes"


def test_jitter_is_torchvisions() -> None:
    byte, random = images(), numbers()
    found = jitter(byte, random, 0.4)
    for row, (image, factors) in enumerate(zip(byte, 1 + 0.4 * (2 * random - 1), strict=True)):
        expected = image.float() / 255
        for change, factor in zip(
            (v2.functional.adjust_brightness, v2.functional.adjust_contrast, v2.functional.adjust_saturation),
            factors.tolist(),
            strict=True,
        ):
            expected = change(expected, factor)
        assert (found[row].float() - expected * 255).abs().max() <= 1


def test_one_channel_has_no_saturation() -> None:
    assert jitter(images(channels=1), numbers(), 0.4).shape == (6, 1, 16, 16)


@pytest.mark.parametrize("name", ["randaugment", "trivialaugment"])
def test_a_policy_is_drawn_by_the_shards_seed_and_for_each_group(name: str) -> None:
    policy = make_policy(name)
    assert policy is not None
    byte = images(32)

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16):
            return by_policy(byte, policy, 4)

    first = drawn(1)
    assert first.dtype == torch.uint8
    assert torch.equal(first, drawn(1))
    assert not torch.equal(first, drawn(2))
    torch.manual_seed(1)
    assert torch.equal(first[:4], policy(byte[:4])), "the first group has the first draw, in full precision"
    assert not torch.equal(first, policy(byte)), "and not all the same"


def test_flipping_bytes_is_flipping_floats() -> None:
    byte, random = images(), numbers()[:, :1]
    scale, shift = torch.rand(3, 1, 1), torch.rand(3, 1, 1)
    first = normalised(flip(byte, random), scale, shift, torch.contiguous_format)
    assert torch.equal(first, flip(normalised(byte, scale, shift, torch.contiguous_format), random))
