"""`make chaos`: runs are cut, killed and signaled at random, and must end with the bits of one that wasn't.

Recipes are those of `tests.recorded.draw`, longer. A run is the real thing (`train.start.rank.train_rank`,
its checkpoints and files), in forks of a process that has imported torch: a cut costs a second and not
twenty. Histories of four sorts:

- alone: one rank;
- ranks: 1, 2 and 4 in turns with parallel.reduction=tree, compared with one rank that nobody disturbed;
- sharded: FSDP or HSDP on 2 or 4 ranks, each rank's part of the last checkpoint compared, too;
- strategies: ddp, fsdp and hsdp in turns: sums have another order, so weights must be close.
"""

import argparse
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import yaml
from pydantic import ValidationError

from tests.helpers.forked import replace
from tests.helpers.hangs import hangs, train_silently
from tests.helpers.late import import_late
from tests.helpers.ports import free_port
from tests.recorded.draw import draw
from tests.recorded.files import left_out, write_files
from tests.recorded.play import ROWS, read_rows, read_run, read_weights
from trainer.checkpoint import store
from trainer.config.recipe import Recipe
from trainer.distributed import consensus
from trainer.errors import EXIT_FAILED, EXIT_REQUEUE, BadInputError
from trainer.host.processes import children
from trainer.train.components.task import check_request, make_task

PHASES = ("start", "train", "write")
_RECIPES = 12  # of each sort
_STEPS = 60
_MOST_CUTS = 6  # then a run is left alone
_MOST_RUNS = 20  # for each hit through the launcher that is wanted
TOLERANCE = 1e-5  # of the largest weight of a tensor, where sums have another order
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Place(NamedTuple):
    """How many ranks an attempt has, and the section parallel of its recipe."""

    ranks: int
    parallel: Mapping[str, Any] = {}


_FSDP: Mapping[str, Any] = {"strategy": "fsdp"}
_SHARDED = (Place(2, _FSDP), Place(4, _FSDP), Place(4, {"strategy": "hsdp", "shard": 2}))
# Places that a history changes between; the undisturbed run is at the first.
PLACES: Mapping[str, tuple[Place, ...]] = {
    "alone": (Place(1),),
    "ranks": tuple(Place(ranks, {"reduction": "tree"}) for ranks in (1, 2, 4)),
    "sharded": _SHARDED,  # one of them for each recipe
    "strategies": (Place(1), Place(2), Place(4), Place(1, _FSDP), *_SHARDED),
}


class Job(NamedTuple):
    """A recipe's sections, the seed that it was drawn by, and the places that it is trained at."""

    seed: int
    recipe: dict[str, Any]
    places: tuple[Place, ...]

    def at(self, place: Place, **sections: Any) -> Recipe:
        """The recipe at a place."""
        parallel = {"threads": 1, "hang_s": 0, **place.parallel}
        return Recipe.model_validate({**self.recipe, "parallel": parallel, **sections})

    def is_possible(self) -> bool:
        """Whether it can be trained at all of its places; the folder is that of the recipes' files."""
        try:
            for place in self.places:
                recipe = self.at(place)
                check_request(recipe, make_task(recipe), place.ranks)
        except (ValidationError, BadInputError):
            return False
        return True


class Ending(NamedTuple):
    """How a run ended: its final weights and average, and all that it has recorded."""

    weights: dict[str, Any]
    rows: list[list[dict[str, Any]]]


def ending(folder: Path) -> Ending:
    """Reads what a finished run left."""
    assert json.loads((folder / "manifest.json").read_text())["status"] == "finished"
    return Ending(read_run(folder)["weights"], [read_rows(folder, name) for name in ROWS])


def jobs(sort: str, seed: int) -> Iterator[Job]:
    """Drawn recipes that go with a sort."""
    for number in itertools.count():
        case, places = draw(seed + number), PLACES[sort]
        if left_out(case.kind) or (sort == "strategies" and case.kind != "digits"):
            continue
        if sort == "sharded":
            places = (places[number % len(places)],)
        recipe = {name: section for name, section in case.recipe.items() if name not in ("hooks", "compile")}
        more = {"micro_batch_size": 2} if places != PLACES["alone"] else {}  # four ranks divide a step
        recipe |= {"epochs": _STEPS, "max_steps": _STEPS, "data": {**recipe["data"], **more}}
        recipe["checkpoint"] = {"every": recipe.get("checkpoint", {}).get("every") or 7}
        recipe["anomaly"] = {"nonfinite": "skip"}  # `spoiled` has such losses
        if recipe.get("precision", {}).get("mode") == "fp16":
            recipe["precision"] = {**recipe["precision"], "growth_interval": 20}
        if sort == "strategies":
            # SGD, because Adam makes steps of any size of what is zero but for rounding.
            recipe |= {"optim": {"name": "sgd", "lr": 0.01, "max_grad_norm": 1.0}, "ema": {"decay": 0.9}}
            recipe |= {"precision": {"mode": "fp32"}, "evaluation": {"every": "1 epoch"}}
        if (job := Job(case.seed, recipe, places)).is_possible():
            yield job


class Tally:
    """What happened, and what must not."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def judge(self, name: str, same: bool) -> None:
        """Counts a run that is, or isn't, what it should be."""
        self.counts["identical" if same else "different"] += 1
        self.failures += [] if same else [f"{name}: other bits"]


def _noting(phase: mmap.mmap) -> Callable[[int], object]:
    """A fault for a rank, which says in `phase` what it is doing."""

    def note(_: int) -> None:
        loop = sys.modules["trainer.train.start.rank"]
        commits = ((store, name, 2) for name in ("commit", "commit_part", "commit_shared"))
        for module, name, doing in ((loop, "train", 1), *commits):
            replace(module, name, partial(noted, getattr(module, name), doing))

    def noted(function: Callable[..., Any], doing: int, *arguments: Any, **named: Any) -> Any:
        phase[0] = doing
        try:
            return function(*arguments, **named)
        finally:
            phase[0] = 1

    return note


def wait_for(process: BaseProcess, phase: mmap.mmap, random_: random.Random, seconds: float) -> None:
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


def takes(pid: int, number: int) -> bool:
    """Whether a command line has come so far that it takes a signal (Linux)."""
    if number == signal.SIGINT:  # which ends it at once, without a word, until there is a rank
        return bool(children(pid))
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return number == signal.SIGKILL or (caught is not None and int(caught[1], 16) >> (number - 1) & 1 == 1)


def attempt(
    recipe: Recipe, folder: Path, size: int, seconds: float, random_: random.Random, number: int = 0
) -> tuple[bool, str]:
    """Trains on so many ranks; sends a signal at a random moment, SIGKILL to all, another to any one of them.

    `seconds` is what the training takes about; signal 0 is none. Returns whether it was through, and its
    phase when it was cut, or "". Raises AssertionError if a rank ended as none should.
    """
    phases = [mmap.mmap(-1, 1) for _ in range(size)]
    resumes, port, hit = any((folder / "checkpoints").glob("step-*")), free_port(), ""
    fork, ranks = multiprocessing.get_context("fork").Process, list[BaseProcess]()
    for index, phase in enumerate(phases):
        given = (index, size, port, folder, None, recipe, [_noting(phase)])
        ranks.append(fork(target=train_silently, args=given))
        ranks[-1].start()
    watched, reached = random_.randrange(size), list[BaseProcess]()
    if number:
        # A kill ends all, as when a machine is lost; a request reaches any one of them.
        wait_for(ranks[watched], phases[watched], random_, seconds)
        if ranks[watched].exitcode is None:
            reached = ranks if number == signal.SIGKILL else [random_.choice(ranks)]
            doing = phases[watched][0]
            hit = "resume" if resumes and not doing else PHASES[doing]
    for rank in reached:
        assert rank.pid is not None
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
        raise AssertionError(f"{size} ranks, signal {number} in {hit or 'no phase'}: {codes}")
    return codes == {0}, hit


def undisturbed(job: Job, folder: Path) -> float:
    """Trains without checkpoints on the way or disturbance, in a new folder; the seconds it took."""
    folder.mkdir()
    began, place = time.monotonic(), job.places[0]
    attempt(job.at(place, checkpoint={}), folder, place.ranks, 0.0, random.Random(0))
    return time.monotonic() - began


def history(job: Job, folder: Path, seconds: float, random_: random.Random, counts: Counter[str]) -> str:
    """Trains a run to its end, cut again and again; returns its ranks and cuts, and counts them."""
    told, last, finished = list[str](), None, False
    while not finished:
        last = random_.choice([place for place in job.places if place != last] or job.places)
        number = random_.choice(SIGNALS) if len(told) < _MOST_CUTS else 0
        recipe = job.at(last, data={**job.recipe["data"], "workers": random_.choice((0, 1, 2, 4))})
        finished, phase = attempt(recipe, folder, last.ranks, seconds, random_, number)
        if phase:
            counts.update(("cuts", signal.Signals(number).name, f"during {phase}"))
        told.append(f"{last.ranks} {number or ''} {phase}".rstrip())
    return ", ".join(told)


def parts_of(folder: Path) -> tuple[str, dict[str, Any]]:
    """What all tensors of a run's last checkpoint are; not its state.json, which has seconds."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return newest.name, {file.name: read_weights(file) for file in newest.glob("*.safetensors")}


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
    """Disturbs so many runs of a sort, of each of its recipes in turn."""
    random_, tally = random.Random(seed), Tally()
    import_late()
    from torch.distributed import fsdp  # noqa: F401

    with _scratch() as root:
        chosen = list(itertools.islice(jobs(sort, seed), min(count, _RECIPES)))
        folders = [root / f"whole-{job.seed}" for job in chosen]
        wholes = [(*both, undisturbed(*both)) for both in zip(chosen, folders, strict=True)]
        for number in range(count):
            job, whole, seconds = wholes[number % len(wholes)]
            (folder := root / str(number)).mkdir()
            name = f"{sort} {number} (recipe {job.seed})"
            try:
                name += history(job, folder, seconds, random_, tally.counts).join("[]")
                if sort == "strategies":
                    tally.judge(name, distance(folder, whole) <= TOLERANCE)
                else:
                    parts = len(job.places) > 1 or parts_of(folder) == parts_of(whole)
                    tally.judge(name, parts and ending(folder) == ending(whole))
            except (OSError, AssertionError, ValueError) as error:
                tally.failures.append(f"{name}: lost ({error!r})")
    return tally


@contextmanager
def _scratch() -> Iterator[Path]:
    """The folder to work in, with the files that recipes name."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as root, pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(consensus, "SECONDS_BETWEEN", 0.02)  # a run here is over in a second
        write_files(Path(root))
        yield Path(root)


def launched(recipe: Recipe, folder: Path, number: signal.Signals, random_: random.Random) -> int:
    """Trains by the real command line and launcher; returns how often the signal hit."""
    file, metrics = folder.with_suffix(".yaml"), folder / "metrics.jsonl"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    words, hits = [sys.executable, "-m", "trainer", "train", str(file), "--out", str(folder)], 0
    while True:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while hits < 2 and process.poll() is None and not (metrics.exists() and takes(process.pid, number)):
            time.sleep(0.02)
        try:
            code = process.wait(random_.uniform(0.0, 0.5) if hits < 2 else None)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            code = process.wait()
        if code == 0:
            return hits
        hits += 1
        if code not in ((-signal.SIGKILL,) if number == signal.SIGKILL else (EXIT_REQUEUE, 1)):
            raise AssertionError(f"exit code {code}")


def chaos_launched(number: signal.Signals, wanted_hits: int, seed: int) -> Tally:
    """Disturbs runs through the command line until there were enough hits."""
    tally, random_ = Tally(), random.Random(seed)
    with _scratch() as root:
        job = next(jobs("alone", seed))
        undisturbed(job, whole := root / "whole")
        for run in range(_MOST_RUNS * wanted_hits):
            folder = root / str(run)
            tally.counts["cuts"] += launched(job.at(job.places[0]), folder, number, random_)
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
    torch.set_num_threads(1)
    # Where a script started this in the background, Ctrl-C is ignored, and so it would be by all runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"seed {options.seed}", flush=True)
    told = [(sort, chaos(sort, options.runs, options.seed)) for sort in options.only or PLACES]
    for number in SIGNALS if options.launched else ():
        name = f"{number.name} through the launcher"
        told.append((name, chaos_launched(number, options.launched, options.seed)))
    for name, tally in told:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(tally.counts.items()))
        print(f"{name}: {counts}; {len(tally.failures)} failed", flush=True)
    unnamed = hangs(options.hangs, options.seed)
    print(f"{options.hangs} hangs, {options.hangs - len(unnamed)} named, with phase and step")
    failures = [*(failure for _, tally in told for failure in tally.failures), *unnamed]
    print(*failures, sep="\n", end="\n" * bool(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
