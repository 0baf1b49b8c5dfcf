"""Promise: photographs are turned as data.exif_orientation says, alike wherever their pixels are taken."""

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps
from torchvision.transforms import v2

from tests.data.test_arrow import FEATURES, write as write_arrow
from tests.data.test_decode_alike import exif
from tests.helpers.batches import arrays_of
from tests.helpers.image_folders import SIDE, encoded
from tests.helpers.refusals import named, refused
from trainer.commands.predict.images import as_evaluated
from trainer.config.data import DataConfig
from trainer.data.check import CheckedData, check_data
from trainer.data.corrupt import Corrupt
from trainer.data.dataset import limited
from trainer.data.formats.boxes import BoxedImages
from trainer.data.formats.coco import CocoPictures
from trainer.data.formats.files import in_folder
from trainer.data.formats.pack import PackSettings, pack
from trainer.data.sources import load_images


def photograph(number: int) -> bytes:
    """Orientation 1 to 8 in turn; losslessly, so that pixels can be compared."""
    ramp = np.add.outer(np.arange(40) * 3, np.arange(64) * 2).astype(np.uint8)
    image = Image.fromarray(np.stack([ramp, ramp // 2, 255 - ramp], 2))
    return bytes(encoded(image, "PNG", exif=exif(number % 8 + 1)))


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        for number in range(16):
            file = tmp_path / "set" / part / str(number % 2) / f"{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(photograph(number))
    return tmp_path / "set"


def evaluated(**data: Any) -> tuple[npt.NDArray[np.uint8], str]:
    dataset = load_images(DataConfig(image_size=SIDE, **data), 0).evaluation
    return arrays_of(dataset)[0]["image"], dataset.fingerprint()


def packed(folder: Path, target: Path, upright: bool, settings: PackSettings) -> Path:
    for part in ("train", "val"):
        records = in_folder(folder / part)
        records.upright = upright
        pack(records, target / part, settings)
    return target


def test_each_format_follows_the_key_and_has_it_in_the_fingerprint(photographs: Path, tmp_path: Path) -> None:
    stored, mark = evaluated(name="folder", path=photographs)
    upright, other = evaluated(name="folder", path=photographs, exif_orientation="apply")
    assert mark == in_folder(photographs / "val").fingerprint() == other.removesuffix(" upright") != other
    same = [number for number in range(16) if np.array_equal(stored[number], upright[number])]
    records = in_folder(photographs / "val")
    assert [photograph(0) == records.read(number) for number in same] == [True] * 2, "orientation 1"
    cases = (
        ("copied", True, PackSettings(), upright),
        ("pixels", True, PackSettings(raw=True), upright),
        ("pixels as stored", False, PackSettings(raw=True), stored),
        ("small ones are kept as they are", True, PackSettings(40), upright),
    )
    for name, upright_too, settings, expected in cases:
        path = packed(photographs, tmp_path / name, upright_too, settings)
        assert np.array_equal(evaluated(name="pack", path=path)[0], expected), name
    ignored, _ = evaluated(name="pack", path=tmp_path / "copied", exif_orientation="ignore")
    assert np.array_equal(ignored, stored)
    for name, key in (("pixels", "ignore"), ("pixels as stored", "apply")):
        with refused(tmp_path / name, "data.exif_orientation"):
            evaluated(name="pack", path=tmp_path / name, exif_orientation=key)


def test_hugging_face_s_images_are_turned_unless_they_are_not_to_be(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    images = [{"bytes": photograph(number), "path": None} for number in range(8)]
    rows = {"image": images, "label": [number % 2 for number in range(8)]}
    for part in ("train", "test"):
        write_arrow(tmp_path / part, rows, FEATURES, files=1)
    found, _ = evaluated(name="hf", path=tmp_path)
    plain, _ = evaluated(name="hf", path=tmp_path, exif_orientation="ignore")
    evaluated_as = v2.Compose([v2.Resize(round(SIDE * 8 / 7)), v2.CenterCrop(SIDE)])
    for number in range(8):  # what `datasets` gives: PIL's exif_transpose
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(photograph(number))))
        expected = np.asarray(evaluated_as(upright)).astype(int)
        assert np.abs(found[number] - expected).max() <= 1, number
        assert np.array_equal(found[number], plain[number]) is (number == 0)


@pytest.mark.parametrize(("key", "part"), [("apply", 0.875), ("ignore", 0.875), ("apply", 0.5), ("apply", 1)])
def test_a_file_is_predicted_as_it_was_evaluated(key: str, part: float, photographs: Path) -> None:
    keys: Any = {"name": "folder", "path": photographs, "exif_orientation": key, "eval_crop": part}
    found, _ = evaluated(**keys)
    data = DataConfig(image_size=SIDE, **keys)
    dataset = limited(load_images(data, 0).evaluation, 7)  # as data.limit leaves it
    task, recipe = SimpleNamespace(evaluation_data=dataset), SimpleNamespace(data=data)
    run: Any = SimpleNamespace(task=task, recipe=recipe)
    records = in_folder(photographs / "val")
    for number in range(8):
        file = Path(os.fsdecode(records.path(number)))
        assert np.array_equal(as_evaluated(file, run), found[number]), number


def coco(root: Path, size: tuple[int, int], orientation: int) -> Path:
    what = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": size[0], "height": size[1]}],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [2, 3, 10, 12]}],
    }
    for folder in ("train", "annotations"):
        (root / folder).mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(root / "train" / "a.jpg", exif=exif(orientation))
    (root / "annotations" / "instances_train.json").write_text(json.dumps(what))
    return root


def test_coco_says_when_exif_is_why_sizes_differ(tmp_path: Path) -> None:
    turned, stored = coco(tmp_path / "turned", (30, 40), 6), coco(tmp_path / "stored", (40, 30), 6)
    with refused("30 40 EXIF 6 data.exif_orientation=apply", by=Corrupt):
        CocoPictures(turned, "train", "fail").read(0)
    assert CocoPictures(turned, "train", "fail", True).read(0).image.shape == (40, 30, 3)
    with refused("EXIF 6 ignore", by=Corrupt):
        CocoPictures(stored, "train", "fail", True).read(0)


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_turned_boxes(orientation: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, marks = coco(tmp_path / "d", (40, 30), orientation), []
    for upright, expected in ((False, orientation != 1), (True, False)):
        pictures = CocoPictures(root, "train", "fail", upright)
        check_data("fast", False, [CheckedData("training", BoxedImages(pictures, 64, 5, None), 0)])
        assert named(capsys.readouterr().err, "1 of 1 EXIF a.jpg") is expected
        marks.append(pictures.fingerprint())
    assert marks == [marks[0], f"{marks[0]} upright"]
