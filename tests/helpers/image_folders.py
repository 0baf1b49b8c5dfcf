"""Folders of small photographs, and the same images in every format."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trainer.data.formats.files import in_folder
from trainer.data.formats.pack import PackSettings, pack
from trainer.data.formats.records import Records
from trainer.data.formats.sharded import in_shards
from trainer.data.formats.tables import in_table
from trainer.data.formats.tar_shards import index_shards

SIDE = 32
SIZE = 160, 120  # of photographs: width and height


def encoded(image: Image.Image, kind: str, **options: Any) -> bytearray:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return bytearray(buffer.getvalue())


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    ramp = np.add.outer(np.arange(size[1]) * 3, np.arange(size[0]) * 2).astype(np.uint8)
    return Image.merge("RGB", [Image.fromarray(ramp + shift) for shift in (0, 40, 90)]).convert(mode)


def as_csv(folder: Path, root: Path) -> Path:
    files = in_folder(folder)
    rows = [f'"{os.fsdecode(files.path(n))}",{files.classes[files.labels[n]]}' for n in range(len(files))]
    (root / "index.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    return root / "index.csv"


def as_parquet(folder: Path, root: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    files = in_folder(folder)
    paths = [os.fsdecode(files.path(n)) for n in range(len(files))]
    labels = [files.classes[label] for label in files.labels]
    parquet.write_table(pyarrow.table({"path": paths, "label": labels}), root / "index.parquet")
    return root / "index.parquet"


def as_shards(folder: Path, root: Path) -> Path:
    import tarfile

    files = in_folder(folder)
    for shard, first in enumerate(range(0, len(files), 7)):
        with tarfile.open(root / f"{shard:03d}.tar", "w") as tar:
            for sample in range(first, min(first + 7, len(files))):
                parts: dict[str, Any] = {"jpg": files.read(sample), "cls": str(files.labels[sample]).encode()}
                for suffix, data in parts.items():
                    entry = tarfile.TarInfo(f"{sample:05d}.{suffix}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    index_shards(root)
    return root


def opened(kind: str, folder: Path, root: Path) -> Records:
    if kind == "folder":
        return in_folder(folder)
    if kind == "csv":
        return in_table(as_csv(folder, root))
    if kind == "parquet":
        return in_table(as_parquet(folder, root))
    if kind == "shards":
        return in_shards(as_shards(folder, root))
    pack(in_folder(folder), root / "pack", PackSettings(64 if kind == "raw" else None, raw=kind == "raw"))
    return in_shards(root / "pack")
