"""Promise: each claim of the guides has a row, which says "holds" only where the figures bear it out."""

import json
import os
import subprocess
from collections.abc import Collection
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import targets, targets_run
from benchmarks.__main__ import main, make_parser as bench_parser
from benchmarks.claims import measuring, run as runs
from benchmarks.claims.catalogue import ABLATIONS, CLAIMS, in_turn
from benchmarks.claims.claim import Claim, Measured, Row, Series, Source, compare, judge
from benchmarks.claims.measuring import Measurement, Scene, Side, Size, measure_steps
from benchmarks.claims.run import select
from benchmarks.targets_parts import make_parser
from tests.helpers.clock import Clock
from trainer.cli import make_parser as trainer_parser
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.train.step import train_step

# Issue 12's list, and the figures of the field guides; each with the rows that are about it.
LISTED = {
    "pinned memory x non_blocking": ["pinned", "pinned-blocking", "non-blocking-pageable"],
    "num_workers 0, 1, 2, quota": ["workers-1", "workers-2", "workers-quota"],
    "persistent workers": ["persistent-workers"],
    "prefetch factor": ["prefetch-2", "prefetch-4"],
    "uint8 transfer": ["uint8", "uint8-bytes"],
    "pack": ["pack", "pack-raw"],
    "rules of thumb for workers": ["rule-of-cores", "rule-of-four"],
    "+20 % from loader settings": ["loader-settings"],
    "copy 30 to 50 % shorter": ["pinned-copy"],
    "cudnn.benchmark": ["cudnn-benchmark"],
    "channels_last": ["channels-last"],
    "TF32": ["tf32"],
    "fp16 with scaler": ["fp16", "fp16-memory"],
    "bf16": ["bf16", "bf16-memory"],
    "accumulation's memory": ["accumulation-memory"],
    "checkpointing all": ["checkpointing-all-memory", "checkpointing-all-time"],
    "checkpointing some": ["checkpointing-some-memory", "checkpointing-some-time"],
    "torch.compile modes": ["compile", "compile-reduce-overhead", "compile-max-autotune"],
    "fused optimizer": ["fused", "fused-foreach"],
    "zero_grad(set_to_none)": ["zero-grad", "zero-grad-memory"],
    "allocator backends": ["allocator-expandable", "allocator-async"],
    "unified memory off by default": ["managed-off"],
    "OMP threads": ["omp-quota", "omp-twice"],
    "jemalloc and tcmalloc": ["jemalloc", "tcmalloc"],
    "NUMA binding": ["numa"],
    "DDP bucket view": ["ddp-bucket-view", "ddp-bucket-view-memory"],
    "DDP bf16 compression": ["ddp-bf16", "ddp-bf16-bytes"],
    ".item() each step": ["item"],
    "logging each step": ["logging"],
    "above 90 % utilization": ["utilization"],
}
CLAIM = Claim("quick", "it is faster", Source("a guide", "https://example.org"), "settings", "off", "on")
TINY = ("data.global_batch_size=16", "data.micro_batch_size=16", "model.width=4", "parallel.threads=1")


def measured(low: float, ratio: float, high: float, rounds: int = 9, counted: bool = False) -> Measured:
    return Measured(1.0, ratio, ratio, low, high, rounds, "ms", counted)


def test_every_claim_of_the_list_has_a_row_and_every_row_an_ablation() -> None:
    names = [claim.name for claim in CLAIMS]
    assert sorted(names) == sorted(name for rows in LISTED.values() for name in rows)
    assert len(set(names)) == len(names)
    assert {claim.ablation for claim in CLAIMS} == set(ABLATIONS)
    assert in_turn(set(ABLATIONS))[-7:] == [
        name for name in in_turn(set(ABLATIONS)) if ABLATIONS[name].seconds > 48
    ]
    assert all(claim.base != claim.tried and claim.text and claim.source.title for claim in CLAIMS)


def test_the_figures_of_the_guides_are_what_is_judged() -> None:
    most = {claim.name: claim.most for claim in CLAIMS}
    assert (most["pinned"], most["pinned-copy"], most["persistent-workers"]) == (0.90, 0.70, 0.95)
    assert (most["bf16"], most["bf16-memory"], most["loader-settings"]) == (1 / 1.5, 0.60, 1 / 1.2)
    assert (most["checkpointing-all-memory"], most["checkpointing-all-time"]) == (0.30, 1.30)
    assert (most["utilization"], most["rule-of-four"], most["ddp-bf16-bytes"]) == (0.10, 1.05, 0.51)


@pytest.mark.parametrize(
    ("found", "most", "verdict"),
    [
        (measured(0.80, 0.85, 0.90), 0.90, "holds"),
        (measured(0.80, 0.85, 0.91), 0.90, "undecided"),
        (measured(0.90, 0.95, 0.99), 0.90, "undecided"),
        (measured(0.91, 0.95, 0.99), 0.90, "doesn't hold"),
        (measured(0.80, 0.85, 0.88, rounds=5), 0.90, "undecided"),
        (measured(0.95, 0.97, 0.99, rounds=5), 0.90, "undecided"),
        (measured(0.5, 0.5, 0.5, rounds=1, counted=True), 0.5, "holds"),
        (measured(0.6, 0.6, 0.6, rounds=1, counted=True), 0.5, "doesn't hold"),
        (None, 0.90, "not measured"),
    ],
)
def test_the_verdict(found: Measured | None, most: float, verdict: str) -> None:
    assert judge(found, most) == verdict
    assert Row(Claim("n", "t", Source("s"), "a", "b", "t", most), measured=found).verdict == verdict


def test_sides_are_compared_round_by_round() -> None:
    # The machine gets slower all the time, which must not decide.
    off = [float(n) for n in range(1, 10)]
    found = compare(Series({"on": [0.5 * n for n in off], "off": off}, "ms"), "off", "on")
    assert (found.base, found.tried, found.ratio, found.low, found.high) == (5.0, 2.5, 0.5, 0.5, 0.5)
    assert found.rounds == 9
    none = compare(Series({"recipes": [14], "managed": [0]}, "recipes", counted=True), "recipes", "managed")
    assert judge(none, 0.0) == "holds"
    some = compare(Series({"recipes": [14], "managed": [1]}, "recipes", counted=True), "recipes", "managed")
    assert judge(some, 0.0) == "doesn't hold"


@pytest.mark.parametrize(("more", "ratio", "verdict"), [(0.0, 1.0, "doesn't hold"), (-0.5, 0.5, "holds")])
def test_steps_are_timed_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: float, ratio: float, verdict: str
) -> None:
    """On a clock that each step moves by a second: an ablation that does nothing isn't said to help."""
    clock = Clock()

    def step(*arguments: Any) -> None:
        train_step(*arguments)
        clock.move(1.0)

    monkeypatch.setattr(measuring, "train_step", step)
    monkeypatch.setattr(measuring, "now", lambda _: clock())
    size = Size(rounds=6, turn_s=2.0, images=0, scratch=tmp_path)
    sides = {"off": Side(), "on": Side(each=lambda _: clock.move(more))}
    found = measure_steps(Scene("digits", TINY, TINY), sides, size)
    assert found.conditions.endswith("; 2 steps a turn")
    time = compare(found.series["time"], "off", "on")
    assert (time.base, time.low, time.ratio, time.high) == (1000.0, ratio, ratio, ratio)
    assert judge(time, CLAIM.most) == verdict


def test_two_claims_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(name: str, sides: Collection[str], size: Size, _: float) -> Measurement:
        return ABLATIONS[name].measure(sorted(sides), size._replace(turn_s=0.0))

    monkeypatch.setattr(runs, "run_claims", partial(runs.run_claims, measure=here))
    monkeypatch.setattr(measuring, "threads_per_rank", lambda *_: 1)
    monkeypatch.setattr(runs, "QUICK", runs.QUICK._replace(limit_s=3600.0))
    words = ["--quick", "--only", "managed-off,logging", "--out", str(tmp_path / "out")]
    assert main(["claims", *words]) == 0
    out = capsys.readouterr().out
    found = {one["name"]: one for one in json.loads((tmp_path / "out" / "claims.json").read_text())["claims"]}
    assert found["managed-off"]["verdict"] == "holds"
    assert found["logging"]["measured"]["rounds"] == 6
    assert f"{found['logging']['measured']['ratio']:.3f}" in out
    assert (tmp_path / "out" / "claims.svg").read_text().startswith("<?xml")


def test_nothing_that_can_be_measured_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "first_missing", lambda _: "no GPU")
    assert main(["claims", "--quick", "--only", "tf32"]) == 3
    assert "not measured: no GPU" in capsys.readouterr().out


def test_the_targets_say_that_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).parents[2] / "scripts" / "bench_gpu.sh"
    told = {**os.environ, "PYTHON": "/bin/echo"}  # in place of Python: what it would run
    done = subprocess.run([script, "--dry-run"], capture_output=True, text=True, check=True, env=told)
    assert done.stdout == "-m benchmarks targets --dry-run\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["targets"]) == 3
    assert capsys.readouterr().out == "not measured: no GPU\n"
    assert main(["targets", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{target.what}: {target.target}" in shown for target in targets.TARGETS)


STEPS = {step.key: step for target in targets.TARGETS for step in target.steps}


@pytest.mark.parametrize("key", STEPS)
def test_each_command_of_the_targets_parses(key: str, tmp_path: Path) -> None:
    _, _, module, *words = targets_run.command(STEPS[key], tmp_path)
    if module == "benchmarks.targets_parts":
        assert callable(make_parser().parse_args(words).run)
        return
    if module == "benchmarks":
        options = bench_parser(words).parse_args(words)
        assert words[0] != "claims" or select(options.only)
        return
    assert module == "trainer"
    trainer_parser().parse_args(words)
    if words[0] == "train":
        values = override(read_recipe(words[1]), [one for flag, one in pairwise(words) if flag == "--set"])
        assert validated(Recipe, values, words[1]).max_steps


def test_what_the_targets_conclude() -> None:
    rows = [
        {"kind": "train", "time/wall": 10.0, "time/checkpoint": n, "time/unexplained": 0.1} for n in (9, 0.05)
    ]
    rows.append({"kind": "end", "samples_per_s": 200.0})
    judged = {target.what: target.judge for target in targets.TARGETS}
    found = {"bf16": rows, "timm-bf16": {"samples_per_s": 100.0}, "roofline": {"bytes_per_image": 1.0}}
    assert judged["ResNet-50, 224, synthetic, bf16, channels_last, compile"](found)[1] is True
    assert judged["checkpoint stall, every 100 steps"]({"checkpoints": rows}) == ("0.50% of the time", True)
    assert judged["data-wait, copy, compute, optimizer add up"](found) == ("99.0%", True)
    jpeg = [{"kind": "train", "gpu/utilization": share} for share in (0.1, 0.95, 0.95)]
    jpeg.append({"kind": "end", "samples_per_s": 180.0})
    assert judged["ResNet-50 from JPEGs"]({"bf16": rows, "jpeg": jpeg}) == (
        "0.900 of synthetic; GPU utilization 95%",
        False,
    )
