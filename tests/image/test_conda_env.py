"""The environment comes from an explicit lock: each package by its hash, nothing else asked for, repeatable.

The packages are made here and served on loopback. A real conda links them where one is on PATH; otherwise
`container/stand_in_conda.py` does.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from locks import LockError, read_conda

from tests.helpers.packages import Contents, pack
from tests.helpers.programs import Quiet, program, ran, served
from tests.helpers.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "conda_env.py"
REAL = shutil.which("conda")
HOST = "https://conda.anaconda.org"
PLACEHOLDER = "/placeholder" * 12
PYTHON = "{}.{}".format(*sys.version_info)
SHA = "0" * 64
PROXIES = ("http_proxy", "https_proxy", "HTTPS_PROXY")


@dataclass
class Channel:
    """Packages in a folder, served on loopback, their lines of a lock, and what the server was asked for."""

    folder: Path
    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)  # file: answers before the true one
    lines: list[str] = field(default_factory=list)

    def pack(self, file: str, files: Contents, **more: Any) -> None:
        """Makes a package and adds its line."""
        digest = pack(self.folder / "conda-forge" / file, files, **more)
        self.lines.append(f"{HOST}/conda-forge/{file}#{digest}")


def digest(file: Path, algorithm: str = "sha256") -> str:
    return hashlib.new(algorithm, file.read_bytes()).hexdigest()


class Handler(Quiet, BaseHTTPRequestHandler):
    """Serves a channel; as a proxy it is asked for whole URLs, which it notes and refuses."""

    def __init__(self, channel: Channel, *rest: Any) -> None:
        self.channel = channel
        super().__init__(*rest)

    def do_GET(self) -> None:
        self.channel.asked[self.path] += 1
        file = self.channel.folder / self.path.lstrip("/")
        waiting = self.channel.first.get(file.name, [])
        answer = waiting.pop(0) if waiting else ""
        if answer.isdigit() or not file.is_file():
            self.send_error(int(answer or 404))
            return
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if answer else data)

    def do_CONNECT(self) -> None:
        self.do_GET()


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    channel = Channel(tmp_path / "channel")
    with served(partial(Handler, channel)) as server:
        channel.url = f"http://127.0.0.1:{server.server_port}"
        yield channel


@pytest.fixture(scope="module", autouse=True)
def conda(tmp_path_factory: pytest.TempPathFactory) -> str:
    if REAL:
        return REAL
    source = ROOT / "tests/container/stand_in_conda.py"
    text = f'#!/bin/sh\nexec "{sys.executable}" -I "{source}" "$@"\n'
    return str(program(tmp_path_factory.mktemp("bin") / "conda", text))


@dataclass
class Made:
    """What a run of the script left and said."""

    code: int
    out: str
    prefix: Path

    @property
    def error(self) -> str:
        """Its one line."""
        lines = [line for line in self.out.splitlines() if line.startswith("conda_env: ")]
        assert "Traceback" not in self.out
        return lines[-1]


Make = Callable[..., Made]


@pytest.fixture
def make(channel: Channel, conda: str, tmp_path: Path) -> Make:
    def make(*words: object, lines: list[str] | None = None, mirror: str | None = None) -> Made:
        lock, prefix = tmp_path / "conda.lock", tmp_path / "opt" / "env"
        held = channel.lines if lines is None else lines
        lock.write_text("".join(f"{line}\n" for line in ["# a test", "@EXPLICIT", *held]))
        given = [lock, prefix, "--conda", conda, "--backoff", 0.01]
        given += ["--mirror", channel.url if mirror is None else mirror]
        # Whatever asks for another host asks the channel's server, as a proxy: counted.
        env = {**os.environ, **dict.fromkeys(PROXIES, channel.url)}
        env |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
        done = ran(sys.executable, SCRIPT, *given, *words, env=env)
        assert [*prefix.parent.glob("[!e]*"), *prefix.parent.glob(".*")] == [], "working files were left"
        return Made(done.returncode, done.stdout + done.stderr, prefix)

    return make


@pytest.fixture
def packages(channel: Channel) -> Channel:
    """Two packages: a .conda with prefixes in a text and a binary, and a .tar.bz2 with a symlink."""
    text = f"#!/bin/sh\necho {PLACEHOLDER}/share\n".encode()
    binary = b"\x7fELF" + f"{PLACEHOLDER}/lib".encode() + b"\0tail"
    modes = {"bin/where": "text", "lib/binary": "binary"}
    files: Contents = {"bin/where": text, "lib/binary": binary}
    channel.pack("linux-64/where-1.0-h1_0.conda", files, placeholder=(PLACEHOLDER, modes))
    files = {"lib/libplain.so.1": b"plain", "lib/libplain.so": "libplain.so.1"}
    channel.pack("linux-64/plain-1.0-h1_0.tar.bz2", files)
    return channel


def tree(prefix: Path) -> dict[str, tuple[int, bytes | Path]]:
    """Every path with its mode and content."""
    found: dict[str, tuple[int, bytes | Path]] = {}
    for path in prefix.rglob("*"):
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(prefix))] = (path.lstat().st_mode, content)
    return found


def test_the_right_hashes_give_the_environment_alone(packages: Channel, make: Make, tmp_path: Path) -> None:
    """The same bytes each time; records name every file and the true source."""
    python(packages)
    made = make()
    assert made.code == 0, made.out
    prefix, begun = made.prefix, int(time.time())
    assert packages.asked == Counter(line.partition("#")[0].removeprefix(HOST) for line in packages.lines)
    assert subprocess.check_output([prefix / "bin" / "where"], text=True) == f"{prefix}/share\n"
    binary = (prefix / "lib" / "binary").read_bytes()
    assert binary.startswith(b"\x7fELF" + f"{prefix}/lib".encode() + b"\0")
    assert len(binary) == len(b"\x7fELF" + f"{PLACEHOLDER}/lib".encode() + b"\0tail")
    assert (prefix / "lib" / "libplain.so").readlink() == Path("libplain.so.1")
    listed = {"conda-meta/history"}
    for line in packages.lines:
        url, _, sha256 = line.partition("#")
        name = f"conda-meta/{Path(url).stem.removesuffix('.tar')}.json"
        record = json.loads((prefix / name).read_text())
        assert (record["url"], record["sha256"]) == (url, sha256)
        assert record["channel"] == f"{HOST}/conda-forge" and "file:" not in json.dumps(record)
        paths = {one["_path"]: one for one in record["paths_data"]["paths"]}
        listed |= {name, *paths}
        assert [*paths] == record["files"]
        for path, one in paths.items():
            assert digest(prefix / path) == (one.get("sha256_in_prefix") or one["sha256"]), path
    before = tree(prefix)
    assert {path for path in before if not (prefix / path).is_dir()} == listed
    assert before["conda-meta/history"][1] == b"" and str(prefix.parent / ".conda") not in str(before)
    shutil.rmtree(prefix)
    until(lambda: int(time.time()) > begun, "the next second")  # bytecode holds whole ones
    assert tree(make("--cache", tmp_path / "cache", mirror=str(packages.folder)).prefix) == before


def python(channel: Channel) -> None:
    """Adds a `python`, which is the tests' own, and a noarch package with an entry point."""
    shell = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'.encode()
    interpreter: dict[str, bytes | str] = {f"bin/python{PYTHON}": shell, "bin/python": f"python{PYTHON}"}
    channel.pack(f"linux-64/python-{PYTHON}.0-h1_0.conda", interpreter)
    code = b"def main():\n    print('hello from noarch')\n    return 3\n"
    files = {"site-packages/hello.py": code}
    channel.pack("noarch/hello-1.0-pyh_0.conda", files, entry_points=["say-hello = hello:main"])


def test_a_wrong_hash_is_refused(packages: Channel, make: Make) -> None:
    wrong = [packages.lines[0], packages.lines[1][:-4] + "0000"]
    for mirror in (packages.url, packages.folder.as_uri()):
        made = make(lines=wrong, mirror=mirror)
        assert made.code == 1 and "plain-1.0-h1_0.tar.bz2" in made.error


def test_failures_that_pass_and_that_stay(packages: Channel, make: Make, tmp_path: Path) -> None:
    name = "where-1.0-h1_0.conda"
    packages.first[name] = ["500", "cut", "429"]
    assert make().code == 0
    assert packages.asked[f"/conda-forge/linux-64/{name}"] == 4
    shutil.rmtree(tmp_path / "opt")
    packages.first[name] = ["cut"] * 9
    made = make()
    assert made.code == 1 and name in made.error


def test_what_is_cached_is_not_asked_for_unless_corrupt(
    packages: Channel, make: Make, tmp_path: Path
) -> None:
    name = "/conda-forge/linux-64/plain-1.0-h1_0.tar.bz2"
    bad = tmp_path / f"cache{name}"
    assert make("--cache", tmp_path / "cache").code == 0
    bad.write_bytes(bad.read_bytes()[:-1] + b"!")
    for asked in ([name], []):
        shutil.rmtree(tmp_path / "opt")
        packages.asked.clear()
        assert make("--cache", tmp_path / "cache").code == 0
        assert packages.asked == Counter(asked)


def test_an_md5_needs_a_permission(packages: Channel, make: Make) -> None:
    url = packages.lines[0].partition("#")[0]
    md5 = digest(packages.folder / url.removeprefix(f"{HOST}/"), "md5")
    lines = [f"{url}#{md5}", packages.lines[1]]
    made = make(lines=lines)
    assert made.code == 2 and "where has only an md5" in made.error
    assert make("--allow-md5", "where", lines=lines).code == 0
    shutil.rmtree(made.prefix.parent)
    made = make("--allow-md5", "where", lines=[f"{url}#{md5[::-1]}"])
    assert made.code == 1 and "md5 differs" in made.error


FORGE = f"{HOST}/conda-forge/linux-64"


@pytest.mark.parametrize(
    "line",
    [
        f"{FORGE}/a-1-0.conda",
        f"{FORGE}/a-1-0.conda#sha256:{SHA[:32]}",
        f"https://me:secret@host/conda-forge/linux-64/a-1-0.conda#{SHA}",
        f"file:///packages/linux-64/a-1-0.conda#{SHA}",
        f"{HOST}/../linux-64/a-1-0.conda#{SHA}",
    ],
)
def test_locks_that_are_refused(line: str) -> None:
    with pytest.raises(LockError, match="line 3") as refused:
        read_conda(f"# a test\n@EXPLICIT\n{line}\n")
    assert "secret" not in str(refused.value)
    (found,) = read_conda(f"@EXPLICIT\n{FORGE}/x-y-1!2.0-h1_0.tar.bz2#{SHA}\n")
    assert (found.name, found.record, found.digest) == ("x-y", "x-y-1!2.0-h1_0", SHA)


@pytest.mark.usefixtures("packages")
def test_a_conda_that_fails(make: Make, tmp_path: Path) -> None:
    half = '#!/bin/sh\nmkdir -p "$4/bin" && echo half >"$4/bin/half"\nexit 7\n'
    broken = program(tmp_path / "broken", half)
    made = make("--conda", broken)
    assert made.code == 1 and "exit code 7" in made.error
