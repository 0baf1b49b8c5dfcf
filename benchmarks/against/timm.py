"""timm's train.py, run as it is on a folder of small images.

The script isn't in timm's wheel and nothing of it is here: the user names a copy. It runs in a process of its
own, `python -m benchmarks.against.timm`, that gives timm a model of ours by timm's own registry, and reads
the gradients with torch's hook before every optimizer's step.
"""

import hashlib
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import optimizer

from benchmarks.accumulation import CLASSES, MICRO_BATCH_SIZE, Case, Recorded, gradient_of
from benchmarks.against import LibraryFailed, NotMeasured

_SIDE = 8  # pixels


def accumulate(case: Case, script: Path | None) -> list[Recorded]:
    """`train.py --grad-accum-steps`, no augmentation.

    Raises:
        LibraryFailed: If the script ran and failed.
        NotMeasured: If there is no script, or the case isn't for it.
    """
    if script is None:
        raise NotMeasured(
            "its accumulation is in train.py, which its wheel doesn't hold; take the file from timm's "
            "repository (huggingface/pytorch-image-models, same version) and give it with --timm-train FILE"
        )
    if case.tokens_vary:
        raise NotMeasured("valid tokens vary: train.py trains image classifiers, whose samples all count 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_images(folder / "data", case.micro_batches * MICRO_BATCH_SIZE)
        command = [sys.executable, "-m", __name__, name, str(script.resolve()), str(case.accumulation)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise LibraryFailed("timm", f"{script} failed: {why[0]}")
        kept = load_file(folder / "recorded.safetensors")
    recorded = Recorded(
        f"train.py (sha256 {hashlib.sha256(script.read_bytes()).hexdigest()[:12]}) with --grad-accum-steps, "
        f"--no-aug and --smoothing 0, on {_SIDE} x {_SIDE} images and a model of ours in float64",
        _Tiny(),
    )
    recorded.model.load_state_dict({"matrix.weight": kept["weight"], "matrix.bias": kept["bias"]})
    recorded.seen = list(zip(kept["x"], kept["y"], strict=True))
    recorded.updates = list(zip(kept["counts"].tolist(), kept["gradients"], strict=True))
    return [recorded]


def _write_images(folder: Path, samples: int) -> None:
    # The first pixel says which class a sample is of, so that whoever sees an image knows the answer.
    from PIL import Image

    random = np.random.default_rng(samples)
    for sample in range(samples):
        pixels = random.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)
        pixels[0, 0] = sample % CLASSES
        path = folder / "train" / str(sample % CLASSES) / f"{sample}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


class _Tiny(nn.Module):
    num_classes = CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(3 * _SIDE * _SIDE, CLASSES, dtype=torch.float64)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x, (x[:, 0, 0, 0] * 255).round().long()))
        logits: torch.Tensor = self.matrix(x.to(torch.float64).flatten(1))
        return logits


def _run(folder: Path, script: str, accumulation: int) -> None:
    from timm.models import register_model

    model, updates = _Tiny(), []

    def trainer_bench_tiny(**_: Any) -> nn.Module:
        return model

    def keep(stepped: torch.optim.Optimizer, *_: Any) -> None:
        updates.append((len(model.seen), gradient_of(model)))
        stepped.zero_grad()  # nothing left to update with

    register_model(trainer_bench_tiny)
    optimizer.register_optimizer_step_pre_hook(keep)
    sys.argv = [script, "--data-dir", str(folder / "data"), "--output", str(folder), "--val-split", ""]
    sys.argv += ["--model", trainer_bench_tiny.__name__, "--device", "cpu", "--workers", "0"]
    sys.argv += ["--img-size", str(_SIDE), "--mean", "0", "--std", "1", "--no-aug", "--smoothing", "0"]
    sys.argv += ["--batch-size", str(MICRO_BATCH_SIZE), "--grad-accum-steps", str(accumulation)]
    sys.argv += ["--epochs", "1", "--warmup-epochs", "0"]
    runpy.run_path(script, run_name="__main__")
    counts, gradients = zip(*updates, strict=True)
    x, y = map(torch.stack, zip(*model.seen, strict=True))
    kept = {"x": x, "y": y, "counts": torch.tensor(counts), "gradients": torch.stack(gradients)}
    kept |= {"weight": model.matrix.weight.detach(), "bias": model.matrix.bias.detach()}
    save_file(kept, folder / "recorded.safetensors")


if __name__ == "__main__":
    _run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))


def load(folder: Path, work: Path, batch: int, side: int, workers: int) -> Callable[[], Iterator[int]]:
    """create_loader without its CUDA prefetcher and its color jitter; each call is an epoch."""
    from timm.data import create_dataset, create_loader

    del work
    loader = create_loader(
        create_dataset("", root=str(folder)),
        input_size=(3, side, side),
        batch_size=batch,
        is_training=True,
        use_prefetcher=False,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: (len(labels) for _, labels in loader)
