"""P1 and P9: every file of an image has an owner, and none is there that should not be; its bill is valid.

The images are small tars made here, each fault planted in one that is clean without it.
"""

import base64
import gzip
import hashlib
import io
import json
import os
import py_compile
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import image_files
import pytest
from image_files import Made, Report, account, keep, main
from image_records import license_of
from image_tar import MAGICS, Image, ImageError, read_image, source_hashes
from locks import Locked, Package, Wheel
from sbom import bill

from tests.helpers import packages
from tests.helpers.programs import program
from tests.helpers.refusals import refusal

ROOT = Path(__file__).resolve().parents[2]
SITE = "opt/env/lib/python3.12/site-packages"
PYC = f"{SITE}/lib_x/__pycache__/__init__.cpython-312.pyc"
NEW = sys.version_info >= (3, 11)  # before, the hash in bytecode is another
ENTRYPOINT = b'#!/bin/sh\nexec "$@"\n'
PASSWD, LINE = b"root:x:0:0:root:/root:/bin/sh\n", b"trainer:*:1000:1000::/home/trainer:/bin/sh\n"
_LINES = b"b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMw" * 2
KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + _LINES
LONG, SHORT = b"three, with symbols", b"three"
TOKEN = "ghp_" + "a1B2c3D4e5" * 3 + "x" * 6
Node = bytes | str | None | tuple[bytes | None, int]  # a file, a link, a folder, a file with its mode
Tree = dict[str, Node]


def tarred(tree: Tree) -> bytes:
    return packages.tarred({f"./{path}": node for path, node in tree.items()})


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def archived(*layers: Tree, config: Any = None, squeeze: bool = False, **more: str) -> bytes:
    """An image as `docker save` writes it, with an attestation, which is no layer."""
    blobs: Tree = {}

    def put(data: bytes) -> dict[str, Any]:
        blobs[f"blobs/sha256/{sha256(data)}"] = data
        return {"digest": f"sha256:{sha256(data)}", "size": len(data)}

    made = [put(gzip.compress(tarred(layer)) if squeeze else tarred(layer)) for layer in layers]
    manifest = {"config": put(json.dumps({"config": config or {}, **more}).encode()), "layers": made}
    unknown = {**put(b'{"layers": []}'), "platform": {"os": "unknown"}}
    top = put(json.dumps(manifest).encode())
    inner = put(json.dumps({"manifests": [unknown, top]}).encode())
    index = json.dumps({"manifests": [inner]}).encode()
    return tarred({**dict(sorted(blobs.items())), "index.json": index, "oci-layout": b"{}"})


def record(tree: Tree, listed: dict[str, str], place: str) -> bytes:
    """A RECORD of paths in a tree, by the names that it writes."""
    rows = []
    for name, path in listed.items():
        data = tree[path]
        assert isinstance(data, bytes)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*rows, f"{place},,", ""]).encode()


def bytecode(source: bytes, folder: Path, mode: str = "UNCHECKED_HASH") -> bytes:
    """What the compiler of this Python writes."""
    file = folder / "source.py"
    file.write_bytes(source)
    made = py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode[mode], doraise=True)
    assert made
    return Path(made).read_bytes()


BASE: Tree = {"bin": "usr/bin", "usr/bin/sh": (b"shell", 0o755), "usr/bin/su": (b"su", 0o4755)}
BASE |= {"etc/passwd": PASSWD, "etc/group": b"root:x:0:\n", "tmp": (None, 0o1777)}
FORGE = "https://conda.anaconda.org/conda-forge"
LOCKED = Locked(
    [Package("tool", f"{FORGE}/linux-64/tool-1.0-h1_0.conda", "a" * 64)],
    [Wheel("lib-x", "2.0", "", ["train"], f"lib-x==2.0 --hash=sha256:{'b' * 64} --hash=sha256:{'c' * 64}")],
)


def clean(folder: Path) -> Tree:
    """An image with one file of each kind."""
    tree: Tree = {**BASE, "usr/bin/su": (b"su", 0o755), "etc/passwd": PASSWD + LINE}
    tree |= {"etc/group": b"root:x:0:\ntrainer:x:1000:\n", "cache": (None, 0o1777)}
    tree |= {"opt/image/entrypoint": ENTRYPOINT, f"{SITE}/trainer.pth": b"/opt/trainer\n"}
    # conda: a file whose prefix was replaced, one as packaged, links to both, to a folder and to nothing.
    tree |= {"opt/env/bin/tool": b"#!/opt/env/bin/sh", "opt/env/lib/libtool.so.1": b"\x7fELF tool"}
    tree |= {"opt/env/lib/libtool.so": "libtool.so.1", "opt/env/bin/tool-1": "tool", "opt/env/lib64": "lib"}
    tree |= {"opt/env/lib/libgone.so": "libgone.so.9", "opt/env/conda-meta/history": b""}
    tree |= {"opt/env/lib/libother.so": "libtool.so.1"}  # of another package: not there when it was built
    packaged = sha256(b"#!/placeholder/bin/sh")
    tool = sha256(b"\x7fELF tool")
    rows = [("bin/tool", "hardlink", packaged), ("lib/libtool.so.1", "hardlink", tool)]
    rows += [("lib/libtool.so", "softlink", tool), ("bin/tool-1", "softlink", packaged)]
    rows += [(path, "softlink", sha256(b"")) for path in ("lib64", "lib/libgone.so", "lib/libother.so")]
    rows.append(("lib/libtool.a", "hardlink", "e" * 64))  # pruned
    paths: list[dict[str, Any]] = [{"_path": a, "path_type": b, "sha256": c} for a, b, c in rows]
    paths[0]["sha256_in_prefix"] = sha256(b"#!/opt/env/bin/sh")
    paths.append({"_path": "empty", "path_type": "directory"})
    about = {"name": "tool", "version": "1.0", "build": "h1_0", "subdir": "linux-64", "license": "MIT"}
    about |= {"url": f"{FORGE}/linux-64/tool-1.0-h1_0.conda", "sha256": "a" * 64, "channel": FORGE}
    text = json.dumps({**about, "paths_data": {"paths": paths, "paths_version": 1}}).encode()
    tree["opt/env/conda-meta/tool-1.0-h1_0.json"] = text
    # A wheel with a script, data, bytecode, and a library that prune_env.py made a link of.
    source, two, torch = b"x = 1\n", f"{SITE}/lib_x/two.so", f"{SITE}/torch/lib/libtorch_x.so"
    wheel = {"__init__.py": source, "libcudnn.so.9": b"cudnn", "one.so": b"one", "two.so": b"one"}
    wheel = {f"lib_x/{name}": data for name, data in wheel.items()} | {"torch/lib/libtorch_x.so": LONG}
    wheel["lib_x-2.0.dist-info/METADATA"] = b"Name: lib_x\nLicense: MIT\n"
    tree |= {"opt/env/bin/x": b"#!/opt/env/bin/python\n"} | {f"{SITE}/{n}": data for n, data in wheel.items()}
    place = "lib_x-2.0.dist-info/RECORD"
    listed = {"../../../bin/x": "opt/env/bin/x", **{name: f"{SITE}/{name}" for name in wheel}}
    text = record(tree, listed, place)
    text += b"lib_x/__pycache__/__init__.cpython-312.pyc,,\nlib_x/big.a,sha256=aaaa,1\n"
    tree |= {f"{SITE}/{place}": text, two: "one.so", torch: SHORT}
    if NEW:
        tree[PYC] = bytecode(source, folder)
    inside = SITE.removeprefix("opt/env/")
    removed: dict[str, Any] = {"rules": [], "removed": ["lib/libtool.a", f"{inside}/lib_x/big.a"]}
    hashes = {"before": sha256(LONG), "after": sha256(SHORT)}
    removed |= {"linked": {f"{inside}/lib_x/two.so": "one.so"}}
    removed |= {"stripped": {f"{inside}/torch/lib/libtorch_x.so": hashes}}
    tree["opt/image/removed.json"] = json.dumps(removed).encode()
    # The trainer, as pip writes it with --target: its script's name leads out of the folder.
    own = {"trainer/__init__.py": b"", "bin/trainer": b"#!/opt/env/bin/python\nmain()\n"}
    tree |= {f"opt/trainer/{name}": data for name, data in own.items()}
    listed = {f"{'../../' * (name[0] == 'b')}{name}": f"opt/trainer/{name}" for name in own}
    place = "reproducible_trainer-0.1.0.dist-info/RECORD"
    tree[f"opt/trainer/{place}"] = record(tree, listed, place)
    return tree


def read(data: bytes) -> Image:
    return read_image(io.BytesIO(data), keep)


def report(tree: Tree, folder: Path, base: Tree = BASE) -> Report:
    """Walks over a tree; the entrypoint is compared with one in the folder."""
    program(folder / "scripts/entrypoint", ENTRYPOINT.decode())
    return account(read(archived(tree)), [read(archived(base))], root=folder, locked=LOCKED)


def found(report: Report) -> list[tuple[str, str]]:
    return [(finding.kind, finding.path) for finding in report.findings]


def test_each_file_that_the_dockerfile_copies_is_known() -> None:
    text = (Path(image_files.__file__).parent.parent / "Dockerfile").read_text()
    lines = re.findall(r"^COPY --chmod\S+ (.*) \S+$", text, re.M)
    copied = {name for name in " ".join(lines).split() if name.startswith("scripts/")}
    assert len(copied) > 6 and copied == {made.like for made in image_files.MADE if made.like}


def test_a_clean_image_has_an_owner_for_every_file(tmp_path: Path) -> None:
    tree = clean(tmp_path)
    seen = report(tree, tmp_path)
    assert seen.findings == []
    folders = {path for path, node in tree.items() if isinstance(node, tuple) and node[0] is None}
    assert seen.owners.keys() == tree.keys() - folders
    ours = {"etc/group", "etc/passwd", "opt/env/conda-meta/history", f"{SITE}/trainer.pth"}
    ours |= {"opt/image/entrypoint", "opt/image/removed.json"}
    assert {path for path, owner in seen.owners.items() if owner == "repository"} == ours
    counts = {"base": 3, "repository": 6, "conda": 8, "wheel": 8, "trainer": 3, "bytecode": int(NEW)}
    assert Counter(seen.owners.values()) == Counter(counts)
    parts = [("conda", "tool", "1.0"), ("wheel", "lib-x", "2.0")]
    parts.append(("trainer", "reproducible-trainer", "0.1.0"))
    assert [(one.kind, one.name, one.version) for one in seen.components] == parts


# A file of an image that is as clean (None: taken away), and what is found at its path, or at another.
FAULTS: dict[str, tuple[str, str, Node]] = {
    "unowned": ("unowned", "opt/env/lib/own.py", b"1"),
    "changed, conda": ("changed", "opt/env/lib/libtool.so.1", b"evil"),
    "before the prefix": ("changed", "opt/env/bin/tool", b"#!/placeholder/bin/sh"),
    "changed, wheel": ("changed", f"{SITE}/lib_x/one.so", b"evil"),
    "changed, base": ("changed", "usr/bin/sh", b"evil"),
    "link elsewhere": ("changed", "opt/env/lib/libtool.so", "../bin/x"),
    "file for a link": ("changed", "opt/env/lib/libtool.so", b"\x7fELF tool"),
    "other entrypoint": ("changed", "opt/image/entrypoint", b"evil"),
    "history": ("changed", "opt/env/conda-meta/history", b"==> today\n"),
    "another user": ("changed", "etc/passwd", PASSWD + LINE + b"evil:x:0:0::/:/bin/sh\n"),
    "setuid": ("setuid", "usr/bin/su", (b"su", 0o4755)),
    "writable file": ("writable", "opt/env/bin/x", (b"#!/opt/env/bin/python\n", 0o666)),
    "sudo": ("sudo", "usr/bin/sudo", (b"sudo", 0o755)),
    "key": ("key", "opt/image/key.txt", b"\n" + KEY),
    "key in a text": ("key", "opt/image/k.json", json.dumps(KEY.decode()).encode()),
    "token": ("token", "opt/image/notes", f"url {TOKEN}\n".encode()),
    "shell history": ("history", "root/.bash_history", b"ls"),
    "git": ("git workspace/.git", "workspace/.git/HEAD", b"1"),
    "pip cache": ("cache root/.cache", "root/.cache/pip/http/a", b"1"),
    "second cuDNN": (f"library {SITE}/lib_x/libcudnn.so.9", "opt/env/lib/libcudnn.so.8.9", b"8"),
    "missing, conda": ("missing", "opt/env/lib/libtool.so.1", None),
    "missing, wheel": ("missing", f"{SITE}/lib_x/one.so", None),
    "renamed cuDNN": ("library", "opt/libs/libcudnn-1a2b3c4d.so.9", b"9"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(tmp_path: Path, name: str) -> None:
    told, path, node = FAULTS[name]
    kind, _, where = told.partition(" ")
    tree = {**clean(tmp_path), path: node}
    if node is None:
        del tree[path]
    assert (kind, where or path) in found(report(tree, tmp_path))


def test_what_was_pruned_must_be_listed(tmp_path: Path) -> None:
    tree = clean(tmp_path)
    tree["opt/image/removed.json"] = b'{"removed": [], "linked": {}, "stripped": {}}'
    changed = [("changed", f"{SITE}/{name}") for name in ("lib_x/two.so", "torch/lib/libtorch_x.so")]
    missing = [("missing", name) for name in ("opt/env/lib/libtool.a", f"{SITE}/lib_x/big.a")]
    assert found(report(tree, tmp_path)) == changed + missing
    tree["opt/image/removed.json"] = b"[]"
    with pytest.raises(ImageError, match="is not prune_env"):
        report(tree, tmp_path)


def test_a_library_without_symbols_must_be_the_one_listed_and_come_from_the_record(tmp_path: Path) -> None:
    tree, path = clean(tmp_path), f"{SITE}/torch/lib/libtorch_x.so"
    tree[path] = b"another"
    assert found(report(tree, tmp_path)) == [("changed", path)]
    listed = tree["opt/image/removed.json"]
    assert isinstance(listed, bytes)
    tree[path] = LONG  # as the wheel has it
    assert found(report(tree, tmp_path)) == []
    tree[path] = SHORT
    before = sha256(LONG).encode()
    tree["opt/image/removed.json"] = listed.replace(before, b"0" * 64)
    assert found(report(tree, tmp_path)) == [("changed", path)]
    tree["opt/image/removed.json"] = listed.replace(b'"one.so"', b'"libcudnn.so.9"')  # of other content
    tree[f"{SITE}/lib_x/two.so"] = "libcudnn.so.9"
    assert ("changed", f"{SITE}/lib_x/two.so") in found(report(tree, tmp_path))
    tree, one = clean(tmp_path), f"{SITE}/lib_x/one.so"  # no library that prune_env.py may change
    more = listed.replace(b"torch/lib/libtorch_x.so", b"lib_x/one.so")
    more = more.replace(sha256(LONG).encode(), sha256(b"one").encode())
    tree |= {one: SHORT, "opt/image/removed.json": more}
    assert ("changed", one) in found(report(tree, tmp_path))


@pytest.mark.skipif(not NEW, reason="bytecode is checked by Python 3.11 and newer")
def test_bytecode_must_fit_its_source(tmp_path: Path) -> None:
    tree = clean(tmp_path)
    contents = [bytecode(b"x = 1\n", tmp_path, mode) for mode in ("TIMESTAMP", "CHECKED_HASH")]
    unknown = (3439).to_bytes(2, "little") + b"\r\n" + b"\1\0\0\0" + b"\0" * 8  # of no Python that is known
    for content in (*contents, bytecode(b"x = 2\n", tmp_path), b"\0" * 16, unknown):
        assert found(report({**tree, PYC: content}, tmp_path)) == [("unowned", PYC)]
    alone = f"{SITE}/lib_x/__pycache__/gone.cpython-312.pyc"
    assert found(report({**tree, alone: tree[PYC]}, tmp_path)) == [("unowned", alone)]


@pytest.mark.skipif(not NEW, reason="bytecode is checked by Python 3.11 and newer")
def test_the_hash_in_bytecode_is_the_same_on_every_python() -> None:
    hashes = dict(zip(MAGICS, source_hashes(b"x=1\n" * 10), strict=True))
    assert hashes[3531].hex() == "917bb43e92569d28"  # as CPython 3.12.1 says


def test_a_package_that_is_not_locked_is_found(tmp_path: Path) -> None:
    tree = clean(tmp_path)
    image, base = read(archived(tree)), read(archived(BASE))
    others = Locked([LOCKED.conda[0]._replace(digest="f" * 64)], [LOCKED.wheels[0]._replace(version="2.1")])
    made = [Made("etc/*"), Made("opt/image/*"), Made(f"{SITE}/trainer.pth"), Made("opt/*/conda-meta/history")]
    places = ("opt/env/conda-meta/tool-1.0-h1_0.json", f"{SITE}/lib_x-2.0.dist-info/RECORD")
    assert found(account(image, [base], made, tmp_path, others)) == [("unlocked", place) for place in places]


def test_what_a_package_or_the_base_brings_is_no_secret(tmp_path: Path) -> None:
    tree = clean(tmp_path)
    listed = {name: f"{SITE}/{name}" for name in ("lib_y/test.key", "lib_y/.env")}
    tree |= {f"{SITE}/lib_y/test.key": KEY, f"{SITE}/lib_y/.env": b"A=1", "etc/test.key": KEY + b"2"}
    place = "lib_y-1.0.dist-info/RECORD"
    tree[f"{SITE}/{place}"] = record(tree, listed, place)
    seen = report(tree, tmp_path, {**BASE, "etc/test.key": KEY + b"2"})
    assert found(seen) == [("unlocked", f"{SITE}/{place}")]
    # An older copy of the same path is another matter.
    seen = report(tree, tmp_path, {**BASE, "etc/test.key": b"none"})
    assert ("key", "etc/test.key") in found(seen)


def test_layers_are_merged_and_hide_no_secret(tmp_path: Path) -> None:
    tree = clean(tmp_path)
    program(tmp_path / "scripts/entrypoint", ENTRYPOINT.decode())
    base = read(archived(BASE))

    def walk(*layers: Tree, **more: Any) -> list[tuple[str, str]]:
        image = read(archived(BASE, *layers, squeeze=True, **more))
        assert image.digest.startswith("sha256:") and len(image.layers) == len(layers) + 1
        return found(account(image, [base], root=tmp_path, locked=LOCKED))

    own = {path: node for path, node in tree.items() if BASE.get(path) != node}
    assert walk(own) == []
    secret: Tree = {"root/id": KEY, "srv/a/b": b"1", "srv/kept": b"2", "etc/hosts": b"3"}
    gone: Tree = {"root/.wh.id": b"", ".wh.srv": b"", "etc/.wh.hosts": b""}
    assert walk({**own, **secret}, gone) == [("key", "root/id")]
    emptied = walk({**own, "srv/a/b": b"1"}, {"srv/.wh..wh..opq": b"", "srv/c": b"2"})
    assert emptied == [("unowned", "srv/c")]
    assert walk({**own, "srv/a/b": b"1"}, {"srv": "usr"}) == [("unowned", "srv")]
    config = {"Env": ["PATH=/bin", "HF_TOKEN=abc", "JUPYTER_TOKEN="], "Labels": {"note": TOKEN}}
    assert walk(own, config=config) == [("token", "ENV"), ("token", "configuration")]


def test_the_bill_of_materials_is_the_same_each_time(tmp_path: Path) -> None:
    labels = {"org.opencontainers.image.revision": "abc"}
    base, texts = read(archived(BASE)), list[str]()
    for _ in range(2):
        image = read(archived(clean(tmp_path), config={"Labels": labels}, created="2023-11-14T22:13:20.5Z"))
        seen = account(image, [base], root=tmp_path)
        texts.append(bill("trainer:x", image, {"debian": base}, seen.components, LOCKED))
    text, again = texts
    assert text == again
    found = json.loads(text)
    assert found["metadata"]["timestamp"].startswith("2023-11-14T22:13:20")
    assert found["metadata"]["component"]["version"] == image.digest
    held = {one["name"]: one for one in found["components"]}
    assert held["debian"]["version"] == base.digest
    tool, lib = held["tool"], held["lib-x"]
    assert tool["purl"] == "pkg:conda/tool@1.0?build=h1_0&channel=conda-forge&subdir=linux-64&type=conda"
    assert tool["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert lib["purl"] == "pkg:pypi/lib-x@2.0" and lib["licenses"] == [{"license": {"name": "MIT"}}]
    assert {"b" * 64, "c" * 64} <= {one["value"] for one in lib["properties"]}
    assert held["reproducible-trainer"]["purl"] == "pkg:generic/reproducible-trainer@0.1.0"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program, with an engine that knows one image."""
    (tmp_path / "base.tar").write_bytes(archived(BASE))
    (tmp_path / "image.tar").write_bytes(archived({**clean(tmp_path), "opt/image/entrypoint": "nowhere"}))
    monkeypatch.chdir(tmp_path)
    case = f'[ "$*" = "save known" ] && exec cat {tmp_path}/base.tar; echo "No such image: $2" >&2; exit 1'
    engine = program(tmp_path / "bin/docker", f"#!/bin/sh\n{case}\n")
    monkeypatch.setenv("PATH", f"{engine.parent}:{os.environ['PATH']}")

    def run(*words: object) -> tuple[int, str]:
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said), pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        assert isinstance(end.value.code, int)
        return end.value.code, said.getvalue()

    return run


def test_the_program(run: Run, tmp_path: Path) -> None:
    code, out = run("image.tar", "--base", "known", "--json", "out.json", "--sbom", "sbom.json")
    assert code == 1 and out.splitlines()[-1].endswith("1 findings")
    listed = json.loads((tmp_path / "out.json").read_text())
    told = {"owner": "base", "kind": "file", "mode": "755", "sha256": sha256(b"shell")}
    assert listed["files"]["usr/bin/sh"] == told and listed["owners"]["base"]["files"] == 3
    assert [one["path"] for one in listed["findings"]] == ["opt/image/entrypoint"]
    assert json.loads((tmp_path / "sbom.json").read_text())["bomFormat"] == "CycloneDX"


def test_bad_input_is_one_line(run: Run, tmp_path: Path) -> None:
    whole = archived(BASE)
    (tmp_path / "short.tar").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "record.tar").write_bytes(archived({**BASE, "opt/env/conda-meta/x.json": b"{}"}))
    for image, names in {"short.tar": "short", "unknown": "unknown", "record.tar": "x.json"}.items():
        code, out = run(image, "--base", "base.tar")
        refusal(code, out, names)


def test_the_license_of_a_wheel_is_what_its_metadata_names() -> None:
    long = "License: Copyright\n  all of its text\nClassifier: License :: OSI Approved :: ISC\n"
    two = "License: UNKNOWN\nClassifier: License :: Zlib\nClassifier: License :: ISC\n"
    wanted = {"License: BSD\nLicense-Expression: MIT\n": "MIT", long: "ISC", two: "Zlib and ISC"}
    for metadata, license in wanted.items():
        assert license_of(f"Name: x\n{metadata}") == license
