"""Photographs for benches and tests, cut from those that scikit-image and scikit-learn ship."""

import importlib.util
import random
from pathlib import Path

from trainer.errors import BadInputError

_FILES = {
    "skimage": (
        "astronaut.png",
        "chelsea.png",
        "coffee.png",
        "hubble_deep_field.jpg",
        "ihc.png",
        "motorcycle_left.png",
        "motorcycle_right.png",
        "retina.jpg",
        "rocket.jpg",
    ),
    "sklearn": ("china.jpg", "flower.jpg"),
}
_FOLDERS = {"skimage": "data", "sklearn": "datasets/images"}
CLASSES = 10
SIZES = {50: (500, 375), 110: (800, 600), 400: (2000, 1500)}  # width and height, by kilobytes


def originals() -> list[Path]:
    """The photographs that are installed, from 451 x 300 to 1411 x 1411.

    Raises:
        BadInputError: If there are none.
    """
    found = []
    for package, names in _FILES.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            folder = Path(spec.submodule_search_locations[0], _FOLDERS[package])
            found += [folder / name for name in names if (folder / name).exists()]
    if not found:
        raise BadInputError(
            "no photographs: scikit-image and scikit-learn ship them; give a folder of your own, or "
            '`make venv GROUPS="train bench"`'
        )
    return found


def write_photographs(folder: Path, count: int, size: tuple[int, int] = (500, 375)) -> None:
    """Writes `folder/<class>/<number>.jpg`, the same at every call: at random cut and resized, quality 90."""
    from PIL import Image

    images = [Image.open(path).convert("RGB") for path in originals()]
    draw = random.Random(0)
    for number in range(count):
        image = images[number % len(images)]
        width = int(min(image.width, image.height * 4 / 3) * draw.uniform(0.7, 1))
        height = width * 3 // 4
        left, top = draw.randrange(image.width - width + 1), draw.randrange(image.height - height + 1)
        cut = image.resize(size, Image.Resampling.BICUBIC, (left, top, left + width, top + height))
        target = folder / str(number % CLASSES) / f"{number:05d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        cut.save(target, quality=90)
