"""Promise: a shard that isn't as it was indexed gives no sample another's label, and no cache keeps it."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.test_tars import archive, sample
from tests.helpers.remote import Web, files_below
from trainer.config.data import DataConfig
from trainer.data.formats.pack import PackSettings, pack
from trainer.data.formats.sharded import in_shards
from trainer.data.formats.tar_shards import index_shards
from trainer.data.remote import access
from trainer.data.sources import load_images
from trainer.errors import BadInputError


def png(value: int) -> bytes:
    """An image of one gray, as large for each."""
    image = io.BytesIO()
    Image.new("L", (8, 8), value).save(image, "PNG", compress_level=0)
    return image.getvalue()


NAME = "train/1.tar"
SHARD = archive(*sample("10"), *sample("11"), *sample("12"))
AT = SHARD.index(b"11.jpg")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    root = tmp_path_factory.mktemp("shards")
    for part in ("train", "val"):
        (root / part).mkdir()
        (root / part / "0.tar").write_bytes(archive(*sample("00")))
        (root / part / "1.tar").write_bytes(SHARD)
        index_shards(root / part)
    server = Web(files_below(root))
    yield server
    server.close()


def read(web: Web, cache: Path) -> Any:
    where: dict[str, Any] = {"name": "shards", "path": f"{web.url}/", "cache": cache, "image_size": 8}
    data = load_images(DataConfig.model_validate({**where, "micro_batch_size": 2}), 0).train
    out: Any = {name: np.zeros((4, *field.shape), field.dtype) for name, field in data.fields.items()}
    data.read(np.arange(4), np.full((4, data.uniforms), 0.5, np.float32), out)
    return out["image"].tolist()


WRONG = "isn't what its index says .*put the right file there, or make the index again"
CUT = r"ended after [\d,]+ of [\d,]+ bytes, after 2 tries; put the whole file there, or make the index again"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SHARD[:AT] + b"X" + SHARD[AT + 1 :], WRONG),
        (archive(*sample("12"), *sample("11"), *sample("10")), WRONG),
        (SHARD + SHARD, WRONG),
        (SHARD[:AT], CUT),
        (b"<html>not found</html>", r"its server sent an HTML page .*~/\.netrc"),
    ],
    ids=["name", "order", "longer", "cut", "page"],
)
def test_what_is_not_as_it_was_indexed(
    web: Web, tmp_path: Path, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_WAITS", (0.0,))
    web.files[NAME] = content
    for _ in range(2):  # the second user of a cache finds nothing of the first
        with pytest.raises(BadInputError, match=rf"/{NAME}: {message}") as refused:
            read(web, tmp_path)
        assert "\n" not in str(refused.value)
    web.files[NAME] = SHARD
    assert np.array(read(web, tmp_path)).any()


BLACK, WHITE = (png(value) for value in (0, 255))
RIGHT = archive(("0.png", BLACK), ("0.cls", b"0"), ("1.png", WHITE), ("1.cls", b"1"))


@pytest.mark.parametrize(
    "content",
    [
        archive(("0.png", WHITE), ("0.cls", b"0"), ("1.png", BLACK), ("1.cls", b"1")),
        bytes(len(RIGHT)),
    ],
    ids=["swapped", "zeros"],
)
def test_what_was_written_anew_on_disk_at_the_same_size(tmp_path: Path, content: bytes) -> None:
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "0.tar").write_bytes(RIGHT)
        index_shards(tmp_path / part)
    assert len(content) == len(RIGHT)
    (tmp_path / "train" / "0.tar").write_bytes(content)
    config = DataConfig.model_validate({"name": "shards", "path": tmp_path, "image_size": 8})
    data = load_images(config, 0).train
    out: Any = {name: np.zeros((2, *field.shape), field.dtype) for name, field in data.fields.items()}
    changed = r"train/0\.tar: [01]\.png: has changed since it was indexed: bring it back, or make the index"
    with pytest.raises(BadInputError, match=changed):
        data.read(np.arange(2), np.full((2, data.uniforms), 0.5, np.float32), out)
    with pytest.raises(BadInputError, match=changed):
        pack(in_shards(tmp_path / "train"), tmp_path / "pack", PackSettings())
