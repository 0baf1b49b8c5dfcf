"""What tests share."""

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.world import Ranks
from trainer.limits import read_limits

# A shell starts what it puts in the background (`make test &`) with interrupts ignored, and the
# processes that the tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    # Many tests start two ranks or workers of their own.
    return max(1, min(int(read_limits().cpus), 8))


@pytest.fixture(scope="session", autouse=True)
def ranks() -> Iterator[Ranks]:
    # First of all: a process that has run a backward pass must not fork ranks any more.
    started = Ranks()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    # CPU results depend on the number of threads: one, so that what is compared can be compared.
    torch.set_num_threads(1)
