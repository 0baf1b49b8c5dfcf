"""Runs of one, two or four ranks in which one hangs, in forked processes; how the job ended.

A hang is put where a real one would be: into the reading of a sample, the model, the optimizer, a collective,
the disk. It knows its step from the training loop and not from the phases that are under test.
"""

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from tests.helpers.forked import become_rank, replace, small
from tests.helpers.late import import_late
from tests.helpers.ports import free_port
from tests.helpers.toys import step_under_way
from tests.helpers.waiting import until
from trainer.config.recipe import Recipe
from trainer.data import loader
from trainer.distributed.watchdog import Watchdog
from trainer.errors import EXIT_HANG
from trainer.host.affinity import CpuShares
from trainer.launch import exit_record
from trainer.launch.folder import Launch, write_launch
from trainer.launch.worker import Worker
from trainer.observe.log import MetricLogger
from trainer.tasks.classification import Classification
from trainer.train import reduction, saving as checkpoints
from trainer.train.request import Request
from trainer.train.start.rank import train_rank

PHASES = (
    *("data", "forward", "backward", "communication", "update", "evaluation", "logging", "checkpoint"),
    "stopped",
)


Fault = Callable[[int], object]  # called with a rank's number before that rank trains


class Hang(NamedTuple):
    """A hang: its rank, place and step (counted from 1); "stopped": by SIGSTOP, at any place."""

    rank: int
    phase: str
    step: int


class Ending(NamedTuple):
    """Result of a job: its exit code, its output, and its seconds."""

    code: int
    text: str
    seconds: float


def recipe_of(hang_s: float, **sections: Any) -> Recipe:
    """Eight steps a pass, two passes; checkpoints at 5, 10 and 15, evaluation at 8 and 16."""
    parallel = {"threads": 1, "hang_s": hang_s, "timeout_s": 60, **sections.pop("parallel", {})}
    data = {"name": "synthetic", "image_size": 8, "samples": 64, "classes": 4, "global_batch_size": 8}
    data |= {"micro_batch_size": 2, "workers": 0, "resident": False, **sections.pop("data", {})}
    return small(parallel=parallel, data=data, optim={"max_grad_norm": 1.0}, **sections)


class Job:
    """Forked ranks that train. Does what the launcher does: kills those that stay when one has failed."""

    def __init__(self, size: int, recipe: Recipe, *faults: Fault, seconds: float = 300.0) -> None:
        import_late()
        port = free_port()
        self._root = tempfile.TemporaryDirectory(prefix="hang-")
        self.folder, self._words = Path(self._root.name, "run"), Path(self._root.name, "words")
        self.folder.mkdir()
        self._words.mkdir()
        write_launch(self._words, Launch(sys.path, os.getpid(), CpuShares(), False))
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        fork = multiprocessing.get_context("fork").Process
        more = (size, port, self.folder, self._words, recipe, faults)
        self.ranks = [fork(target=train_silently, args=(number, *more)) for number in range(size)]
        faulthandler.cancel_dump_traceback_later()  # pytest's: see trainer/launch/worker.py
        for process in self.ranks:
            process.start()

    def over(self) -> bool:
        """Whether all have ended that can, or their time is up."""
        running = [process for process in self.ranks if process.is_alive()]
        if any(process.exitcode for process in self.ranks):
            self._deadline = min(self._deadline, time.monotonic() + 20.0)
            running = [process for process in running if not _is_stopped(process.pid)]
        return time.monotonic() > self._deadline or not running

    def end(self) -> Ending:
        """Waits for them; how the job ended."""
        while not self.over():
            time.sleep(0.02)
        took, late = time.monotonic() - self._began, [process.is_alive() for process in self.ranks]
        for process in self.ranks:
            with contextlib.suppress(OSError):  # what it started, too
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
        records = []
        for number, process in enumerate(self.ranks):
            try:
                records.append(exit_record.read_exit_record(self._words, number))
            except FileNotFoundError:
                line = f"no word, {process.exitcode}"
                records.append(exit_record.ExitRecord(number, 1, line, consequence=late[number]))
        self._root.cleanup()
        return Ending(exit_record.job_code(records), exit_record.exit_message(records, len(records)), took)


def train_silently(
    number: int,
    size: int,
    port: int,
    folder: Path,
    words: Path | None,
    recipe: Recipe,
    faults: Sequence[Fault],
) -> None:
    """A rank of so many, in a fork that ends with it; `words` is the folder of the launch."""
    become_rank(os.open(os.devnull, os.O_WRONLY), number, size, port)
    os.setsid()  # the launcher kills a rank's session
    for fault in faults:
        fault(number)
    with Worker(words) as worker:
        worker.code = train_rank(Request(recipe, "small", folder)).code
    os._exit(worker.exit_code)


def _is_stopped(pid: int | None) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def sleep_forever() -> None:
    while True:
        time.sleep(60)


def hang(where: Hang, begins: Callable[[], object] = int) -> Fault:
    """A fault for `Job`: this rank does not go on there; `begins` is called before."""

    def put(number: int) -> None:
        if number == where.rank:
            _put(where, step_under_way(), begins)

    return put


class _Soon(threading.Event):
    """For a watchdog to look every 0.2 s, however long it waits for the answers of the others."""

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        return super().wait(0.2)


def watched_hang(where: Hang) -> list[Fault]:
    """Faults for `Job`: a hang, and watchdogs that begin to look when it is there: a slow start is none."""
    hangs, start = torch.zeros(1).share_memory_(), Watchdog.start

    def late(watchdog: Watchdog, *given: int) -> None:
        def begin() -> None:
            until(hangs.any)
            start(watchdog, *given)

        watchdog.stopped = _Soon()
        threading.Thread(target=begin, daemon=True).start()

    return [lambda _: replace(Watchdog, "start", late), hang(where, lambda: hangs.fill_(1))]


def _put(where: Hang, step: Callable[[], int], begins: Callable[[], object]) -> None:
    places: Mapping[str, tuple[object, str]] = {
        "data": (loader._Filler, "_fill"),
        "forward": (Classification, "loss"),
        "backward": (Classification, "loss"),
        "stopped": (Classification, "loss"),
        "communication": (dist, "all_reduce"),
        "update": (reduction, "clip_gradients"),
        "evaluation": (Classification, "measure"),
        "logging": (MetricLogger, "stage"),
        # Only rank 0 stages a checkpoint; the others give it their losses.
        "checkpoint": (checkpoints, "stage") if where.rank == 0 else (reduction, "sum_over_ranks"),
    }
    thing, name = places[where.phase]
    original = getattr(thing, name)

    def stand_still(*_: object) -> None:
        begins()
        if where.phase == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            sleep_forever()

    def stuck(*arguments: Any, **named: Any) -> Any:
        if where.phase == "data":  # which is read before its step
            share = arguments[0]._source.share
            here = arguments[1] // share.gradient_accumulation_steps + 1 if share.plan.shuffle else 0
        else:
            here = step()
        if here == where.step and where.phase != "backward":
            stand_still()
        result = original(*arguments, **named)
        if here == where.step and where.phase == "backward":
            result.register_hook(stand_still)
        return result

    replace(thing, name, stuck)


def is_named(ending: Ending, where: Hang) -> bool:
    """Whether the job ended with 76 and a line that names this hang, and nothing else."""
    what = f"rank {where.rank} hangs in {where.phase}, step {where.step};"
    if where.phase == "stopped":
        what = f"rank {where.rank} gave no sign of life;"
    line = ending.text.partition("\n")[0]
    return ending.code == EXIT_HANG and line.startswith("trainer: no progress for ") and f" s: {what}" in line


def random_hangs(random_: random.Random) -> Iterator[tuple[int, Hang, dict[str, Any]]]:
    """World sizes, hangs, and what else the recipe says."""
    steps: dict[str, Sequence[int]] = {"evaluation": (8, 16), "checkpoint": (5, 10, 15)}
    steps["logging"] = range(2, 17, 2)
    for phase in itertools.cycle(PHASES):
        size = random_.choice((2, 4) if phase in ("communication", "stopped") else (1, 2, 4))
        step = random_.choice(steps.get(phase, range(1, 17)))
        sections: dict[str, Any] = {"data": {"workers": random_.choice((0, 0, 2))}}
        if phase not in ("communication", "checkpoint"):  # these hang in what a tree doesn't do
            sections["parallel"] = {"reduction": random_.choice(("all_reduce", "tree"))}
        yield size, Hang(random_.randrange(size), phase, step), sections


def hangs(count: int, seed: int, hang_s: float = 2.0) -> list[str]:
    """Lets so many jobs hang at random; prints each, and returns those that were not named."""
    missed = []
    chosen = random_hangs(random.Random(seed))
    for number in range(count):
        size, where, sections = next(chosen)
        ending = Job(size, recipe_of(hang_s, **sections), hang(where)).end()
        told = f"{size} ranks, {where}, {sections}: {ending.seconds:.1f} s, code {ending.code}"
        print(f"hang {number}: {told}", flush=True)
        if not is_named(ending, where):
            missed.append(f"{told}: {ending.text}")
    return missed
