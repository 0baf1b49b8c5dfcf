"""What one GPU is asked for, row after row: `scripts/bench_gpu.sh`.

A call begins with the first row without a result, and begins none after its limit. Results are written after
each row. `--small` runs each row's commands on this machine's CPU, to see that they run.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import picked
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED, BadInputError
from trainer.host.files import write_whole
from trainer.observe.flops import short_name
from trainer.runs.folder import read_rows

RESULTS = Path("docs/results/gpu.json")
WORK = Path("build/gpu")
LIMIT_S = 230.0

# Bytes per second as NVIDIA's data sheets give them, by the GPU's whole name: a slice of it has another.
_BANDWIDTHS = {
    **dict.fromkeys(("H200", "H200 NVL"), 4.8e12),
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100 80GB HBM3": 3.35e12,
}
# Of a metrics record.
_KEPT = ("kind", "step", "loss", "samples_per_s", "mfu", "gpu/utilization", "time/")

Found = Mapping[str, Any]
Verdict = tuple[str, bool | None]


@dataclass(frozen=True)
class Step:
    """A command, and what is kept of it.

    Attributes:
        key: Name of its result.
        words: Of the command, after Python; {work} stands for a folder.
        keeps: "rows" of its run, its last line of "json", or its exit "code".
        small: Further words with `--small`.
        deterministic: True to tell cuBLAS so before it starts.
    """

    key: str
    words: tuple[str, ...]
    keeps: str = "json"
    small: tuple[str, ...] = ()
    deterministic: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        key: For `--only`.
        what: What is measured.
        target: What is asked for.
        steps: Commands, in turn; one that another row has run isn't repeated.
        judge: Returns the figure as text, and whether it meets the target; None: not to be judged.
    """

    key: str
    what: str
    target: str
    steps: tuple[Step, ...]
    judge: Callable[[Found], Verdict]


def _train(key: str, recipe: str, settings: str, small: str) -> Step:
    words = ("-m", "trainer", "train", recipe, "--out", f"{{work}}/{key}", *settings.split())
    return Step(key, words, "rows", tuple(small.split()))


def _part(key: str, words: str = "", deterministic: bool = False) -> Step:
    return Step(key, ("-m", "benchmarks.gpu_parts", *(words or key).split()), deterministic=deterministic)


def _code(key: str, words: str, small: str = "", deterministic: bool = False) -> Step:
    return Step(key, ("-m", *words.split()), "code", tuple(small.split()), deterministic)


_ALL = "evaluation.every=end epochs=1000000 checkpoint.minutes=0 log.every=20"
_LARGE = (
    "data.global_batch_size=256 data.micro_batch_size=256 model.channels_last=true compile.mode=default "
    f"{_ALL}"
)
_TINY = (
    "data.global_batch_size=4 data.micro_batch_size=4 data.eval_batch_size=4 log.every=1 compile.mode=none "
    "max_steps=3"
)
_IMAGES = f"{_TINY} data.image_size=32 data.classes=10 data.samples=16"
_BF16 = _train("bf16", "resnet50-synthetic", f"precision.mode=bf16 {_LARGE} max_steps=120", _IMAGES)
_STALL = _train("checkpoints", "resnet50-synthetic", f"{_LARGE} checkpoint.every=100 max_steps=260", _IMAGES)
_JPEG = _train(
    "jpeg",
    "resnet50-imagenet",
    f"data.path={{work}}/photographs {_LARGE} data.eval_batch_size=64 max_steps=120",
    f"{_TINY} data.image_size=32",
)
_ZOO = ("ctc", "mean_teacher", "moco", "vae")


def share(rows: Sequence[Mapping[str, Any]], phase: str) -> float:
    """Share of a run's time that a phase took, from its records but the first, which compiles."""
    own = [row for row in rows if "time/wall" in row and row["kind"] != "end"][1:]
    wall = sum(row["time/wall"] for row in own)
    return sum(float(row.get(f"time/{phase}", 0.0)) for row in own) / wall if wall else float("nan")


def _speed(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(next(row["samples_per_s"] for row in rows if row["kind"] == "end"))


def _gpt2(key: str) -> Callable[[Found], Verdict]:
    def judge(found: Found) -> Verdict:
        one = found[key]
        (first, last), mfu, speed = one["losses"]["trainer"], one["mfu"]["trainer"], one["tokens_per_s"]
        said = (
            f"loss {first:.3f} to {last:.3f}, apart by {one['loss_apart']:.1e}, gradient norms by "
            f"{one['norm_apart']:.1e}; {speed['trainer']:,.0f} tokens/s, MFU {_percent(mfu)}; the plain loop "
            f"{speed['by_hand']:,.0f}, {_percent(one['mfu']['by_hand'])}; ratio {one['ratio']:.3f}"
        )
        return said, one["close"] and last < first and mfu is not None and mfu >= 0.5

    return judge


def _interval(one: Mapping[str, Any]) -> str:
    return f"{one['ratio']:.3f} ({one['low']:.3f} to {one['high']:.3f})"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _timm(key: str) -> Callable[[Found], Verdict]:
    def judge(found: Found) -> Verdict:
        one = found[key]
        ours, theirs = (one["samples_per_s"][name] for name in ("trainer", "timm"))
        said = f"{ours:,.0f} images/s; timm's calls {theirs:,.0f}; {_interval(one)}"
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        if (peak := _BANDWIDTHS.get(short_name(name), 0.0)) and "roofline" in found:
            used = ours * found["roofline"]["bytes_per_image"] / peak
            said += f"; unfused it would move {used:.0%} of what the memory can"
        return said, one["high"] >= 1.0

    return judge


def _faults(found: Found) -> Verdict:
    all_ = found["faults"]["faults"]
    said = "; ".join(f"{name}: {one['as_torch_is']}, as set {one['as_set']}" for name, one in all_.items())
    return f"shown by {said}", all(one["as_set"] is False for one in all_.values())


def _jpeg(found: Found) -> Verdict:
    ratio = _speed(found["jpeg"]) / _speed(found["bf16"])
    busy = [row["gpu/utilization"] for row in found["jpeg"] if "gpu/utilization" in row][1:]
    used = statistics.median(busy) if busy else float("nan")
    return f"{ratio:.3f} of synthetic; GPU utilization {used:.0%}", ratio >= 0.95 and used >= 0.9


def _zoo(found: Found) -> Verdict:
    codes = {name: found[f"check-{name}"] for name in _ZOO}
    return ", ".join(f"{name}: {code}" for name, code in codes.items()), not any(codes.values())


def _cuts(found: Found) -> Verdict:
    cuts = found["cuts"]
    return f"{cuts['same']} of {cuts['cuts']} cuts end with the same bits", cuts["same"] == cuts["cuts"]


def _resumed(found: Found) -> Verdict:
    one = found["resumed"]
    return f"exit codes {one['codes']}, the same bits: {one['same']}", one["same"] and one["codes"] == [
        0,
        75,
        0,
        0,
    ]


def _sizes(found: Found) -> Verdict:
    each = found["sizes"]["sizes"]
    said = "; ".join(f"{batch}: {one['size']} in {one['seconds']:.0f} s" for batch, one in each.items())
    return said, all(one["code"] == 0 for one in each.values())


def _stopped(found: Found) -> Verdict:
    each = found["stopped"]
    said = "; ".join(
        f"{name}: code {one['code']} in {one['seconds']:.0f} s, {one['line']}" for name, one in each.items()
    )
    return said, each["hangs"]["code"] == 76 and each["stopped"]["code"] not in (0, None)


def _graphs(found: Found) -> Verdict:
    one = found["graphs"]
    said = (
        f"{_interval(one)}; {one['trainer_us']:,.0f} us a step, by hand "
        f"{one['by_hand_us']:,.0f}, by hand without compiling {one['eager_us']:,.0f}"
    )
    if one["mode"] != "reduce-overhead" or one["skipped"]:
        return f"{said}; mode {one['mode']}, {one['skipped']} graphs given up", None
    return said, one["high"] <= 1.05 or (None if one["low"] <= 1.05 else False)


def _kept(found: Found) -> Verdict:
    one = found["start-memory"]
    return f"{one['kept']:,} bytes stay of each start", one["kept"] <= 0 if one["measured"] else None


def _waits(found: Found) -> Verdict:
    one = found["synchronizations"]
    return f"{one['waits']} in {one['steps']} steps", one["waits"] == 0


def _stall(found: Found) -> Verdict:
    stalled = share(found["checkpoints"], "checkpoint")
    return f"{stalled:.2%} of the time", stalled <= 0.01


def _explained(found: Found) -> Verdict:
    explained = 1 - share(found["bf16"], "unexplained")
    return f"{explained:.1%}", explained >= 0.97


def _exit(key: str) -> Callable[[Found], Verdict]:
    return lambda found: (f"exit code {found[key]}", {0: True, 1: False}.get(found[key]))


_TIMM_ = "at least timm's calls"
_PLAIN = "losses and gradient norms of the plain loop to 1e-2, MFU of 50 %"
_ROOF = _part("roofline")
ROWS = (
    Row(
        "gpt2", "GPT-2 124M, 1,024 tokens, bf16, compiled, 60 steps", _PLAIN, (_part("gpt2"),), _gpt2("gpt2")
    ),
    Row(
        "faults",
        "torch's faults of docs/stacks.md",
        "none as the trainer sets torch",
        (_part("faults"),),
        _faults,
    ),
    Row(
        "gpt2-whole",
        "the same, the loss by torch's whole logits",
        _PLAIN,
        (_part("gpt2-whole", "gpt2 --whole"),),
        _gpt2("gpt2-whole"),
    ),
    Row("digits", "digits, bf16, compiled", _TIMM_, (_part("digits", "timm digits"),), _timm("digits")),
    Row(
        "resnet-bf16",
        "ResNet-50, 224 pixels, synthetic, bf16, channels_last, compiled",
        _TIMM_,
        (_ROOF, _part("resnet-bf16", "timm resnet50")),
        _timm("resnet-bf16"),
    ),
    Row(
        "resnet-fp16",
        "the same in fp16 with GradScaler",
        _TIMM_,
        (_ROOF, _part("resnet-fp16", "timm resnet50 --precision fp16")),
        _timm("resnet-fp16"),
    ),
    Row(
        "jpeg",
        "ResNet-50 from JPEGs on 16 cores",
        "at least 0.95 of synthetic data, GPU utilization of 90 %",
        (_BF16, _part("photographs", "photographs {work}/photographs"), _JPEG),
        _jpeg,
    ),
    Row("explained", "phases of a step", "at least 97 % of the time", (_BF16,), _explained),
    Row(
        "zoo",
        "`trainer check` of four tasks",
        "code 0",
        tuple(_code(f"check-{name}", f"trainer check tests/tasks/zoo/{name}.py") for name in _ZOO),
        _zoo,
    ),
    Row(
        "cuts",
        "deterministic runs, cut at each of 20 steps",
        "the same bits",
        (_part("cuts", "", True),),
        _cuts,
    ),
    Row(
        "resumed",
        "a deterministic run: stopped, resumed, verified",
        "the same bits",
        (_part("resumed"),),
        _resumed,
    ),
    Row(
        "sizes", "data.micro_batch_size=auto at three global batches", "each found", (_part("sizes"),), _sizes
    ),
    Row(
        "stopped",
        "a rank that hangs, and one that is stopped",
        "code 76; an end",
        (_part("stopped"),),
        _stopped,
    ),
    Row(
        "start",
        "CPU seconds to the first step",
        "a plain script's",
        (_code("start", "benchmarks start"),),
        _exit("start"),
    ),
    Row("start-memory", "memory that a start leaves behind", "0 bytes", (_part("start-memory"),), _kept),
    Row(
        "graphs",
        "a small model's step with CUDA graphs",
        "1.05 of a loop by hand",
        (_part("graphs"),),
        _graphs,
    ),
    Row(
        "one-rank",
        "fp16, CUDA graphs, packed documents; NCCL in a group of one",
        "tests/gpu pass",
        (_code("one-rank", "pytest -q -p no:cacheprovider tests/gpu"),),
        _exit("one-rank"),
    ),
    Row(
        "waits", "host synchronizations in a step without a record", "0", (_part("synchronizations"),), _waits
    ),
    Row("stall", "time that checkpoints stop the training", "at most 1 %", (_STALL,), _stall),
    Row(
        "overhead",
        "Python time of a step over a loop by hand",
        "at most 20 us",
        (_code("overhead", "benchmarks overhead --rounds 20", "--rounds 2"),),
        _exit("overhead"),
    ),
)


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("--dry-run", action="store_true", help="show the commands")
    bench.add_argument(
        "--small", action="store_true", help="run them on the CPU, small; results go to a folder of their own"
    )
    keys = ", ".join(row.key for row in ROWS)
    bench.add_argument("--only", default="", metavar="KEY,…", help=f"rows: {keys}")
    bench.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help="begin no row after so many seconds"
    )
    bench.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"default: {RESULTS}")
    bench.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    chosen = picked(options.only, [row.key for row in ROWS], "--only", "row")
    rows = [row for row in ROWS if not chosen or row.key in chosen]
    if options.dry_run:
        for row in rows:
            print(f"# {row.key}: {row.what}: {row.target}")
            for step in row.steps:
                print(shlex.join(command(step, Path("WORK"), options.small)))
        return EXIT_DONE
    if options.small:
        with tempfile.TemporaryDirectory() as folder:
            return measure(rows, Path(folder, "gpu.json"), Path(folder), options.limit, small=True)
    if not torch.cuda.is_available():
        print("not measured: no GPU")
        return EXIT_NOT_MEASURED
    return measure(rows, options.results, WORK.absolute(), options.limit)


def measure(rows: Sequence[Row], results: Path, work: Path, limit_s: float, small: bool = False) -> int:
    """Measures rows without a result until the limit, and prints the table.

    Returns:
        0 if each of these rows is met, 1 if one is missed, 3 if one isn't measured (with `small`, 1).
    """
    from benchmarks.conditions import conditions

    work.mkdir(parents=True, exist_ok=True)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(name, str(work / name.partition("_")[0].lower()))
    began, found = time.monotonic(), _read(results, str(conditions()))
    for row in rows:
        for step in row.steps:
            if step.key in found["results"] or time.monotonic() - began > limit_s:
                continue
            try:
                found["results"][step.key] = result_of(step, work, small)
            except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
                print(f"not measured: {step.key}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
                break
            write_whole(results, json.dumps(found, indent=1) + "\n")
    print(f"{found['conditions']}\n\n{table_of(rows, found['results'])}")
    verdicts = [judged(row, found["results"]) for row in rows]
    if small:
        return EXIT_FAILED if any(said.startswith("not measured") for said, _ in verdicts) else EXIT_DONE
    met = [one for _, one in verdicts]
    return EXIT_FAILED if False in met else EXIT_DONE if all(met) else EXIT_NOT_MEASURED


def table_of(rows: Sequence[Row], found: Found) -> str:
    """Returns rows as a table in Markdown."""
    lines = ["| what | target | measured | |", "|---|---|---|---|"]
    for row in rows:
        said, met = judged(row, found)
        lines.append(
            f"| {row.what} | {row.target} | {said} | { {True: 'met', False: 'MISSED', None: ''}[met] } |"
        )
    return "\n".join(lines)


def judged(row: Row, found: Found) -> Verdict:
    """Judges a row by what was found; says why where that can't be."""
    if missing := [step.key for step in row.steps if step.key not in found]:
        return f"not measured ({', '.join(missing)})", None
    try:
        return row.judge(found)
    except (KeyError, StopIteration, ZeroDivisionError, TypeError) as error:
        return f"not measured: no figure ({type(error).__name__} {error})", None


def command(step: Step, work: Path, small: bool) -> list[str]:
    """Returns the words of a step's command."""
    words = [*step.words, *(step.small if small else ())]
    return [sys.executable, *(word.replace("{work}", str(work)) for word in words)]


def _read(results: Path, now: str) -> dict[str, Any]:
    """Reads the results of earlier calls; of another machine they don't count."""
    try:
        found: dict[str, Any] = json.loads(results.read_text())
    except FileNotFoundError:
        found = {}
    except ValueError as error:
        raise BadInputError(f"{results} can't be read ({error}): remove it") from error
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return found if found.get("card") == card else {"card": card, "conditions": now, "results": {}}


def result_of(step: Step, work: Path, small: bool) -> Any:
    """Runs a command, and returns what is kept of it."""
    words = command(step, work, small)
    print(f"+ {shlex.join(words)}", file=sys.stderr, flush=True)
    told = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if step.deterministic else {}
    piped = subprocess.PIPE if step.keeps == "json" else None
    done = subprocess.run(
        words, stdout=piped, text=True, check=step.keeps != "code", env={**os.environ, **told}
    )
    if step.keeps == "code":
        return done.returncode
    if step.keeps == "json":
        return json.loads(done.stdout.splitlines()[-1])
    rows = read_rows(work / step.key)
    return [{name: value for name, value in row.items() if name.startswith(_KEPT)} for row in rows]
