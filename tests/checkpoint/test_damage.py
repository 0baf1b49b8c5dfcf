"""Promise: whatever happens to the files of a checkpoint is found, and it is never read as a good one."""

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from tests.helpers.marked import FILES, flip, mark_of, resum, save
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


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_any_flipped_bit_is_found(victim: Path, name: str, share: float, bit: int) -> None:
    file = victim / name
    position = int(share * file.stat().st_size)
    flip(file, position, bit)
    checkpoint, skipped = newest_good(victim.parent)
    flip(file, position, bit)
    assert checkpoint is not None and checkpoint.step == 1
    assert len(skipped) == 1 and skipped[0].startswith("step-00000002: ")


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
    signal.alarm(300)
    yield
    signal.alarm(0)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("name", FILES)
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
        (9, "the folder: Not a directory"),
        (8, "the folder: Not a directory"),
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


@pytest.mark.parametrize("name", FILES)
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
    broken = [(path / name).stat().st_ino for name in FILES] + [path.stat().st_ino]

    class Broken(Interfering):
        def _call(self, *args: Any, **kwargs: Any) -> Any:
            result = getattr(os, call)(*args, **kwargs)
            if os.fstat(result if call == "open" else args[0]).st_ino in broken:
                raise OSError(EIO, os.strerror(EIO))
            return result

    disk = Broken("", lambda: None)
    setattr(disk, call, disk._call)
    monkeypatch.setattr(files, "os", disk)
    with refused("step-00000002 Input/output", by=Unreadable):
        newest_good(tmp_path)
    assert "can't be read now" in str(listing(tmp_path, verify=True)[0].problem)
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
        assert tensor.dtype == wanted[name].dtype and tensor.shape == wanted[name].shape
        same = tensor.reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8)
        assert torch.equal(*same)
