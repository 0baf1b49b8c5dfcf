"""Promise: the bench of decoders times the same crop of the same image."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.decoders import Decode, Jpeg, bench_decoders, installed, native, ours, read_files
from trainer.errors import BadInputError


@pytest.fixture
def files(tmp_path: Path) -> list[Jpeg]:
    random = np.random.default_rng(0)
    (tmp_path / "a").mkdir()
    for number, (height, width) in enumerate([(200, 300), (33, 47), (64, 64)]):
        # Smooth, as decoders differ in how they interpolate chroma at a sharp edge.
        pixels = Image.fromarray(random.integers(0, 256, (5, 6, 3), np.uint8)).resize((width, height))
        pixels.save(tmp_path / "a" / f"{number}.jpg", quality=90)
    Image.new("L", (9, 9)).save(tmp_path / "a" / "9.png")
    return read_files(tmp_path, 10)


def test_each_decodes_the_same_part(files: list[Jpeg], tmp_path: Path) -> None:
    assert len(files) == 3, "and not what is no JPEG"
    there: dict[str, Decode] = installed()
    assert any("pillow" in name for name in there)
    crops = {name: decode for name, decode in native(tmp_path).items() if "crop" in name}
    for decode in (there | crops).values():
        for file in files:
            pixels = decode(file)
            assert pixels is not None
            assert pixels.shape == (file.box.height, file.box.width, 3)
            assert np.abs(pixels.astype(int) - ours(file)).mean() < 1


def test_a_table(files: list[Jpeg], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(200):
        (tmp_path / "a" / f"x{number:03}.jpg").write_bytes(files[1].data)
    assert bench_decoders(tmp_path, rounds=1, images=2) == 0
    assert "| trainer (torchvision) |" in capsys.readouterr().out
    with pytest.raises(BadInputError, match="from 1 on"):
        bench_decoders(tmp_path, rounds=0, images=2)
