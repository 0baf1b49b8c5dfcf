"""Checkpoints in which all tensors say the same number, and which number that is; how they are damaged."""

import hashlib
from pathlib import Path

import torch

from trainer.checkpoint.store import newest_good, write

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"]
Tensors = dict[str, dict[str, torch.Tensor]]


def marked(mark: int, numbers: int = 50) -> Tensors:
    """Tensors that all say the same number."""
    value = torch.full((numbers,), mark, dtype=torch.int64)
    return {"model": {"a.weight": value, "b": value.float()}, "optimizer": {"a.weight/step": value[0]}}


def save(folder: Path, step: int, mark: int | None = None) -> Path:
    mark = step if mark is None else mark
    return write(folder, step, marked(mark), {"mark": mark})


def mark_of(folder: Path) -> int | None:
    """Returns the number in the newest good checkpoint, the same in all its tensors."""
    checkpoint, _ = newest_good(folder)
    if checkpoint is None:
        return None
    mark: int = checkpoint.state["mark"]
    assert checkpoint.tensors.keys() == {"model", "optimizer"}
    for group in checkpoint.tensors.values():
        assert all((tensor == mark).all() for tensor in group.values())
    return mark


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def flip(file: Path, position: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def resum(path: Path) -> None:
    """Hashes that are right again: what is wrong then must be seen without them."""
    files = [file for file in sorted(path.iterdir()) if file.name != "SHA256SUMS"]
    sums = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (path / "SHA256SUMS").write_text("".join(sums))


def assert_same_tensor(one: torch.Tensor, other: torch.Tensor) -> None:
    """Compares type, shape and each bit: also of NaN."""
    assert one.dtype == other.dtype and one.shape == other.shape
    assert torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
