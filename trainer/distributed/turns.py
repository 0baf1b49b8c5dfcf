"""Ranks prepare a run in turns, by messages over the store: without a collective, and without its time limit.

Rank 0 prepares and says what. Then the first rank of each other host opens the data, then all others. Who
refuses the run tells all ranks why. Messages are JSON.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trainer.distributed.parallel import RankPlace, place_of
from trainer.errors import EXIT_FAILED, LostPeerError, RefusedElsewhereError
from trainer.launch.exit_record import record_of
from trainer.launch.worker import note_signals

_POLL_SECONDS = 0.05
_HEARD_SECONDS = 3.0  # that a rank which leaves the job stays for the others
_REFUSED, _HEARD, _THROUGH = "refused", "heard", "through"


class Turns(NamedTuple):
    """The ranks of a job while they prepare.

    Attributes:
        place: This rank's place.
        store: Store of the messages; None for a single rank.
    """

    place: RankPlace
    store: Any

    @property
    def first_here(self) -> int:
        """Number of the first rank of this host."""
        return self.place.rank - self.place.local_rank


@contextmanager
def in_turns(store: Any) -> Iterator[Turns]:
    """A context in which the ranks prepare; what is raised in it ends all of them.

    Args:
        store: From `trainer.distributed.parallel.open_store`.

    Raises:
        RefusedElsewhereError: If another rank has left the context by an error.
    """
    turns = Turns(place_of(os.environ), store and PrefixStore("prepare", store))
    try:
        yield turns
    except LostPeerError:
        raise
    except BaseException as error:
        _refuse(turns, error)
        raise


def say_to_all(turns: Turns, key: str, content: Mapping[str, Any] | None = None) -> None:
    """Leaves a message for all ranks."""
    if turns.store is not None:
        turns.store.set(key, json.dumps(content or {}))


def heard(turns: Turns, key: str, seconds: float | None = None, word: str = "") -> dict[str, Any]:
    """Waits for a message, and returns it.

    Args:
        turns: The ranks.
        key: Key of the message.
        seconds: Time to wait; None: without a limit.
        word: What is said if the time is over.

    Raises:
        RefusedElsewhereError: If another rank has refused the run.
        LostPeerError: If the rank that holds the store is gone, or the time is over.
    """
    until = None if seconds is None else time.monotonic() + seconds
    try:
        while not turns.store.check([key]):
            if turns.store.check([_REFUSED]):
                _leave(turns)
            if until is not None and time.monotonic() > until:
                raise LostPeerError(word)
            time.sleep(_POLL_SECONDS)
        content: dict[str, Any] = json.loads(turns.store.get(key))
    except RuntimeError as error:
        raise LostPeerError(f"rank {turns.place.rank} of {turns.place.size} lost rank 0") from error
    return content


def wait_for_all(turns: Turns, seconds: float) -> None:
    """Waits until all ranks are ready.

    Args:
        turns: The ranks.
        seconds: Time to wait: a rank that was killed says nothing.

    Raises:
        RefusedElsewhereError: If another rank has refused the run.
        LostPeerError: If one isn't ready in time.
    """
    (rank, size, *_), store = turns
    if store is None:
        return
    say_to_all(turns, f"ready-{rank}")
    until = time.monotonic() + seconds
    for other in range(size):
        left = max(0.0, until - time.monotonic())
        late = f"rank {other} of {size} wasn't ready after {seconds:.0f} s: was it killed?"
        heard(turns, f"ready-{other}", left, late)
    with suppress(RuntimeError):  # rank 0, which holds the store, may leave before it answers
        through = store.add(_THROUGH, 1)
        while rank == 0 and through < size and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            through = store.add(_THROUGH, 0)


def _refuse(turns: Turns, error: BaseException) -> None:
    """Tells the others why there is no run, and stays until they have heard."""
    (rank, size, *_), store = turns
    if store is None:
        return
    note_signals()  # a signal mustn't end this rank while the others listen
    record = record_of(rank, None, error)
    with suppress(RuntimeError):
        store.compare_set(_REFUSED, "", json.dumps([record.code or EXIT_FAILED, record.line]))
        until = time.monotonic() + _HEARD_SECONDS
        while store.add(_HEARD, 0) < size - 1 and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)


def _leave(turns: Turns) -> None:
    """Ends this rank with what another one has refused."""
    note_signals()  # torchrun ends the ranks that are left by one
    code, line = json.loads(turns.store.get(_REFUSED))
    turns.store.add(_HEARD, 1)
    raise RefusedElsewhereError(line, code)
