"""Watchdog: ends a rank of a job that hangs, with code 76, and names the rank that the others wait for.

One thread a rank looks at its phase (observe.phases) a few times within parallel.hang_s, and counts the
looks at which no rank had made progress: a rank that waits for a slow one doesn't hang. Over the rendezvous
store the ranks share one counter, and where they are. There a rank that fails leaves its code, too, for those
that lose it.
"""

import contextlib
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from trainer.config.training import ParallelConfig
from trainer.distributed.exchange import store_client
from trainer.distributed.parallel import World, silenced
from trainer.errors import EXIT_HANG, LostPeerError
from trainer.launch.exit_record import record_of
from trainer.launch.worker import dump_no_more, dump_unless_called_within, leave_now
from trainer.observe.phases import PHASE_TIMER
from trainer.observe.text import enumerated

_ALONE = ("evaluation", "checkpoint", "end")  # phases in which a rank works on while others wait
_LOOKS = 4  # within the allowed time without progress
_PATIENCE = 10  # factor of the allowed time while a step compiles, and at the end
_ANSWER_SECONDS = 10.0  # of the store
_NAMED = 3
_FRAMES, _FRAMES_BESIDE = 20, 3  # of the main thread, of each other one

# Keys of the store.
_JOB, _PROGRESS, _PLACES, _TOLD, _END = "job", "progress", "places", "told", "end"
_RUNS, _HANGS, _FAILED = "runs", "hangs", "failed"

_CHECK: dict[str, str] = {
    "start": "the disk of the run folder",
    "data": "the loader's workers, and the file system or network that the data comes from",
    "copy": "the device (nvidia-smi; Xid in dmesg)",
    "host": "whether its process was stopped",
    "forward": "the model's code, and on a GPU the device (nvidia-smi; Xid in dmesg)",
    "backward": "the model's code, and on a GPU the device (nvidia-smi; Xid in dmesg)",
    "communication": "the network between the ranks (NCCL_DEBUG=INFO), and on GPUs the devices (nvidia-smi)",
    "update": "the optimizer, and on a GPU the device (nvidia-smi; Xid in dmesg)",
    "evaluation": "the evaluation data's workers and file system, and the model's code",
    "logging": "the disk of the run folder, and whether its terminal was stopped (Ctrl-S)",
    "checkpoint": "the disk of the run folder",
    "end": "the disk of the run folder, and the loader's workers",
}
_T = TypeVar("_T")


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        rank: Number of the rank.
        entered: Number of phases that it entered.
        step: Current step, counted from 1.
        phase: Current phase; "done" once the rank has ended.
        host: Host name.
    """

    rank: int
    entered: int
    step: int
    phase: str
    host: str = ""

    @property
    def where(self) -> str:
        """Returns phase and step as text."""
        return f"{self.phase}, step {self.step}" if self.step else "the start"


def waited_for(places: Sequence[Place], size: int, seconds: float) -> tuple[str, list[int]]:
    """Finds the ranks that the others of a job that hangs wait for.

    Ranks that didn't say where they are: they were stopped, or are gone. Else those with the fewest phases,
    as all ranks enter the same ones in the same order.

    Args:
        places: Where the ranks are that said so.
        size: Number of ranks.
        seconds: Seconds without progress.

    Returns:
        A line for the user, and the numbers of these ranks.
    """
    known = {place.rank for place in places}
    silent = [rank for rank in range(size) if rank not in known]
    running = [place for place in places if place.phase != "done"]
    if silent:
        check = (
            "whether it was stopped (SIGSTOP), whether its host is there, and whether its code holds the GIL"
        )
        parts = [f"{_names(silent, [], 1)} gave no sign of life", *_waiting(running)]
        return _sentence(seconds, parts, check), silent
    least = min(place.entered for place in running)
    behind = [place for place in running if place.entered == least]
    ranks, first = [place.rank for place in behind], behind[0]
    if len(behind) == len(running) > 1 and first.phase == "communication":
        text = f"all {len(running)} ranks wait in {first.where}, and none is behind the others"
        return _sentence(seconds, [text], _CHECK[first.phase]), ranks
    hosts = [place.host for place in behind]
    names = _names(ranks, hosts, len({place.host for place in running}))
    text = f"{names} {'hang' if len(behind) > 1 else 'hangs'} in {first.where}"
    others = [place for place in running if place.entered > least]
    return _sentence(seconds, [text, *_waiting(others)], _CHECK[first.phase]), ranks


def _sentence(seconds: float, parts: Sequence[str], check: str) -> str:
    slow = "if that is only slow, raise parallel.hang_s"
    return f"no progress for {seconds:g} s: {'; '.join(parts)}; check {check}; {slow}"


def _waiting(others: Sequence[Place]) -> list[str]:
    if not others:
        return []
    ((where, count), *_) = Counter(other.where for other in others).most_common()
    if len(others) == 1:
        return [f"rank {others[0].rank} waits in {where}"]
    return [f"{len(others)} others wait{', most of them' * (count < len(others))} in {where}"]


def _names(ranks: Sequence[int], hosts: Sequence[str], different: int) -> str:
    """Names the first few ranks by number, with the host if there are several hosts."""
    names = [
        f"{rank} on {host}" for rank, host in zip(ranks, hosts, strict=True)
    ] if different > 1 else [str(rank) for rank in ranks]  # fmt: skip
    return f"rank{'s' * (len(names) > 1)} {enumerated(names, _NAMED)}"


@contextlib.contextmanager
def watching(world: World, config: ParallelConfig) -> Iterator["Watchdog"]:
    """A context with a watchdog, which `Watchdog.start` starts.

    All ranks enter it before their first collective.

    Raises:
        LostPeerError: In place of an error that looks like the end of another rank.
    """
    watchdog = Watchdog(world, config)
    try:
        yield watchdog
    except BaseException as error:
        watchdog.stop()
        watchdog.leave_word(error)
        raise
    watchdog.stop(done=True)


class Watchdog:
    """Watchdog of this rank."""

    def __init__(self, world: World, config: ParallelConfig) -> None:
        """Starts no thread yet: loader workers are forked first."""
        PHASE_TIMER.reset()
        # Before the collectives' own time is over.
        self._seconds, self._timeout = min(config.hang_s, config.timeout_s / 2), config.timeout_s
        self._interval = self._seconds / _LOOKS
        self._world, self._compiling_until = world, 0
        self.stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._asking: threading.Thread | None = None
        self._store: Any = None
        if world.size > 1:
            self._store = store_client("hang", config.timeout_s)
            if world.rank == 0:
                self._store.set(_JOB, _RUNS)

    def start(self, compiling_until: int = 0) -> None:
        """Starts watching, once the loader workers are forked.

        Args:
            compiling_until: Last step in which code may be compiled; 0: none.
        """
        self._compiling_until = compiling_until
        if self._seconds and self._thread is None:
            # A daemon: a thread that waits for a dead host must not keep this process alive.
            self._thread = threading.Thread(target=self.watch, name="hang", daemon=True)
            self._thread.start()

    def stop(self, *, done: bool = False) -> None:
        """Stops watching; `done`: this rank has ended well, and isn't to be waited for."""
        self.stopped.set()
        if self._thread is not None:
            self._thread.join(1.0)
        if done and self._store is not None:
            self._asked(lambda store: self._tell_place(store, self._here()._replace(phase="done")), None)
            if self._holds_the_store():  # a request to a store that is gone is told at length
                self._wait_until_all_told(_ANSWER_SECONDS)

    def leave_word(self, error: BaseException) -> None:
        """Writes how this rank fails to the store; or reads how the other rank failed that it has lost.

        Raises:
            LostPeerError: In the second case.
        """
        if self._store is None:
            return
        record = record_of(self._world.rank, None, error)
        if record.consequence:
            lost = f"rank {record.rank} of {self._world.size} lost another rank ({record.line})"
            with silenced(sys.stderr):  # the store may be gone with the rank
                code, line = self._end(_ANSWER_SECONDS) or (None, lost)
            raise LostPeerError(line, code) from error
        self._asked(lambda store: self._tell_end(store, record.code, record.line), None, _ANSWER_SECONDS)

    # --- the thread that watches ---

    def watch(self) -> None:
        """Looks until it is stopped: the thread's work."""
        idle, place, progress = 0, (-1, -1), -1
        while True:
            here = self._here()
            where = f"rank {here.rank} on {here.host}: {here.where}\n"
            dump_unless_called_within((_LOOKS + 1) * self._interval, where)  # the next step may hold the GIL
            if self.stopped.wait(self._interval):
                break
            here, allowed = self._here(), self.allowed_seconds() / self._interval
            alive = PHASE_TIMER.heartbeats if here.phase in _ALONE else 0
            moved, place = place != (here.entered, alive), (here.entered, alive)
            job, together = self.job_state(moved, progress)
            # Looks are counted, no clock is read: a job that was suspended as a whole goes on.
            idle = 0 if moved or together != progress else idle + 1
            progress = together
            if job == _HANGS or idle >= allowed or (job == _FAILED and not moved):
                self._leave()
        dump_no_more()

    def job_state(self, moved: bool, before: int) -> tuple[str, int]:
        """Counts progress of this rank; returns how the job is, and the progress of all ranks."""

        def ask(store: Any) -> tuple[str, int]:
            return store.get(_JOB).decode(), store.add(_PROGRESS, int(moved))

        return (_RUNS, 0) if self._store is None else self._asked(ask, (_RUNS, before))

    def allowed_seconds(self) -> float:
        """Returns the allowed seconds without progress in this phase."""
        if PHASE_TIMER.phase != "end" and PHASE_TIMER.step > self._compiling_until:
            return self._seconds
        patient = _PATIENCE * self._seconds
        return min(patient, 0.75 * self._timeout) if PHASE_TIMER.phase == "communication" else patient

    def _leave(self) -> None:
        """Tells the others where this rank is, and ends it with what they told."""
        world, here, several = self._world, self._here(), self._store is not None
        end = self._end()
        if end is not None and end[0] != EXIT_HANG:
            leave_now(*end, consequence=True, told=True)
        line, ranks = waited_for(self.places_of_all(here), world.size, self._seconds)
        own = world.rank in ranks
        if several:
            self._asked(lambda store: self._tell_end(store, EXIT_HANG, line), None)
        # The others need the store to read where all are.
        holds = several and self._holds_the_store()
        leave_now(
            EXIT_HANG,
            line,
            f"rank {world.rank} is here:\n{_stacks()}",
            for_all=True,
            consequence=not own,
            linger=2 * self._interval if holds else 0.0,
        )

    def places_of_all(self, here: Place) -> list[Place]:
        """Tells the others where this rank is; returns where all are that say so until their next look."""

        def tell(store: Any) -> None:
            self._tell_place(store, here)
            store.set(_JOB, _HANGS)

        if self._store is not None:
            self._asked(tell, None)
            self._wait_until_all_told(2 * self._interval)
        lines = self._asked(lambda store: store.get(_PLACES).decode(), "")
        places = {place.rank: place for place in (Place(*json.loads(line)) for line in lines.splitlines())}
        if not places and self._world.rank:  # the store is in rank 0, or in torchrun on its host
            others = range(1, self._world.size)
            return [
                here._replace(rank=rank, phase="done" if rank != here.rank else here.phase) for rank in others
            ]
        return [*(places | {here.rank: here}).values()]

    # --- the store ---

    def _holds_the_store(self) -> bool:
        """True if the store is in this rank, and not in torchrun."""
        return self._world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _wait_until_all_told(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._asked(lambda store: store.add(_TOLD, 0), self._world.size) < self._world.size:
            if time.monotonic() > until:
                break
            time.sleep(min(self._interval / 20, 0.05))

    def _asked(self, question: Callable[[Any], _T], otherwise: _T, seconds: float | None = None) -> _T:
        """Asks the store, in a thread of its own: a request to a host that is gone never returns."""
        seconds = min(_ANSWER_SECONDS, max(1.0, self._interval)) if seconds is None else seconds
        answers, store = list[_T](), self._store

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question(store))

        if self._asking is not None:
            self._asking.join(seconds)
        if store is not None and not (self._asking and self._asking.is_alive()):
            self._asking = threading.Thread(target=ask, name="hang: store", daemon=True)
            self._asking.start()
            self._asking.join(seconds)
        return answers[0] if answers else otherwise

    def _here(self) -> Place:
        timer = PHASE_TIMER
        return Place(self._world.rank, timer.count, timer.step, timer.phase, platform.node())

    def _tell_place(self, store: Any, place: Place) -> None:
        store.append(_PLACES, f"{json.dumps(place)}\n")
        store.add(_TOLD, 1)

    def _tell_end(self, store: Any, code: int, line: str) -> None:
        """The first one counts: the others may be its consequences."""
        line = f"rank {self._world.rank} on {platform.node()} failed: {line}" if code != EXIT_HANG else line
        store.append(_END, f"{json.dumps([code, line])}\n")
        if code != EXIT_HANG:
            store.set(_JOB, _FAILED)

    def _end(self, seconds: float | None = None) -> tuple[int, str] | None:
        """Returns the code and the line of the rank that failed first; None if none left word."""

        def ask(store: Any) -> str:
            return store.get(_END).decode() if store.check([_END]) else ""

        if not (lines := self._asked(ask, "", seconds)):
            return None
        code, line = json.loads(lines.splitlines()[0])
        return int(code), str(line)


def _stacks() -> str:
    """Returns the stacks of all threads: of the main one, the last, from the training on."""
    frames, names = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    text = ""
    for ident, frame in frames.items():
        name = names.get(ident, "")
        if ident != main and not name.startswith("hang"):
            text += f"thread {name}:\n{''.join(traceback.format_stack(frame)[-_FRAMES_BESIDE:])}"
    stack = traceback.extract_stack(frames.get(main or 0))
    start = max((index for index, frame in enumerate(stack) if frame.name == "train_rank"), default=-1) + 1
    return text + "".join(traceback.format_list(stack[start:][-_FRAMES:]))
