"""Promise: whenever a write ends, and whatever happens to the files, the newest good checkpoint is found."""

import itertools
import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from tests.helpers.faulty_disk import Disk, Killed
from tests.helpers.marked import Tensors, assert_same_tensor, flip, hidden, mark_of, marked, save
from tests.helpers.refusals import named
from trainer.checkpoint import tensor_file
from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.folder import read
from trainer.checkpoint.store import listing, newest_good, prune, remove_leftovers, write
from trainer.cli import main
from trainer.host import files, strict_json


@pytest.mark.parametrize("dtype", tensor_file._DTYPES.values(), ids=str)
def test_every_type_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    high = 2 if dtype is torch.bool else 256  # any bits are a number, NaN with a payload too
    raw = torch.randint(0, high, (6 * 4 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(6, 4)
    tensors = {"x": tensor, "0d": tensor[0, 0], "empty": tensor[:0], "column": tensor[:, 1], "t": tensor.T}
    got = read(write(tmp_path, 7, {"model": tensors}, {})).tensors["model"]
    assert got.keys() == tensors.keys()
    for name, wanted in tensors.items():
        assert_same_tensor(got[name], wanted)


def test_any_layout_and_tied_tensors_and_any_name(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 5, 5)
    last = weight.to(memory_format=torch.channels_last)
    tied = torch.nn.Parameter(torch.randn(8))
    names = {"../a/b.c": weight, "ünï ☃": last, "": tied, "x.tied": tied, "part": tied[2:5], "t": weight.mT}
    checkpoint = read(write(tmp_path, 0, {"model": names, "ema": {}}, {"epoch": 1, "list": [1.5, None, "a"]}))
    assert checkpoint.step == 0 and checkpoint.state == {"epoch": 1, "list": [1.5, None, "a"]}
    assert checkpoint.tensors["ema"] == {}
    for name, wanted in names.items():
        assert torch.equal(checkpoint.tensors["model"][name], wanted)
        assert checkpoint.tensors["model"][name].is_contiguous()


def test_other_tools_read_it(tmp_path: Path) -> None:
    path = save(tmp_path, 12)
    assert path.name == "step-00000012"
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=path, check=True, capture_output=True)
    loaded = safetensors.torch.load_file(path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in marked(12)["model"].items())


ODD = [torch.zeros(2, dtype=torch.complex128), torch.zeros(2).to_sparse()]


@pytest.mark.parametrize(
    ("tensors", "state"),
    [
        *(({}, {"a": value}) for value in ((1, 2), float("nan"), "x" * (strict_json.LARGEST + 1))),
        *(({"model": {"a": tensor}}, {}) for tensor in ODD),
        ({"../model": {}}, {}),
    ],
    ids=["tuple", "nan", "long", "complex", "sparse", "path"],
)
def test_what_would_not_come_back_is_refused(tmp_path: Path, tensors: Tensors, state: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        write(tmp_path, 1, tensors, state)
    assert not list(tmp_path.iterdir())


def second(folder: Path) -> object:
    return save(folder, 2)


# What is there, what changes it; marks that may be found after a kill, and that after the change.
Change = Callable[[Path], object]
CHANGES: dict[str, tuple[Change, Change, set[int], int]] = {
    "new": (lambda folder: save(folder, 1), second, {1, 2}, 2),
    "same": (lambda folder: save(folder, 2, mark=1), second, {1, 2}, 2),
    "damaged": (lambda folder: (save(folder, 1).parent / "step-00000002").mkdir(), second, {1, 2}, 2),
    "prune": (
        lambda folder: [save(folder, step, mark=1) for step in range(4)],
        *(lambda folder: prune(folder, keep_last=1, best=0), {1}, 1),
    ),
}


@pytest.mark.parametrize("fault", ["kill", "power", "refusal"])
@pytest.mark.parametrize("what", CHANGES)
def test_killed_at_every_operation(
    tmp_path: Path, disk: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch, what: str, fault: str
) -> None:
    """Or the power is cut there, or it is refused; of everything that changes the folder."""
    before, change, allowed, after = CHANGES[what]
    monkeypatch.setattr(files, "_CHUNK", 256)
    chance, seen = random.Random(2), set()
    disk()
    before(tmp_path / "before")
    for at in itertools.count():
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"at-{at}")
        faulty = disk(at, ENOSPC if fault == "refusal" else None)
        finished = True
        try:
            change(folder)
        except (Killed, OSError) as stopped:
            assert not isinstance(stopped, OSError) or stopped.errno == ENOSPC
            finished = False
        if fault == "power":
            faulty.cut_power(folder, chance)
        disk()
        mark = mark_of(folder)
        assert mark in ({after} if finished else allowed)
        if faulty.done <= at:
            break
        seen.add(mark)
        if fault == "refusal":
            assert finished or what == "prune" or not hidden(folder)
        elif what != "damaged":
            assert all(entry.problem is None for entry in listing(folder, verify=True))
        # And everything goes on from here.
        remove_leftovers(folder)
        assert not hidden(folder)
        second(folder)
        prune(folder, keep_last=1)
        assert mark_of(folder) == 2 or what == "prune"
        assert len(list(folder.iterdir())) <= 2
        shutil.rmtree(folder)
    assert at > 10 and (seen == allowed or fault == "refusal")


def steps(folder: Path) -> list[int]:
    return [entry.step for entry in listing(folder)]


def test_the_newest_comes_first_and_leftovers_never(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    assert listing(tmp_path / "none") == [] and newest_good(tmp_path / "none") == (None, [])
    began = time.time()
    for step in (3, 100_000_000, 20):
        save(tmp_path, step)
    disk(15)
    with pytest.raises(Killed):
        save(tmp_path, 21)
    disk()
    entries = listing(tmp_path, verify=True)
    assert [entry.step for entry in entries] == [100_000_000, 20, 3]
    assert all(entry.problem is None and began - 1 <= entry.time <= time.time() + 1 for entry in entries)
    assert entries[0].size == sum(file.stat().st_size for file in entries[0].path.iterdir())
    assert len(hidden(tmp_path)) == 1
    assert len(remove_leftovers(tmp_path)) == 1 and not hidden(tmp_path)
    assert steps(tmp_path) == [100_000_000, 20, 3]


def test_only_what_is_older_than_the_last_good_ones_goes(tmp_path: Path) -> None:
    for step in range(8):
        save(tmp_path, step)
    for step in (6, 2):
        (tmp_path / f"step-{step:08d}" / "state.json").unlink()
    assert prune(tmp_path, keep_last=3, best=1) == [3, 2, 0]
    assert steps(tmp_path) == [7, 6, 5, 4, 1]
    assert prune(tmp_path, keep_last=9) == []
    (tmp_path / "step-00000007" / "state.json").unlink()
    for good, newest in ((7, 7), (None, 5)):  # what was verified before isn't verified again
        assert BackgroundWriter(tmp_path, 1, print, good).newest() == newest
    assert prune(tmp_path, keep_last=1, known_good={7}) == [6, 5, 4, 1]
    with pytest.raises(ValueError):
        prune(tmp_path, keep_last=0)


def test_nothing_goes_while_nothing_is_good(tmp_path: Path) -> None:
    for step in range(4):
        (save(tmp_path, step) / "SHA256SUMS").unlink()
    assert prune(tmp_path, keep_last=1) == []


def test_the_command_lists_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 1200):
        save(folder, step)
    flip(folder / "step-00001200" / "model.safetensors", -1, 3)
    assert main(["runs", str(tmp_path)]) == 1
    assert named(capsys.readouterr().out, "1200 SHA256SUMS", folder / "step-00000002")
    assert main(["runs", str(tmp_path), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in shown["checkpoints"]] == [1200, 2, 1]
    assert [one["problem"] is None for one in shown["checkpoints"]] == [False, True, True]
    assert shown["newest_good"] == str(folder / "step-00000002")


def test_the_command_without_a_good_one(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["runs", str(tmp_path)]) == 0
    (save(tmp_path / "checkpoints", 1) / "state.json").unlink()
    assert main(["runs", str(tmp_path)]) == 1
    assert main(["runs", str(tmp_path / "none")]) == 2
