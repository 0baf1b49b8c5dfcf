"""Watchdog: finds the rank that hangs, and ends the job with code 76.

Each rank has a thread that watches its phases (observe.phases), and a second one that exchanges them with the
other ranks over the rendezvous store, separate because a request to a dead host never returns. A rank without
progress for long reads the others' last messages. The rank with the fewest phases is the one that the others
wait for; a silent one was stopped, or its host is down.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.config.training import ParallelConfig
from trainer.distributed.exchange import store_client
from trainer.distributed.flight_recorder import dump_recorder, parse_dumps
from trainer.distributed.parallel import World
from trainer.errors import EXIT_FAILED, EXIT_HANG
from trainer.launch.worker import leave_now
from trainer.observe.phases import PHASE_TIMER
from trainer.observe.text import enumerated

_ALONE = ("evaluation", "checkpoint", "end")  # phases in which a rank works on while others wait
_LOOKS = 20  # checks within the allowed time without progress
_LONGEST_INTERVAL = 5.0  # seconds
_PATIENCE = 10  # factor of the allowed time while a step compiles, and at the end
_NAMED = 3
_FRAMES = 20
_NOTHING = "-"
# With more ranks, reading all flight records would overload the store.
_MOST_RECORDS = 256

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


@dataclass(frozen=True)
class RankStatus:
    """Last message of a rank.

    Attributes:
        rank: Number of the rank.
        count: Number of phases that it entered.
        step: Current step, counted from 1.
        phase: Current phase; "failed" or "done" once it has left.
        idle: Seconds without progress at the time of the message, by the sender's clock.
        silence: Seconds since the message, or since this rank started to listen, by the receiver's clock.
        host: Host name.
    """

    rank: int
    count: int
    step: int
    phase: str
    idle: float
    silence: float = 0.0
    host: str = ""

    @property
    def where(self) -> str:
        """Returns phase and step as text."""
        return f"{self.phase}, step {self.step}" if self.step else "the start"


@dataclass(frozen=True)
class HangVerdict:
    """Verdict with which the watchdog ends the job.

    Attributes:
        line: Message for the user.
        culprits: Ranks that hang.
        code: Exit code.
    """

    line: str
    culprits: list[int]
    code: int = EXIT_HANG


def judge_ranks(states: Sequence[RankStatus], limit: float, doubtful: float) -> HangVerdict | None:
    """Finds the rank that the others wait for.

    Args:
        states: Last message of every rank.
        limit: Seconds without progress, or without a message, after which a rank counts as hanging.
        doubtful: Seconds of silence of a rank after which the verdict waits for its next message.

    Returns:
        The verdict; None while all ranks may make progress.
    """
    running = [state for state in states if state.phase != "done"]
    failed = [state for state in running if state.phase == "failed"]
    if failed:
        names = _names(failed, running)
        return HangVerdict(f"{names} failed, and the others wait in vain", _ranks(failed), EXIT_FAILED)
    if any(doubtful < state.silence < limit for state in running):
        return None
    silent = [state for state in running if state.silence >= limit]
    least = min(state.count for state in running)
    culprits = silent or [state for state in running if state.count == least]
    if not silent and any(state.idle < limit for state in culprits):
        return None
    first, others = culprits[0], [state for state in running if state not in culprits]
    if len(culprits) == len(running) > 1 and first.phase == "communication":
        text = f"all {len(running)} ranks wait in {first.where}, and none is behind the others"
        return HangVerdict(_sentence(limit, [text], _CHECK[first.phase]), _ranks(culprits))
    names = _names(culprits, running)
    if silent:
        check = "whether it was stopped (SIGSTOP), and whether its host is there"
        text = f"{names} gave no sign of life since {first.where}"
    else:
        check = _CHECK[first.phase]
        text = f"{names} {'hang' if len(culprits) > 1 else 'hangs'} in {first.where}"
    return HangVerdict(_sentence(limit, [text, *_waiting(others)], check), _ranks(culprits))


def _sentence(limit: float, parts: Sequence[str], check: str) -> str:
    slow = "if that is only slow, raise parallel.hang_s"
    return f"no progress for {limit:g} s: {'; '.join(parts)}; check {check}; {slow}"


def _waiting(others: Sequence[RankStatus]) -> list[str]:
    if not others:
        return []
    ((where, count), *_) = Counter(other.where for other in others).most_common()
    if len(others) == 1:
        return [f"rank {others[0].rank} waits in {where}"]
    return [f"{len(others)} others wait{', most of them' * (count < len(others))} in {where}"]


def _names(culprits: Sequence[RankStatus], running: Sequence[RankStatus]) -> str:
    """Names the first few ranks by number, with the host if there are several hosts."""
    hosts = len({state.host for state in running}) > 1
    names = [f"{state.rank} on {state.host}" if hosts else str(state.rank) for state in culprits]
    return f"rank{'s' * (len(names) > 1)} {enumerated(names, _NAMED)}"


def _ranks(states: Sequence[RankStatus]) -> list[int]:
    return [state.rank for state in states]


@contextlib.contextmanager
def watching(world: World, config: ParallelConfig) -> Iterator["Watchdog"]:
    """A context with a watchdog, which `Watchdog.start` starts.

    All ranks enter it before their first collective, so that each has a message of every other.
    """
    watchdog = Watchdog(world, config)
    try:
        yield watchdog
    except BaseException:
        watchdog.stop("failed")
        raise
    watchdog.stop("done")


class Watchdog:
    """Watchdog of this rank: finds the rank that hangs."""

    def __init__(self, world: World, config: ParallelConfig) -> None:
        """Starts no thread yet: loader workers are forked first."""
        PHASE_TIMER.reset()
        # Before the collectives' own time is over, also for a silent rank, which takes half as much more.
        self._seconds, self._timeout = min(config.hang_s, config.timeout_s / 2), config.timeout_s
        self._interval = min(self._seconds / _LOOKS, _LONGEST_INTERVAL)
        self._world = world
        self._compiling_until = 0
        self._idle = 0.0
        self._number = 0
        self._left = ""
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._first = RankStatus(0, -1, 0, "start", 0.0)
        self._heard: list[RankStatus] = []
        self._heard_times = 0
        self._proposal = self._agreed = ""
        self._recorded: str | None = None
        self._records: dict[int, str] = {}
        self._store: Any = None
        if self._seconds and world.size > 1:
            self._store = self._connect()
            self._store.set(self._key(world.rank), self._word())
            if world.rank == 0:
                self._store.set(_VERDICT, _NOTHING)

    def start(self, compiling_until: int = 0) -> None:
        """Starts watching; called again after a rollback.

        Args:
            compiling_until: Last step in which code may be compiled; 0: none.
        """
        self._compiling_until = compiling_until
        if self._seconds and not self._threads:
            works = [self._watch, *([self._exchange] if self._world.size > 1 else [])]
            # Daemons: a thread that waits for a dead host must not keep this process alive.
            self._threads = [threading.Thread(target=work, name="hang", daemon=True) for work in works]
            for thread in self._threads:
                thread.start()

    def stop(self, why: str) -> None:
        """Stops watching, and publishes why this rank leaves: "done" or "failed"."""
        self._left = why
        self._stopped.set()
        for thread in self._threads:
            thread.join(1.0)

    # --- the thread that watches ---

    def _watch(self) -> None:
        last, position, unanswered, waited, heard = time.monotonic(), (-1, -1), 0.0, 0.0, 0
        while not self._stopped.wait(self._interval):
            # Time during which the whole job was suspended doesn't count.
            now = time.monotonic()
            step, last = min(now - last, 4 * self._interval), now
            here = (
                PHASE_TIMER.count,
                PHASE_TIMER.heartbeats if PHASE_TIMER.phase in _ALONE else 0,
            )
            self._idle = self._idle + step if here == position else 0.0
            position, limit = here, self._limit()
            unanswered = unanswered + step if heard == self._heard_times and self._listens() else 0.0
            heard = self._heard_times
            if self._agreed:
                self._leave(HangVerdict(**json.loads(self._agreed)))
            verdict = self._verdict(limit, unanswered) if self._idle >= limit else None
            waited = waited + step if verdict else 0.0
            if verdict and (self._store is None or waited > 4 * self._interval or unanswered >= limit):
                self._leave(verdict)  # no other rank to agree with
            self._proposal = json.dumps(asdict(self._with_record(verdict))) if verdict else ""

    def _verdict(self, limit: float, unanswered: float) -> HangVerdict | None:
        own = self._seen()
        if self._world.size == 1 or PHASE_TIMER.phase == "end":  # without collectives
            return judge_ranks([own], limit, limit)
        if unanswered >= limit:  # the store is in rank 0, or in torchrun on its host
            first = replace(self._first, silence=limit)
            return judge_ranks([first, own] if own.rank else [own], limit, limit)
        heard = [own if state.rank == own.rank else state for state in self._heard]
        return judge_ranks(heard, limit, 4 * self._interval) if heard else None

    def _with_record(self, verdict: HangVerdict) -> HangVerdict:
        """Adds the collective that some ranks didn't enter, from torch's flight recorders."""
        records = {number: self._records.get(number) or None for number in range(self._world.size)}
        line = parse_dumps(records) if any(records.values()) and verdict.code == EXIT_HANG else None
        return replace(verdict, line=f"{verdict.line}; {line}") if line else verdict

    def _limit(self) -> float:
        """Returns the allowed seconds without progress in this phase."""
        if PHASE_TIMER.phase != "end" and PHASE_TIMER.step > self._compiling_until:
            return self._seconds
        patient = _PATIENCE * self._seconds
        return min(patient, 0.75 * self._timeout) if PHASE_TIMER.phase == "communication" else patient

    def _listens(self) -> bool:
        return self._idle >= self._seconds / 2

    def _leave(self, verdict: HangVerdict) -> None:
        own = self._world.rank in verdict.culprits
        # If the store is in rank 0 and not in torchrun, the others need it to read the agreed verdict.
        holds = self._world.rank == 0 and self._world.size > 1 and not _agent_holds_the_store()
        leave_now(
            verdict.code,
            verdict.line,
            f"rank {self._world.rank} is here:\n{_stack()}" if own else "",
            for_all=True,
            consequence=not own,
            linger=4 * self._interval if holds else 0.0,
        )

    # --- the thread that talks to the others ---

    def _exchange(self) -> None:
        ranks = range(self._world.size)
        keys, last, numbers = [*map(self._key, ranks), _VERDICT], 0.0, dict.fromkeys(ranks, -1)
        while True:
            left = self._stopped.wait(self._interval)
            try:
                self._store = self._store or self._connect()
                self._store.set(self._key(self._world.rank), self._word())
                if left:
                    return
                if self._proposal:
                    self._agreed = self._store.compare_set(_VERDICT, _NOTHING, self._proposal).decode()
                self._first = RankStatus(**json.loads(self._store.get(keys[0]))[1])
                if not self._listens():
                    self._heard, last = [], 0.0
                    self._forget_records()
                    continue
                self._share_records()
                *words, verdict = (text.decode() for text in self._store.multi_get(keys))
            except RuntimeError:  # no answer: `_watch` notices when it takes too long
                self._store = None
                if left:
                    return
                continue
            now = time.monotonic()
            step, last = min(now - last, 4 * self._interval) if last else 0.0, now
            silences = {state.rank: state.silence + step for state in self._heard}
            heard = []
            for number, word in enumerate(words):
                message, values = json.loads(word)
                silence = silences.get(number, 0.0) if message == numbers[number] else 0.0
                heard.append(replace(RankStatus(**values), silence=silence))
                numbers[number] = message
            self._heard = heard
            self._heard_times += 1
            if verdict != _NOTHING:
                self._agreed = verdict

    def _share_records(self) -> None:
        """Publishes this rank's flight record, and reads the others'."""
        if self._world.size > _MOST_RECORDS or self._recorded == "":
            return
        if self._recorded is None:
            self._recorded = ""  # asked only once: a hanging driver may never answer
            threading.Thread(target=self._record, name="flight recorder", daemon=True).start()
            return
        self._store.set(f"record-{self._world.rank}", self._recorded)
        for number in range(self._world.size):
            if self._store.check([f"record-{number}"]):
                self._records[number] = self._store.get(f"record-{number}").decode()

    def _forget_records(self) -> None:
        """Drops the records of a wait that has ended."""
        if self._recorded:
            self._store.set(f"record-{self._world.rank}", "")
            self._recorded, self._records = None, {}

    def _record(self) -> None:
        self._recorded = dump_recorder() or ""

    def _seen(self) -> RankStatus:
        phase = self._left or PHASE_TIMER.phase
        host = platform.node()
        return RankStatus(self._world.rank, PHASE_TIMER.count, PHASE_TIMER.step, phase, self._idle, host=host)

    def _word(self) -> str:
        self._number += 1
        return json.dumps([self._number, asdict(self._seen())])

    def _key(self, number: int) -> str:
        return f"rank-{number}"

    def _connect(self) -> Any:
        return store_client("hang", self._seconds)


_VERDICT = "verdict"


def _agent_holds_the_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _stack() -> str:
    """Returns the main thread's stack, from the training on."""
    frames = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    start = max((index for index, frame in enumerate(frames) if frame.name == "train_rank"), default=-1) + 1
    return "".join(traceback.format_list(frames[start:][-_FRAMES:]))
