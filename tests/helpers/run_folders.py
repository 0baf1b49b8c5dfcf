"""Run folders: copied, changed, and compared by their final weights."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from trainer.runs.folder import lock


def manifest(folder: Path | str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Path(folder, "manifest.json").read_text())
    return read


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights and average."""
    files = sorted(folder.glob("*.safetensors"))
    found = {file.stem: safetensors.torch.load_file(file) for file in files}
    return {f"{stem}/{name}": one for stem, tensors in found.items() for name, one in tensors.items()}


def same(folder: Path, other: Path) -> bool:
    ours, theirs = weights(folder), weights(other)
    if not ours or ours.keys() != theirs.keys():
        return False
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def changed(folder: Path, stopped: Path) -> Path:
    """A copy of the stopped run, to be changed."""
    return Path(shutil.copytree(stopped, folder))


def rewrite(folder: Path, change: Callable[[Path], object]) -> None:
    """Changes every checkpoint, and its hashes with it."""
    for path in (folder / "checkpoints").glob("step-*"):
        change(path)
        names = [line.split("  ")[1] for line in (path / "SHA256SUMS").read_text().splitlines()]
        lines = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
        (path / "SHA256SUMS").write_text("".join(lines))


def with_state(**values: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        file = path / "state.json"
        about = json.loads(file.read_text())
        about["state"].update(values)
        file.write_text(json.dumps(about))

    return change


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Any]:
    """A process that holds a folder's lock, and has a child of its own that outlives it."""

    def hold(ready: Any) -> None:
        lock(folder)
        if (child := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        ready.send(child)
        time.sleep(600)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(theirs,))
    process.start()
    child = ours.recv()
    try:
        yield process
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
