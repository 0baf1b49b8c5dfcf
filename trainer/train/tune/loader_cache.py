"""What a search of workers and prefetch found, kept for the next run of the recipe on this machine."""

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from trainer.config.recipe import Recipe
from trainer.config.redact import redact
from trainer.data.fit import Loading
from trainer.host import strict_json
from trainer.host.files import write_whole
from trainer.host.limits import Limits
from trainer.version import __version__

# What decides how fast steps and batches come; neither a run's length nor its seed.
_PARTS = ("data", "model", "step", "precision", "memory", "compile", "ema", "regularization", "parallel")
_FILE_BYTES = 1 << 16


class Kept(BaseModel):
    """A file of the cache."""

    model_config = ConfigDict(strict=True, extra="forbid")

    key: dict[str, Any]
    date: str = Field(max_length=32)
    workers: int = Field(ge=0, le=1024)
    prefetch: int = Field(ge=1, le=1024)
    evidence: list[str]

    @property
    def setting(self) -> Loading:
        """What was chosen."""
        return Loading(self.workers, self.prefetch)


def key_of(recipe: Recipe, limits: Limits, ranks: int, threads: int, cuda: bool) -> dict[str, Any]:
    """What a choice depends on, as JSON."""
    config = recipe.model_dump(mode="json", include=set(_PARTS)) | {"optim": recipe.optim.name}
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if cuda else []
    key: dict[str, Any] = redact(
        {
            "config": config,
            "cpus": limits.cpus,
            "memory": limits.memory_bytes,
            "pids": limits.pids,
            "ranks": ranks,
            "threads": threads,
            "processor": _processor(),
            "gpus": gpus,
            "torch": torch.__version__,
            "trainer": __version__,
        }
    )
    found: dict[str, Any] = json.loads(json.dumps(key))
    return found


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where caches lie: below XDG_CACHE_HOME, which the image sets, or ~/.cache; None if there is no home."""
    try:
        root = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return root / "trainer" / "loader"


def read(folder: Path | None, key: Mapping[str, Any]) -> Kept | None:
    """What is kept for a key; None if there is nothing, or nothing that can be trusted."""
    if folder is None:
        return None
    with suppress(OSError, ValueError, RecursionError):
        file = _file(folder, key)
        if file.stat().st_size <= _FILE_BYTES:
            kept = Kept.model_validate(strict_json.parse(file.read_bytes()))
            return kept if kept.key == key else None
    return None


def write(folder: Path | None, kept: Kept) -> Path | None:
    """Keeps a choice, whole or not at all; returns the file, None where it can't be written."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _file(folder, kept.key)
        write_whole(file, kept.model_dump_json(indent=2) + "\n")
    except OSError:
        return None
    return file


def _file(folder: Path, key: Mapping[str, Any]) -> Path:
    text = json.dumps(key, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
