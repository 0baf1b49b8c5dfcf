"""Whole runs of other projects' own training scripts beside ours: the same model, data, batches and steps.

The scripts are given by path; none is part of this repository. Both sides run at their own defaults, evaluate
and save as often, and take turns. Wall time includes imports and the last checkpoint; memory is the
largest sum of proportional set sizes (PSS) of all its processes, sampled four times a second.
"""

import argparse
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.paired import median_interval
from benchmarks.photographs import CLASSES, write_photographs
from trainer.config.sizes import GIB
from trainer.errors import EXIT_DONE, EXIT_NOT_MEASURED, BadInputError
from trainer.host.processes import tree
from trainer.observe.conditions import conditions
from trainer.runs.folder import read_rows

_BATCH, _PIXELS = 32, 128
_GPT = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "dropout": 0.0}


class Peer(NamedTuple):
    """A script of another project, and our run with the same work.

    Attributes:
        script: Name of its file.
        prepare: Writes the data of both sides into a folder, given the path of the text.
        theirs: Words after the script, in its folder, given the data's folder and the number of steps.
        ours: Words of `trainer train`.
        loss: Pattern of its last loss of evaluation in what it prints.
    """

    script: str
    prepare: Callable[[Path, Path, Path], None]
    theirs: Callable[[Path, int], Sequence[str]]
    ours: Callable[[Path, int], Sequence[str]]
    loss: str


class Run(NamedTuple):
    """Measurements of a whole run: seconds of the clock and of CPUs, GiB at most, and the final loss."""

    seconds: float
    cpu_seconds: float
    gib: float
    loss: float


def _characters(script: Path, folder: Path, text: Path) -> None:
    """Writes what nanoGPT's `prepare.py` writes, which fetches its text from the network."""
    read = text.read_text()
    letters = sorted(set(read))
    number = {letter: count for count, letter in enumerate(letters)}
    tokens = np.array([number[letter] for letter in read], dtype=np.uint16)
    there = script.parent / "data" / "shakespeare_char"
    there.mkdir(parents=True, exist_ok=True)
    cut = int(len(tokens) * 0.9)
    tokens[:cut].tofile(there / "train.bin")
    tokens[cut:].tofile(there / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": number}
    (there / "meta.pkl").write_bytes(pickle.dumps(meta))
    (folder / "text.txt").write_text(read)


def _photographs(script: Path, folder: Path, text: Path) -> None:
    del script, text
    write_photographs(folder / "train", 400)
    write_photographs(folder / "val", 80)


def _nanogpt(folder: Path, steps: int) -> list[str]:
    more = {"max_iters": steps, "lr_decay_iters": steps, "eval_interval": steps, "eval_iters": 20}
    flags = [f"--{name}={value}" for name, value in ({**_GPT, **more}).items()]
    return [
        "config/train_shakespeare_char.py",
        "--device=cpu",
        "--compile=False",
        f"--out_dir={folder}/out",
        *flags,
    ]


def _timm(folder: Path, steps: int) -> list[str]:
    model = f"--model resnet18 --num-classes {CLASSES} --img-size {_PIXELS} --opt adamw --lr 1e-3"
    epochs = max(1, steps * _BATCH // 400)
    loading = f"--data-dir {folder} -b {_BATCH} --epochs {epochs} --workers 2 --no-prefetcher"
    return f"{model} {loading} --device cpu --output {folder}/out".split()


def _ours_of_timm(folder: Path, steps: int) -> list[str]:
    return [
        *("resnet50-imagenet", f"data.path={folder}", "data.name=folder", "model.name=timm/resnet18"),
        *("optim.name=adamw", "optim.lr=0.001", f"epochs={max(1, steps * _BATCH // 400)}", "device=cpu"),
        *(
            f"data.image_size={_PIXELS}",
            f"data.global_batch_size={_BATCH}",
            f"data.micro_batch_size={_BATCH}",
        ),
        *("precision.mode=fp32", "compile.mode=none", "data.workers=2"),
    ]


PEERS = {
    "nanogpt": Peer(
        "train.py",
        _characters,
        _nanogpt,
        lambda folder, steps: ["gpt-char", f"data.path={folder}/text.txt", f"max_steps={steps}"],
        r"step [1-9]\d*: train loss [\d.]+, val loss ([\d.]+)",
    ),
    "timm": Peer("train.py", _photographs, _timm, _ours_of_timm, r"Test: .*Loss: +[\d.]+ \( *([\d.]+)\)"),
}


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    for name, peer in PEERS.items():
        bench.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=f"its checkout, with {peer.script}")
    bench.add_argument("--text", type=Path, metavar="FILE", help="text for nanogpt")
    bench.add_argument("--rounds", type=int, default=3, metavar="N", help="interleaved rounds (default: 3)")
    bench.add_argument("--steps", type=int, default=200, metavar="N", help="of each run (default: 200)")
    bench.set_defaults(run=bench_peers)


def bench_peers(options: argparse.Namespace) -> int:
    """Measures and prints a row for each peer whose folder was given.

    Returns:
        0; 3 if none was.
    """
    chosen = {name: getattr(options, name) for name in PEERS if getattr(options, name) is not None}
    if not chosen:
        print("nothing measured: give the folder of a peer (--help)")
        return EXIT_NOT_MEASURED
    print(f"{conditions()}\n{options.rounds} interleaved runs of {options.steps} steps\n", flush=True)
    lines = [
        "| peer | wall, ours / theirs | CPU | peak memory | seconds | GiB | final loss |",
        "|---" * 7 + "|",
    ]
    for name, folder in chosen.items():
        peer = PEERS[name]
        pairs = []
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory(prefix="trainer-peers-") as data:
                peer.prepare(folder / peer.script, Path(data), options.text)
                run: dict[bool, Run] = {}
                for mine in (True, False) if number % 2 else (False, True):
                    if mine:
                        run[mine] = _ours(peer, Path(data), options.steps)
                    else:
                        run[mine] = _theirs(peer, folder, Path(data), options.steps)
            pairs.append((run[True], run[False]))
        lines.append(_row(name, pairs))
    print("\n".join(lines))
    return EXIT_DONE


def _row(name: str, pairs: Sequence[tuple[Run, Run]]) -> str:
    ratios = []
    for field in ("seconds", "cpu_seconds", "gib"):
        ratio, low, high = median_interval([getattr(a, field) / getattr(b, field) for a, b in pairs])
        ratios.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    medians = []
    for field, digits in (("seconds", 1), ("gib", 2), ("loss", 3)):
        sides = [
            median_interval([getattr(one, field) for one in runs])[0] for runs in zip(*pairs, strict=True)
        ]
        medians.append(" / ".join(f"{value:.{digits}f}" for value in sides))
    return f"| {name} | {' | '.join([*ratios, *medians])} |"


def _theirs(peer: Peer, folder: Path, data: Path, steps: int) -> Run:
    words = [sys.executable, str(folder.resolve() / peer.script), *peer.theirs(data, steps)]
    run, printed = _measured(words, folder)
    losses = re.findall(peer.loss, printed)
    if not losses:
        raise BadInputError(f"{folder}: no final loss in what it printed: {printed[-500:]}")
    return run._replace(loss=float(losses[-1]))


def _ours(peer: Peer, data: Path, steps: int) -> Run:
    out = data / "run"
    words = [sys.executable, "-m", "trainer", "train", "--out", str(out), *peer.ours(data, steps)]
    run, _ = _measured(words, Path.cwd())
    rows = [row for row in read_rows(out) if row["kind"] == "eval"]
    return run._replace(loss=float(rows[-1]["loss"]))


def _measured(words: Sequence[str], folder: Path) -> tuple[Run, str]:
    """Runs a command to its end.

    Raises:
        BadInputError: If it fails, with the end of what it said.
    """
    began, most, done = time.monotonic(), 0, threading.Event()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, cwd=folder, stdout=said, stderr=subprocess.STDOUT)

        def watch() -> None:
            nonlocal most
            while not done.wait(0.25):
                most = max(most, sum(map(_pss, tree(process.pid))))

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        done.set()
        watcher.join()
        said.seek(0)
        printed = said.read()
    if process.returncode:
        raise BadInputError(
            f"{' '.join(words[:4])} … ended with code {process.returncode}: {printed[-1500:]}"
        )
    return Run(seconds, used.ru_utime + used.ru_stime, most / GIB, float("nan")), printed


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss: +(\d+) kB", text, re.M)
    return int(found[1]) * 1024 if found else 0
