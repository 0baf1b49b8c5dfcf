"""Promise: a remote shard is copied once, is whole and right or not there, and the cache keeps its limit."""

import fcntl
import hashlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.helpers.refusals import named, refused
from tests.helpers.remote import Web, files_below, wait_until_answered, write_pack
from tests.helpers.waiting import SECONDS, until
from trainer.data.formats.sharded import COLUMNS, INDEX, Shard
from trainer.data.remote import cache
from trainer.data.remote.cache import Cached, open_cached

SIZE = 50_000
NAMES = ("one", "two", "three", "four", "five")


def content(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(SIZE)


def shard(name: str) -> Shard:
    return Shard(name=name, bytes=SIZE, sha256=hashlib.sha256(content(name)).hexdigest())


def place_of(folder: Path, name: str) -> Path:
    return folder / f"{shard(name).sha256}.shard"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr("trainer.data.remote.access._WAITS", (0.0, 0.0))
    with closing(Web({f"data/{name}": content(name) for name in NAMES})) as server:
        yield server


def read(place: Cached, name: str) -> bytes:
    with os.fdopen(place.open(shard(name))) as file:
        return os.pread(file.fileno(), SIZE + 1, 0)


def kept(folder: Path) -> set[str]:
    """Shards that lie there, and "part" where there is one of one."""
    return {n for n in NAMES if place_of(folder, n).exists()} | {"part" for _ in folder.glob("*.part")}


def in_forks(count: int, work: Callable[[], bool]) -> list[int | None]:
    """Exit codes of so many processes that work at once: 0 if it was true."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=lambda: os._exit(0 if work() else 1)) for _ in range(count)]
    wait_until_answered()
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    return [process.exitcode for process in processes]


def test_processes_that_want_a_shard_at_once_share_one_download(web: Web, tmp_path: Path) -> None:
    web.app.faults["one"] = iter(["slow"])
    place = Cached(f"{web.url}/data", tmp_path, 10 * SIZE)
    assert in_forks(4, lambda: read(place, "one") == content("one")) == [0] * 4
    assert web.app.asked == {"/data/one": 1} and kept(tmp_path) == {"one"}


def test_a_kill_during_a_download_leaves_nothing_that_is_taken_for_whole(web: Web, tmp_path: Path) -> None:
    web.app.faults["one"] = iter(["half"])
    place = Cached(f"{web.url}/data", tmp_path, 2 * SIZE)
    process = multiprocessing.get_context("fork").Process(target=read, args=(place, "one"))
    process.start()
    part = tmp_path / f"{place_of(tmp_path, 'one').name}.part"
    until(lambda: part.exists() and part.stat().st_blocks > 0)
    process.kill()
    process.join(300)
    web.app.going.set()
    assert part.stat().st_size == SIZE  # the size is right, the content isn't
    assert part.read_bytes() != content("one") and kept(tmp_path) == {"part"}
    assert read(place, "one") == content("one")
    assert web.app.asked == {"/data/one": 2} and kept(tmp_path) == {"one"}


@pytest.mark.parametrize("wrong", ["damage", "more"])
def test_content_that_stays_wrong_is_told_and_not_kept(web: Web, tmp_path: Path, wrong: str) -> None:
    place = Cached(f"{web.url}/data", tmp_path, None)
    web.app.faults |= {"two": iter([wrong]), "one": itertools.repeat(wrong)}
    assert read(place, "two") == content("two"), "fetched once more"
    with refused("/data/one:"):
        place.open(shard("one"))
    assert web.app.asked["/data/one"] == 2 and kept(tmp_path) == {"two"}


def test_the_shards_that_were_not_used_for_longest_go(web: Web, tmp_path: Path) -> None:
    place = Cached(f"{web.url}/data", tmp_path, 3 * SIZE)
    for name in ("one", "two", "three", "one"):
        read(place, name)
    held = place.open(shard("two"))
    for name, there in (("four", "one two"), ("one", "four two"), ("five", "four one"), ("two", "five one")):
        assert read(place, name) == content(name) and kept(tmp_path) == {name, *there.split()}
    assert os.pread(held, SIZE, 0) == content("two")  # evicted, and readable as long as it is open
    os.close(held)
    assert web.app.asked["/data/two"] == 2


def test_a_shard_above_the_limit_is_told(web: Web, tmp_path: Path) -> None:
    with refused("data.cache_limit=49999B: 50000B"):
        Cached(f"{web.url}/data", tmp_path, SIZE - 1).open(shard("one"))
    assert not kept(tmp_path)


def test_others_downloads_are_waited_for(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = tmp_path / f"{place_of(tmp_path, 'two').name}.part"
    part.write_bytes(bytes(SIZE))
    file = os.open(part, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    largest = list[int]()

    def finish(_: float) -> None:
        largest.append(sum(path.stat().st_size for path in tmp_path.glob("*.shard*")))
        part.rename(place_of(tmp_path, "two"))
        os.close(file)

    monkeypatch.setattr(cache, "time", SimpleNamespace(sleep=finish, time_ns=time.time_ns))
    assert read(Cached(f"{web.url}/data", tmp_path, SIZE), "one") == content("one")
    assert largest == [SIZE]
    assert kept(tmp_path) == {"one"}


def test_a_disk_that_fails_is_told(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("trainer.data.remote.access.os.pwrite", failing)
    with refused(f"data.cache={tmp_path}:"):
        Cached(f"{web.url}/data", tmp_path, None).open(shard("one"))
    assert web.app.asked.total() == 1  # the server did nothing wrong
    assert not kept(tmp_path)


@pytest.fixture
def pack(web: Web, tmp_path: Path) -> None:
    write_pack(tmp_path / "pack", [3, 2])
    web.files |= files_below(tmp_path)


@pytest.mark.usefixtures("pack")
def test_an_index_is_fetched_once_for_each_of_its_versions(web: Web, tmp_path: Path) -> None:
    url, folder = f"{web.url}/pack", tmp_path / "cache"
    first, again = (open_cached(url, folder, None) for _ in range(2))
    assert first.fingerprint() == again.fingerprint()
    assert (web.app.asked[f"/pack/{INDEX}"], web.app.asked[f"/pack/{COLUMNS}"]) == (2, 1)
    old = first.read(0)
    write_pack(tmp_path / "other", [4], seed=1)
    web.files |= {f"pack/{name}": data for name, data in files_below(tmp_path / "other").items()}
    other = open_cached(url, folder, None)
    assert (len(first), len(other)) == (5, 4) and first.read(0) == old != other.read(0)
    for path in folder.glob("*.shard"):
        path.unlink()
    with refused("index"):  # it is there no more
        again.read(0)


@pytest.mark.usefixtures("pack")
def test_an_index_that_is_wrong_at_the_server_is_told(web: Web, tmp_path: Path) -> None:
    web.files[f"pack/{COLUMNS}"] += b"!"
    with refused(f"{web.url}/pack:"):
        open_cached(f"{web.url}/pack", tmp_path / "cache", None)
    web.files[f"pack/{INDEX}"] = b"<html>log in</html>"
    with refused(f"{web.url}/pack/{INDEX} HTML"):
        open_cached(f"{web.url}/pack", tmp_path / "cache", None)
    assert list((tmp_path / "cache").glob("*.index")) == []


@pytest.mark.usefixtures("pack")
def test_a_cut_off_index_is_fetched_again(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "AGAIN", (0.0, 0.0))
    expected = open_cached(f"{web.url}/pack", tmp_path / "one", None).fingerprint()
    web.app.faults[INDEX] = iter(["cut", "cut"])
    assert open_cached(f"{web.url}/pack", tmp_path / "two", None).fingerprint() == expected
    web.app.faults[INDEX] = itertools.repeat("cut")
    with refused(f"{web.url}/pack/{INDEX} JSON"):
        open_cached(f"{web.url}/pack", tmp_path / "two", None)
    assert web.app.asked[f"/pack/{INDEX}"] == 1 + 3 + 3


def test_a_changed_piece_comes_anew(web: Web, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, path = Cached(f"{web.url}/data", tmp_path, None), place_of(tmp_path, "one")
    assert read(place, "one") == content("one")
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(bytes([content("one")[SIZE // 2] ^ 1]))
    for _ in range(2):  # once is enough
        assert read(place, "one") == content("one") == path.read_bytes()
    (line,) = capsys.readouterr().err.splitlines()
    assert named(line, "data.cache:", path)
    assert web.app.asked == {"/data/one": 2}


@pytest.mark.usefixtures("pack")
@pytest.mark.parametrize("name", [INDEX, COLUMNS])
def test_a_changed_index(web: Web, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = tmp_path / "cache"
    expected = open_cached(f"{web.url}/pack", folder, None)
    (file,) = folder.glob(f"*/{name}")
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"a"', b'"z"') if name == INDEX else data[:-1] + bytes([data[-1] ^ 1]))
    again = open_cached(f"{web.url}/pack", folder, None)
    assert (again.classes, again.fingerprint()) == (expected.classes, expected.fingerprint())
    (line,) = capsys.readouterr().err.splitlines()
    assert named(line, file)


@pytest.mark.usefixtures("pack")
def test_an_endless_index_is_refused(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.host.strict_json.LARGEST", 1 << 10)
    web.files[f"pack/{INDEX}"] = b" " * ((1 << 10) + 1)
    with refused(f"{INDEX}: 1024B"):
        open_cached(f"{web.url}/pack", tmp_path / "cache", None)
    monkeypatch.setattr("trainer.host.strict_json.LARGEST", 1 << 24)
    monkeypatch.setattr(cache, "_MOST_COLUMNS", 10)
    web.files |= files_below(tmp_path)
    with refused(f"{COLUMNS}: 10B"):
        open_cached(f"{web.url}/pack", tmp_path / "cache", None)
    assert list((tmp_path / "cache").rglob("*.part")) == []
