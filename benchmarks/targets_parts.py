"""Measurements of `scripts/bench_gpu.sh` that no command makes: each prints one line of JSON.

`python -m benchmarks.targets_parts PART`; on a CPU the parts run as well, small, to see that they do.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks.claims.measuring import Scene, Side, Turns
from benchmarks.claims.training import IMAGES
from benchmarks.photographs import write_photographs
from benchmarks.targets_graphs import graphs
from trainer.checkpoint.store import newest_good, write
from trainer.errors import BadInputError
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


def timm_loop(precision: str, batch: int = 256, steps: int = 60, side: int = 224) -> dict[str, Any]:
    """Images per second of ResNet-50 as timm's tools train it: its model, its optimizer, its scaler.

    timm's train.py isn't in its wheel; these are the calls that it makes in a step, on one synthetic batch.
    """
    try:
        from timm import create_model
        from timm.optim import create_optimizer_v2
        from timm.utils import NativeScaler
    except ImportError as error:
        raise BadInputError(f"timm is not installed here ({error}): pip install .[bench]") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    torch.backends.cudnn.benchmark = True
    model = create_model("resnet50", num_classes=1000).to(device, memory_format=torch.channels_last)
    compiled = torch.compile(model) if device.type == "cuda" else model
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = NativeScaler() if precision == "fp16" and device.type == "cuda" else None
    images = torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)
    seconds = 0.0
    for timed in (False, True):
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(device.type, dtype):
                loss = F.cross_entropy(compiled(images), labels, label_smoothing=0.1)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler(loss, optimizer, parameters=model.parameters())
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began if timed else 0.0
    return {"samples_per_s": batch * steps / seconds, "precision": precision}


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets_parts", allow_abbrev=False)
    parts = parser.add_subparsers(required=True, metavar="PART")
    images = parts.add_parser("photographs", allow_abbrev=False)
    images.add_argument("folder", type=Path)
    images.set_defaults(run=lambda o: photographs(o.folder, 2048))
    parts.add_parser("synchronizations").set_defaults(run=lambda _: synchronizations())
    parts.add_parser("start-memory").set_defaults(run=lambda _: start_memory())
    parts.add_parser("cuts").set_defaults(run=lambda _: cuts())
    parts.add_parser("roofline").set_defaults(run=lambda _: roofline())
    parts.add_parser("graphs").set_defaults(run=lambda _: graphs())
    timm = parts.add_parser("timm", allow_abbrev=False)
    timm.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    timm.set_defaults(run=lambda o: timm_loop(o.precision))
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
