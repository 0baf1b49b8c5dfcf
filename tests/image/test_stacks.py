"""P1, pinned by hash: conda's half of a stack is closed, hashed, free of `defaults`, and says one thing."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conda_lock
import lock
import pytest
from conda_lock import FILES, HOST, REPLACED, SUBDIRS, Package, read_records, solve, split
from locks import canonical, read_conda, read_toml, read_wheels

ROOT = Path(__file__).resolve().parents[2]
STACKS = sorted(path.parent for path in ROOT.glob("stacks/*/stack.toml"))
# NVIDIA's table: the driver that a CUDA came with, and the oldest one under minor-version compatibility.
DRIVERS = {"11.8": ("520.61.05", "450.80.02"), "13.0": ("580.65.06", "580")}
DRIVERS |= {"12.4": ("550.54.14", "525.60.13"), "12.8": ("570.26", "525.60.13")}
DEFAULT = ROOT / "stacks" / lock.DEFAULT


@pytest.fixture(params=STACKS, ids=lambda path: path.name)
def stack(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def locked(stack: Path, target: str, hashed: bool = False) -> list[Any]:
    """The packages of a lock in its order: their records, or as `hashed` there."""
    names = [split(one)[0] for one in read_toml(stack / "stack.toml")["conda"].get("md5_only", [])]
    found = read_conda((stack / FILES[target]).read_text(), names)
    records = {one.url: one for one in read_records((stack / "records.json").read_text())}
    return [*found] if hashed else [records[one.url] for one in found]


def test_each_file_is_what_the_records_say(stack: Path) -> None:
    held, channels = set[str](), read_toml(stack / "stack.toml")["conda"]["channels"]
    for target, file in FILES.items():
        assert (stack / file).read_text() == conda_lock.write_lock(stack.name, target, locked(stack, target))
        held |= {one.url for one in locked(stack, target)}
    records = read_records((stack / "records.json").read_text())
    assert {one.url for one in records} == held
    assert all(split(one.url) == (one.name, one.version, one.build) for one in records)
    for path in [stack / "environment.yml", *([ROOT / "environment.yml"] if stack == DEFAULT else [])]:
        page = str(path.relative_to(ROOT))
        written = conda_lock.write_environment(stack.name, channels, locked(stack, "train"), page)
        assert path.read_text() == written


def test_each_package_is_hashed_and_of_the_stacks_channels(stack: Path) -> None:
    description = read_toml(stack / "stack.toml")
    channels, md5_only = description["conda"]["channels"], description["conda"].get("md5_only", [])
    wheels = description["kind"] == "wheels"
    assert channels == (["conda-forge"] if wheels else ["pytorch", "nvidia", "conda-forge"])
    folders = {f"{HOST}{channel}/{subdir}/" for channel in channels for subdir in SUBDIRS}
    weak = set()
    for target in FILES:
        for one in locked(stack, target, hashed=True):
            assert one.url.removesuffix(one.file) in folders
            assert not one.file.startswith(REPLACED)  # by its publisher, in place
            weak |= {one.file} if one.algorithm == "md5" else set()
    assert weak == set(md5_only) and len(weak) == 2 * (stack.name == "pytorch-cuda-11.8")


def test_stack_toml_says_what_is_locked(stack: Path) -> None:
    description, train = read_toml(stack / "stack.toml"), locked(stack, "train")
    brings, held = description["brings"], {one.name: one.version for one in train}
    assert description["name"] == stack.name and description["source_date_epoch"] % 86400 == 0
    assert description["python"] == held["python"].rpartition(".")[0]
    assert (description["driver"]["native"], description["driver"]["floor"]) == DRIVERS[brings["cuda"]]
    until = description["supported_until"]
    rows = (ROOT / "docs/stacks.md").read_text().splitlines()
    assert [row.endswith(f"| {until} |") for row in rows if row.startswith(f"| `{stack.name}`")] == [True]
    if description["kind"] == "conda":
        pins, (torch,) = description["pins"], (one for one in train if one.name == "pytorch")
        names = {"torch": "pytorch", "torchvision": "torchvision", "torchaudio": "torchaudio"}
        assert pins == {name: held[other] for name, other in names.items()}
        assert (brings["cuda"], brings["triton"]) == (held["pytorch-cuda"], held["torchtriton"])
        assert held["cuda-cudart"].startswith(f"{brings['cuda']}.")
        assert f"_cuda{brings['cuda']}_cudnn{brings['cudnn']}_" in torch.build


def test_no_wheel_replaces_a_package_of_condas(stack: Path) -> None:
    kind = read_toml(stack / "stack.toml")["kind"]
    held = {canonical(one.name): one.version for one in locked(stack, "train") if one.python}
    wheels = {one.name: one.version for one in read_wheels((stack / "wheels.lock").read_text())}
    assert {name: wheels[name] for name in wheels.keys() & held if wheels[name] != held[name]} == {}
    if kind == "conda":
        assert not wheels.keys() & {*held, "torch", "triton"}


def test_it_is_what_solving_again_gives(stack: Path) -> None:
    """Without a network, from the records in the repository."""
    conda, train, dev = read_toml(stack / "stack.toml")["conda"], locked(stack, "train"), locked(stack, "dev")
    again = solve(conda["train"], conda["channels"], [*train, *dev])
    assert {one.url for one in again} == {one.url for one in train}
    whole = solve([*conda["train"], *conda["dev"]], conda["channels"], [*train, *dev])
    assert {one.url for one in whole} == {one.url for one in [*train, *dev]}


def test_conda_brings_what_the_trainer_needs_or_a_wheel_does(stack: Path) -> None:
    """And a compiler; the slim image carries no more than it needs."""
    names = {target: {one.name for one in locked(stack, target)} for target in FILES}
    assert {"python", "pip", "gcc", "gxx", "jemalloc", "rdma-core"} <= names["train"]
    assert {"git", "openssh"} <= names["dev"]
    assert not {"git", "openssh", "perl", "jupyterlab", "matplotlib-base"} & names["train"]
    wheels = read_wheels((stack / "wheels.lock").read_text())
    assert [one.name for one in wheels if "image" in one.groups] == ["dumb-init"]
    here = {"torch" if name == "pytorch" else name.replace("_", "-") for name in names["train"]}
    here |= {one.name for one in wheels if "train" in one.groups}
    needed = read_toml(ROOT / "pyproject.toml")["project"]["dependencies"]
    assert {line.partition(">")[0] for line in needed} <= here


SHA = "a" * 64


def package(version: str, *depends: str) -> Package:
    name = "apple" if depends else "pear"
    url = f"{HOST}conda-forge/noarch/{name}-{version}-0.conda"
    return Package(url, name, version, "0", 0, SHA, "", 1, "MIT", list(depends), [])


TREE = [package("1.0", "pear"), package("2.0", "pear >=2"), package("2.0")]
MD5 = {"md5": "b" * 32}


Lock = Callable[..., int]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stack of apples."""
    folder = tmp_path / "stacks" / "fruit"
    folder.mkdir(parents=True)
    text = 'name = "fruit"\nkind = "wheels"\nsource_date_epoch = 0\n[conda]\nchannels = ["conda-forge"]\n'
    (folder / "stack.toml").write_text(f'{text}train = ["pear"]\ndev = ["apple"]\n')
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """Locks from a small pool, with records that must not be taken."""
    kept: dict[str, Any] = {}
    for one in TREE:
        held = {"sha256": SHA, "depends": one.depends, "constrains": one.constrains}
        kept[one.url.removeprefix(HOST)] = {**MD5, **held}
    kept["conda-forge/noarch/apple-3.0-0.conda"] = {**MD5, "depends": []}
    kept["conda-forge/noarch/apple-4.0-0.conda"] = {**MD5, "sha256": SHA}  # depends unknown
    kept["main/noarch/apple-5.0-0.conda"] = {**MD5, "sha256": SHA, "depends": []}
    path = tmp_path / "pool.json.xz"
    path.write_bytes(lzma.compress(json.dumps(kept).encode()))

    def run(*words: str) -> int:
        given = ["lock", "--stack", "fruit", "--only", "conda", "--pool", str(path), *words]
        monkeypatch.setattr("sys.argv", given)
        return lock.main()

    return run


def test_locking_from_a_pool(made: Path, run: Lock) -> None:
    assert run() == 0
    assert [one.file for one in read_conda((made / "conda.lock").read_text())] == ["pear-2.0-0.conda"]
    assert f"apple-2.0-0.conda#{SHA}\n" in (made / "conda-dev.lock").read_text()
    assert "  - pear=2.0=0\n" in (made / "environment.yml").read_text()
    dated = read_toml(made / "stack.toml")["source_date_epoch"]
    assert dated > 0 and dated % 86400 == 0


def test_what_is_locked_stays_unless_upgraded(made: Path, run: Lock) -> None:
    (made / "records.json").write_text(conda_lock.write_records(TREE[::2]))
    assert run() == 0
    assert "apple-1.0" in (made / "conda-dev.lock").read_text()
    before = (made / "stack.toml").read_text().replace("source_date_epoch = ", "source_date_epoch = 1")
    (made / "stack.toml").write_text(before)
    assert run() == 0
    assert (made / "stack.toml").read_text() == before  # nothing changed, nor the date
    assert run("--upgrade") == 0
    assert "apple-2.0" in (made / "conda-dev.lock").read_text()


def test_no_solution_changes_nothing(made: Path, run: Lock, capsys: pytest.CaptureFixture[str]) -> None:
    (made / "stack.toml").write_text((made / "stack.toml").read_text().replace('["pear"]', '["plum"]'))
    assert run() == 1
    said = capsys.readouterr().err
    assert said.startswith("lock: conda: ") and "plum" in said and said.count("\n") == 1
    assert [path.name for path in made.iterdir()] == ["stack.toml"]
