"""Promise: whatever happens to the files of a checkpoint is found, and it is never read as a good one."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from errno import EIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from tests.helpers.marked import FILES, assert_same_tensor, flip, mark_of, resum, save
from tests.helpers.refusals import refused
from trainer.checkpoint import tensor_file
from trainer.checkpoint.folder import Damaged, Unreadable, problem, read
from trainer.checkpoint.store import listing, newest_good, prune
from trainer.host import files


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flips")
    save(folder, 1)
    return save(folder, 2)


@pytest.mark.parametrize("name", FILES)
def test_a_byte_anywhere_counts(victim: Path, name: str) -> None:
    file = victim / name
    good = file.read_bytes()
    for position in range(0, len(good), 1 + len(good) // 200):
        flip(file, position, position % 8)
        assert problem(victim) is not None
        file.write_bytes(good[:position])
        assert problem(victim) is not None
        file.write_bytes(good)
    file.write_bytes(good + b"\n")
    assert problem(victim) is not None
    file.write_bytes(good)
    assert problem(victim) is None


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (0 if isinstance(header, bytes) else -len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


ONE = entry()["x"]
BAD_TENSORS = {
    "pickle": pickle.dumps({"a": 1}),
    "header beyond the file": (99).to_bytes(8, "little") + b"{}",
    "header not JSON": safetensors_bytes(b"{nope"),
    "header nested": safetensors_bytes(b"[" * 200_000),
    "header a list": safetensors_bytes([]),
    "unknown dtype": safetensors_bytes(entry(dtype="PICKLE"), bytes(8)),
    "negative": safetensors_bytes(entry(shape=[-2]), bytes(8)),
    "negative twice": safetensors_bytes(entry(shape=[-1, -2]), bytes(8)),
    "no whole number": safetensors_bytes(entry(shape=[2.0]), bytes(8)),
    "much too large": safetensors_bytes(entry(shape=[2**62, 2**62])),
    "too small": safetensors_bytes(entry(shape=[1]), bytes(8)),
    "beyond the end": safetensors_bytes(entry(), bytes(4)),
    "gap": safetensors_bytes(entry(data_offsets=[4, 12]), bytes(12)),
    "overlap": safetensors_bytes({"x": ONE, "y": ONE}, bytes(8)),
    "not aligned": safetensors_bytes(json.dumps(entry()).encode(), bytes(8)),
}


BAD_STATES = {
    "not JSON": (b"{'a': 1}", ""),
    "another format": (b'{"format": 3}', "2"),
    "nothing else": (b'{"format": 2}', "state"),
    "NaN": (b'{"format": NaN}', "NaN"),
    "huge int": (b'{"format": ' + b"9" * 1_000_000 + b"}", ""),
    "nested": (b"[" * 1_000_000 + b"]" * 1_000_000, ""),
    "path as a file": (b'{"format":2,"step":1,"tensors":["../model"],"state":{}}', "state"),
    "names unhashable": (b'{"format":2,"step":1,"tensors":[[]],"state":{}}', "state"),
    "fewer files": (b'{"format":2,"step":1,"tensors":["model"],"state":{}}', "SHA256SUMS"),
    "another step": (b'{"format":2,"step":2,"tensors":["model","optimizer"],"state":{}}', "2"),
    "too large": (b" " * ((16 << 20) + 1), "16"),
}


DAMAGED = {
    **{what: ("model.safetensors", data, "model.safetensors") for what, data in BAD_TENSORS.items()},
    **{f"state {what}": ("state.json", *bad) for what, bad in BAD_STATES.items()},
}


@pytest.mark.parametrize(("name", "data", "names"), DAMAGED.values(), ids=DAMAGED)
def test_bad_files_with_right_sums_are_refused(tmp_path: Path, name: str, data: bytes, names: str) -> None:
    path = save(tmp_path, 1)
    (path / name).write_bytes(data)
    resum(path)
    with refused(names, by=Damaged):
        read(path)
    assert problem(path) is not None


BAD_SUMS: dict[str, Callable[[str], str]] = {
    "path up": lambda text: f"{text}{'0' * 64}  ../x.json\n",
    "extra file": lambda text: f"{text}{'0' * 64}  ema.safetensors\n",
    "twice": lambda text: text + text.splitlines(keepends=True)[0],
    "upper case": str.upper,
    "one file less": lambda text: "".join(text.splitlines(keepends=True)[1:]),
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "fifo") for name in FILES), (FILES[0], "link"), (FILES[2], "folder"), (FILES[3], "missing")],
)
def test_odd_files_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = save(tmp_path / "checkpoints", 1)
    file, outside = path / name, tmp_path / "outside"
    file.rename(outside)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to(outside)  # the very same content
    elif kind == "folder":
        file.mkdir()
    with refused(name, by=Damaged):
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
    for name in ("step-7", "step-00000007~", ".step-00000007"):
        (folder / name).mkdir()
    entries = listing(folder, verify=True)
    assert [entry.step for entry in entries] == [9, 8, 7] and all(entry.problem for entry in entries)
    assert newest_good(folder)[0] is None
    save(folder, 1)
    prune(folder, keep_last=1)  # only removes what is older
    assert mark_of(folder) == 1
    for step in (7, 8, 9):  # odd ones are replaced, and what a link points to stays
        save(folder, step)
    assert mark_of(folder) == 9 and read(tmp_path / "elsewhere").state == {"mark": 5}


def os_with(**calls: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(os), **calls})


@pytest.mark.parametrize("call", ["open", "readv"])
def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    broken = [(path / name).stat().st_ino for name in FILES] + [path.stat().st_ino]

    def fails(*args: Any, **kwargs: Any) -> Any:
        result = getattr(os, call)(*args, **kwargs)
        if os.fstat(result if call == "open" else args[0]).st_ino in broken:
            raise OSError(EIO, os.strerror(EIO))
        return result

    monkeypatch.setattr(files, "os", os_with(**{call: fails}))
    with refused("step-00000002 Input/output", by=Unreadable):
        newest_good(tmp_path)
    assert listing(tmp_path, verify=True)[0].problem
    assert prune(tmp_path, keep_last=1) == [], "what can't be read doesn't count as good"


GOOD = b"".join(
    tensor_file.safetensors_bytes({"a": torch.arange(6).view(2, 3), "b": torch.tensor(1.5).half()})
)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_whatever_is_accepted_the_library_accepts_too(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    try:
        start = 8 + tensor_file.header_size(bytes(data[:8]), len(data))
        slots = tensor_file.parse_header(bytes(data[8:start]), len(data) - start)
        got = tensor_file.tensors_in(torch.frombuffer(data, dtype=torch.uint8)[start:], slots)
    except ValueError:
        return
    wanted = safetensors.torch.load(bytes(data))
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert_same_tensor(tensor, wanted[name])


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_files_that_vanish_or_shrink_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = save(tmp_path, 1)

    def opened(file: Any, *args: Any, **kwargs: Any) -> int:
        found = os.open(file, *args, **kwargs)
        if file == name:
            shutil.rmtree(path, ignore_errors=True)
        return found

    def larger(file: int) -> os.stat_result:
        facts = os.fstat(file)
        return os.stat_result([*facts[:6], facts.st_size + 100, *facts[7:10]])

    monkeypatch.setattr(files, "os", os_with(open=opened))
    found = problem(path)  # the last files may have been open already
    assert found is not None or name == "model.safetensors"
    path = save(tmp_path, 2)
    monkeypatch.setattr(files, "os", os_with(fstat=larger))
    assert problem(path) is not None
