"""Promise: what is seen of an image is what torchvision's transforms make of it, whatever its shape."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import _geometry

from trainer.config.data import DataConfig
from trainer.data.formats import crop
from trainer.data.formats.crop import Box, middle_cut, random_cut
from trainer.data.formats.decode import cut_out, resized_middle
from trainer.data.sources import load_images
from trainer.rng import uniforms

# Height and width: squares, photographs, a line, a column, one pixel, and panoramas.
SHAPES = [
    (224, 224),
    (480, 640),
    (640, 480),
    (1080, 1920),
    (1, 20),
    (1, 500),
    (500, 1),
    (1, 1),
    (37, 740),
    (740, 37),
]


def torchvisions_cut(
    monkeypatch: pytest.MonkeyPatch,
    height: int,
    width: int,
    numbers: list[float],
    scale: tuple[float, float] = (0.08, 1.0),
) -> Box:
    """Its RandomResizedCrop with these numbers in place of what it draws."""
    cut = v2.RandomResizedCrop(224, scale=scale)
    drawn = iter([numbers, *(crop._drawn_again(numbers, attempt) for attempt in range(1, 10))])
    left: list[float] = []

    def next_number() -> float:
        if not left:
            left.extend(next(drawn))
        return left.pop(0)

    def uniform(low: Any, high: Any) -> torch.Tensor:
        if high == scale[1]:
            left.clear()  # a new attempt: places that weren't asked for are left out
        return torch.tensor(float(low) + (float(high) - float(low)) * next_number(), dtype=torch.float64)

    def integer(low: int, high: int, **_: Any) -> torch.Tensor:
        return torch.tensor(int(low + next_number() * (high - low)))

    stand_in = SimpleNamespace(
        empty=lambda _: SimpleNamespace(uniform_=uniform), exp=torch.exp, randint=integer
    )
    cut._log_ratio = torch.log(torch.tensor(cut.ratio, dtype=torch.float64))
    with monkeypatch.context() as patched:
        patched.setattr(_geometry, "torch", stand_in)
        patched.setattr(_geometry, "query_size", lambda _: (height, width))
        found = cut.make_params([])
    return Box(found["top"], found["left"], found["height"], found["width"])


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_a_random_cut_is_torchvisions_with_the_same_numbers(
    height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for numbers in uniforms(0, np.zeros(60, np.int64), np.arange(60), 4).tolist():
        found = random_cut(height, width, *numbers)
        assert found == torchvisions_cut(monkeypatch, height, width, numbers)


@pytest.mark.parametrize(("height", "width"), SHAPES)
@pytest.mark.parametrize(
    ("side", "share", "short"), [(32, 0.875, 37), (224, 0.875, 256), (224, 0.95, 236), (224, 1, 224)]
)
def test_an_evaluation_image_is_torchvisions_resize_and_center_crop(
    height: int, width: int, side: int, share: float, short: int
) -> None:
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


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize(("height", "width"), [(64, 96), (1, 20), (12, 240)])
def test_a_file_is_evaluated_as_pillow_and_torchvision_do(
    mode: str, height: int, width: int, tmp_path: Path
) -> None:
    gradient = np.zeros((height, width, 3), np.uint8)
    gradient[..., 0] = np.linspace(0, 255, width)
    gradient[..., 1] = np.linspace(0, 200, height)[:, None]
    for part in ("train", "val"):
        (tmp_path / part / "only").mkdir(parents=True)
        image = encoded(mode, gradient, tmp_path / part / "only" / "x.png")
    images = load_images(DataConfig(name="folder", path=tmp_path, image_size=28), 0)
    out: dict[str, Any] = {"image": np.empty((1, 28, 28, 3), np.uint8), "label": np.empty(1, np.int64)}
    images.evaluation.read(np.array([0]), None, out)
    expected = v2.Compose([v2.Resize(32), v2.CenterCrop(28)])(image.convert("RGB"))
    assert abs(out["image"][0].astype(int) - np.asarray(expected)).max() <= 1
    data = bytearray((tmp_path / "val" / "only" / "x.png").read_bytes())
    alike = resized_middle(cut_out(data, middle_cut), 28)[0].permute(1, 2, 0).numpy()
    assert np.array_equal(out["image"][0], alike)
    numbers = np.full((1, 4), 0.999, np.float32)
    images.train.read(np.array([0]), numbers, out)  # any image has a training cut


def encoded(mode: str, pixels: npt.NDArray[np.uint8], path: Path) -> Image.Image:
    image = Image.fromarray(pixels)
    if mode == "RGBA":
        image.putalpha(128)
    image = image.convert(mode)
    image.save(path)
    return image
