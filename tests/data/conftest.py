"""What tests of images share."""

from pathlib import Path

import pytest

from benchmarks.photographs import write_photographs
from tests.helpers.image_folders import SIZE


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder, 30, SIZE)
    return folder


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 photographs, three of them cut off; nobody changes them."""
    root = tmp_path_factory.mktemp("broken")
    write_photographs(root, 60, SIZE)
    for file in sorted(root.rglob("*.jpg"))[2:17:7]:
        file.write_bytes(file.read_bytes()[:2000])
    return root
