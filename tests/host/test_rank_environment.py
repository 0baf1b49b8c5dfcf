"""What the launcher sets for its ranks, from limits and recipe: allocator, CPUs, threads, compilers."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import preloaded
from tests.helpers.manifests import least_manifest
from tests.helpers.refusals import named, refused
from tests.helpers.run_folders import manifest
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.host.affinity import CpuShares, cpus_text
from trainer.host.allocator import VARIABLES
from trainer.host.limits import Limits
from trainer.launch.launcher import Launched, LocalRanks
from trainer.runs.manifest import Manifest
from trainer.train.options import Mode
from trainer.train.start import checks, job, local_ranks
from trainer.train.start.local_ranks import check_threads

TWELVE = Limits(12.0, 1 << 34, 1 << 30, None, {})
CLEAN = ("OMP_WAIT_POLICY", "TORCHINDUCTOR_COMPILE_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What `launch` was called with, on a machine with 12 CPUs."""
    seen: dict[str, Any] = {}

    def launch(_: str, request: dict[str, Any], local: LocalRanks, **__: Any) -> Launched:
        seen.update(local._asdict())
        return Launched(0, request)

    monkeypatch.setattr(job, "launch", launch)
    for module in (local_ranks, checks):
        monkeypatch.setattr(module, "read_limits", lambda: TWELVE)
    monkeypatch.chdir(tmp_path)
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    return seen


def train(*settings: str) -> int:
    return main(["train", "digits", "--nproc-per-node", "2", "data.micro_batch_size=32", *settings])


def test_threads_compilers_and_the_allocator_are_chosen_before_ranks_start(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the limits and the recipe; what the user set stays."""
    assert train() == 0
    assert (started["ranks"], started["threads"]) == (2, 6)
    environment = started["environment"]
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == "6"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert not {name for name in environment if "ALLOC" in name}
    assert train("memory.allocator=expandable") == 0
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert started["environment"][VARIABLES[release < (2, 9)]] == "expandable_segments:True"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert train("memory.allocator=async") == 0
    environment = started["environment"]
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert environment["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64,backend:cudaMallocAsync"


def test_more_threads_than_a_machine_bears_are_refused(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("parallel.threads=100000") == 2
    assert not started
    assert named(capsys.readouterr().err, "parallel.threads=100000 4096")
    with refused("parallel.threads=65 12 auto"):
        check_threads(65, TWELVE, known=False)
    assert train("parallel.threads=16") == 0  # for results of a larger machine
    assert started["threads"] == 16
    assert named(check_threads(16, TWELVE, known=False), "parallel.threads=16 12")
    assert check_threads(12, TWELVE, known=False) == ""


@pytest.mark.parametrize(
    ("threads", "begun", "mode", "told"),
    [
        (100, 100, "auto", True),  # a run goes on with what its results depend on
        ("auto", 100, "auto", True),
        (100, None, "force", True),  # as `trainer verify` repeats it
        ("auto", 100, "force", False),
        ("auto", None, "auto", False),
        ("auto", 12, "auto", False),
    ],
)
@pytest.mark.usefixtures("started")
def test_a_run_goes_on_on_a_smaller_machine(
    threads: int | str, begun: int | None, mode: Mode, told: bool
) -> None:
    recipe = Recipe.model_validate({"epochs": 1, "parallel": {"threads": threads}})
    stored = None if begun is None else Manifest.model_validate(least_manifest(threads=begun))
    assert bool(checks.threads_line(recipe, stored, mode)) == told
    if begun == threads:
        with refused("parallel.threads=100 12"):
            checks.threads_line(recipe, None, mode)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="binding is Linux's")
def test_ranks_with_cores_of_their_own_have_their_threads(started: dict[str, Any]) -> None:
    there = sorted(os.sched_getaffinity(0))
    assert train("parallel.cpu_binding=cores") == 0
    shares = started["cpus"].each
    assert sorted({cpu for share in shares for cpu in share}) == there
    if len(there) == 2:
        assert [cpus_text(share) for share in shares] == [str(cpu) for cpu in there]
    each = min(len(share) / shares.count(share) for share in shares)
    assert started["threads"] == max(1, min(6, int(each)))
    assert train("parallel.cpu_binding=none") == 0
    assert started["cpus"] == CpuShares()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_real_run_says_where_its_ranks_are(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = "train digits max_steps=2 evaluation.every=end parallel.cpu_binding=cores parallel.threads=1"
    words += " data.micro_batch_size=32 --nproc-per-node 2 --out"
    done = preloaded.run([sys.executable, "-m", "trainer", *words.split(), out])
    assert done.returncode == 0, done.stdout + done.stderr
    (note,) = [one for one in manifest(out)["notes"] if "CPUs" in one]
    assert note in done.stdout
    first, second = note.removeprefix("CPUs: ranks on ").partition(", ")[0].split(" | ")
    assert first != second
