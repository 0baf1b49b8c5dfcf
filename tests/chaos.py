"""`make chaos`: runs are cut, killed and signaled at random, and must end with the bits of one that wasn't.

A run here is the real thing (`train.start.rank.train_rank`, its checkpoints and files) in a process forked
from one that has imported torch, so that a cut costs a second and not twenty.
"""

import argparse
import hashlib
import itertools
import json
import mmap
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import yaml

from tests.helpers.late import import_late
from tests.helpers.rows import read_rows
from trainer.checkpoint import store
from trainer.config.recipe import Recipe
from trainer.errors import EXIT_REQUEUE
from trainer.host.processes import children
from trainer.launch.worker import Worker
from trainer.train.request import Request
from trainer.train.start.rank import train_rank

PHASES = ("start", "train", "write")
_ATTEMPTS = 12
_MOST_RUNS = 20  # for each hit that is wanted
THROUGH_THE_LAUNCHER = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Ending(NamedTuple):
    """How a run ended: hash of the final weights and average, and the rows that matter."""

    weights: str
    rows: list[tuple[Any, ...]]


def kinds() -> list[dict[str, Any]]:
    """Recipes that a run can be of: every value of every part at least once, mixed."""
    random_ = random.Random(0)
    parts: dict[str, list[Any]] = {
        "workers": [0, 1, 2, 4],
        "mode": ["fp32", "bf16", "fp16"],
        "gradient_accumulation_steps": [1, 2, 4, 8],
        "ema": [{}, {"decay": 0.9}, {"decay": 0.9, "every": 3}],
        "dropout": [0.0, 0.3],
        "augment": ["none", "flip", "affine"],
        "mixup": [0.0, 0.3],
        "channels_last": [False, True],
        "optim": ["adamw", "sgd", "muon"],
        "every": [1, 3, 7],
    }
    columns = {name: random_.sample(values * 12, 12) for name, values in parts.items()}
    return [{name: column[number] for name, column in columns.items()} for number in range(12)]


def recipe_of(kind: dict[str, Any]) -> Recipe:
    """The recipe digits, short, with the parts of a kind."""
    micro_batch_size = 32 // kind["gradient_accumulation_steps"]
    return Recipe.model_validate(
        {
            "epochs": 3,
            "max_steps": 60,
            "evaluation": {"every": "1 epoch"},
            "data": {
                **{"name": "digits", "global_batch_size": 32, "micro_batch_size": micro_batch_size},
                **{"resident": kind["workers"] == 0, "workers": kind["workers"], "augment": kind["augment"]},
            },
            "model": {"width": 8, "dropout": kind["dropout"], "channels_last": kind["channels_last"]},
            "precision": {"mode": kind["mode"], "initial_scale": 2.0**24, "growth_interval": 20},
            "optim": {"name": kind["optim"], "lr": 0.01, "max_grad_norm": 1.0},
            "ema": kind["ema"],
            "regularization": {"mixup": kind["mixup"] if micro_batch_size > 1 else 0.0},
            "parallel": {"threads": 1},
            "log": {"every": 7, "to": ["jsonl"]},
            "checkpoint": {"every": kind["every"]},
        }
    )


def start(
    recipe: Recipe, folder: Path, phase: mmap.mmap, world: tuple[int, int, int] = (0, 1, 0)
) -> multiprocessing.process.BaseProcess:
    """Forks a rank: its number, how many there are, and where they meet; `phase` says what it is doing."""
    phase[0] = 0
    process = multiprocessing.get_context("fork").Process(target=_rank, args=(recipe, folder, phase, world))
    process.start()
    return process


def _rank(recipe: Recipe, folder: Path, phase: mmap.mmap, world: tuple[int, int, int]) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    rank, size, port = map(str, world)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    loop = sys.modules["trainer.train.start.rank"]
    for name in ("commit", "commit_part", "commit_shared"):
        setattr(store, name, _noted(getattr(store, name), phase))
    original: Any = loop.__dict__["train"]

    def train(*arguments: Any, **named: Any) -> Any:
        phase[0] = 1
        return original(*arguments, **named)

    loop.__dict__["train"] = train
    with Worker() as worker:
        worker.code = train_rank(Request(recipe, "digits", folder)).code
    os._exit(worker.exit_code)


def _noted(commit: Callable[..., Any], phase: mmap.mmap) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        phase[0] = 2
        try:
            return commit(*arguments)
        finally:
            phase[0] = 1

    return noted


def ending(folder: Path) -> Ending:
    """Reads what a finished run left."""
    assert json.loads((folder / "manifest.json").read_text())["status"] == "finished"
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(safetensors.torch.load_file(file).items()):
            digest.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    keys = ("kind", "step", "loss", "grad_norm", "lr", "updates", "accuracy", "loss_scale")
    return Ending(digest.hexdigest(), [tuple(row.get(key) for key in keys) for row in read_rows(folder)])


class Tally:
    """What happened, and what must not."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def judge(self, name: str, folder: Path, wanted: Ending) -> None:
        """Compares a run's end with that of the run that nobody disturbed."""
        try:
            same = ending(folder) == wanted
        except (OSError, AssertionError, ValueError) as error:
            self.failures.append(f"{name}: lost ({error!r})")
            return
        self.counts["identical" if same else "different"] += 1
        if not same:
            self.failures.append(f"{name}: other bits")


def undisturbed(recipe: Recipe, folder: Path, phase: mmap.mmap) -> tuple[Ending, float]:
    """Runs without checkpoints or disturbance; the ending and the seconds it took."""
    began = time.monotonic()
    process = start(recipe.model_copy(update={"checkpoint": type(recipe.checkpoint)()}), folder, phase)
    process.join()
    return ending(folder), time.monotonic() - began


def disturb(
    recipe: Recipe,
    folder: Path,
    phase: mmap.mmap,
    number: signal.Signals,
    seconds: float,
    random_: random.Random,
) -> Counter[str]:
    """Sends a signal at a random time, again and again, until the run is through; counts when it hit."""
    hits: Counter[str] = Counter()
    for attempt in itertools.count():
        process = start(recipe, folder, phase)
        # While it starts or resumes, trains, or writes; after many attempts it is left alone.
        if attempt < _ATTEMPTS:
            wait_for(process, phase, random_, seconds)
        else:
            process.join()
        if process.exitcode is None:
            resuming = phase[0] == 0 and any((folder / "checkpoints").glob("step-*"))
            hits["resume" if resuming else PHASES[phase[0]]] += 1
            assert process.pid is not None
            while process.exitcode is None and not takes(process.pid, number):
                time.sleep(0.005)
            if process.exitcode is None:
                os.kill(process.pid, number)
            process.join(120)
            if process.exitcode is None:
                process.kill()
                hits["late"] += 1
        if process.exitcode == 0:
            return hits
        if process.exitcode not in (-signal.SIGKILL, EXIT_REQUEUE, 1):
            hits["odd"] += 1
            return hits
    return hits


def wait_for(
    process: multiprocessing.process.BaseProcess, phase: mmap.mmap, random_: random.Random, seconds: float
) -> None:
    """Waits until a random moment of a random phase, or the end."""
    aim = random_.random()
    if aim < 0.2:
        process.join(random_.uniform(0.0, 0.15))
        return
    while phase[0] == 0 and process.exitcode is None:
        process.join(0.005)
    process.join(random_.uniform(0.0, seconds / 2))
    if aim < 0.6:
        while phase[0] == 1 and process.exitcode is None:
            time.sleep(0.0002)
        time.sleep(random_.uniform(0.0, 0.01))


def launched(recipe: Recipe, folder: Path, number: signal.Signals, random_: random.Random) -> int:
    """The same with the real command line and launcher; returns how often the signal hit."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    words = [sys.executable, "-m", "trainer", "train", str(file), "--out", str(folder)]
    for hits in itertools.count():
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        metrics = folder / "metrics.jsonl"
        while hits < 2 and process.poll() is None and not (metrics.exists() and takes(process.pid, number)):
            time.sleep(0.02)
        try:
            code = process.wait(random_.uniform(0.0, 0.5) if hits < 2 else None)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            code = process.wait()
        if code == 0:
            return hits
        if code not in ((-signal.SIGKILL,) if number == signal.SIGKILL else (EXIT_REQUEUE, 1)):
            raise AssertionError(f"exit code {code}")
    return hits


def takes(pid: int, number: signal.Signals) -> bool:
    """Whether a command line has come so far that it takes a signal (Linux)."""
    if number == signal.SIGINT:  # which ends it at once, without a word, until there is a rank
        return bool(children(pid))
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return number == signal.SIGKILL or (caught is not None and int(caught[1], 16) >> (number - 1) & 1 == 1)


def chaos(kills: int, signals: int, seed: int) -> Tally:
    """Disturbs runs of all kinds until there were enough of each."""
    random_, tally, phase = random.Random(seed), Tally(), mmap.mmap(-1, 1)
    import_late()
    wanted: dict[int, tuple[Ending, float]] = {}
    recipes = [recipe_of(kind) for kind in kinds()]
    with tempfile.TemporaryDirectory(prefix="chaos-") as root:
        for number in itertools.count():
            missing_kills = kills - tally.counts["kills"]
            missing_signals = signals - tally.counts["signals"]
            if missing_kills <= 0 and missing_signals <= 0:
                return tally
            which = number % len(recipes)
            folder = Path(root, str(number))
            folder.mkdir()
            if which not in wanted:
                whole = Path(root, f"whole-{which}")
                whole.mkdir()
                wanted[which] = undisturbed(recipes[which], whole, phase)
            end, seconds = wanted[which]
            killing = missing_kills > 0 and (number // len(recipes) % 2 == 0 or missing_signals <= 0)
            kind = (
                signal.SIGKILL if killing else random_.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
            )
            hits = disturb(recipes[which], folder, phase, kind, seconds, random_)
            name = "kills" if killing else "signals"
            for place in (*PHASES, "resume"):
                tally.counts[name] += hits[place]
                tally.counts[f"{name} during {place}"] += hits[place]
            tally.counts["late"] += hits["late"]
            if hits["odd"] or hits["late"]:
                tally.failures.append(f"run {number}: {dict(hits)}")
            tally.judge(f"run {number} ({kind.name}, {kinds()[which]})", folder, end)
            shutil.rmtree(folder)
    return tally


def chaos_launched(number: signal.Signals, wanted_hits: int, tally: Tally, random_: random.Random) -> None:
    """Disturbs runs through the command line until there were enough hits."""
    name = f"{number.name} through the launcher"
    recipe = recipe_of(kinds()[0])
    with tempfile.TemporaryDirectory(prefix="chaos-") as root:
        whole = Path(root, "whole")
        whole.mkdir()
        wanted, _ = undisturbed(recipe, whole, mmap.mmap(-1, 1)) if wanted_hits else (None, 0.0)
        for run in range(_MOST_RUNS * wanted_hits):
            if wanted is None or tally.counts[name] >= wanted_hits:
                return
            folder = Path(root, str(run))
            tally.counts[name] += launched(recipe, folder, number, random_)
            tally.judge(f"{name} {run}", folder, wanted)
        if tally.counts[name] < wanted_hits:
            tally.failures.append(f"{name}: {tally.counts[name]} hits only")


def main() -> int:
    """Prints what happened; 1 if anything was lost or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--topologies", type=int, default=100, help="runs on changing numbers of ranks")
    parser.add_argument("--sharded", type=int, default=200, help="cuts of sharded runs on 2 and 4 ranks")
    parser.add_argument("--resharded", type=int, default=12, help="runs whose ranks and strategy change")
    parser.add_argument("--hangs", type=int, default=30, help="ranks that hang somewhere")
    parser.add_argument("--launched", type=int, default=10, help="hits of each kind through the command line")
    options = parser.parse_args()
    from tests.helpers.hangs import hangs
    from tests.helpers.sharded_chaos import resharded, sharded
    from tests.helpers.topologies import topologies  # it is made of what is in here

    torch.set_num_threads(1)
    # Where a script started this in the background, Ctrl-C is ignored, and so it would be by all runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    tally = chaos(options.kills, options.signals, options.seed)
    for number in THROUGH_THE_LAUNCHER:
        chaos_launched(number, options.launched, tally, random.Random(options.seed))
    told = topologies(options.topologies, options.seed, tally)
    told += "\n" + sharded(options.sharded, options.seed, tally)
    told += "\n" + resharded(options.resharded, options.seed, tally)
    unnamed = hangs(options.hangs, options.seed)
    tally.failures += unnamed
    for failure in tally.failures:
        print(failure)
    counts = tally.counts
    print(f"seed {options.seed}, {time.monotonic() - began:.0f} s, kinds of runs: {len(kinds())}")
    for name in ("kills", "signals"):
        all_places = (*PHASES, "resume")
        places = ", ".join(f"{counts[f'{name} during {place}']} during {place}" for place in all_places)
        print(f"{counts[name]} {name} ({places})")
    for name in (number.name for number in THROUGH_THE_LAUNCHER):
        print(f"{counts[f'{name} through the launcher']} {name} through the launcher")
    print(told)
    print(f"{options.hangs} hangs, {options.hangs - len(unnamed)} named, with phase and step")
    lost = len(tally.failures) - counts["different"] - len(unnamed)
    print(f"{counts['identical']} runs identical, {counts['different']} different, {lost} lost or late")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
