"""Promise: what is seen of an image is what torchvision's transforms make of it, whatever its shape."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import _geometry

from trainer.data.formats import crop
from trainer.data.formats.crop import Box, middle_cut, random_cut
from trainer.data.formats.decode import resized_middle
from trainer.rng import uniforms

# Height and width: squares, photographs, lines, columns, one pixel, and panoramas.
SHAPES = [(1, 20), (1, 500), (37, 740), (480, 640), (1080, 1920)]
SHAPES += [(1, 1), (224, 224), *(shape[::-1] for shape in SHAPES[1:4])]
SEEN = [(32, 0.875, 37), (224, 0.875, 256), (224, 0.95, 236), (224, 1, 224)]


def torchvisions_cut(patch: pytest.MonkeyPatch, height: int, width: int, numbers: list[float]) -> Box:
    """Its RandomResizedCrop with these numbers in place of what it draws."""
    cut = v2.RandomResizedCrop(224, scale=(0.08, 1.0))
    drawn = iter([numbers, *(crop._drawn_again(numbers, attempt) for attempt in range(1, 10))])
    left: list[float] = []

    def next_number() -> float:
        if not left:
            left.extend(next(drawn))
        return left.pop(0)

    def uniform(low: Any, high: Any) -> torch.Tensor:
        if high == 1.0:
            left.clear()  # a new attempt: places that weren't asked for are left out
        return torch.tensor(float(low) + (float(high) - float(low)) * next_number(), dtype=torch.float64)

    def integer(low: int, high: int, **_: Any) -> torch.Tensor:
        return torch.tensor(int(low + next_number() * (high - low)))

    empty = lambda _: SimpleNamespace(uniform_=uniform)  # noqa: E731
    cut._log_ratio = torch.log(torch.tensor(cut.ratio, dtype=torch.float64))
    with patch.context() as patched:
        patched.setattr(_geometry, "torch", SimpleNamespace(empty=empty, exp=torch.exp, randint=integer))
        patched.setattr(_geometry, "query_size", lambda _: (height, width))
        found = cut.make_params([])
    return Box(found["top"], found["left"], found["height"], found["width"])


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_a_random_cut_is_torchvisions(height: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for numbers in uniforms(0, np.zeros(60, np.int64), np.arange(60), 4).tolist():
        found = random_cut(height, width, *numbers)
        assert found == torchvisions_cut(monkeypatch, height, width, numbers)


@pytest.mark.parametrize(("height", "width"), SHAPES)
@pytest.mark.parametrize(("side", "share", "short"), SEEN)
def test_evaluation_sees_torchvisions(height: int, width: int, side: int, share: float, short: int) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8, generator=generator)
    cut = middle_cut(height, width)
    assert cut.height * cut.width == min(height, 32 * width) * min(width, 32 * height)
    seen = image[:, :, cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
    expected = v2.Compose([v2.Resize(short), v2.CenterCrop(side)])(seen)
    # Where a processor has no AVX2, torchvision resizes as floats.
    rounding = 0 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 1
    assert (resized_middle(seen, side, share).int() - expected.int()).abs().max() <= rounding


def test_what_is_drawn_again_is_uniform_and_of_its_own() -> None:
    numbers = uniforms(0, np.zeros(1000, np.int64), np.arange(1000), 4).astype(np.float64)
    again = np.array([[crop._drawn_again(row, attempt) for attempt in (1, 2)] for row in numbers.tolist()])
    columns = np.concatenate([numbers, again.reshape(1000, 8)], axis=1)
    assert ((columns >= 0) & (columns < 1)).all()
    assert abs(columns.mean(0) - 0.5).max() < 0.05
    assert abs(columns.std(0) - 12**-0.5).max() < 0.02
    assert abs(np.corrcoef(columns.T) - np.eye(12)).max() < 0.13
