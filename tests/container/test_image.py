"""Promise: the image runs as anyone, says what it is, holds one CUDA, and asks nothing of the network."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from image import Request, archive_words, commit_of, labels_of, mismatches, read_layers, read_stack, size_of
from locks import canonical, read_wheels

from tests.container.run import engine
from tests.helpers.packages import wheel
from tests.helpers.programs import ran

pytestmark = pytest.mark.container

ROOT = Path(__file__).parents[2]
STACK = "torch2.9-cu128"
# What every user's container must be able to do: a compiled step, imports, some steps, checkpoints.
COMPILED = """
python - <<'END'
import torch, torchvision, torchaudio, triton
step = torch.compile(lambda x: torch.relu(x @ x) + 1)
x = torch.ones(8, 8)
assert torch.equal(step(x), torch.relu(x @ x) + 1)
END
"""
TRAINED = """
short="--set parallel.threads=1 --set max_steps=4 --set checkpoint.every=2"
trainer train digits $short --set data.workers=1 --out /tmp/run
trainer runs /tmp/run
"""
SHELLS_OWN = ("_", "PWD", "OLDPWD", "SHLVL")
LIMITED = ["--rm", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none"]
READ_ONLY = ["--read-only", "--tmpfs=/tmp:exec", "--tmpfs=/cache:exec", "--tmpfs=/home/trainer"]


def configuration(image: str) -> Any:
    return json.loads(engine("image", "inspect", image))[0]["Config"]


# The image's own user, root, and two whom nobody knows: of root's group, as on OpenShift, and of no group.
_numbers = random.Random(STACK)
USERS = ("", "0:0", *(f"{_numbers.randrange(2000, 2**31)}:{group}" for group in (0, 54321)))


@pytest.mark.parametrize("user", USERS)
def test_anyone_trains_without_capabilities_network_or_a_disk_to_write_to(
    train_image: str, user: str
) -> None:
    given = [f"--user={user}"] if user else []
    # Compiling asks for a name, which the image has for its own user and root: tried as one of each kind.
    program = TRAINED if user in USERS[1:3] else COMPILED + TRAINED
    out = engine("run", *LIMITED, *READ_ONLY, *given, train_image, "bash", "-ec", program)
    assert "accuracy" in out
    assert "newest good" in out


DOCTOR = """
trainer doctor --json --out /tmp/run >/tmp/first || exit
trainer doctor --json >/tmp/second; code=$?
echo "[$(cat /tmp/first), $(cat /tmp/second), $code]"
"""


def test_the_doctor_finds_nothing_wrong_with_anyone(train_image: str) -> None:
    """What it can't write to is said; the software is whole."""
    for user in (USERS[0], USERS[-1]):
        given = [f"--user={user}"] if user else []
        run = ["run", *LIMITED, *READ_ONLY, *given, train_image, "bash", "-c", DOCTOR]
        first, second, code = json.loads(engine(*run, expected=['"status": "warn"']))
        wrong = {row["id"] for row in first if row["status"] in ("warn", "bad")}
        # Folders in memory, as READ_ONLY makes them; the host's clock; how much memory there is just now.
        allowed = ("disk.", "memory.limit", "gpu.nvml")
        assert not {name for name in wrong if not name.startswith(allowed)}, (user, wrong)
        (row,) = [row for row in second if row["status"] == "bad"]
        assert (code, row["id"], "Read-only" in row["finding"]) == (1, "disk.run", True)


def test_a_hostile_home_is_not_imported(train_image: str, tmp_path: Path) -> None:
    for version in ("3.11", "3.12"):
        site = tmp_path / ".local" / "lib" / f"python{version}" / "site-packages"
        site.mkdir(parents=True)
        for name in ("torch", "sitecustomize", "usercustomize"):
            (site / f"{name}.py").write_text("raise SystemExit('the home of the host leaked in')")
    tmp_path.chmod(0o755)
    asked = "from importlib.util import find_spec; print(find_spec('torch').origin)"
    for home in ("/home/trainer", "/somewhere"):
        mount = ["-v", f"{tmp_path}:{home}:ro", "-e", f"HOME={home}"]
        assert engine("run", *LIMITED, *mount, train_image, "python", "-c", asked).startswith("/opt/env/lib/")


def test_packages_go_on_top_and_leave_the_images_as_they_are(train_image: str, tmp_path: Path) -> None:
    """As a user with a checkout; each command in a container of its own."""
    for name, version, needs in (("on_top", "1.0", "torch"), ("torch", "2.0.0", "")):
        wheel(tmp_path, name, version, needs)
    os.chown(tmp_path, 1000, 1000)
    mount = ["-v", f"{tmp_path}:/workspace", "--read-only", "--tmpfs=/tmp:exec", "--tmpfs=/cache"]
    pip = ["pip", "install", "--no-index", "--find-links", "/workspace"]
    out = engine("run", *LIMITED, *mount, train_image, *pip, "on-top")
    assert re.search(r"Successfully installed on[-_]top-1\.0\n", out)
    asked = "import on_top, torch; print(on_top.version, torch.__file__)"
    out = engine("run", *LIMITED, *mount, "--entrypoint=python", train_image, "-c", asked)
    assert out.startswith("1.0 /opt/env/lib/")
    out = engine("run", *LIMITED, *mount, train_image, *pip, "torch==2.0.0", code=1, expected=["ERROR: "])
    assert "(constraint) torch==2.9.1" in out
    held = engine("run", *LIMITED, train_image, "cat", "/opt/image/constraints.txt").split()
    wheels = read_wheels((ROOT / "stacks" / STACK / "wheels.lock").read_text())
    wheels = [one for one in wheels if {"train", "image"} & set(one.groups)]
    locked = {f"{canonical(one.name)}=={one.version}" for one in wheels}
    assert {line for line in held if line.startswith(("torch", "nvidia-", "triton", "numpy"))} <= locked
    assert len(held) > 80


def test_an_image_of_ones_own_is_four_lines(train_image: str, tmp_path: Path) -> None:
    """Those of docs/image.md, with a package of this machine."""
    page = (ROOT / "docs/image.md").read_text()
    lines = page.partition("```dockerfile\n")[2].partition("```")[0]
    assert lines.startswith(f"FROM {train_image}\n")
    wheel(tmp_path, "einops", "1.0", "torch")
    text, name = lines.replace("USER 0\n", "USER 0\nCOPY *.whl /tmp/\n", 1), "trainer:with-einops"
    local = ["--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/tmp"]
    (tmp_path / "Dockerfile").write_text(text.replace("COPY", "ARG PIP_NO_INDEX PIP_FIND_LINKS\nCOPY"))
    engine("buildx", "build", *local, "--tag", name, "--load", tmp_path, expected=["WARN", "WARNING"])
    where = "import einops, os; print(einops.__file__, os.getuid())"
    out = engine("run", *LIMITED, name, "python", "-c", where)
    assert out.startswith("/opt/env/lib/") and out.endswith("einops.py 1000\n")
    engine("rmi", name)


def test_without_the_entrypoint_all_is_the_same(train_image: str) -> None:
    program = "import os, sys, json; print(json.dumps([dict(os.environ), sys.path, sys.executable]))"
    seen = []
    plain = (train_image, "python", "-c", program)
    for words in (
        plain,
        ("--entrypoint=python", train_image, "-c", program),
        ("--entrypoint=/usr/bin/env", *plain),
    ):
        environment, path, executable = json.loads(engine("run", *LIMITED, "--hostname=one", *words))
        seen.append(({k: v for k, v in environment.items() if k not in SHELLS_OWN}, path, executable))
    assert seen[0] == seen[1] == seen[2]


@pytest.fixture(scope="module")
def facts(train_image: str) -> Any:
    """What the image's libraries say they are."""
    asked = ["run", *LIMITED, "-v", f"{ROOT / 'scripts/image_facts.py'}:/facts.py:ro", train_image]
    return json.loads(engine(*asked, "python", "-B", "/facts.py"))


@pytest.mark.xdist_group("facts")
def test_the_labels_are_what_is_inside(train_image: str, facts: Any) -> None:
    labels = configuration(train_image)["Labels"]
    stack = read_stack(STACK)
    stand_in = "trainer.stand-in" in labels
    wanted = labels_of(Request(STACK, "train", "base" if stand_in else ""), stack, commit_of(ROOT))
    revision = "org.opencontainers.image.revision"
    assert {**labels, revision: ""} == {**wanted, revision: ""}
    assert mismatches(stack, facts, stand_in) == []


def test_what_must_hold_is_set_without_secrets(train_image: str, dev_image: str) -> None:
    for image in (train_image, dev_image):
        found = configuration(image)
        environment = dict(entry.split("=", 1) for entry in found["Env"])
        assert environment["PYTHONNOUSERSITE"] == environment["PYTHONUNBUFFERED"] == "1"
        assert environment["PYTORCH_VERSION"] == read_stack(STACK)["pins"]["torch"]
        assert environment["NVIDIA_REQUIRE_CUDA"] == f"driver>={read_stack(STACK)['driver']['floor']}"
        homes = {"HOME", "USER", "LOGNAME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
        assert homes <= environment.keys()
        assert not [name for name in environment if re.search("TOKEN|KEY|SECRET|PASS", name)]
        assert found["User"] == "1000:1000"
        assert not found.get("Volumes")


def test_dev_has_its_tools(dev_image: str) -> None:
    imports = "import jupyterlab, ipywidgets, pandas, matplotlib, tqdm, tensorboard, trainer"
    words = f"python -c '{imports}' && git --version && conda --version && g++ --version"
    out = engine("run", *LIMITED, dev_image, "bash", "-c", words)
    assert "git version" in out


def test_nccl_finds_the_verbs_library_and_it_its_providers(train_image: str) -> None:
    """By the name that NCCL opens it by, from /opt/env's Python."""
    if "trainer.stand-in" in configuration(train_image)["Labels"]:
        pytest.skip("the stand-in for conda's packages has no rdma-core")
    read = 'from ctypes import CDLL; CDLL("libibverbs.so.1")'
    words = f"python -c '{read}' && ls /opt/env/lib/libibverbs/libmlx5-*.so"
    engine("run", *LIMITED, train_image, "bash", "-c", words)


# Small enough to build twice: what the stages above `wheels` make.
ABOVE = """
FROM scratch AS above
COPY --from=base /etc/passwd /etc/group /etc/
COPY --from=base /opt/image/entrypoint /opt/image/environment /opt/image/
COPY --from=code /opt/trainer /opt/trainer
"""


def test_what_is_built_above_the_wheels_is_the_same_each_time(tmp_path: Path) -> None:
    """In two builds that take nothing of these stages from the cache, and leave nothing there for others."""
    text = (ROOT / "Dockerfile").read_text()
    for stage in ("code", "base"):
        text = text.replace(f"FROM wheels AS {stage}\n", f"FROM wheels AS {stage}\nARG AGAIN\n")
    (tmp_path / "Dockerfile").write_text(text + ABOVE)
    request = Request(STACK, "above", os.environ.get("TRAINER_STAND_IN", ""))
    more = (f"--file={tmp_path}/Dockerfile", "--build-arg=AGAIN=1", "--no-cache-filter=base,code,above")
    for number in (1, 2):
        words = archive_words(request, read_stack(STACK), {}, tmp_path / f"{number}.tar", *more)
        subprocess.run(words, check=True, capture_output=True)
    first, second = (read_layers(tmp_path / f"{number}.tar") for number in (1, 2))
    assert first == second and len(first[1]) == 3


@pytest.mark.parametrize("argument", ["STACK=nosuch", "TORCH_VERSION=.*"])
def test_a_wrong_stack_is_a_line_before_any_package_is_downloaded(argument: str) -> None:
    """Compose builds without image.py, which would have said so."""
    base = os.environ.get("TRAINER_STAND_IN")
    bases = ("conda-base", "debian-base") if base else ()
    given = [f"--build-context={name}=docker-image://{base}" for name in bases]
    words = ["buildx", "build", "--progress=plain", "--target=train", *given, f"--build-arg={argument}"]
    out = engine(*words, ROOT, code=1, expected=[".*"])
    assert "make image STACK=" in out and "/stacks/torch2.6-cu124/" in out
    assert "[env " not in out and "[wheels " not in out


@pytest.mark.parametrize("target", ["train", "dev"])
def test_the_budget_is_kept(request: pytest.FixtureRequest, target: str) -> None:
    """With the stand-in for the bases, for which it was measured."""
    image = request.getfixturevalue(f"{target}_image")
    if "trainer.stand-in" in configuration(image)["Labels"]:
        assert size_of(image) <= read_stack(STACK)["budget_gb"][target] * 1e9


def test_a_change_to_the_code_is_the_last_layer_and_small(tmp_path: Path) -> None:
    """A user pulls that layer alone. The context is what the image is built from, and one line more."""
    for name in ("trainer", "scripts", "stacks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".env").write_text("SECRET=planted\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("planted")
    layers = []
    for tag in ("trainer:before", "trainer:changed"):
        ran(sys.executable, tmp_path / "scripts/image.py", "build", "--tag", tag, code=0)
        layers.append(json.loads(engine("image", "inspect", tag))[0]["RootFS"]["Layers"])
        with (tmp_path / "trainer" / "__init__.py").open("a") as file:
            file.write("CHANGED = True\n")
    before, after = layers
    assert [a == b for a, b in zip(before, after, strict=True)] == [True] * (len(before) - 1) + [False]
    listed = "find / -xdev -name .env -o -name .git; du -sb /opt/trainer"
    out = engine("run", *LIMITED, "--user=0", "--entrypoint=sh", "trainer:changed", "-c", listed)
    (size,) = out.splitlines()
    assert int(size.split()[0]) < 20e6
    engine("rmi", "trainer:before", "trainer:changed")


def test_every_file_has_an_owner_and_no_secret_is_in_a_layer(dev_image: str, tmp_path: Path) -> None:
    """Of dev, whose lower layers are train's, from the engine's store: `docker save` would take minutes."""
    base = os.environ.get("TRAINER_STAND_IN")
    if base is None:
        pytest.skip("the bases' names are known where they are stood in for")
    digest = json.loads(engine("image", "inspect", dev_image))[0]["Id"]
    store = Path(engine("info", "--format", "{{.DockerRootDir}}").strip())
    (tmp_path / "blobs").symlink_to(store / "containerd/daemon/io.containerd.content.v1.content/blobs")
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [{"digest": digest}]}))
    listed, waiting = ["index.json"], [digest]
    while waiting:
        listed.append(f"blobs/{waiting.pop().replace(':', '/')}")
        if (tmp_path / listed[-1]).stat().st_size < 1 << 20:
            text = (tmp_path / listed[-1]).read_bytes()
            waiting += re.findall(r'"digest": ?"(sha256:\w+)"', text.decode(errors="replace"))
    words = [sys.executable, str(ROOT / "scripts/image_files.py"), "/dev/stdin", "--base", base]
    with subprocess.Popen(["tar", "-chf", "-", *listed], cwd=tmp_path, stdout=subprocess.PIPE) as tar:
        done = ran(*words, "--sbom", tmp_path / "sbom.json", code=0, stdin=tar.stdout)
    assert " 0 findings" in done.stdout
    components = json.loads((tmp_path / "sbom.json").read_text())["components"]
    assert {"torch", "nvidia-cudnn-cu12", "reproducible-trainer"} <= {one["name"] for one in components}
