"""`make chaos`: runs are cut, killed and signaled at random, and must end with the bits of one that wasn't.

A run here is the real thing (`train.start.rank.train_rank`, its checkpoints and files), in processes forked
from one that has imported torch, so that a cut costs a second and not twenty. Histories of four sorts:

- alone: one rank;
- ranks: 1, 2 and 4 in turns with parallel.reduction=tree, compared with one rank that nobody disturbed;
- sharded: FSDP or HSDP on 2 or 4 ranks, each rank's part of the last checkpoint compared, too;
- strategies: ddp, fsdp and hsdp in turns: sums have another order, so weights must be close.
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
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import yaml

from tests.helpers.late import import_late
from tests.helpers.ports import free_port
from tests.helpers.rows import read_rows
from trainer.checkpoint import store
from trainer.config.recipe import Recipe
from trainer.distributed import consensus
from trainer.errors import EXIT_FAILED, EXIT_REQUEUE
from trainer.host.processes import children
from trainer.launch.worker import Worker
from trainer.train.request import Request
from trainer.train.start.rank import train_rank

PHASES = ("start", "train", "write")
_MOST_CUTS = 6  # then a run is left alone
_MOST_RUNS = 20  # for each hit through the launcher that is wanted
TOLERANCE = 1e-5  # of the largest weight of a tensor, where sums have another order
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Place(NamedTuple):
    """How many ranks an attempt has, and the section parallel of its recipe."""

    ranks: int
    parallel: Mapping[str, Any] = {}


_SHARDED = (
    Place(2, {"strategy": "fsdp"}),
    Place(4, {"strategy": "fsdp"}),
    Place(4, {"strategy": "hsdp", "shard": 2}),
)
# Places that a history changes between; the undisturbed run is at the first.
PLACES: Mapping[str, tuple[Place, ...]] = {
    "alone": (Place(1),),
    "ranks": tuple(Place(ranks, {"reduction": "tree"}) for ranks in (1, 2, 4)),
    "sharded": _SHARDED,  # one of them for each kind
    "strategies": (Place(1), Place(2), Place(4), Place(1, {"strategy": "fsdp"}), *_SHARDED),
}


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

    def judge(self, name: str, same: bool) -> None:
        """Counts a run that is, or isn't, what it should be."""
        self.counts["identical" if same else "different"] += 1
        if not same:
            self.failures.append(f"{name}: other bits")


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


def jobs(sort: str) -> list[tuple[dict[str, Any], tuple[Place, ...]]]:
    """Kinds of recipes that go with a sort, and the places of each."""
    chosen, places = kinds(), PLACES[sort]
    if sort == "alone":
        return [(kind, places) for kind in chosen]
    if sort == "ranks":  # four ranks divide a step
        return [
            ({**kind, "gradient_accumulation_steps": 4 << n % 2}, places) for n, kind in enumerate(chosen)
        ]
    if sort == "sharded":  # which refuses Muon and channels_last
        adamw: dict[str, Any] = {"optim": "adamw", "channels_last": False}
        return [
            ({**kind, **adamw, "gradient_accumulation_steps": place.ranks << n % 2}, (place,))
            for n, (kind, place) in enumerate(zip(chosen, itertools.cycle(places), strict=False))
        ]
    # SGD, because Adam makes steps of any size of what is zero but for rounding.
    kind = {**chosen[0], "gradient_accumulation_steps": 4, "channels_last": False, "mode": "fp32"}
    return [({**kind, "optim": "sgd", "every": 3, "ema": {"decay": 0.9}}, places)]


def at(recipe: Recipe, place: Place) -> Recipe:
    """Puts a place's section parallel into a recipe."""
    values = recipe.model_dump(mode="json")
    return Recipe.model_validate({**values, "parallel": {"threads": 1, "hang_s": 0, **place.parallel}})


class Left(NamedTuple):
    """End of an attempt: whether it was through, and its phase when it was cut, or ""."""

    finished: bool
    phase: str


def attempt(
    recipe: Recipe,
    folder: Path,
    size: int,
    seconds: float,
    random_: random.Random,
    number: signal.Signals | None,
) -> Left:
    """Trains on so many ranks; sends `number` at a random moment, SIGKILL to all, another to any one of them.

    Args:
        seconds: What the training takes about.

    Raises:
        AssertionError: If a rank ended as none should.
    """
    phases = [mmap.mmap(-1, 1) for _ in range(size)]
    resumes, port, hit = any((folder / "checkpoints").glob("step-*")), free_port(), ""
    ranks = [start(recipe, folder, phases[rank], (rank, size, port)) for rank in range(size)]
    watched, reached = random_.randrange(size), list[BaseProcess]()
    if number is not None:
        # A kill ends all, as when a machine is lost; a request reaches any one of them.
        wait_for(ranks[watched], phases[watched], random_, seconds)
        if ranks[watched].exitcode is None:
            reached = ranks if number == signal.SIGKILL else [random_.choice(ranks)]
            phase = phases[watched][0]
            hit = "resume" if resumes and not phase else PHASES[phase]
    for rank in reached:
        assert rank.pid is not None and number is not None
        # Python takes SIGINT from its first moment on.
        while rank.exitcode is None and not (number == signal.SIGINT or takes(rank.pid, number)):
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)
    for rank in reached:
        rank.join(300)
    for rank in ranks:
        if any(one.exitcode == EXIT_FAILED for one in reached):
            rank.kill()  # as the launcher does: it would wait for one that left before it began
        rank.join(300)
    codes = {rank.exitcode for rank in ranks}
    # 1: stopped before there was a checkpoint; the others of a rank that was killed.
    if codes - ({0, 1, EXIT_REQUEUE, -signal.SIGKILL} if hit else {0}):
        raise AssertionError(f"{size} ranks, {number and number.name} in {hit or 'no phase'}: {codes}")
    return Left(codes == {0}, hit)


def undisturbed(recipe: Recipe, folder: Path, place: Place = PLACES["alone"][0]) -> float:
    """Trains without checkpoints on the way or disturbance, in a new folder; the seconds it took."""
    folder.mkdir()
    began = time.monotonic()
    plain = at(recipe, place).model_copy(update={"checkpoint": type(recipe.checkpoint)()})
    attempt(plain, folder, place.ranks, 0.0, random.Random(0), None)
    return time.monotonic() - began


def history(
    recipe: Recipe,
    places: tuple[Place, ...],
    folder: Path,
    seconds: float,
    random_: random.Random,
    counts: Counter[str],
) -> str:
    """Trains a run to its end, cut again and again; returns its ranks and cuts, and counts them."""
    told, last = list[str](), None
    while True:
        last = random_.choice([place for place in places if place != last] or places)
        number = random_.choice(SIGNALS) if len(told) < _MOST_CUTS else None
        left = attempt(at(recipe, last), folder, last.ranks, seconds, random_, number)
        if left.phase and number is not None:
            counts.update(("cuts", number.name, f"during {left.phase}"))
        told.append(f"{last.ranks} {number.name if number else ''} {left.phase}".rstrip())
        if left.finished:
            return ", ".join(told)


def parts_of(folder: Path) -> str:
    """A hash of all tensors of a run's last checkpoint; not of state.json, which has seconds."""
    newest = max((folder / "checkpoints").glob("step-*"))
    digest = hashlib.sha256(newest.name.encode())
    for file in sorted(newest.glob("*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def distance(folder: Path, other: Path) -> float:
    """The largest difference of two runs' final weights, as a part of the largest number of its tensor."""
    found = [0.0]
    for file in ("model.safetensors", "ema.safetensors"):
        theirs = safetensors.torch.load_file(other / file)
        for name, tensor in safetensors.torch.load_file(folder / file).items():
            difference = (tensor.double() - theirs[name].double()).abs().max()
            found.append(float(difference / theirs[name].double().abs().max().clamp(min=1e-3)))
    return max(found)


def chaos(sort: str, count: int, seed: int) -> Tally:
    """Disturbs so many runs of a sort, of each of its kinds in turn."""
    random_, tally, wholes = random.Random(seed), Tally(), dict[int, tuple[Path, float]]()
    consensus.SECONDS_BETWEEN = 0.02  # a run here is over in a second
    import_late()
    from torch.distributed import fsdp  # noqa: F401

    chosen = jobs(sort)
    with tempfile.TemporaryDirectory(prefix="chaos-") as root:
        for number in range(count):
            kind, places = chosen[number % len(chosen)]
            recipe, folder = recipe_of(kind), Path(root, str(number))
            if number < len(chosen):
                whole = Path(root, f"whole-{number}")
                wholes[number] = whole, undisturbed(recipe, whole, places[0])
            whole, seconds = wholes[number % len(chosen)]
            folder.mkdir()
            name = f"{sort} {number} ({kind})"
            try:
                name += history(recipe, places, folder, seconds, random_, tally.counts).join("[]")
                if sort == "strategies":
                    tally.judge(name, distance(folder, whole) <= TOLERANCE)
                else:
                    parts = len(places) > 1 or parts_of(folder) == parts_of(whole)
                    tally.judge(name, parts and ending(folder) == ending(whole))
            except (OSError, AssertionError, ValueError) as error:
                tally.failures.append(f"{name}: lost ({error!r})")
    return tally


def chaos_launched(number: signal.Signals, wanted_hits: int, seed: int) -> Tally:
    """Disturbs runs through the command line until there were enough hits."""
    tally, random_, recipe = Tally(), random.Random(seed), recipe_of(kinds()[0])
    with tempfile.TemporaryDirectory(prefix="chaos-") as root:
        undisturbed(recipe, whole := Path(root, "whole"))
        for run in range(_MOST_RUNS * wanted_hits):
            folder = Path(root, str(run))
            tally.counts["cuts"] += launched(recipe, folder, number, random_)
            tally.judge(f"{number.name} through the launcher, {run}", ending(folder) == ending(whole))
            if tally.counts["cuts"] >= wanted_hits:
                return tally
    tally.failures.append(f"{number.name} through the launcher: {tally.counts['cuts']} hits only")
    return tally


def main() -> int:
    """Prints what happened; 1 if anything was lost or differs."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=50, help="of each sort")
    parser.add_argument("--only", choices=PLACES, action="append", help="histories of this sort")
    parser.add_argument("--hangs", type=int, default=30, help="ranks that hang somewhere")
    parser.add_argument("--launched", type=int, default=10, help="hits of each signal by the command line")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    from tests.helpers.hangs import hangs

    torch.set_num_threads(1)
    # Where a script started this in the background, Ctrl-C is ignored, and so it would be by all runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"seed {options.seed}, kinds of runs: {len(kinds())}", flush=True)
    failures = list[str]()
    told = [(sort, chaos(sort, options.runs, options.seed)) for sort in options.only or PLACES]
    if options.launched:
        told += [
            (f"{number.name} through the launcher", chaos_launched(number, options.launched, options.seed))
            for number in SIGNALS
        ]
    for name, tally in told:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(tally.counts.items()))
        print(f"{name}: {counts}; {len(tally.failures)} failed", flush=True)
        failures += tally.failures
    unnamed = hangs(options.hangs, options.seed)
    print(f"{options.hangs} hangs, {options.hangs - len(unnamed)} named, with phase and step")
    for failure in [*failures, *unnamed]:
        print(failure)
    return int(bool(failures or unnamed))


if __name__ == "__main__":
    sys.exit(main())
