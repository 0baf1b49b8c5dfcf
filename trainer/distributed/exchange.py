"""Messages between threads of different ranks, over the rendezvous store.

Collectives would interleave with those of the ranks' main threads.
"""

import os
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainer.host.interfaces import from_files_alone

# The store is there already: one that refuses a connection is gone with its rank, as after a signal that came
# before the first step. Torch tries for up to twice as long.
_CONNECTION_SECONDS = 30.0


def store_client(purpose: str, seconds: float) -> Any:
    """Opens a separate store client, since the process group's has a lock, and may block for long.

    Args:
        purpose: Prefix of its keys.
        seconds: Timeout of an answer.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    connection = timedelta(seconds=min(seconds, _CONNECTION_SECONDS))
    with from_files_alone(address):
        store = TCPStore(address, port, None, False, connection, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=seconds))
    return PrefixStore(f"{purpose}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class StoreExchange:
    """Messages between threads of several ranks.

    Attributes:
        rank: This rank's number among the participants.
        ranks: Number of participants.
    """

    def __init__(self, rank: int, ranks: int, seconds: float) -> None:
        """Connects to the store; `seconds`: timeout of an answer."""
        self.rank, self.ranks = rank, ranks
        self._store = store_client("checkpoint", seconds)

    def tell(self, topic: str, word: str) -> None:
        """Publishes a message on a topic to all ranks.

        Raises:
            RuntimeError: If the store doesn't answer.
        """
        self._store.set(f"{topic}/{self.rank}", word)

    def told(self, topic: str) -> list[str] | None:
        """Returns the message of each rank on a topic; None until all have sent one.

        Raises:
            RuntimeError: If the store doesn't answer.
        """
        keys = [f"{topic}/{rank}" for rank in range(self.ranks)]
        if not self._store.check(keys):
            return None
        words = [text.decode() for text in self._store.multi_get(keys)]
        for key in keys:
            self._store.delete_key(key)
        return words
