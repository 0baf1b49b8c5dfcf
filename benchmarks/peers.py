"""Whole runs of other projects' own training scripts beside ours: the same model, data, batches and steps.

The scripts are given by path; none is part of this repository. Both sides run at their own defaults, evaluate
and save as often, and take turns. Wall time includes imports and the last checkpoint; memory is the
largest sum of proportional set sizes (PSS) of all its processes, sampled once a second.
"""

import argparse
import importlib.util
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from benchmarks.conditions import conditions
from benchmarks.paired import median_interval
from benchmarks.photographs import CLASSES, write_photographs
from trainer.config.sizes import GIB
from trainer.errors import EXIT_DONE, EXIT_NOT_MEASURED, BadInputError
from trainer.host.processes import tree
from trainer.runs.folder import read_rows

_BATCH, _PIXELS, _PHOTOGRAPHS = 32, 128, 400
_GPT = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "dropout": 0.0}


class Peer(NamedTuple):
    """A script of another project, and our run with the same work.

    Attributes:
        script: Name of its file.
        prepare: Writes the data of both sides into a folder, given the script, the text and a seed.
        theirs: Words after the script, given the folder, the number of steps and a seed; run in the folder.
        ours: Words of `trainer train`, given the folder and the number of steps.
        loss: Pattern of its last loss of evaluation in what it prints.
        needs: Modules without which it can't run.
    """

    script: str
    prepare: Callable[[Path, Path, Path, int], None]
    theirs: Callable[[Path, int, int], Sequence[str]]
    ours: Callable[[Path, int], Sequence[str]]
    loss: str
    needs: Sequence[str] = ()


class Run(NamedTuple):
    """Measurements of a whole run: seconds of the clock and of CPUs, GiB at most, and the final loss."""

    seconds: float
    cpu_seconds: float
    gib: float
    loss: float


def _characters(script: Path, folder: Path, text: Path, seed: int) -> None:
    """Writes what nanoGPT's `prepare.py` writes, which fetches its text from the network."""
    for entry in script.resolve().parent.iterdir():
        if entry.name != "data":
            (folder / entry.name).symlink_to(entry)
    read = text.read_text()
    letters = sorted(set(read))
    number = {letter: count for count, letter in enumerate(letters)}
    tokens = np.array([number[letter] for letter in read], dtype=np.uint16)
    there = folder / "data" / "shakespeare_char"
    there.mkdir(parents=True)
    cut = int(len(tokens) * 0.9)
    tokens[:cut].tofile(there / "train.bin")
    tokens[cut:].tofile(there / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": number}
    (there / "meta.pkl").write_bytes(pickle.dumps(meta))
    # Its seed is no setting; a file of settings is Python, and it has imported torch by then.
    (folder / "seed.py").write_text(
        f"_seed = torch.manual_seed\ntorch.manual_seed = lambda number: _seed(number + {seed})\n"
    )
    (folder / "text.txt").write_text(read)


def _text(script: Path, folder: Path, text: Path, seed: int) -> None:
    del script, seed
    (folder / "text.txt").write_text(text.read_text())


def _photographs(script: Path, folder: Path, text: Path, seed: int) -> None:
    del script, text, seed
    write_photographs(folder / "train", _PHOTOGRAPHS)
    write_photographs(folder / "val", 80)


def _nanogpt(folder: Path, steps: int, seed: int) -> list[str]:
    del seed
    more = {"max_iters": steps, "lr_decay_iters": steps, "eval_interval": steps, "eval_iters": 20}
    flags = [f"--{name}={value}" for name, value in ({**_GPT, **more}).items()]
    files = ["config/train_shakespeare_char.py", "seed.py"]
    return [*files, "--device=cpu", "--compile=False", f"--out_dir={folder}/out", *flags]


def _epochs(steps: int) -> int:
    return max(1, steps * _BATCH // _PHOTOGRAPHS)


def _timm(folder: Path, steps: int, seed: int) -> list[str]:
    model = f"--model resnet18 --num-classes {CLASSES} --img-size {_PIXELS} --opt adamw --lr 1e-3"
    loading = f"--data-dir {folder} -b {_BATCH} --epochs {_epochs(steps)} --workers 2 --no-prefetcher"
    return f"{model} {loading} --device cpu --seed {seed} --output {folder}/out".split()


def _imagenet(folder: Path, steps: int, seed: int) -> list[str]:
    return f"{folder} -a resnet18 -b {_BATCH} -j 2 --epochs {_epochs(steps)} --lr 0.01 --seed {seed}".split()


def _trainer(folder: Path, steps: int, seed: int) -> list[str]:
    return [str(folder), str(steps), str(seed)]


def _on_photographs(folder: Path, steps: int) -> list[str]:
    return [
        *("resnet50-imagenet", f"data.path={folder}", "data.name=folder", f"epochs={_epochs(steps)}"),
        *(f"data.global_batch_size={_BATCH}", f"data.micro_batch_size={_BATCH}", "data.workers=2"),
        *("precision.mode=fp32", "compile.mode=none", "device=cpu"),
        *("evaluation.every=1 epoch", f"checkpoint.every={_PHOTOGRAPHS // _BATCH}"),
    ]


def _gpt_char(folder: Path, steps: int) -> list[str]:
    return ["gpt-char", f"data.path={folder}/text.txt", f"max_steps={steps}"]


PEERS = {
    "nanogpt": Peer(
        "train.py",
        _characters,
        _nanogpt,
        lambda folder, steps: [*_gpt_char(folder, steps), "optim.warmup_steps=100"],  # as its configuration
        r"step [1-9]\d*: train loss [\d.]+, val loss ([\d.]+)",
    ),
    "timm": Peer(
        "train.py",
        _photographs,
        _timm,
        lambda folder, steps: [
            *_on_photographs(folder, steps),
            *("model.name=timm/resnet18", f"data.image_size={_PIXELS}"),
            *("optim.name=adamw", "optim.lr=0.001"),
        ],
        r"Test: .*Loss: +[\d.]+ \( *([\d.]+)\)",
    ),
    "imagenet": Peer(
        "main.py",
        _photographs,
        _imagenet,
        lambda folder, steps: [
            *_on_photographs(folder, steps),
            *("model.name=resnet18", "data.image_size=224", "optim.lr=0.01"),
        ],
        r"Test: .*Loss [\d.e+-]+ \(([\d.e+-]+)\)",
    ),
    "transformers": Peer(
        "peer_trainer.py", _text, _trainer, _gpt_char, r"loss on all held-out text ([\d.]+)", ("accelerate",)
    ),
}


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    for name, peer in PEERS.items():
        bench.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=f"where its {peer.script} is")
    bench.add_argument("--text", type=Path, metavar="FILE", help="text for the language models")
    bench.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="interleaved rounds, each with another seed (default: 3)",
    )
    bench.add_argument("--steps", type=int, default=200, metavar="N", help="of each run (default: 200)")
    bench.set_defaults(run=bench_peers)


def bench_peers(options: argparse.Namespace) -> int:
    """Measures and prints a row for each peer whose folder was given.

    Returns:
        0; 3 if none was.

    Raises:
        BadInputError: If a script, a module that it imports, or the text is missing, or if a run fails.
    """
    chosen = {name: getattr(options, name) for name in PEERS if getattr(options, name) is not None}
    if not chosen:
        print("nothing measured: give the folder of a peer (--help)")
        return EXIT_NOT_MEASURED
    if options.rounds < 1 or options.steps < 1:
        raise BadInputError("--rounds and --steps: 1 or more")
    for name, folder in chosen.items():
        _check(name, folder, options.text)
    print(f"{conditions()}\n{options.rounds} interleaved runs of {options.steps} steps\n", flush=True)
    lines = [
        "| peer | wall, ours / theirs | CPU | peak memory | seconds | GiB | final loss |",
        "|---" * 7 + "|",
    ]
    for name, folder in chosen.items():
        pairs = [
            _pair(PEERS[name], folder, options.text, options.steps, seed) for seed in range(options.rounds)
        ]
        lines.append(_row(name, pairs))
        print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    return EXIT_DONE


def _check(name: str, folder: Path, text: Path | None) -> None:
    peer = PEERS[name]
    if not (folder / peer.script).is_file():
        raise BadInputError(f"--{name} {folder}: it has no {peer.script}")
    for module in peer.needs:
        if importlib.util.find_spec(module) is None:
            raise BadInputError(f"--{name}: its script needs {module}, which isn't installed")
    if peer.prepare is not _photographs and text is None:
        raise BadInputError(f"--{name} needs --text FILE, a text that both sides learn from")
    if text is not None and not text.is_file():
        raise BadInputError(f"--text {text}: no such file")


def _pair(peer: Peer, folder: Path, text: Path, steps: int, seed: int) -> tuple[Run, Run]:
    """A run of ours and one of theirs; which is first changes from round to round."""
    runs: dict[bool, Run] = {}
    for mine in (True, False) if seed % 2 else (False, True):
        with tempfile.TemporaryDirectory(prefix="trainer-peers-") as place:
            data = Path(place)
            peer.prepare(folder / peer.script, data, text, seed)
            if mine:
                runs[mine] = _ours(peer, data, steps, seed)
            else:
                runs[mine] = _theirs(peer, folder / peer.script, data, steps, seed)
    return runs[True], runs[False]


def _row(name: str, pairs: Sequence[tuple[Run, Run]]) -> str:
    ratios = []
    for field in ("seconds", "cpu_seconds", "gib"):
        ratio, low, high = median_interval([getattr(a, field) / getattr(b, field) for a, b in pairs])
        ratios.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    sides = list(zip(*pairs, strict=True))
    for field, digits in (("seconds", 1), ("gib", 2)):
        medians = [statistics.median(getattr(one, field) for one in runs) for runs in sides]
        ratios.append(" / ".join(f"{value:.{digits}f}" for value in medians))
    losses = [[one.loss for one in runs] for runs in sides]
    ratios.append(
        " / ".join(f"{statistics.mean(one):.3f} ({min(one):.3f} to {max(one):.3f})" for one in losses)
    )
    return f"| {name} | {' | '.join(ratios)} |"


def _theirs(peer: Peer, script: Path, data: Path, steps: int, seed: int) -> Run:
    words = [str(script.resolve()), *peer.theirs(data, steps, seed)]
    run, printed = measured(words, data)
    losses = re.findall(peer.loss, printed)
    if not losses:
        raise BadInputError(f"{script}: no final loss in what it printed: {printed[-500:]}")
    return run._replace(loss=float(losses[-1]))


def _ours(peer: Peer, data: Path, steps: int, seed: int) -> Run:
    out = data / "run"
    words = [*peer.ours(data, steps), f"seed={seed}"]
    run, _ = measured(["-m", "trainer", "train", "--out", str(out), *words], Path.cwd())
    rows = [row for row in read_rows(out) if row["kind"] == "eval"]
    return run._replace(loss=float(rows[-1]["loss"]))


def measured(
    words: Sequence[str], folder: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> tuple[Run, str]:
    """Runs a Python with these words to its end, in a folder and with further variables.

    Raises:
        BadInputError: If it fails, with the end of what it said.
    """
    began, most, done = time.monotonic(), 0, threading.Event()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=said,
            stderr=subprocess.STDOUT,
        )

        def watch() -> None:
            nonlocal most
            while not done.wait(1):
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
