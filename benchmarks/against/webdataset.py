"""webdataset, streaming from tar shards that are written here, with torchvision's transforms."""

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.data.formats.files import in_folder

_SHARDS = 8


def load(folder: Path, work: Path, batch: int, side: int, workers: int) -> Callable[[], Iterator[int]]:
    """WebDataset + PIL + v1 transforms + WebLoader; each call is an epoch and yields sizes of batches."""
    import webdataset

    from benchmarks.against.torchvision import transforms

    _write_shards(folder, work)
    data = (
        webdataset.WebDataset(sorted(map(str, work.glob("*.tar"))), shardshuffle=_SHARDS)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transforms(side), int)
        .batched(batch, partial=False)
    )
    loader = webdataset.WebLoader(data, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda: (len(labels) for _, labels in loader)


def _write_shards(folder: Path, work: Path) -> None:
    records = in_folder(folder)
    for shard in range(_SHARDS):
        with tarfile.open(work / f"{shard:02d}.tar", "w") as tar:
            for number in range(shard, len(records), _SHARDS):
                label = str(records.labels[number]).encode()
                for name, data in (("jpg", records.read(number)), ("cls", label)):
                    entry = tarfile.TarInfo(f"{number:06d}.{name}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
