"""Promise: the image runs as anyone, says what it is, holds one CUDA, and asks nothing of the network."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from image import Request, commit_of, labels_of, mismatches, read_stack

from tests.container.run import engine

pytestmark = pytest.mark.container

ROOT = Path(__file__).parents[2]
STACK = "torch2.9-cu128"
# Imports, a compiled step, twenty windows, a checkpoint: what every user's container must be able to do.
PROBE = """
set -e
python - <<'END'
import torch, torchvision, torchaudio, triton
step = torch.compile(lambda x: torch.relu(x @ x) + 1)
x = torch.ones(8, 8)
assert torch.equal(step(x), torch.relu(x @ x) + 1)
END
trainer train digits --set max_windows=20 --set checkpoint.every=10 --set data.workers=1 --out /tmp/run
trainer checkpoints /tmp/run
"""
SHELLS_OWN = ("_", "PWD", "OLDPWD", "SHLVL")
LIMITED = ["--rm", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none"]
READ_ONLY = ["--read-only", "--tmpfs=/tmp:exec", "--tmpfs=/cache:exec", "--tmpfs=/home/trainer"]


def configuration(image: str) -> Any:
    return json.loads(engine("image", "inspect", image))[0]["Config"]


def users() -> list[str]:
    numbers = random.Random(STACK)
    return ["", "0:0", *(f"{numbers.randrange(2000, 2**31)}:{numbers.choice([0, 54321])}" for _ in range(5))]


@pytest.mark.parametrize("number", range(7))
def test_anyone_can_train_without_capabilities_network_or_a_disk_to_write_to(
    train_image: str, number: int
) -> None:
    user = users()[number]
    given = [f"--user={user}"] if user else []
    out = engine("run", *LIMITED, *READ_ONLY, *given, train_image, "bash", "-c", PROBE, timeout=600)
    assert "accuracy" in out
    assert "newest good" in out


def test_a_hostile_home_is_not_imported(train_image: str, tmp_path: Path) -> None:
    for version in ("3.11", "3.12"):
        site = tmp_path / ".local" / "lib" / f"python{version}" / "site-packages"
        site.mkdir(parents=True)
        for name in ("torch", "sitecustomize", "usercustomize"):
            (site / f"{name}.py").write_text("raise SystemExit('the home of the host leaked in')")
    tmp_path.chmod(0o755)
    for home in ("/home/trainer", "/somewhere"):
        mount = ["-v", f"{tmp_path}:{home}:ro", "-e", f"HOME={home}"]
        engine("run", *LIMITED, *mount, train_image, "python", "-c", "import torch")


def test_without_the_entrypoint_all_is_the_same(train_image: str) -> None:
    program = "import os, sys, json; print(json.dumps([dict(os.environ), sys.path, sys.executable]))"
    seen = []
    for words in (
        [train_image, "python", "-c", program],
        ["--entrypoint=python", train_image, "-c", program],
        ["--entrypoint=/usr/bin/env", train_image, "python", "-c", program],
    ):
        environment, path, executable = json.loads(engine("run", *LIMITED, "--hostname=one", *words))
        seen.append(({k: v for k, v in environment.items() if k not in SHELLS_OWN}, path, executable))
    assert seen[0] == seen[1] == seen[2]


def test_the_labels_are_what_is_inside(train_image: str) -> None:
    labels = configuration(train_image)["Labels"]
    stack = read_stack(STACK)
    asked = ["run", *LIMITED, "-v", f"{ROOT / 'scripts/image_facts.py'}:/facts.py:ro", train_image]
    facts = json.loads(engine(*asked, "python", "-B", "/facts.py"))
    stand_in = "trainer.stand-in" in labels
    wanted = labels_of(Request(STACK, "train", "base" if stand_in else ""), stack, facts, commit_of(ROOT))
    revision = "org.opencontainers.image.revision"
    assert {**labels, revision: ""} == {**wanted, revision: ""}
    assert mismatches(stack, facts, stand_in) == []


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("pins", "torch", "2.9.0"), ("brings", "cuda", "12.6"), ("brings", "cudnn", "9.10.1.4"),
        ("brings", "nccl", "2.27.6"), ("brings", "triton", "3.5.0"), ("gpu", "architectures", ["sm_70"]),
    ],
)  # fmt: skip
def test_a_planted_mismatch_is_found(train_image: str, where: str, key: str, value: Any) -> None:
    stack = read_stack(STACK)
    asked = ["run", *LIMITED, "-v", f"{ROOT / 'scripts/image_facts.py'}:/facts.py:ro", train_image]
    facts = json.loads(engine(*asked, "python", "-B", "/facts.py"))
    wrong = mismatches({**stack, where: {**stack[where], key: value}}, facts, stand_in=True)
    assert len(wrong) == 1
    assert key in wrong[0]


def test_what_must_hold_is_set_without_secrets(train_image: str, dev_image: str) -> None:
    for image in (train_image, dev_image):
        found = configuration(image)
        environment = dict(entry.split("=", 1) for entry in found["Env"])
        assert environment["PYTHONNOUSERSITE"] == environment["PYTHONUNBUFFERED"] == "1"
        assert environment["PYTORCH_VERSION"] == read_stack(STACK)["pins"]["torch"]
        assert {
            "HOME",
            "USER",
            "LOGNAME",
            "TRITON_CACHE_DIR",
            "TORCHINDUCTOR_CACHE_DIR",
        } <= environment.keys()
        assert not [
            name for name in environment if any(word in name for word in ("TOKEN", "KEY", "SECRET", "PASS"))
        ]
        assert found["User"] == "1000:1000"
        assert not found.get("Volumes")


def test_dev_has_its_tools(dev_image: str) -> None:
    imports = "import jupyterlab, ipywidgets, pandas, matplotlib, tqdm, tensorboard, trainer"
    words = f"python -c '{imports}' && git --version && conda --version && g++ --version"
    out = engine("run", *LIMITED, dev_image, "bash", "-c", words)
    assert "git version" in out


@pytest.mark.parametrize("library", ["libjemalloc.so.2"])
def test_the_allocator_can_be_changed(train_image: str, library: str) -> None:
    if "trainer.stand-in" in configuration(train_image)["Labels"]:
        pytest.skip("the stand-in for conda's packages has no jemalloc")
    preload = ["-e", f"LD_PRELOAD=/opt/env/lib/{library}"]
    engine("run", *LIMITED, *preload, train_image, "python", "-c", "import torch; torch.ones(9).sum()")
