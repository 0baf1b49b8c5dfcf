"""Forty refusals: bad input, its exit code, and the names that its line holds; no other words of it."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.recorded.play import BEGIN_FROM, Workplace


class Refusal(NamedTuple):
    """A bad input: words of a command, and the names (key, file, tensor) that its line must hold."""

    words: str
    names: tuple[str, ...]


_SMALL = "data.limit=24 data.global_batch_size=8 data.micro_batch_size=8 max_steps=2 parallel.threads=1"
_IMAGES = f"train digits {_SMALL} model.width=4"
_PICTURES = f"{_IMAGES} data.name=folder data.image_size=16"

REFUSALS = (
    # recipes and keys
    Refusal("train digitz", ("digitz", "digits")),
    Refusal("train absent.yaml", ("absent.yaml",)),
    Refusal("train torn.yaml", ("torn.yaml",)),
    Refusal("train twice.yaml", ("twice.yaml", "epochs")),
    Refusal("train slip.yaml", ("slip.yaml", "epoch")),
    Refusal("train digits optim.lrr=1", ("optim.lrr", "optim.lr")),
    Refusal("train digits optim.lr=-1", ("optim.lr",)),
    Refusal("train digits optim.lr=fast", ("optim.lr",)),
    Refusal("train digits optim.name=adam", ("optim.name", "adamw")),
    Refusal("train digits optim.lr=.inf", ("optim.lr",)),
    Refusal("train digits data.name=tokens", ("data.name",)),
    Refusal("train digits task=texts", ("task",)),
    Refusal("train digits language.width=8", ("language",)),
    Refusal("train digits audio.mels=8", ("audio",)),
    # keys that don't go together
    Refusal("train digits data.micro_batch_size=7", ("data.micro_batch_size", "data.global_batch_size")),
    Refusal("train digits --nproc-per-node 3", ("data.global_batch_size",)),
    Refusal("train digits data.micro_batch_size=1 regularization.mixup=0.2", ("regularization.mixup",)),
    Refusal("train digits parallel.strategy=fsdp optim.name=muon", ("optim.name", "parallel.strategy")),
    Refusal("train digits precision.keep_fp32=[head]", ("precision.keep_fp32", "precision.mode")),
    Refusal("train digits data.last_batch=drop data.global_batch_size=4096", ("data.last_batch",)),
    Refusal("train digits model.freeze=[steam]", ("model.freeze", "steam")),
    Refusal("train digits memory.checkpointing=names memory.names=[nothing]", ("memory.names", "nothing")),
    # data
    Refusal(f"{_PICTURES} data.path=absent", ("absent",)),
    Refusal(f"{_PICTURES} data.path=pictures data.check=full", ("14.png",)),
    Refusal(f'{_PICTURES} data.path=pictures data.class_weights={{"zebra":2}}', ("class_weights", "zebra")),
    Refusal(f"train gpt-stdlib {_SMALL} data.name=tokens data.path=odd", ("train.bin",)),
    Refusal(f"train gpt-stdlib {_SMALL} data.name=text data.path=absent.txt", ("absent.txt",)),
    Refusal(f"train dtmf {_SMALL} audio.hop=0", ("audio.hop",)),
    Refusal(f"train digits-detection {_SMALL} data.image_size=64", ("data.image_size",)),
    # task files and hooks
    Refusal(f"train mean.py {_SMALL}", ("loss",)),
    Refusal(f"train empty.py {_SMALL}", ("empty.py",)),
    Refusal(f"train broken.py {_SMALL}", ("broken.py", "nowhere")),
    Refusal(f"{_IMAGES} hooks.use=[cut.py:Cot]", ("Cot", "cut.py")),
    # runs and weights
    Refusal(f"{_IMAGES} BEGIN_FROM absent", ("absent",)),
    Refusal(f"{_IMAGES} model.pretrained=short.safetensors", ("short.safetensors", "head.weight")),
    Refusal(f"{_IMAGES} model.pretrained=wide.safetensors", ("wide.safetensors", "head.weight")),
    Refusal(f"{_IMAGES} optim.lr=0.5 --out run", ("run", "optim.lr")),
    Refusal(f"{_IMAGES} --out run --resume never", ("run",)),
    Refusal("evaluate absent", ("absent",)),
    Refusal("export run --to peft --out export", ("peft",)),
)

_MEAN = "return F.cross_entropy(model(batch.fields['point']), batch.fields['label'])"
_TEXTS = {"torn.yaml": "optim: {lr: 0.1", "twice.yaml": "epochs: 1\nepochs: 2", "slip.yaml": "epoch: 3"}
_TEXTS |= {"empty.py": "", "broken.py": "import nowhere"}


def refuse(place: Workplace) -> dict[str, dict[str, Any]]:
    """Gives the trainer all bad inputs, where there are no runs; by input its code and the names it says."""
    folder = place.folder
    for name, text in _TEXTS.items():
        (folder / name).write_text(text)
    task = (folder / "spoiled.py").read_text()
    start, end = task.index("        each ="), task.index("    def measure")
    (folder / "mean.py").write_text(f"{task[:start]}        {_MEAN}\n\n{task[end:]}")
    (folder / "odd").mkdir()
    (folder / "odd" / "train.bin").write_bytes(b"abc")
    done = place.trainer(*_IMAGES.split(), "--out", "run")
    assert done.returncode == 0, done.stderr
    tensors = load_file(folder / "run" / "model.safetensors")
    wide = {**tensors, "head.weight": np.zeros((10, 99), np.float32)}
    save_file(wide, folder / "wide.safetensors")
    tensors.pop("head.weight")
    save_file(tensors, folder / "short.safetensors")
    found = {}
    for words, names in REFUSALS:
        before = _runs(folder)
        done = place.trainer(*words.replace("BEGIN_FROM", BEGIN_FROM).split())
        told = done.stderr + done.stdout
        held = [name for name in names if name in told]
        found[words] = {"code": done.returncode, "names": held, "left": sorted(_runs(folder) - before)}
    return found


def _runs(folder: Path) -> set[str]:
    """Returns the run folders that are there; a refusal leaves none."""
    return {path.name for path in (folder / "runs").glob("*")}
