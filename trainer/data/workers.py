"""Loader workers: their number and prefetch, how they are started, and how their time is spent."""

import ast
import contextlib
import errno
import gc
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, NamedTuple

from trainer.config.data import LoaderConfig
from trainer.config.user_file import is_importable, shadowing
from trainer.data.dataset import Dataset
from trainer.errors import BadInputError
from trainer.host.limits import Limits, read_limits, workers_per_rank
from trainer.host.processes import queued_ns
from trainer.launch.worker import die_with_parent
from trainer.observe.text import megabytes

Given = int | Literal["auto"]

# A sample of tokens, audio or a small picture; an image (224 x 224 has 150 kB, 512 x 512 has 786 kB); video.
_SMALL_BYTES = 32 << 10
_VIDEO_BYTES = 2 << 20
_LARGE_BATCH_BYTES = 16 << 20
# Fraction of the container's memory for loading; the rest is for weights, activations and the page cache.
_MEMORY_FRACTION = 0.25
# Bytes that a loader process adds to the PSS of all, decoding included: 31 to 49 MiB were seen where it is
# forked, 380 where it is spawned and so imports torch (photographs; torch 2.9.1).
_FORKED_BYTES = 48 << 20
_STARTED_BYTES = 384 << 20
# The batch in use and the one that is being copied, in addition to those that workers prepare.
SPARE_SLOTS = 2
EVALUATION_WORKERS = 2


class Loading(NamedTuple):
    """Loader workers of a rank, and batches that each prepares ahead."""

    workers: int
    prefetch: int

    def __str__(self) -> str:
        """Describes the setting in words."""
        if not self.workers:
            return "no workers"
        return f"{self.workers} worker{'s' * (self.workers > 1)} x prefetch {self.prefetch}"


class Sizes(NamedTuple):
    """Bytes of a sample, a micro-batch and an evaluation batch in the ring, and of a loader process.

    Attributes:
        evaluation_sets: Number of evaluation sets, each with a ring and loader workers of its own.
        workers: data.workers; a number holds for the main evaluation set, too.
    """

    sample: int
    batch: int
    eval_batch_size: int = 0
    process: int = _FORKED_BYTES
    evaluation_sets: int = 1
    workers: Given = "auto"


def sizes_of(
    dataset: Dataset,
    micro_batch_size: int,
    eval_batch_size: int = 0,
    method: str = "fork",
    evaluation_sets: int = 1,
) -> Sizes:
    """Returns the sizes of a data set's batches in the ring, and of a loader worker by start method."""
    sample = sum(math.prod(field.shape) * field.dtype.itemsize for field in dataset.fields.values())
    process = _FORKED_BYTES if start_method(method) == "fork" else _STARTED_BYTES
    return Sizes(sample, sample * micro_batch_size, sample * eval_batch_size, process, evaluation_sets)


def prefetch_by_size(sizes: Sizes) -> int:
    """Returns the batches that a loader worker prepares ahead: many small ones, few large ones.

    4 for samples below 32 KiB (tokens, sounds, small pictures); for images, below 2 MiB, 3 while a
    micro-batch is below 16 MiB and else 2; 1 for larger samples (video).
    """
    if sizes.sample < _SMALL_BYTES:
        return 4
    if sizes.sample < _VIDEO_BYTES:
        return 3 if sizes.batch < _LARGE_BATCH_BYTES else 2
    return 1


def prefetch_of(config: LoaderConfig, dataset: Dataset, micro_batch_size: int) -> int:
    """Returns the batches that a loader worker prepares ahead, by data.prefetch or by size."""
    by_size = prefetch_by_size(sizes_of(dataset, micro_batch_size))
    return by_size if config.prefetch == "auto" else config.prefetch


def without_workers(config: LoaderConfig) -> bool:
    """True if data.workers requests no workers."""
    return config.workers in ("auto", 0)


def workers_of(config: LoaderConfig, dataset: Dataset, cpu_workers: int) -> int:
    """Returns the loader workers for a data set that isn't resident; `cpu_workers` is the value of `auto`."""
    able = 0 if dataset.in_process else cpu_workers
    return able if config.workers == "auto" else config.workers


def bytes_needed(setting: Loading, sizes: Sizes) -> int:
    """Returns the memory of a rank's loaders: all rings with their spare slots, and the processes."""
    measuring = min(setting.workers, EVALUATION_WORKERS)
    main = measuring if sizes.workers == "auto" else setting.workers
    evaluation = [main, *[measuring] * (sizes.evaluation_sets - 1)]
    loaders = [(setting.workers, sizes.batch), *((one, sizes.eval_batch_size) for one in evaluation)]
    return sum(
        (workers * setting.prefetch + SPARE_SLOTS) * size + workers * sizes.process
        for workers, size in loaders
    )


def memory_budget(limits: Limits, ranks: int) -> float:
    """Returns the bytes that a rank's loaders may take: a quarter of the container's memory / ranks."""
    return limits.memory_bytes * _MEMORY_FRACTION / ranks if limits.memory_bytes else math.inf


def by_rule(workers: Given, prefetch: Given, sizes: Sizes, limits: Limits, ranks: int) -> Loading:
    """Replaces `auto` by rules, without measuring; given numbers are kept.

    Workers are 75 % of the rank's CPUs, prefetch follows from the size of a sample. If both exceed the memory
    budget, first prefetch is lowered, down to 1, then workers.

    Args:
        workers: data.workers.
        prefetch: data.prefetch.
        sizes: Sizes of samples and batches.
        limits: Limits of the container.
        ranks: Ranks in the container.
    """
    chosen = Loading(
        workers_per_rank(limits, ranks) if workers == "auto" else workers,
        prefetch_by_size(sizes) if prefetch == "auto" else prefetch,
    )
    budget = memory_budget(limits, ranks)
    while bytes_needed(chosen, sizes) > budget:
        if prefetch == "auto" and chosen.prefetch > 1:
            chosen = chosen._replace(prefetch=chosen.prefetch - 1)
        elif workers == "auto" and chosen.workers:
            chosen = chosen._replace(workers=chosen.workers - 1)
        else:
            break
    return chosen


def estimate(setting: Loading, sizes: Sizes, limits: Limits, ranks: int) -> str:
    """Describes a setting's memory: "3 workers x prefetch 3 x 9.6 MB = 87 MB, …"."""
    needed, budget = bytes_needed(setting, sizes), memory_budget(limits, ranks)
    of = "" if budget == math.inf else f" of the {megabytes(budget)} that they may take"
    text = f"{setting}"
    if setting.workers:
        ahead = setting.workers * setting.prefetch * sizes.batch
        text += f" x {megabytes(sizes.batch)} = {megabytes(ahead)}"
    return f"{text}; with spare slots, evaluation and processes {megabytes(needed)}{of}"


def start_method(configured: str) -> str:
    """Returns the start method of loader workers: as configured, or a safe one."""
    if configured != "auto":
        return configured
    if sys.platform != "linux":
        return "spawn"
    # A fork doesn't copy other threads, and locks that they hold stay locked.
    return "fork" if threading.active_count() == 1 else "forkserver"


def check_importable(dataset: Dataset, method: str) -> None:
    """Checks that a loader worker that isn't forked can import a data set's class, transforms and collate.

    Raises:
        BadInputError: If one is defined in a notebook, or in a task's file with a dot in its stem, if
            importing the script would train again, or if a file beside a task's shadows a module.
    """
    if method != "fork" and (line := _unguarded_line()):
        raise BadInputError(
            f"data.start_method={method}: a loader worker imports the script, which would train again in "
            f'line {line}: put that under if __name__ == "__main__":, or set data.workers=0'
        )
    if method != "fork" and (file := shadowing()):
        raise BadInputError(
            f"data.start_method={method}: a loader worker would import {file} in place of the module of that "
            "name that this process has; rename the file, or set data.workers=0"
        )
    if name := unimportable(dataset, method):
        raise BadInputError(
            f"data.start_method={method}: a loader worker can't import {name} from a notebook, or from a "
            "file with a dot in its stem; import it from a module of yours, or set data.workers=0"
        )


def unimportable(dataset: Dataset, method: str) -> str:
    """Returns the name of a data set's class or function that no loader worker can import, or ""."""
    for thing in (dataset, *getattr(dataset, "user_objects", ())) if method != "fork" else ():
        if not is_importable(getattr(thing, "__module__", "")):
            return str(getattr(thing, "__name__", type(thing).__name__))
    return ""


def _unguarded_line() -> int | None:
    """Returns the line of the main script that led here if importing the script runs it, else None."""
    main, frame, line = sys.modules["__main__"], sys._getframe(), None
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            line = frame.f_lineno
    if line is None or not getattr(main, "__file__", None):
        return None
    try:
        tree = ast.parse(Path(str(main.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    tests = [node.test for node in tree.body if isinstance(node, ast.If) and node.lineno <= line]
    named = (node for test in tests for node in ast.walk(test) if isinstance(node, ast.Name))
    return None if any(node.id == "__name__" for node in named) else line


class CurrentBatches:
    """Sampler whose batch numbers can be replaced while loader workers run."""

    def __init__(self, numbers: list[range]) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers[0])

    def __len__(self) -> int:
        return len(self._numbers[0])


def begin_worker(parent: int | None, _worker: int) -> None:
    """Prepares a loader worker; it ends together with the process that trains.

    Args:
        parent: That process, if it is the parent; None if a forkserver is.
    """
    if parent is None:
        threading.Thread(target=_end_with_trainer, daemon=True).start()
    else:  # torch's workers check for their parent every five seconds, and not at all if it ended before
        die_with_parent(parent)
    # Objects of the parent are never garbage; a collection would copy their pages.
    gc.freeze()
    # Ctrl-C and a scheduler's signal reach every process of the job (Slurm's scancel, systemd), but the rank
    # needs its workers until it has reached the step at which all ranks save a checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _end_with_trainer() -> None:
    # A forkserver lives as long as its children do. The pipe ends with the process that asked for the worker.
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(1)


@contextlib.contextmanager
def starting(workers: int, context: BaseContext) -> Iterator[None]:
    """Context manager in which loader workers start; an error of the system names what is lacking.

    Raises:
        BadInputError: If there is no room in /dev/shm, or a limit of open files or processes is reached.
    """
    try:
        # torch makes these first, and fails at them with a traceback of its own.
        tried = [context.Queue() for _ in range(workers + 1)]
        del tried
        yield
    except OSError as error:
        match error.errno:
            case errno.ENOSPC:
                free = read_limits().shm_bytes >> 10
                lack = f"/dev/shm is full ({free:,} kB are free): free it"
            case errno.EMFILE:
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                lack = f"the limit of open files is reached (ulimit -n: {most:,}): raise it"
            case errno.EAGAIN:
                lack = "a limit of processes is reached (ulimit -u, or the container's pids): raise it"
            case _:
                raise
        raise BadInputError(
            f"data.workers={workers}: loader workers can't be started, {lack}, or set data.workers=0"
        ) from error


def end_by_kill(workers: Iterable[BaseProcess]) -> None:
    """Makes torch and multiprocessing end workers by SIGKILL: they ignore SIGTERM."""
    for worker in workers:
        worker._popen.terminate = worker._popen.kill  # type: ignore[attr-defined]


class Work(NamedTuple):
    """Nanoseconds that loader workers spent filling batches.

    CPU time is CLOCK_THREAD_CPUTIME_ID, waiting for a CPU is from /proc/thread-self/schedstat
    (https://docs.kernel.org/scheduler/sched-stats.html). The rest of the wall time the thread was blocked, by
    disk or network.

    Attributes:
        wall: Wall time.
        cpu: CPU time: decoding, cropping, copying.
        queued: Runnable, waiting for a CPU.
        samples: Samples that were filled.
    """

    wall: int = 0
    cpu: int = 0
    queued: int = 0
    samples: int = 0

    @staticmethod
    def now() -> "Work":
        """Reads this thread's clocks."""
        return Work(time.perf_counter_ns(), time.thread_time_ns(), queued_ns())

    def until_now(self, samples: int) -> "Work":
        """Returns the time since `now`, for so many samples."""
        wall, cpu, queued, _ = Work.now()
        return Work(wall - self.wall, cpu - self.cpu, queued - self.queued, samples)

    def plus(self, other: "Work") -> "Work":
        """Returns the sum of both."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def metrics(self, workers: int) -> dict[str, float]:
        """Returns fractions of the wall time for a metrics record; {} if nothing was filled."""
        if not self.samples or not self.wall:
            return {}
        cpu, queued = (min(1.0, part / self.wall) for part in (self.cpu, self.queued))
        return {
            "loader/workers": workers,
            "loader/cpu": cpu,
            "loader/starved": queued,
            "loader/blocked": max(0.0, 1.0 - cpu - queued),
            "loader/seconds_per_sample": self.wall / 1e9 / self.samples,
        }
