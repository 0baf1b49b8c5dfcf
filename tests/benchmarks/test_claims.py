"""Promise: each claim of the guides has a row, which says "holds" only where the figures bear it out."""

import json
import os
import subprocess
from collections.abc import Collection, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import targets, targets_run
from benchmarks.__main__ import main, make_parser as bench_parser
from benchmarks.claims import measuring, run as runs
from benchmarks.claims.catalogue import ABLATIONS, CLAIMS, in_turn
from benchmarks.claims.chart import chart
from benchmarks.claims.claim import Claim, Measured, Row, Series, Source, compare, judge
from benchmarks.claims.loading import AsFloats
from benchmarks.claims.measuring import Measurement, Scene, Side, Size, measure_steps
from benchmarks.claims.needs import library
from benchmarks.claims.run import select
from benchmarks.claims.show import as_json, summary, table
from benchmarks.claims.training import _keep_gradients
from benchmarks.targets_parts import Traffic, make_parser
from tests.helpers.clock import Clock
from trainer.cli import make_parser as trainer_parser
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.data.dataset import ArrayDataset
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


def test_no_difference_at_all_is_not_said_to_help() -> None:
    same = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.0, 1.0]
    found = compare(Series({"off": same, "on": same[::-1]}, "ms"), "off", "on")
    assert 0.95 < found.ratio < 1.05
    assert judge(found, CLAIM.most) != "holds"


def test_what_takes_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "threads_per_rank", lambda *_: 1)
    size = Size(rounds=1, turn_s=0.0, images=0, scratch=tmp_path)
    sides = {"one": Side(), "four": Side(("data.micro_batch_size=4",))}
    found = measure_steps(Scene("digits", TINY, TINY), sides, size, memory=True).series
    assert found["peak"].values["four"][0] < 0.5 * found["peak"].values["one"][0]
    assert found["peak"].values["one"][0] < found["memory"].values["one"][0]
    sides = {"zeros": Side(prepare=_keep_gradients), "None": Side()}
    gradients = measure_steps(Scene("digits", TINY, TINY), sides, size, memory=True).series["memory"]
    assert gradients.values["None"][0] < gradients.values["zeros"][0]
    assert gradients.counted


def fake(series: Mapping[str, Series]) -> runs.Measure:
    def measure(name: str, sides: Collection[str], size: Size, within: float) -> Measurement | str:
        assert sides and within > 0 and size.rounds >= 6
        return Measurement(f"conditions of {name}", series)

    return measure


def test_table_and_json_say_the_same(tmp_path: Path) -> None:
    claims = runs.select("bf16,fp16,zero-grad")
    timed = Series({"fp32": [2.0] * 6, "bf16": [1.0] * 6, "zeros": [1.0] * 6, "None": [1.0] * 6}, "ms a step")
    rows = runs.run_claims(claims, True, tmp_path, lambda _: None, fake({"time": timed}))
    assert [row.claim for row in rows] == claims
    found = json.loads(as_json(rows, "here", "how"))["claims"]
    lines = [line for line in table(rows).splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(found) == 3
    for line, one in zip(lines, found, strict=True):
        text, _, _, ratio, _, most, verdict = (cell.strip() for cell in line.strip("|").split(" | "))
        assert text == one["claim"]
        assert most == f"{one['most']:.2f}"
        assert verdict == (f"{one['verdict']}: {one['reason']}" if one["reason"] else one["verdict"])
        if one["measured"]:
            assert ratio == f"{one['measured']['ratio']:.3f}"
    verdicts = {one["name"]: one["verdict"] for one in found}
    assert verdicts["bf16"] == "holds" and verdicts["zero-grad"] == "doesn't hold"
    assert summary(rows).startswith("3 claims: ")
    (axes,) = chart("title", rows).axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [(dot.get_xdata(), dot.get_ydata()) for dot in dots] == [
        ([row.measured.ratio], [number]) for number, row in enumerate(rows) if row.measured
    ]
    assert [text.get_text().partition(":")[0] for text in axes.texts] == [row.verdict for row in rows]


def test_why_a_claim_was_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runs, "first_missing", lambda needs: "no GPU" if "cuda" in needs else "")

    def fails(name: str, *_: object) -> str:
        return f"failed: {name}"

    claims = runs.select("tf32,bf16,compile,item")
    rows = {row.claim.name: row for row in runs.run_claims(claims, True, tmp_path, lambda _: None, fails)}
    assert rows["tf32"].reason == "no GPU"
    assert rows["bf16"].reason == "failed: precision"
    assert rows["compile"].reason == "takes longer than --quick allows"
    assert {row.verdict for row in rows.values()} == {"not measured"}
    monkeypatch.setattr(runs, "QUICK", runs.QUICK._replace(limit_s=0.0))
    late = runs.run_claims(claims, True, tmp_path, lambda _: None, fails)
    assert late[-1].reason == "no time was left of 0 s: --only item"


def test_an_ablation_that_fails_or_hangs_has_a_row(tmp_path: Path) -> None:
    size = Size(6, 0.01, 16, tmp_path)
    left = runs.measured_apart("precision", ["no such side"], size, 60.0)
    assert isinstance(left, str) and left.startswith("failed: ")
    assert runs.measured_apart("checkpointing", ["all", "none"], size, 0.0) == "did not end within 0 s"


def test_a_wrong_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "--only", "bf61"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "no claim or ablation is called 'bf61'; did you mean 'bf16'?" in line


def test_an_ablation_in_a_process_of_its_own(tmp_path: Path) -> None:
    (claim,) = runs.select("managed-off")
    sides = (claim.base, claim.tried)
    found = runs.measured_apart(claim.ablation, sides, Size(6, 0.01, 16, tmp_path), 120.0)
    assert not isinstance(found, str)
    assert judge(compare(found.series[claim.quantity], *sides), claim.most) == "holds"


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


def test_images_as_floats_are_those_of_the_bytes() -> None:
    image = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    floats = AsFloats(ArrayDataset({"image": image, "label": np.array([0, 1])}))
    assert floats.fields["image"].dtype == np.float32
    out: dict[str, Any] = {"image": np.empty(image.shape, np.float32), "label": np.empty(2, np.int64)}
    floats.read(np.array([0, 1]), None, out)
    np.testing.assert_array_equal(out["image"], image.astype(np.float32) / np.float32(255))


def test_a_library_is_found(tmp_path: Path) -> None:
    (tmp_path / "libjemalloc.so.2").touch()
    assert library("jemalloc", {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}) == tmp_path / "libjemalloc.so.2"
    assert library("no-such-library", {}) is None


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


def test_the_bytes_that_operations_move_are_counted() -> None:
    layer = torch.nn.Linear(4, 2, bias=False)
    with Traffic() as counted:
        torch.relu_(layer(torch.ones(3, 4)).view(-1))
    # ones: 48 bytes, product: 48 + 32 + 24, relu in place: 24 read, 24 written; transposing moves nothing
    assert counted.bytes == 48 + 104 + 48
