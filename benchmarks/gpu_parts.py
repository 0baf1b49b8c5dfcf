"""Measurements of `scripts/bench_gpu.sh` that no command makes: each prints one line of JSON.

`python -m benchmarks.gpu_parts PART`; on a CPU the parts run as well, small, to see that they do.
"""

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks.claims.measuring import Scene, Side, Turns
from benchmarks.claims.training import IMAGES
from benchmarks.gpu_faults import faults
from benchmarks.gpu_gpt2 import gpt2
from benchmarks.gpu_graphs import graphs
from benchmarks.paired import interleaved, median_interval
from benchmarks.photographs import write_photographs
from benchmarks.setting import now
from trainer.checkpoint.store import newest_good, write
from trainer.errors import BadInputError
from trainer.host.processes import children
from trainer.train.components.task import make_task
from trainer.train.state import load_tensors, tensors_of
from trainer.train.step import train_step

_CUTS = 20
_STEPS = 20
_DETERMINISTIC = "deterministic=true max_steps=21 ema.decay=0.9 model.width=8"


def photographs(folder: Path, count: int) -> dict[str, Any]:
    """Writes so many JPEGs by class, for training, and a few for validation."""
    write_photographs(folder / "val", 64)
    write_photographs(folder / "train", count)
    return {"images": count}


def synchronizations() -> dict[str, Any]:
    """Counts the host's waits for the GPU in steps without a metrics record, by CUDA's sync debug mode."""
    with ExitStack() as stack:
        turns = Turns(IMAGES, Side(), stack)
        turns(5)
        run, cuda = turns.run, turns.device.type == "cuda"
        batches = run.loader(run.share.batches(5))
        train_step(run, batches, 5)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if cuda:
                torch.cuda.set_sync_debug_mode("warn")
            for step in range(6, 6 + _STEPS):
                train_step(run, batches, step)
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
    waits = [f"{one.filename}:{one.lineno}" for one in seen if "called a synchronizing" in str(one.message)]
    return {"waits": len(waits), "where": waits[:5], "steps": _STEPS, "measured": cuda}


def start_memory() -> dict[str, Any]:
    """Bytes that stay allocated after a run was built and closed, for each start but the first."""
    settings = ("memory.checkpointing=blocks", "data.micro_batch_size=8", "data.global_batch_size=8")
    held = []
    for _ in range(3):
        with ExitStack() as stack:
            turns = Turns(IMAGES, Side(settings), stack)
            cuda = turns.device.type == "cuda"
            del turns
        gc.collect()
        held.append(torch.cuda.memory_allocated() if cuda else _parameter_bytes())
    return {"kept": (held[2] - held[0]) // 2, "measured": cuda}


def _parameter_bytes() -> int:
    return sum(one.nbytes for one in gc.get_objects() if type(one) is nn.Parameter)


def cuts() -> dict[str, Any]:
    """Cuts a deterministic run of the digits at each of 20 steps, goes on, and compares the weights."""
    scene = Scene("digits", _DETERMINISTIC.split(), _DETERMINISTIC.split())
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folders = [Path(name, str(cut)) for cut in range(_CUTS + 1)]
        whole = _trained(
            Turns(scene, Side(), stack),
            0,
            lambda cut, run: write(folders[cut], cut, tensors_of(run.state), {}),
        )
        same = 0
        for cut in range(1, _CUTS + 1):
            turns = Turns(scene, Side(), stack)
            found, skipped = newest_good(folders[cut])
            if found is None:
                raise BadInputError(f"no checkpoint to go on from: {skipped}")
            load_tensors(turns.run.state, found.step, found.tensors)
            later = _trained(turns, cut, lambda *_: None)
            same += all(torch.equal(a, b) for a, b in zip(whole, later, strict=True))
    return {"cuts": _CUTS, "same": same}


def _trained(turns: Turns, start: int, done: Callable[[int, Any], object]) -> list[torch.Tensor]:
    run = turns.run
    batches = run.loader(run.share.batches(start))
    for step in range(start, _CUTS + 1):
        train_step(run, batches, step)
        if step < _CUTS:
            done(step + 1, run)
    return [p.detach().clone() for p in run.state.model.parameters()]


_RESNET = Scene(
    "resnet50-synthetic",
    [
        *("data.image_size=32", "data.classes=10", "data.samples=64", "device=cpu"),
        *("data.global_batch_size=4", "data.micro_batch_size=4"),
    ],
    [
        *("data.global_batch_size=256", "data.micro_batch_size=256"),
        *("model.channels_last=true", "compile.mode=default"),
    ],
)
_DIGITS = Scene("digits", ["device=cpu"], ["compile.mode=default"])
_SCENES = {"resnet50": _RESNET, "digits": _DIGITS}


def against_timm(what: str, precision: str) -> dict[str, Any]:
    """Images per second of the trainer's steps and of timm's calls on the same model, in turns.

    timm's train.py isn't in its wheel; these are the calls that it makes in a step, on one batch.

    Args:
        what: "resnet50" or "digits".
        precision: "bf16" or "fp16".

    Raises:
        BadInputError: If timm isn't installed.
    """
    try:
        from timm.optim import create_optimizer_v2
        from timm.utils import NativeScaler
    except ImportError as error:
        raise BadInputError(f"timm is not installed here ({error}): pip install .[bench]") from error
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    cuda = torch.cuda.is_available()
    rounds, steps = (6, 20) if cuda else (2, 1)
    with ExitStack() as stack:
        turns = Turns(_SCENES[what], Side((f"precision.mode={precision}",)), stack)
        device, recipe = turns.device, turns.recipe
        channels_last = torch.channels_last if recipe.model.channels_last else torch.contiguous_format
        torch.backends.cudnn.benchmark = True
        model = make_task(recipe).model().to(device, memory_format=channels_last)  # type: ignore[call-overload]
        compiled = torch.compile(model) if cuda else model
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
        scaler = NativeScaler() if precision == "fp16" and cuda else None
        fields = next(turns.run.loader(range(1))).fields
        images = fields["image"].float().permute(0, 3, 1, 2).contiguous(memory_format=channels_last) / 255
        labels = fields["label"].long()

        def theirs(count: int) -> float:
            began = now(device)
            for _ in range(count):
                with torch.autocast(device.type, dtype):
                    loss = F.cross_entropy(compiled(images), labels, label_smoothing=0.1)
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler(loss, optimizer, parameters=model.parameters())
                optimizer.zero_grad()
            return now(device) - began

        sides = (turns, theirs)
        for side in sides:
            side(steps)  # compiles
        ours, other = (
            [*each] for each in interleaved([partial(one, steps) for one in sides], rounds, shown=False)
        )
    ratio, low, high = median_interval([b / a for a, b in zip(ours, other, strict=True)])
    speed = [steps * recipe.data.global_batch_size / statistics.median(each) for each in (ours, other)]
    return {
        "samples_per_s": dict(zip(("trainer", "timm"), speed, strict=True)),
        **{"ratio": ratio, "low": low, "high": high, "rounds": rounds, "steps": steps, "measured": cuda},
    }


def sizes() -> dict[str, Any]:
    """`data.micro_batch_size=auto` for three global batches: the size that was found, and seconds.

    On a CPU nothing is tried, and the size is the recipe's.
    """
    cuda, found = torch.cuda.is_available(), {}
    for batch in (64, 1024, 16384) if cuda else (64, 96, 128):
        with tempfile.TemporaryDirectory() as name:
            words = [
                "digits" if not cuda else "resnet50-synthetic",
                f"data.global_batch_size={batch}",
                "max_steps=2",
            ]
            words += [
                "data.micro_batch_size=auto",
                "evaluation.every=end",
                "data.limit=256",
                "--out",
                f"{name}/run",
            ]
            began = time.perf_counter()
            done = _trainer("train", *words)
            size = None
            if not done.returncode:
                size = json.loads(Path(name, "run/manifest.json").read_text())["config"]["data"][
                    "micro_batch_size"
                ]
            found[str(batch)] = {
                "code": done.returncode,
                "size": size,
                "seconds": time.perf_counter() - began,
            }
    return {"sizes": found, "measured": cuda}


_HANGS = """
import time
class Hangs:
    def after_step(self, row):
        if row["step"] == 4:
            time.sleep(1000)
"""


def stopped_rank() -> dict[str, Any]:
    """A rank that hangs, and one that is stopped by SIGSTOP and then ended: code, line and seconds."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        hook = Path(name, "hangs.py")
        hook.write_text(_HANGS)
        began = time.perf_counter()
        words = [
            "digits",
            "parallel.hang_s=8",
            "log.every=2",
            f"hooks.use=[{hook}:Hangs]",
            "--out",
            f"{name}/hangs",
        ]
        done = _trainer("train", *words)
        found["hangs"] = _ended(done.returncode, done.stderr, began)
        command = [
            sys.executable,
            "-m",
            "trainer",
            "train",
            "digits",
            "--out",
            f"{name}/stopped",
            "--grace",
            "5",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not (Path(name, "stopped/metrics.jsonl").exists() or process.poll() is not None):
            time.sleep(0.1)
        for pid in children(process.pid):
            os.kill(pid, signal.SIGSTOP)
        began = time.perf_counter()
        process.terminate()
        _, said = process.communicate()
        found["stopped"] = _ended(process.returncode, said, began)
    return found


def _ended(code: int, said: str, began: float) -> dict[str, Any]:
    lines = [line for line in said.splitlines() if line.startswith("trainer: ")]
    return {"code": code, "line": (lines or [""])[0], "seconds": time.perf_counter() - began}


def resumed() -> dict[str, Any]:
    """A deterministic run, stopped, resumed and verified by the command line: exit codes, and the bits."""
    with tempfile.TemporaryDirectory() as name:
        words = ["digits", "deterministic=true", "max_steps=60", "log.every=10", "evaluation.every=20 steps"]
        whole = _trainer("train", *words, "--out", f"{name}/whole").returncode
        cut = _trainer("train", *words, "--out", f"{name}/cut", "--stop-after", "25").returncode
        rest = _trainer("train", *words, "--out", f"{name}/cut").returncode
        verified = _trainer("verify", f"{name}/cut").returncode
        files = [Path(name, run, "model.safetensors") for run in ("whole", "cut")]
        same = all(file.exists() for file in files) and files[0].read_bytes() == files[1].read_bytes()
    return {"codes": [whole, cut, rest, verified], "same": same}


def _trainer(*words: str) -> "subprocess.CompletedProcess[str]":
    """The command, as users type it."""
    command = [sys.executable, "-m", "trainer", *words]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment
    )


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, views left out: what nothing fused would move."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            tensors = [*tree_flatten((args, kwargs or {}))[0], *tree_flatten(out)[0]]
            self.bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return out


def traffic(model: nn.Module, batch: torch.Tensor) -> float:
    """Bytes per image of a forward and a backward pass, unfused; on `meta` nothing is computed."""
    with Traffic() as counted:
        model(batch).sum().backward()
    return float(counted.bytes / len(batch))


def roofline() -> dict[str, Any]:
    """Bytes per image of ResNet-50 in bfloat16."""
    from torchvision.models import resnet50

    with torch.device("meta"):
        model, batch = resnet50().to(torch.bfloat16), torch.empty(32, 3, 224, 224, dtype=torch.bfloat16)
    return {"bytes_per_image": traffic(model, batch)}


def make_parser() -> argparse.ArgumentParser:
    """The command line of the parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_parts", allow_abbrev=False)
    parts = parser.add_subparsers(required=True, metavar="PART")
    images = parts.add_parser("photographs", allow_abbrev=False)
    images.add_argument("folder", type=Path)
    images.set_defaults(run=lambda o: photographs(o.folder, 2048 if torch.cuda.is_available() else 64))
    parts.add_parser("synchronizations").set_defaults(run=lambda _: synchronizations())
    parts.add_parser("start-memory").set_defaults(run=lambda _: start_memory())
    parts.add_parser("cuts").set_defaults(run=lambda _: cuts())
    parts.add_parser("roofline").set_defaults(run=lambda _: roofline())
    parts.add_parser("graphs").set_defaults(run=lambda _: graphs())
    parts.add_parser("faults").set_defaults(run=lambda _: faults())
    parts.add_parser("sizes").set_defaults(run=lambda _: sizes())
    parts.add_parser("stopped").set_defaults(run=lambda _: stopped_rank())
    parts.add_parser("resumed").set_defaults(run=lambda _: resumed())
    both = parts.add_parser("gpt2", allow_abbrev=False)
    both.add_argument("--whole", action="store_true", help="the trainer's loss by whole logits")
    both.set_defaults(run=lambda o: gpt2(o.whole))
    timm = parts.add_parser("timm", allow_abbrev=False)
    timm.add_argument("model", choices=[*_SCENES])
    timm.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    timm.set_defaults(run=lambda o: against_timm(o.model, o.precision))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Does a part and prints what it found."""
    options = make_parser().parse_args(arguments)
    try:
        print(json.dumps(options.run(options)))
    except BadInputError as error:
        print(f"targets: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
