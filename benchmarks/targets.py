"""The targets on one H200 with 16 CPU cores, each with the commands that measure it.

`targets_run` measures them (`scripts/bench_gpu.sh`), in pieces: the promises first. Nothing is downloaded.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.observe.flops import short_name

# Bytes per second as NVIDIA's data sheets give them, by the GPU's whole name: a slice of it has another.
_BANDWIDTHS = {
    **dict.fromkeys(("H200", "H200 NVL"), 4.8e12),
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100 80GB HBM3": 3.35e12,
}

_WITHIN = 1.05

Rows = list[dict[str, Any]]
Found = Mapping[str, Any]
Verdict = tuple[str, bool | None]


@dataclass(frozen=True)
class Step:
    """A command, and what is kept of it: the rows of its run, its line of JSON, or its exit code.

    Attributes:
        key: What others know it by.
        words: Of the command, after Python: `-m …`; {work} stands for a folder.
        keeps: Which of the three.
        deterministic: Whether cuBLAS is told so before it starts.
    """

    key: str
    words: tuple[str, ...]
    keeps: str = "rows"
    deterministic: bool = False


@dataclass(frozen=True)
class Target:
    """A row: what is asked for, how it is measured and what the figures come to.

    Attributes:
        key: For `--only`.
        piece: Number of the call that measures it; a piece takes less than 8 minutes, as far as is known.
        what: In words.
        target: In words.
        steps: Done in turn; those that were done for another row aren't repeated.
        judge: Words for what was found, and whether that meets the target; None: not to be judged.
    """

    key: str
    piece: int
    what: str
    target: str
    steps: tuple[Step, ...]
    judge: Callable[[Found], Verdict]


def train(key: str, recipe: str, settings: str) -> Step:
    """A run, whose rows are kept; settings are separated by spaces."""
    words = [word for one in settings.split() for word in ("--set", one)]
    return Step(key, ("-m", "trainer", "train", recipe, "--out", f"{{work}}/{key}", *words))


def part(key: str, words: str, deterministic: bool = False) -> Step:
    """A part of `targets_parts`, whose JSON is kept."""
    return Step(key, ("-m", "benchmarks.targets_parts", *words.split()), "json", deterministic)


def bench(key: str, words: str, deterministic: bool = False) -> Step:
    """A bench, whose table is shown and whose exit code is kept."""
    return Step(key, ("-m", "benchmarks", *words.split()), "code", deterministic)


_LARGE = (
    "data.global_batch_size=256 data.micro_batch_size=256 model.channels_last=true compile.mode=default "
    "evaluation.every=end epochs=1000000 checkpoint.minutes=0 log.every=20"
)
_BF16 = train("bf16", "resnet50-synthetic", f"precision.mode=bf16 {_LARGE} max_steps=120")
_FP16 = train("fp16", "resnet50-synthetic", f"precision.mode=fp16 {_LARGE} max_steps=80")
_STALL = train("checkpoints", "resnet50-synthetic", f"{_LARGE} checkpoint.every=100 max_steps=260")
_JPEG = train(
    "jpeg",
    "resnet50-imagenet",
    f"data.path={{work}}/photographs {_LARGE} data.eval_batch_size=64 max_steps=120",
)
_GPT2 = train(
    "gpt2",
    "gpt2-124m",
    "data.name=synthetic data.global_batch_size=64 data.micro_batch_size=32 data.eval_batch_size=8 "
    "evaluation.every=end epochs=1000000 checkpoint.minutes=0 max_steps=60 log.every=10",
)
_OVERHEAD = (bench("overhead", "overhead --rounds 20"),)
_PRICE = (
    bench(
        "price",
        "setting resnet50-synthetic deterministic=true --rounds 7 --steps 5 --set data.micro_batch_size=256",
        deterministic=True,
    ),
)


def speed(rows: Rows) -> float:
    """Samples per second of a run."""
    return float(next(row["samples_per_s"] for row in rows if row["kind"] == "end"))


def share(rows: Rows, phase: str) -> float:
    """Share of a run's time that a phase took, from its rows but the first, which compiles."""
    own = [row for row in rows if "time/wall" in row and row["kind"] != "end"][1:]
    wall = sum(row["time/wall"] for row in own)
    return sum(float(row.get(f"time/{phase}", 0.0)) for row in own) / wall if wall else float("nan")


def _against_timm(ours: str, theirs: str) -> Callable[[Found], Verdict]:
    def judge(found: Found) -> Verdict:
        mine, other = speed(found[ours]), float(found[theirs]["samples_per_s"])
        said = f"{mine:,.0f} img/s; timm's calls {other:,.0f}; ratio {mine / other:.3f}"
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        peak = _BANDWIDTHS.get(short_name(name), 0.0)
        if peak:
            used = mine * found["roofline"]["bytes_per_image"] / peak
            said += f"; unfused it would move {used:.0%} of what the memory can"
        return said, mine >= other

    return judge


def _real(found: Found) -> Verdict:
    ratio = speed(found["jpeg"]) / speed(found["bf16"])
    busy = [row["gpu/utilization"] for row in found["jpeg"] if "gpu/utilization" in row][1:]
    used = statistics.median(busy) if busy else float("nan")
    return f"{ratio:.3f} of synthetic; GPU utilization {used:.0%}", ratio >= 0.95 and used >= 0.9


def _mfu(found: Found) -> Verdict:
    rows = [float(row["mfu"]) for row in found["gpt2"] if "mfu" in row]
    if not rows:
        return "no row has an MFU: the peak of this GPU isn't known", None
    return f"MFU {statistics.median(rows[1:] or rows):.1%}", statistics.median(rows[1:] or rows) >= 0.5


def _waits(found: Found) -> Verdict:
    waits = found["synchronizations"]
    return f"{waits['waits']} in {waits['steps']} steps", waits["waits"] == 0


def _graphs(found: Found) -> Verdict:
    graphs = found["graphs"]
    said = (
        f"{graphs['ratio']:.3f} x ({graphs['low']:.3f} to {graphs['high']:.3f}); "
        f"{graphs['trainer_us']:,.0f} us a step, by hand {graphs['by_hand_us']:,.0f}, "
        f"by hand without compiling {graphs['eager_us']:,.0f}"
    )
    if not graphs["measured"]:
        return f"{said}; without a GPU there are no graphs", None
    if graphs["mode"] != "reduce-overhead":
        return f"{said}; compiled with {graphs['mode']}, not with graphs", None
    if graphs["skipped"]:
        return f"{said}; torch gave up {graphs['skipped']} graphs", None
    met = graphs["high"] <= _WITHIN
    return said, met if met or graphs["low"] > _WITHIN else None


def _stall(found: Found) -> Verdict:
    stalled = share(found["checkpoints"], "checkpoint")
    return f"{stalled:.2%} of the time", stalled <= 0.01


def _code(key: str) -> Callable[[Found], Verdict]:
    def judge(found: Found) -> Verdict:
        code = found[key]
        return f"exit code {code}: see its table above", {0: True, 1: False}.get(code)

    return judge


def _claims(found: Found) -> Verdict:
    return f"exit code {found['claims']}: see its table above", None


def _resumed(found: Found) -> Verdict:
    cuts = found["cuts"]
    return f"{cuts['same']} of {cuts['cuts']} cuts end with the same bits", cuts["same"] == cuts["cuts"]


def _start(found: Found) -> Verdict:
    start = found["start-memory"]
    return f"{start['kept']:,} bytes stay of each start", start["kept"] <= 0 if start["measured"] else None


def _added_up(found: Found) -> Verdict:
    explained = 1 - share(found["bf16"], "unexplained")
    return f"{explained:.1%}", explained >= 0.97


_ROOFLINE = part("roofline", "roofline")
_IN_BF16 = (_BF16, part("timm-bf16", "timm --precision bf16"), _ROOFLINE)
_IN_FP16 = (_FP16, part("timm-fp16", "timm --precision fp16"), _ROOFLINE)
_FILES = (_BF16, part("photographs", "photographs {work}/photographs"), _JPEG)
_CLAIMS = (bench("claims", "claims --quick --only precision,checkpointing,accumulation"),)
_RESNET, _TIMM = "ResNet-50, 224, synthetic, bf16, channels_last, compile", "at least timm's calls x 1.00"
_LEFT, _BUSY = (
    "memory that a start leaves behind",
    "at least 0.95 of synthetic, GPU utilization at least 90 %",
)
_BY_HAND = f"within {_WITHIN:.2f} x of a hand-written loop's"


def _alone(key: str, deterministic: bool = False) -> tuple[Step]:
    return (part(key, key, deterministic),)


TARGETS = (
    Target(
        "waits", 1, "host synchronizations in a step without a row", "0", _alone("synchronizations"), _waits
    ),
    Target("cuts", 1, "deterministic: bitwise resume", "20 of 20 cuts", _alone("cuts", True), _resumed),
    Target("start-memory", 1, f"{_LEFT}, with activation checkpointing", "0", _alone("start-memory"), _start),
    Target("stall", 1, "checkpoint stall, every 100 steps", "at most 1 % of the time", (_STALL,), _stall),
    Target("graphs", 2, "small model's step with CUDA graphs", _BY_HAND, _alone("graphs"), _graphs),
    Target(
        "overhead",
        2,
        "overhead over a hand-written loop",
        "at most 20 us a step",
        _OVERHEAD,
        _code("overhead"),
    ),
    Target("resnet-bf16", 3, _RESNET, _TIMM, _IN_BF16, _against_timm("bf16", "timm-bf16")),
    Target("added-up", 3, "data-wait, copy, compute, optimizer add up", "at least 97 %", (_BF16,), _added_up),
    Target(
        "gpt2", 4, "GPT-2 124M, T = 1024, bf16, compile, flash attention", "MFU at least 50 %", (_GPT2,), _mfu
    ),
    Target("jpeg", 4, "ResNet-50 from JPEGs", _BUSY, _FILES, _real),
    Target(
        "resnet-fp16",
        5,
        "the same, fp16 with its scaler",
        _TIMM,
        _IN_FP16,
        _against_timm("fp16", "timm-fp16"),
    ),
    Target(
        "claims",
        6,
        "AMP, activation checkpointing, accumulation",
        "the claims' table, measured",
        _CLAIMS,
        _claims,
    ),
    Target("price", 6, "deterministic: its price", "known", _PRICE, _code("price")),
)
