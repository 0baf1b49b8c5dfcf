"""Times a recipe's steps with one setting of the loader after another, in a process of its own.

The process assembles what a rank would, on that rank's share of the CPUs, without compiling and without the
other ranks. It ends with its parent, and its workers end with it.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from trainer.config.recipe import Recipe
from trainer.data.fit import Loading
from trainer.data.loader import RingLoader, Source
from trainer.data.workers import begin_worker
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.host.limits import keep_to_share, read_limits
from trainer.launch.signals import SIGNALS
from trainer.train.run import Parts, assemble, device_kind, make_task
from trainer.train.step import train_step

_STARTS_WITHIN = 20.0  # seconds
_MORE = 5.0  # seconds beyond its own limit after which a turn is taken to hang
_MOST_STEPS = 1_000_000
_WAITING = "OMP_WAIT_POLICY"


class Turn(NamedTuple):
    """What to time.

    Attributes:
        setting: Of the loader.
        warm_up: Steps before the clock starts.
        steps: Steps that are timed.
        limit: Seconds after which a turn is cut, with a step timed at least.
    """

    setting: Loading
    warm_up: int
    steps: int
    limit: float


class Timed(NamedTuple):
    """What a turn took: seconds of so many steps, and of all else."""

    steps: int
    seconds: float
    around: float


class Prober:
    """The process, started when it is first needed and anew after a turn that failed."""

    def __init__(self, recipe: Recipe, ranks: int, threads: int, environment: Mapping[str, str]) -> None:
        """Takes what a rank of this recipe would get."""
        length = {"epochs": 10**9, "max_steps": _MOST_STEPS}
        plain = {
            "compile": recipe.compile.model_copy(update={"mode": "none"}),
            "parallel": recipe.parallel.model_copy(update={"reduction": "all_reduce"}),
            # Nothing is in this process but what is timed: its loaders come with the turns.
            "data": recipe.data.model_copy(update={"workers": 0}),
        }
        self._arguments = (
            recipe.model_copy(update={**length, **plain}),
            recipe,
            ranks,
            threads,
        )
        self._environment = dict(environment)
        self._process: Any = None
        self._pipe: Connection | None = None

    def __enter__(self) -> "Prober":
        """Starts nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process."""
        self._end()

    def time(self, turn: Turn, within: float) -> Timed | str:
        """Does a turn, or says why it could not be done in so many seconds."""
        end = time.monotonic() + within
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(turn)
            if not self._pipe.poll(max(0.0, end - time.monotonic())):
                self._end()
                return f"did not end within {within:.0f} s"
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_MORE)
            code = self._process.exitcode
            self._end()
            return f"ended with exit code {code}"
        if isinstance(answer, str):
            self._end()
        assert isinstance(answer, Timed | str)
        return answer

    def _start(self) -> None:
        recipe = self._arguments[1]
        variables = {_WAITING: "PASSIVE", **self._environment}
        # Forking takes no imports; but not after another thread or CUDA has begun, nor where OpenMP's threads
        # would spin while they wait, as they don't in a rank: steps took 20 times as long.
        quick = device_kind(recipe) == "cpu" and sys.platform == "linux" and threading.active_count() == 1
        quick = quick and os.environ.get(_WAITING) == variables[_WAITING]
        context = multiprocessing.get_context("fork" if quick else "spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, os.getpid(), *self._arguments), name="loader probe"
        )
        own = dict(os.environ)
        # It must not take a signal with the handlers that it inherits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            os.environ.update(variables)
            self._process.start()
        finally:
            for name in variables.keys() - own.keys():
                del os.environ[name]
            os.environ.update(own)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.join(0.5 if self._process.exitcode is None else 0)
            self._process.kill()
            self._process.join()
        self._pipe = self._process = None


def limit_of(turn: Turn) -> float:
    """Seconds after which a turn in a process that has yet to start is taken to hang."""
    return _STARTS_WITHIN + turn.limit + _MORE


def _serve(
    pipe: Connection,
    parent: int,
    plain: Recipe,
    recipe: Recipe,
    ranks: int,
    threads: int,
) -> None:
    begin_worker(parent, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    nowhere = os.open(os.devnull, os.O_WRONLY)  # what torch warns of, the run itself will say
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    keep_to_share(read_limits(), ranks)  # the other ranks' CPUs would be busy
    torch.set_num_threads(threads)
    try:
        task = make_task(plain)
        device = torch.device("cuda", 0) if device_kind(plain) == "cuda" else torch.device("cpu")
        # As the first of several ranks, but without a group: nobody else is there.
        parts = assemble(plain, task, World(0, ranks, 0, device, None), 0)
        source = Source(task.train_data, parts.training.share, task.train_data.uniforms + task.uniforms)
        done = 0
        parts.training.replica.train()
        with suppress(EOFError, OSError):
            while True:
                turn = pipe.recv()
                timed, done = _do(turn, done, parts, source, recipe, device)
                pipe.send(timed)
    except BadInputError as error:
        with suppress(OSError):
            pipe.send(str(error))


def _do(
    turn: Turn, done: int, parts: Parts, source: Source, recipe: Recipe, device: torch.device
) -> tuple[Timed, int]:
    """Does a turn from step `done` on; returns also the step after its last."""
    began = time.perf_counter()
    training = parts.training
    config = recipe.data.model_copy(update=turn.setting._asdict())
    with _closing(RingLoader(source, device, turn.setting.workers, config)) as loader:
        batches = loader(training.share.batches(done))
        for _ in range(turn.warm_up):
            train_step(training, batches, done)
            done += 1
            if time.perf_counter() - began > turn.limit:
                break
        _wait(device)
        first, start = done, time.perf_counter()
        while done < first + turn.steps:
            train_step(training, batches, done)
            done += 1
            if time.perf_counter() - began > turn.limit:
                break
        _wait(device)
        seconds = time.perf_counter() - start
    return Timed(done - first, seconds, time.perf_counter() - began - seconds), done


@contextmanager
def _closing(loader: RingLoader) -> Iterator[RingLoader]:
    try:
        yield loader
    finally:
        loader.close()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
