"""Promise: whenever a write ends, and whatever happens to the files, the newest good checkpoint is found."""

import hashlib
import json
import mmap
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from errno import EIO, ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from tests.helpers.faulty_disk import Disk, Killed
from tests.helpers.waiting import SECONDS, until
from trainer.checkpoint import store, tensor_file
from trainer.checkpoint.background import BackgroundWriter, stage
from trainer.checkpoint.folder import Damaged, Unreadable, problem, read, verify
from trainer.checkpoint.store import Entry, listing, newest_good, prune, remove_leftovers, write
from trainer.cli import main
from trainer.commands import checkpoints as show
from trainer.host import files, strict_json

Tensors = dict[str, dict[str, torch.Tensor]]


def marked(mark: int, numbers: int = 50) -> Tensors:
    """Tensors that all say the same number."""
    value = torch.full((numbers,), mark, dtype=torch.int64)
    return {"model": {"a.weight": value, "b": value.float()}, "optimizer": {"a.weight/step": value[0]}}


def save(folder: Path, step: int, mark: int | None = None) -> Path:
    mark = step if mark is None else mark
    return write(folder, step, marked(mark), {"mark": mark})


def mark_of(folder: Path) -> int | None:
    """What the newest good checkpoint says, everywhere in it the same."""
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


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Disk]:
    def replace(*args: Any, **kwargs: Any) -> Disk:
        made = Disk(*args, **kwargs)
        monkeypatch.setattr(files, "os", made)
        return made

    return replace


# What is written is read again.


@pytest.mark.parametrize("dtype", tensor_file._DTYPES.values(), ids=str)
def test_every_type_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    high = 2 if dtype is torch.bool else 256  # any bits are a number, NaN with a payload too
    raw = torch.randint(0, high, (6 * 4 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(6, 4)
    tensors = {
        "x": tensor,
        "scalar": tensor[0, 0],
        "empty": tensor[:0],
        "column": tensor[:, 1],
        "t": tensor.T,
    }
    got = read(write(tmp_path, 7, {"model": tensors}, {})).tensors["model"]
    assert got.keys() == tensors.keys()
    for name, wanted in tensors.items():
        assert got[name].dtype == wanted.dtype and got[name].shape == wanted.shape
        same = got[name].reshape(-1).view(torch.uint8), wanted.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(*same)


def test_any_layout_and_tied_tensors_and_any_name(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 5, 5)
    last = weight.to(memory_format=torch.channels_last)
    tied = torch.nn.Parameter(torch.randn(8))
    names = {
        "../a/b.c": weight,
        "ünï ☃": last,
        "": tied,
        "x.tied": tied,
        "part": tied[2:5],
        "flip": weight.mT,
    }
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


def test_the_library_s_files_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    tensors = {"a": torch.randn(3, 5), "b": torch.tensor(True), "c": torch.randn(7).bfloat16()}
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    resum(path)
    got = read(path).tensors["model"]
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "tensors, state",
    [
        ({}, {"a": (1, 2)}),
        ({}, {"a": {1: 2}}),
        ({}, {"a": float("nan")}),
        ({}, {"a": torch.zeros(1)}),
        ({}, {"a": "x" * (strict_json.LARGEST + 1)}),
        ({"../model": {}}, {}),
        ({"model": {"a": torch.zeros(2, dtype=torch.complex128)}}, {}),
        ({"model": {"a": torch.zeros(2).to_sparse()}}, {}),
        ({"model": {"__metadata__": torch.zeros(2)}}, {}),
    ],
)
def test_what_would_not_come_back_is_refused(tmp_path: Path, tensors: Tensors, state: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        write(tmp_path, 1, tensors, state)
    assert not list(tmp_path.iterdir())


# A kill, a power cut or a refusal at every operation of everything that changes the folder.


def older(folder: Path) -> None:
    save(folder, 1)


def same_step(folder: Path) -> None:
    save(folder, 2, mark=1)


def same_step_damaged(folder: Path) -> None:
    (save(folder, 1).parent / "step-00000002").mkdir()


def several(folder: Path) -> None:
    for step in (0, 1, 2, 3):
        save(folder, step, mark=1)


def second(folder: Path) -> None:
    save(folder, 2)


def prune_to_one(folder: Path) -> None:
    prune(folder, keep_last=1, best=0)


CHANGES = [
    (older, second, {1, 2}, 2),
    (same_step, second, {1, 2}, 2),
    (same_step_damaged, second, {1, 2}, 2),
    (several, prune_to_one, {1}, 1),
]
IDS = ["new", "same", "damaged", "prune"]


@pytest.mark.parametrize("power_cut", [None, 2, 3], ids=["kill", "power", "power again"])
@pytest.mark.parametrize("before, change, allowed, after", CHANGES, ids=IDS)
def test_killed_at_every_operation(
    tmp_path: Path,
    disk: Callable[..., Disk],
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Path], None],
    change: Callable[[Path], None],
    allowed: set[int],
    after: int,
    power_cut: int | None,
) -> None:
    monkeypatch.setattr(files, "_CHUNK", 64)
    chance = random.Random(power_cut)
    seen = set()
    at = 0
    while True:
        folder = tmp_path / f"at-{at}"
        disk()
        before(folder)
        dying = disk(at)
        try:
            change(folder)
        except Killed:
            pass
        else:
            if power_cut is not None:
                dying.cut_power(folder, chance)
            disk()
            break
        if power_cut is not None:
            dying.cut_power(folder, chance)
        disk()
        mark = mark_of(folder)
        assert mark in allowed
        seen.add(mark)
        if before is not same_step_damaged:
            assert all(entry.problem is None for entry in listing(folder, verify=True))
        # And everything goes on from here.
        remove_leftovers(folder)
        assert not hidden(folder)
        second(folder)
        prune(folder, keep_last=1)
        assert mark_of(folder) == 2 or before is several
        assert len(list(folder.iterdir())) <= 2
        shutil.rmtree(folder)
        at += 1
    assert at > 10
    assert mark_of(folder) == after and seen == allowed


@pytest.mark.parametrize("error", [ENOSPC, EIO])
@pytest.mark.parametrize("before, change, allowed, after", CHANGES, ids=IDS)
def test_refused_at_every_operation(
    tmp_path: Path,
    disk: Callable[..., Disk],
    before: Callable[[Path], None],
    change: Callable[[Path], None],
    allowed: set[int],
    after: int,
    error: int,
) -> None:
    at = 0
    while True:
        folder = tmp_path / f"at-{at}"
        disk()
        before(folder)
        refusing = disk(at, error)
        try:
            change(folder)
            finished = True
        except OSError as refused:
            finished = False
            assert refused.errno == error
        disk()
        assert mark_of(folder) in ({after} if finished else allowed)
        if change is second and not finished:
            assert not hidden(folder)
        if refusing.done <= at:
            break
        shutil.rmtree(folder)
        at += 1


# Real kills.


def write_for_ever(folder: Path, step: int, acknowledged: mmap.mmap) -> None:
    remove_leftovers(folder)
    while True:
        step += 1
        for _ in range(1 + (step % 3 == 0)):
            write(folder, step, marked(step, 40_000), {"mark": step})
        acknowledged[:8] = struct.pack("<q", step)
        prune(folder, keep_last=2, best=1)


def _acknowledges(told: mmap.mmap, least: int) -> bool:
    return bool(struct.unpack("<q", told[:8])[0] >= least)


def test_killed_for_real(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    acknowledged = mmap.mmap(-1, 8)
    chance = random.Random(2)
    step = 0
    for _ in range(16):
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(folder, step, acknowledged)
            finally:
                os._exit(1)
        until(partial(_acknowledges, acknowledged, step + 1))
        time.sleep(chance.uniform(0.0, 0.02))  # anywhere in a write
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child failed by itself"
        promised = struct.unpack("<q", acknowledged[:8])[0]
        found, skipped = newest_good(folder)
        assert not skipped
        step = mark_of(folder) or 0
        assert step >= promised
        assert found is None or found.tensors["model"]["b"].shape == (40_000,)
    assert step >= 16


# A full disk and a read-only one, real.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mounted"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"can't mount a small tmpfs here: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_the_older_ones(small_disk: Path) -> None:
    problems: list[str] = []
    folder = small_disk / "checkpoints"
    writer = BackgroundWriter(folder, keep_last=1, on_problem=problems.append)
    writer.submit(1, marked(1), {"mark": 1})
    writer.submit(2, marked(2, 300_000), {"mark": 2})
    assert writer.finish() == 1
    assert problems == [
        "the checkpoint of step 2 wasn't written (No space left on device); the last one is of step 1"
    ]
    assert mark_of(folder) == 1 and not hidden(folder)
    writer.submit(3, marked(3), {"mark": 3})
    assert writer.finish() == 3 and mark_of(folder) == 3
    assert len(problems) == 1


def test_a_disk_that_is_read_only_for_a_while(small_disk: Path) -> None:
    problems: list[str] = []
    writer = BackgroundWriter(small_disk, keep_last=1, on_problem=problems.append)
    writer.submit(1, marked(1), {"mark": 1})
    writer.finish()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    writer.submit(2, marked(2), {"mark": 2})
    assert writer.finish() == 1 and "Read-only file system" in problems[0]
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    writer.submit(3, marked(3), {"mark": 3})
    assert writer.finish() == 3 and mark_of(small_disk) == 3


# Damage.


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flips")
    save(folder, 1)
    return save(folder, 2)


def flip(file: Path, position: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


NAMES = ["model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"]


@given(st.sampled_from(NAMES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_any_flipped_bit_is_found(victim: Path, name: str, share: float, bit: int) -> None:
    file = victim / name
    position = int(share * file.stat().st_size)
    flip(file, position, bit)
    checkpoint, skipped = newest_good(victim.parent)
    flip(file, position, bit)
    assert checkpoint is not None and checkpoint.step == 1
    assert len(skipped) == 1 and skipped[0].startswith("step-00000002: ")


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_counts(victim: Path, name: str) -> None:
    file = victim / name
    good = file.read_bytes()
    for position in range(len(good)):
        flip(file, position, position % 8)
        assert problem(victim) is not None
        file.write_bytes(good[:position])
        assert problem(victim) is not None
        file.write_bytes(good)
    file.write_bytes(good + b"\n")
    assert problem(victim) is not None
    file.write_bytes(good)
    assert problem(victim) is None


def test_reasons_are_given(tmp_path: Path) -> None:
    flip(save(tmp_path, 4) / "model.safetensors", -1, 0)
    (save(tmp_path, 3) / "state.json").unlink()
    save(tmp_path, 2)
    checkpoint, skipped = newest_good(tmp_path)
    assert checkpoint is not None and checkpoint.step == 2
    assert skipped == [
        "step-00000004: model.safetensors: its hash isn't the one in SHA256SUMS",
        "step-00000003: state.json is missing",
    ]


def resum(path: Path) -> None:
    """Hashes that are right again: what is wrong then must be seen without them."""
    sums = (
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(path.iterdir())
        if file.name != "SHA256SUMS"
    )
    (path / "SHA256SUMS").write_text("".join(sums))


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (0 if isinstance(header, bytes) else -len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


ONE = entry()["x"]
BAD_TENSORS = {
    "pickle": (pickle.dumps({"a": 1}), "no header of a sane size"),
    "empty": (b"", "no header of a sane size"),
    "oversized header": ((1 << 40).to_bytes(8, "little") + b"{}", "no header of a sane size"),
    "header beyond the file": ((99).to_bytes(8, "little") + b"{}", "no header of a sane size"),
    "header not JSON": (safetensors_bytes(b"{nope"), "its header: not JSON"),
    "header nested": (safetensors_bytes(b"[" * 200_000), "nested too deeply"),
    "header a list": (safetensors_bytes([]), "isn't a mapping"),
    "name twice": (safetensors_bytes(b'{"x":1,"x":2}'), "a key stands there twice"),
    "entry not a mapping": (safetensors_bytes({"x": 5}), "isn't known"),
    "unknown dtype": (safetensors_bytes(entry(dtype="PICKLE"), bytes(8)), "isn't known"),
    "dtype a list": (safetensors_bytes(entry(dtype=["F32"]), bytes(8)), "isn't known"),
    "extra key": (safetensors_bytes(entry(device="cuda"), bytes(8)), "isn't known"),
    "negative": (safetensors_bytes(entry(shape=[-2]), bytes(8)), "isn't known"),
    "bool": (safetensors_bytes(entry(shape=[True, 2]), bytes(8)), "isn't known"),
    "65 dimensions": (safetensors_bytes(entry(shape=[1] * 65), bytes(8)), "isn't known"),
    "too large for any": (safetensors_bytes(entry(shape=[2**63, 2**62])), "isn't known"),
    "much too large": (safetensors_bytes(entry(shape=[2**62, 2**62])), "shape and size differ"),
    "too small": (safetensors_bytes(entry(shape=[1]), bytes(8)), "shape and size differ"),
    "backwards": (safetensors_bytes(entry(data_offsets=[8, 0]), bytes(8)), "shape and size differ"),
    "beyond the end": (safetensors_bytes(entry(), bytes(4)), "holds 4 bytes of tensors"),
    "not used": (safetensors_bytes(entry(), bytes(9)), "holds 9 bytes of tensors"),
    "gap": (safetensors_bytes(entry(data_offsets=[4, 12]), bytes(12)), "overlap or leave a gap"),
    "overlap": (safetensors_bytes({"x": ONE, "y": ONE}, bytes(8)), "overlap or leave a gap"),
    "not aligned": (safetensors_bytes(json.dumps(entry()).encode(), bytes(8)), "isn't aligned"),
    "empty but huge": (
        safetensors_bytes(entry(shape=[0, 2**62, 2**62], data_offsets=[0, 0])),
        "shape and size",
    ),
}


@pytest.mark.parametrize("data, reason", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensor_files_are_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = save(tmp_path, 1)
    (path / "model.safetensors").write_bytes(data)
    resum(path)
    with pytest.raises(Damaged, match=rf"^model\.safetensors: .*{reason}"):
        read(path)
    assert problem(path) is not None


BAD_STATES = {
    "not JSON": (b"{'a': 1}", "not JSON"),
    "empty": (b"", "not JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "UTF-8"),
    "a list": (b"[]", "isn't a checkpoint of format 2"),
    "another format": (b'{"format": 3}', "isn't a checkpoint of format 2"),
    "nothing else": (b'{"format": 2}', "isn't the state of a checkpoint"),
    "NaN": (b'{"format": NaN}', "NaN"),
    "infinity": (b'{"format": -Infinity}', "Infinity"),
    "huge float": (b'{"format": 1e999}', "no float can hold"),
    "huge int": (b'{"format": ' + b"9" * 1_000_000 + b"}", "digits"),
    "nested lists": (b"[" * 1_000_000 + b"]" * 1_000_000, "nested too deeply"),
    "nested mappings": (b'{"a":' * 1_000_000, "nested too deeply"),
    "key twice": (b'{"format": 2, "format": 2}', "twice"),
    "step a word": (b'{"format":2,"step":"1","tensors":[],"state":{}}', "isn't the state"),
    "path as a file": (b'{"format":2,"step":1,"tensors":["../model"],"state":{}}', "isn't the state"),
    "names unhashable": (b'{"format":2,"step":1,"tensors":[[]],"state":{}}', "isn't the state"),
    "fewer files": (b'{"format":2,"step":1,"tensors":["model"],"state":{}}', "doesn't list"),
    "more files": (b'{"format":2,"step":1,"tensors":["model","optimizer","ema"],"state":{}}', "doesn't list"),
    "another step": (b'{"format":2,"step":2,"tensors":["model","optimizer"],"state":{}}', "of step 2"),
    "too large": (b" " * ((16 << 20) + 1), "larger than 16 MiB"),
}


@pytest.mark.parametrize("data, reason", BAD_STATES.values(), ids=BAD_STATES)
def test_bad_states_are_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = save(tmp_path, 1)
    (path / "state.json").write_bytes(data)
    resum(path)
    with pytest.raises(Damaged, match=reason):
        read(path)


def with_line(line: str) -> Callable[[str], str]:
    return lambda text: text + line


BAD_SUMS: dict[str, Callable[[str], str]] = {
    "path up": with_line("0" * 64 + "  ../x.json\n"),
    "absolute": with_line("0" * 64 + "  /etc/passwd\n"),
    "absolute with a suffix": with_line("0" * 64 + "  /etc/x.json\n"),
    "below": with_line("0" * 64 + "  a/x.json\n"),
    "NUL": with_line("0" * 64 + "  a\0.json\n"),
    "extra file": with_line("0" * 64 + "  ema.safetensors\n"),
    "another extra file": with_line("0" * 64 + "  other.json\n"),
    "itself": with_line("0" * 64 + "  SHA256SUMS\n"),
    "twice": lambda text: text + text.splitlines(keepends=True)[0],
    "empty line": with_line("\n"),
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "upper case": str.upper,
    "binary mark": lambda text: text.replace("  ", " *"),
    "one file less": lambda text: "".join(text.splitlines(keepends=True)[1:]),
    "no state": lambda text: "".join(line for line in text.splitlines(keepends=True) if "state" not in line),
    "empty": lambda _: "",
    "huge": lambda text: text * 1000,
}


@pytest.mark.parametrize("change", BAD_SUMS.values(), ids=BAD_SUMS)
def test_bad_sums_are_refused(tmp_path: Path, change: Callable[[str], str]) -> None:
    path = save(tmp_path, 1)
    file = path / "SHA256SUMS"
    file.write_bytes(change(file.read_text()).encode())
    with pytest.raises(Damaged, match=r"SHA256SUMS|state\.json"):
        read(path)


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends the tests if something hangs."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "missing", "device", "loop"])
def test_odd_files_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = save(tmp_path / "checkpoints", 1)
    file = path / name
    outside = tmp_path / "outside"
    file.rename(outside)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to(outside)  # the very same content
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        try:
            os.mknod(file, 0o20666, os.makedev(1, 5))  # /dev/zero
        except OSError:
            pytest.skip("can't make a device here")
    elif kind == "loop":
        file.symlink_to(file)
    with pytest.raises(Damaged, match=rf"^{name}(:? is missing|: isn't a regular file|: is a symbolic link)"):
        read(path)
    assert len(listing(path.parent, verify=True)) == 1
    prune(path.parent, keep_last=1)


def test_odd_folders_are_no_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    real = save(folder, 5)
    real.rename(tmp_path / "elsewhere")
    (folder / "step-00000009").symlink_to(tmp_path / "elsewhere")
    (folder / "step-00000008").write_text("a file")
    (folder / "step-00000007").mkdir()
    for name in (
        "step-7",
        "step-000000000007",
        "step-00000007.0",
        "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667",
        "step-00000007~",
        ".step-00000007",
    ):
        (folder / name).mkdir()
    problems = [(entry.step, entry.problem) for entry in listing(folder, verify=True)]
    assert problems == [
        (9, "the folder isn't one (Not a directory)"),
        (8, "the folder isn't one (Not a directory)"),
        (7, "SHA256SUMS is missing"),
    ]
    assert newest_good(folder)[0] is None
    save(folder, 1)
    prune(folder, keep_last=1)  # only removes what is older
    assert mark_of(folder) == 1
    for step in (7, 8, 9):  # odd ones are replaced, and what a link points to stays
        save(folder, step)
    assert mark_of(folder) == 9 and read(tmp_path / "elsewhere").state == {"mark": 5}


class Interfering:
    """`os`, but something happens when a file is opened."""

    def __init__(self, name: str, happens: Callable[[], object]) -> None:
        self.name, self.happens = name, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        opened = os.open(path, flags, *args, **kwargs)
        if path == self.name:
            self.happens()
        return opened


@pytest.mark.parametrize("name", NAMES)
def test_files_that_vanish_or_shrink_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = save(tmp_path, 1)
    monkeypatch.setattr(files, "os", Interfering(name, lambda: shutil.rmtree(path, ignore_errors=True)))
    found = problem(path)  # the last files may have been open already
    assert found is None or found.endswith("is missing")
    assert found is not None or name not in ("SHA256SUMS", "state.json")
    path = save(tmp_path, 2)
    real_fstat = os.fstat
    interfering = Interfering(name, lambda: None)
    interfering.fstat = lambda file: _larger(real_fstat(file))  # type: ignore[attr-defined]
    monkeypatch.setattr(files, "os", interfering)
    assert problem(path) is not None


def _larger(facts: os.stat_result) -> os.stat_result:
    return os.stat_result([*facts[:6], facts.st_size + 100, *facts[7:10]])


@pytest.mark.parametrize("call", ["open", "readv", "pread"])
def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    broken = [(path / name).stat().st_ino for name in NAMES] + [path.stat().st_ino]

    class Broken(Interfering):
        def _call(self, *args: Any, **kwargs: Any) -> Any:
            result = getattr(os, call)(*args, **kwargs)
            if os.fstat(result if call == "open" else args[0]).st_ino in broken:
                raise OSError(EIO, os.strerror(EIO))
            return result

    disk = Broken("", lambda: None)
    setattr(disk, call, disk._call)
    monkeypatch.setattr(files, "os", disk)
    with pytest.raises(Unreadable, match=r"step-00000002: .* can't be read now \(Input/output error\)"):
        newest_good(tmp_path)
    assert "can't be read now" in str(listing(tmp_path, verify=True)[0].problem)
    assert prune(tmp_path, keep_last=1) == [], "what can't be read doesn't count as good"


GOOD = b"".join(tensor_file.encode({"a": torch.arange(6).view(2, 3), "b": torch.tensor(1.5).half()}))


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_whatever_is_accepted_the_library_accepts_too(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    try:
        start = 8 + tensor_file.header_size(bytes(data[:8]), len(data))
        slots = tensor_file.parse_header(bytes(data[8:start]), len(data) - start)
        got = tensor_file.decode(torch.frombuffer(data, dtype=torch.uint8)[start:], slots)
    except ValueError:
        return
    wanted = safetensors.torch.load(bytes(data))
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert tensor.dtype == wanted[name].dtype and tensor.shape == wanted[name].shape
        same = tensor.reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8)
        assert torch.equal(*same)


# Listing, pruning.


def steps(entries: list[Entry]) -> list[int]:
    return [entry.step for entry in entries]


def test_the_newest_comes_first_and_leftovers_never(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    assert listing(tmp_path / "none") == [] and newest_good(tmp_path / "none") == (None, [])
    for step in (3, 100_000_000, 20):
        save(tmp_path, step)
    disk(15)
    with pytest.raises(Killed):
        save(tmp_path, 21)
    disk()
    entries = listing(tmp_path, verify=True)
    assert steps(entries) == [100_000_000, 20, 3]
    assert all(entry.problem is None and time.time() - entry.time < 60 for entry in entries)
    assert entries[0].size == sum(file.stat().st_size for file in entries[0].path.iterdir())
    assert len(hidden(tmp_path)) == 1
    assert len(remove_leftovers(tmp_path)) == 1 and not hidden(tmp_path)
    assert steps(listing(tmp_path)) == [100_000_000, 20, 3]


def test_only_what_is_older_than_the_last_good_ones_goes(tmp_path: Path) -> None:
    for step in range(8):
        save(tmp_path, step)
    for step in (6, 2):
        (tmp_path / f"step-{step:08d}" / "state.json").unlink()
    assert prune(tmp_path, keep_last=3, best=1) == [3, 2, 0]
    assert steps(listing(tmp_path)) == [7, 6, 5, 4, 1]
    assert prune(tmp_path, keep_last=9) == []
    (tmp_path / "step-00000007" / "state.json").unlink()
    assert prune(tmp_path, keep_last=1, known_good={7}) == [6, 5, 4, 1]
    with pytest.raises(ValueError):
        prune(tmp_path, keep_last=0)


def test_nothing_goes_while_nothing_is_good(tmp_path: Path) -> None:
    for step in range(4):
        (save(tmp_path, step) / "SHA256SUMS").unlink()
    assert prune(tmp_path, keep_last=1) == []


# On the command line.


def test_the_command_lists_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 1200):
        save(folder, step)
    flip(folder / "step-00001200" / "model.safetensors", -1, 3)
    assert main(["checkpoints", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "age", "size", "verified"]
    assert lines[1].split()[0] == "1200" and lines[1].endswith("hash isn't the one in SHA256SUMS")
    assert lines[2].split()[0] == "2" and lines[2].endswith("good")
    assert "MB/s" in lines[4] and lines[5] == f"newest good: step 2 ({folder / 'step-00000002'})"
    assert main(["checkpoints", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in shown["checkpoints"]] == [1200, 2, 1]
    assert [one["problem"] is None for one in shown["checkpoints"]] == [False, True, True]
    assert shown["newest_good"] == str(folder / "step-00000002") and shown["mb_per_second"] > 0


@pytest.mark.parametrize(
    ("speed", "said"), [(1234.4, "1,234 MB/s"), (0.0312, "0.031 MB/s"), (9.96, "10 MB/s"), (0.0, "")]
)
def test_a_speed_is_never_told_as_0(speed: float, said: str) -> None:
    entry = Entry(1, Path("step-1"), 10, 0.0, None)
    told = [line for line in show._lines(Path("run"), [entry], entry, speed) if "verified at" in line]
    assert told == ([f"verified at {said}"] if said else [])


def test_the_command_without_a_good_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no checkpoints\n"
    (save(tmp_path / "checkpoints", 1) / "state.json").unlink()
    assert main(["checkpoints", str(tmp_path)]) == 1
    assert "none" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path / "manifest.json")]) == 2
    assert main(["checkpoints", str(tmp_path / "none")]) == 2
    assert main(["checkpoints", str(tmp_path / "checkpoints" / "step-00000001")]) == 2


# Written in the background.


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Set when a write has begun; and what it waits for then."""
    begun, may = threading.Event(), threading.Event()
    write_files = store.__dict__["write_files"]

    def gated(*arguments: Any) -> None:
        begun.set()
        assert may.wait(SECONDS)
        write_files(*arguments)

    monkeypatch.setattr(store, "write_files", gated)
    return begun, may


def test_training_goes_on_while_it_is_written(
    tmp_path: Path, gate: tuple[threading.Event, threading.Event]
) -> None:
    begun, may = gate
    problems: list[str] = []
    writer = BackgroundWriter(tmp_path, keep_last=2, on_problem=problems.append)

    def submit(step: int) -> None:
        state, tensors = {"mark": step}, marked(step)
        writer.submit(step, stage(tensors), state, best=0)
        state["mark"] = -1
        for group in tensors.values():
            for tensor in group.values():
                tensor.fill_(-1)

    submit(0)  # comes back though the write can't end
    assert begun.wait(SECONDS) and not listing(tmp_path)
    second = threading.Thread(target=submit, args=(1,))
    second.start()
    second.join(0.05)
    assert second.is_alive(), "one write at a time"
    assert sum(thread.name == "checkpoint" for thread in threading.enumerate()) == 1
    may.set()
    second.join(SECONDS)
    for step in (2, 3):
        submit(step)
    assert writer.finish() == 3 and writer.finish() == 3
    assert steps(listing(tmp_path)) == [3, 2, 0]
    assert mark_of(tmp_path) == 3 and not problems


def test_staged_tensors_keep_their_layout(tmp_path: Path) -> None:
    last = torch.randn(2, 3, 4, 4, requires_grad=True).to(memory_format=torch.channels_last)
    staged = stage({"model": {"a": last, "b": last}})["model"]
    assert staged["a"].is_contiguous(memory_format=torch.channels_last) and not staged["a"].requires_grad
    assert staged["a"].data_ptr() != last.data_ptr()
    assert torch.equal(read(write(tmp_path, 1, {"model": staged}, {})).tensors["model"]["b"], last)


def test_a_failed_write_is_told_and_the_next_tries_again(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    folder = run / "checkpoints"
    problems: list[str] = []
    writer = BackgroundWriter(folder, keep_last=1, on_problem=problems.append)
    disk(8, ENOSPC)
    writer.submit(1, marked(1), {"mark": 1})
    assert writer.finish() is None
    assert problems == ["the checkpoint of step 1 wasn't written (No space left on device); there is none"]
    assert not hidden(folder)
    disk()
    writer.submit(2, marked(2), {"mark": 2})
    writer.finish()
    shutil.rmtree(run)
    writer.submit(3, marked(3), {"mark": 3})
    assert writer.finish() == 2
    assert "step 3 wasn't written (No such file or directory)" in problems[1]
    run.mkdir()
    writer.submit(4, marked(4), {"mark": 4})
    assert writer.finish() == 4 and mark_of(folder) == 4 and len(problems) == 2


def test_a_folder_that_goes_under_way_is_told(
    tmp_path: Path, gate: tuple[threading.Event, threading.Event]
) -> None:
    begun, may = gate
    problems: list[str] = []
    writer = BackgroundWriter(tmp_path / "checkpoints", keep_last=1, on_problem=problems.append)
    writer.submit(1, marked(1), {"mark": 1})
    assert begun.wait(SECONDS)
    shutil.rmtree(tmp_path / "checkpoints")
    may.set()
    assert writer.finish() is None and len(problems) == 1


def test_old_ones_that_stay_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    writer = BackgroundWriter(tmp_path, keep_last=1, on_problem=problems.append)

    def refuse(_: Path) -> None:
        raise OSError(EIO, os.strerror(EIO))

    monkeypatch.setattr(files, "remove", refuse)
    for step in (1, 2):
        writer.submit(step, marked(step), {"mark": step})
    assert writer.finish() == 2
    assert problems == ["old checkpoints weren't removed (Input/output error)"]


def test_a_wrong_state_is_the_caller_s_mistake(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path, keep_last=1, on_problem=pytest.fail)
    with pytest.raises(ValueError):
        writer.submit(1, marked(1), {"loss": float("inf")})


def test_an_abandoned_write_leaves_nothing(
    tmp_path: Path, gate: tuple[threading.Event, threading.Event]
) -> None:
    begun, may = gate
    writer = BackgroundWriter(tmp_path, keep_last=1, on_problem=pytest.fail)
    writer.submit(1, marked(1), {"mark": 1})
    assert begun.wait(SECONDS)
    writer.abandon()  # doesn't wait: the write can't end before the next line
    may.set()
    assert writer.finish() is None
    assert not list(tmp_path.iterdir())


def test_verifying_tells_how_far_it_is(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    counts: list[int] = []
    verify(path, counts.append)
    assert sum(counts) == sum((path / name).stat().st_size for name in NAMES if name != "SHA256SUMS")
