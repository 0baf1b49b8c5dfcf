"""P1, pinned by hash: conda's half of a stack is closed, hashed, free of `defaults`, and says one thing."""

import functools
import http.server
import json
import lzma
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conda_lock
import lock
import new_stack
import pytest
import rattler
import stack_table
import yaml
from conda_lock import FILES, Package, read_lock, read_records, read_toml, solve
from wheels import read_lock as read_wheels

from tests.image.stack_checks import (
    brings_faults,
    closure_faults,
    lock_faults,
    same_faults,
    stack_faults,
    twice_faults,
)

ROOT = Path(__file__).resolve().parents[2]
STACKS = sorted(path.parent for path in ROOT.glob("stacks/*/stack.toml"))
# NVIDIA's table: the driver that a CUDA came with, and the oldest one under minor-version compatibility.
DRIVERS = {
    "11.8": ("520.61.05", "450.80.02"),
    "12.4": ("550.54.14", "525.60.13"),
    "12.8": ("570.26", "525.60.13"),
    "13.0": ("580.65.06", "580"),
}
DEFAULT = ROOT / "stacks" / lock.DEFAULT


@pytest.fixture(params=STACKS, ids=lambda path: path.name)
def stack(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def locked(stack: Path, target: str) -> list[Package]:
    """The records of a lock, in its order."""
    records = {one.url: one for one in read_records((stack / "records.json").read_text())}
    return [records[url] for url, _ in read_lock((stack / FILES[target]).read_text())]


def test_nothing_is_wrong_with_it(stack: Path) -> None:
    assert stack_faults(stack) == []


def test_it_is_what_solving_again_gives(stack: Path) -> None:
    """Without a network, from the records in the repository."""
    conda, train, dev = read_toml(stack / "stack.toml")["conda"], locked(stack, "train"), locked(stack, "dev")
    again = solve(conda["train"], conda["channels"], [*train, *dev])
    assert {one.url for one in again} == {one.url for one in train}
    whole = solve([*conda["train"], *conda["dev"]], conda["channels"], [*train, *dev])
    assert {one.url for one in whole} == {one.url for one in [*train, *dev]}


def test_without_one_of_its_packages_it_cannot_be_solved(stack: Path) -> None:
    conda, train = read_toml(stack / "stack.toml")["conda"], locked(stack, "train")
    for gone in ("openssl", "libgcc", "binutils_impl_linux-64"):
        with pytest.raises(conda_lock.Unsolved):
            solve(conda["train"], conda["channels"], [one for one in train if one.name != gone])


def test_only_two_files_have_no_sha256() -> None:
    weak = {
        one.url.rsplit("/", 1)[1] for s in STACKS for t in FILES for one in locked(s, t) if not one.sha256
    }
    assert weak == set(read_toml(ROOT / "stacks/pytorch-cuda-11.8/stack.toml")["conda"]["md5_only"])
    assert len(weak) == 2


def test_wheels_stacks_take_conda_forge_only(stack: Path) -> None:
    conda = read_toml(stack / "stack.toml")["conda"]
    wheels = read_toml(stack / "stack.toml")["kind"] == "wheels"
    assert conda["channels"] == (["conda-forge"] if wheels else ["pytorch", "nvidia", "conda-forge"])


def test_it_can_compile_and_the_slim_image_carries_no_more_than_it_needs(stack: Path) -> None:
    names = {target: {one.name for one in locked(stack, target)} for target in FILES}
    assert {"python", "pip", "gcc", "gxx", "jemalloc", "rdma-core"} <= names["train"]
    assert {"git", "openssh"} <= names["dev"]
    assert not {"git", "openssh", "perl", "jupyterlab", "matplotlib-base"} & names["train"]


def test_conda_brings_what_the_trainer_needs_or_a_wheel_does(stack: Path) -> None:
    description, project = read_toml(stack / "stack.toml"), read_toml(ROOT / "pyproject.toml")
    here = {"torch" if one.name == "pytorch" else one.name for one in locked(stack, "train")}
    here = {name.replace("_", "-") for name in here}
    here |= {one.name for one in read_wheels((stack / "wheels.lock").read_text()) if "train" in one.groups}
    for line in project["project"]["dependencies"]:
        assert line.partition(">")[0] in here, description["name"]


def test_the_image_gets_its_init_from_a_wheel(stack: Path) -> None:
    wheels = read_wheels((stack / "wheels.lock").read_text())
    assert [one.name for one in wheels if "image" in one.groups] == ["dumb-init"]


def test_driver_floors_are_nvidias(stack: Path) -> None:
    description = read_toml(stack / "stack.toml")
    said = (description["driver"]["native"], description["driver"]["floor"])
    assert said == DRIVERS[description["brings"]["cuda"]]


def test_the_top_level_environment_is_the_defaults() -> None:
    top = yaml.safe_load((ROOT / "environment.yml").read_text())
    own = yaml.safe_load((DEFAULT / "environment.yml").read_text())
    *packages, pip = top["dependencies"]
    assert pip == {"pip": ["--require-hashes", f"-r stacks/{DEFAULT.name}/wheels.lock"]}
    assert (ROOT / pip["pip"][1].removeprefix("-r ")).is_file()
    assert own["dependencies"] == [*packages, {"pip": ["--require-hashes", "-r wheels.lock"]}]
    assert top["channels"] == own["channels"] == ["conda-forge", "nodefaults"]
    assert packages == [f"{one.name}={one.version}={one.build}" for one in locked(DEFAULT, "train")]


# Planted faults: each check must find them.


def edited(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


SHA = "a" * 64
URL = "https://conda.anaconda.org/conda-forge/linux-64/zlib-1.3-0.conda"
GOOD = f"@EXPLICIT\n{URL}#{SHA}\n"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (SHA, SHA[:-1], "zlib has no valid hash"),
        (SHA, SHA[:32], "zlib has only an md5"),
        (f"#{SHA}", "", "zlib has no valid hash (none)"),
        ("conda.anaconda.org/conda-forge", "repo.anaconda.com/pkgs/main", "of Anaconda's defaults"),
        ("conda-forge", "main", "of Anaconda's defaults"),
        ("conda-forge", "defaults", "of Anaconda's defaults"),
        ("conda-forge", "bioconda", "not of conda-forge"),
        ("https://conda.anaconda.org", "http://127.0.0.1", "not of conda-forge"),
        ("linux-64", "osx-64", "not of conda-forge"),
        ("zlib-1.3-0", "cuda-version-12.6-3", "was replaced in place"),
        ("@EXPLICIT\n", "", "comes before @EXPLICIT"),
        (f"{URL}#{SHA}\n", f"{URL}#{SHA}\n{URL.replace('1.3', '1.2')}#{SHA}\n", "zlib is there twice"),
    ],
)
def test_a_fault_in_a_lock_is_found(old: str, new: str, says: str) -> None:
    assert lock_faults(GOOD, ["conda-forge"]) == []
    assert says in "\n".join(lock_faults(edited(GOOD, old, new), ["conda-forge"]))


def test_an_md5_passes_only_where_it_is_named() -> None:
    weak = GOOD.replace(SHA, SHA[:32])
    assert lock_faults(weak, ["conda-forge"], ["zlib-1.3-0.conda"]) == []
    assert lock_faults(weak, ["conda-forge"], ["zlib-1.3-1.conda"])
    assert lock_faults(GOOD, ["conda-forge"], ["zlib-1.3-0.conda"])


def package(name: str, version: str, *depends: str, **more: Any) -> Package:
    url = f"{conda_lock.HOST}conda-forge/noarch/{name}-{version}-0.conda"
    given = {"sha256": SHA, "md5": "", "size": 1, "license": "MIT", "constrains": [], **more}
    return Package(url, name, version, "0", 0, depends=list(depends), **given)


def test_an_open_or_contradictory_set_is_found() -> None:
    apple, pear = package("apple", "1.0", "pear >=2,<3", "__glibc >=2.17"), package("pear", "2.1")
    assert closure_faults([apple, pear], ["apple 1.*"]) == []
    assert closure_faults([apple]) == ["apple needs pear >=2,<3: missing"]
    assert closure_faults([apple, pear._replace(version="3.0")]) == [
        "apple needs pear >=2,<3: 3.0 0 is locked"
    ]
    assert closure_faults([apple, pear, pear]) == ["a package is named twice"]
    assert closure_faults([pear], ["apple"]) == ["the stack needs apple: missing"]
    assert closure_faults([package("apple", "1.0", "__glibc >=2.35"), pear])
    assert closure_faults([package("apple", "1.0", "pear 2.* *_1"), pear])
    assert closure_faults([package("apple", "1.0", constrains=["pear <2"]), pear])
    assert closure_faults([package("apple", "1.0", constrains=["plum <2"]), pear]) == []


def test_what_stack_toml_says_is_compared_with_the_packages() -> None:
    folder = ROOT / "stacks" / "pytorch-cuda-12.4"
    description, packages = read_toml(folder / "stack.toml"), locked(folder, "train")
    assert brings_faults(description, packages) == []
    for table, key in [("brings", "cuda"), ("brings", "cudnn"), ("brings", "triton"), ("pins", "torchaudio")]:
        wrong = {**description, table: {**description[table], key: "1.0"}}
        assert any("stack.toml says" in fault and "1.0" in fault for fault in brings_faults(wrong, packages))
    assert brings_faults({**description, "python": "3.11"}, packages)


def test_a_package_from_both_sides_is_found() -> None:
    wheels = read_wheels(f"# groups: train\nnumpy==2.0 \\\n    --hash=sha256:{SHA}\n")
    python = package("numpy", "2.0", "python >=3.12")
    assert twice_faults([python], wheels, "wheels") == []
    assert twice_faults([python._replace(version="1.9")], wheels, "wheels")
    assert twice_faults([python], wheels, "conda")
    assert twice_faults([package("numpy", "1.9")], wheels, "wheels") == []  # not Python's


def test_the_first_line_that_differs_is_named() -> None:
    assert same_faults("a", "x\ny\n", "x\ny\n") == []
    assert same_faults("a", "x\ny\n", "x\nz\n") == ["a has 'y', the records say 'z'"]
    assert same_faults("a", "x\n", "x\nz\n") == ["a has '', the records say 'z'"]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("conda.lock", lambda text: text.replace("pip-26", "pip-25")),
        ("conda.lock", lambda text: "\n".join(line for line in text.splitlines() if "openssl-" not in line)),
        ("conda-dev.lock", lambda text: text.replace("#", "#0", 9)),
        ("environment.yml", lambda text: text.replace("python=3.12.13", "python=3.12.12")),
        ("environment.yml", lambda text: text.replace("  - nodefaults\n", "")),
        ("environment.yml", lambda text: text.replace("      - --require-hashes\n", "")),
        ("../../environment.yml", lambda text: text.replace("gxx=14", "gxx=13")),
        ("stack.toml", lambda text: text.replace('python = "3.12"', 'python = "3.13"')),
        ("stack.toml", lambda text: text.replace('"jemalloc 5.3.*"', '"jemalloc 5.2.*"')),
        ("stack.toml", lambda text: text.replace("source_date_epoch = 1", "source_date_epoch = 2")),
        ("records.json", lambda text: text.replace('"openssl >=3', '"openssl >=4', 1)),
        ("wheels.lock", lambda text: text.replace("\nsetuptools==8", "\nsetuptools==9")),
    ],
)
def test_a_fault_in_a_file_is_found(tmp_path: Path, file: str, change: Callable[[str], str]) -> None:
    folder = tmp_path / "stacks" / DEFAULT.name
    shutil.copytree(DEFAULT, folder)
    shutil.copy(ROOT / "environment.yml", tmp_path)
    assert stack_faults(folder) == []
    path = folder / file
    text = change(path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    assert stack_faults(folder)


# Locking.


def entry(one: Package) -> dict[str, Any]:
    return {"md5": "b" * 32, "sha256": one.sha256, "depends": one.depends, "constrains": one.constrains}


TREE = [package("apple", "1.0", "pear"), package("apple", "2.0", "pear >=2"), package("pear", "2.0")]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A small pool, with records that must not be taken."""
    kept = {one.url.removeprefix(conda_lock.HOST): entry(one) for one in TREE}
    kept["conda-forge/noarch/apple-3.0-0.conda"] = {"md5": "b" * 32, "depends": []}
    kept["conda-forge/noarch/apple-4.0-0.conda"] = {"md5": "b" * 32, "sha256": SHA}  # depends unknown
    kept["main/noarch/apple-5.0-0.conda"] = {"md5": "b" * 32, "sha256": SHA, "depends": []}
    path = tmp_path / "pool.json.xz"
    path.write_bytes(lzma.compress(json.dumps(kept).encode()))
    return path


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stack of apples."""
    folder = tmp_path / "stacks" / "fruit"
    folder.mkdir(parents=True)
    text = 'name = "fruit"\nkind = "wheels"\nsource_date_epoch = 0\n[conda]\nchannels = ["conda-forge"]\n'
    (folder / "stack.toml").write_text(f'{text}train = ["pear"]\ndev = ["apple"]\n')
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["lock", "--stack", "fruit", "--only", "conda", *map(str, arguments)])
    return lock.main()


def test_locking_from_a_pool(made: Path, pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--pool", pool) == 0
    assert [url.rsplit("/", 1)[1] for url, _ in read_lock((made / "conda.lock").read_text())] == [
        "pear-2.0-0.conda"
    ]
    assert f"apple-2.0-0.conda#{SHA}\n" in (made / "conda-dev.lock").read_text()
    assert "  - pear=2.0=0\n" in (made / "environment.yml").read_text()
    dated = read_toml(made / "stack.toml")["source_date_epoch"]
    assert dated > 0
    assert dated % 86400 == 0


def test_what_is_locked_stays_unless_upgraded(
    made: Path, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made / "records.json").write_text(conda_lock.write_records(TREE[::2]))
    assert run(monkeypatch, "--pool", pool) == 0
    assert "apple-1.0" in (made / "conda-dev.lock").read_text()
    before = (made / "stack.toml").read_text().replace("source_date_epoch = ", "source_date_epoch = 1")
    (made / "stack.toml").write_text(before)
    assert run(monkeypatch, "--pool", pool) == 0
    assert (made / "stack.toml").read_text() == before  # nothing changed, nor the date
    assert run(monkeypatch, "--pool", pool, "--upgrade") == 0
    assert "apple-2.0" in (made / "conda-dev.lock").read_text()


def test_no_solution_is_one_line_and_changes_nothing(
    made: Path, pool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (made / "stack.toml").write_text((made / "stack.toml").read_text().replace('["pear"]', '["plum"]'))
    assert run(monkeypatch, "--pool", pool) == 1
    said = capsys.readouterr().err
    assert said.startswith("lock: conda: ")
    assert "plum" in said
    assert said.count("\n") == 1
    assert [path.name for path in made.iterdir()] == ["stack.toml"]
    assert run(monkeypatch, "--pool", "absent") == 2
    assert "no pool absent" in capsys.readouterr().err


@pytest.fixture
def channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A channel on loopback."""
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "channel"
    for _, subdir, path in conda_lock.write_repodata(TREE, tmp_path / "repodata"):
        shutil.copytree(path.parent, folder / subdir)
    (folder / "linux-64").mkdir()
    (folder / "linux-64" / "repodata.json").write_text('{"packages": {}, "packages.conda": {}}')
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_solving_from_a_channel(channel: str) -> None:
    found = solve(["apple"], [channel])
    assert [(one.url, one.sha256) for one in found] == [
        (f"{channel}/noarch/{name}-2.0-0.conda", SHA) for name in ("pear", "apple")
    ]


def test_a_channel_out_of_reach_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(conda_lock.Unsolved, match=r"--pool FILE") as caught:
        solve(["apple"], ["http://127.0.0.1:9"])
    assert "\n" not in str(caught.value)


def test_the_build_number_is_read_from_the_build() -> None:
    assert rattler.__version__
    builds = {
        "20_gnu": 20,
        "h8ab3286_1_cpython": 1,
        "16_linux64_mkl": 16,
        "mkl": 0,
        "default_hbd61a6d_102": 102,
    }
    assert {build: conda_lock.build_number(build) for build in builds} == builds


def test_a_new_stack_is_what_was_made_by_hand(tmp_path: Path) -> None:
    """From the default's text and the lock of torch 2.14: the facts of the stack that is there."""
    there = ROOT / "stacks/torch2.14-cu130"
    expected = read_toml(there / "stack.toml")
    brings = new_stack.brought((there / "wheels.lock").read_text())
    pins = {
        "torch": "2.14.1",
        "torchvision": brings.pop("torchvision"),
        "torchaudio": new_stack.audio_of("2.14.1"),
    }
    driver = new_stack.drivers(brings["cuda"], "", ROOT / "stacks")
    text = new_stack.described((DEFAULT / "stack.toml").read_text(), there.name, pins, brings, driver)
    text = new_stack.with_architectures(text, "sm_75 sm_80 sm_86 sm_90a sm_100 sm_120")
    (tmp_path / "stack.toml").write_text(text)
    made = read_toml(tmp_path / "stack.toml")
    for key in ("name", "kind", "python", "pins", "brings", "gpu", "driver", "conda"):
        assert made[key] == expected[key], key
    assert "budget_gb" not in made


@pytest.mark.parametrize(
    ("base", "torch", "said"),
    [
        ("torch9", "2.14.1", "FROM=torch9: no such folder"),
        ("torch2.9-cu128", "2.14", "TORCH=2.14: give a release"),
        ("pytorch-cuda-12.4", "2.14.1", "channel ended with torch 2.5.1"),
    ],
)
def test_what_makes_no_stack_is_one_line(
    base: str, torch: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new_stack.main([f"--base={base}", f"--torch={torch}"]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default stack and the files that list stacks; torch 2.14 resolves as the lock of its stack."""
    for name in ("stacks/torch2.9-cu128", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(new_stack, "ROOT", tmp_path)
    resolution = (ROOT / "stacks/torch2.14-cu130/wheels.lock").read_text()
    monkeypatch.setattr(lock, "resolve", lambda *_: resolution)
    return tmp_path


WORDS = ["--base=torch2.9-cu128", "--torch=2.14.1", "--driver=580.65.06,580"]


@pytest.mark.parametrize("failing", ["lock.py", "bootstrap.py"])
def test_a_stack_that_fails_halfway_leaves_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    (project / "build/stack/torch2.14-cu130").mkdir(parents=True)  # of a call that was killed
    files = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}

    def call(words: list[str], **_: object) -> int:
        (project / "build/compat/torch2.14-cu130").mkdir(parents=True, exist_ok=True)
        return int(failing in words[1])

    monkeypatch.setattr(subprocess, "call", call)
    assert new_stack.main(WORDS) == 2
    assert capsys.readouterr().err.endswith("failed (above)\n")
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == files
    assert not list(project.glob("build/*/*"))


def installed(
    *visions: str, audio: str = "2.11.0+cu130"
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Answers of an installed torch 2.14.1, with another torchvision each time."""
    left = list(visions)

    def run(*_: object, **__: object) -> "subprocess.CompletedProcess[str]":
        said = {
            "torch": "2.14.1+cu130",
            "gpus": "sm_75 sm_90a",
            "torchvision": left.pop(0),
            "torchaudio": audio,
        }
        return subprocess.CompletedProcess([], 0, json.dumps(said), "")

    return run


def test_torchvision_is_of_the_same_cuda(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision 0.29.2 takes torch 2.14 by its metadata, and was built for CUDA 13.2."""
    asked = list[str]()

    def resolve(_: str, words: list[str], *__: object) -> str:
        asked.append(words[1])
        text = (ROOT / "stacks/torch2.14-cu130/wheels.lock").read_text()
        return text.replace("torchvision==0.29.1", f"torchvision==0.29.{3 - len(asked)}")

    monkeypatch.setattr(lock, "resolve", resolve)
    monkeypatch.setattr(new_stack, "call", lambda *_: None)
    monkeypatch.setattr(stack_table, "main", lambda: None)
    monkeypatch.setattr(subprocess, "run", installed("0.29.2+cu132", "0.29.1+cu130"))
    assert new_stack.main(WORDS) == 0
    assert asked == ["torchvision", "torchvision<0.29.2"]
    assert read_toml(project / "stacks/torch2.14-cu130/stack.toml")["pins"]["torchvision"] == "0.29.1"


def test_torchaudio_of_another_cuda_is_one_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(new_stack, "call", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", installed("0.29.1+cu130", audio="2.11.0+cu128"))
    assert new_stack.main(WORDS) == 2
    said = capsys.readouterr().err
    assert said == "stack: torchaudio 2.11.0+cu128 was built for another CUDA than torch 2.14.1+cu130\n"
    assert not (project / "stacks/torch2.14-cu130").exists()


def test_a_torch_that_has_left_a_python_makes_a_stack_without_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*given: Any) -> str:
        environments = read_toml(given[-1] / "pyproject.toml")["tool"]["uv"]["environments"]
        if ">= '3.11'" not in environments[0]:
            said = "Because torch==2.14.1 depends on Python>=3.11, we can conclude that it cannot be used."
            raise subprocess.CalledProcessError(1, "uv", stderr=said)
        return (ROOT / "stacks/torch2.14-cu130/wheels.lock").read_text()

    monkeypatch.setattr(lock, "resolve", resolve)
    monkeypatch.setattr(new_stack, "call", lambda *_: None)
    monkeypatch.setattr(stack_table, "main", lambda: None)
    monkeypatch.setattr(subprocess, "run", installed("0.29.1+cu130"))
    assert new_stack.main(WORDS) == 0
    made = read_toml(project / "stacks/torch2.14-cu130/stack.toml")
    assert [one.endswith(" and python_full_version >= '3.11'") for one in made["environments"]] == [True] * 3
    assert made["python"] == "3.12" and made["source_date_epoch"]


def test_what_uv_refuses_is_one_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(*_: object) -> str:
        raise subprocess.CalledProcessError(2, "uv", stderr="error: Failed to fetch\n")

    monkeypatch.setattr(lock, "resolve", resolve)
    assert new_stack.main(WORDS) == 2
    assert "torch==2.14.1 torchvision" in capsys.readouterr().err
    assert [path.name for path in (project / "stacks").iterdir()] == ["torch2.9-cu128"]


def test_a_cuda_without_a_stack_needs_its_drivers_and_torchaudio_ends() -> None:
    with pytest.raises(new_stack.StackError, match=r"no stack has CUDA 13\.9: give DRIVER=NATIVE,FLOOR"):
        new_stack.drivers("13.9", "", ROOT / "stacks")
    assert new_stack.drivers("13.2", "595.45.04,580", ROOT / "stacks") == ("595.45.04", "580")
    assert [new_stack.audio_of(one) for one in ("2.9.1", "2.12.0", "2.15.0")] == ["2.9.1", "2.11.0", ""]


def test_the_page_names_each_stack_and_its_end(stack: Path) -> None:
    text, until = (ROOT / "docs/stacks.md").read_text(), read_toml(stack / "stack.toml")["supported_until"]
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{stack.name}`")]
    assert row.endswith(f"| {until} |")
