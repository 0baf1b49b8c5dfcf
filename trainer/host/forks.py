"""Forks of a process in which torch has computed with several threads."""

import os

from trainer.host.processes import openmp_threads

_pool_at_fork = False
_without_pool = False


def _before_fork() -> None:
    global _pool_at_fork  # noqa: PLW0603
    _pool_at_fork = bool(openmp_threads())


def _in_a_fork() -> None:
    global _without_pool  # noqa: PLW0603
    _without_pool = _without_pool or _pool_at_fork


os.register_at_fork(before=_before_fork, after_in_child=_in_a_fork)


def hangs_in_parallel() -> bool:
    """True in a fork of a process in which torch had computed with several threads: here that would hang.

    OpenMP's threads don't come through a fork, and the library waits for them. One thread can compute.
    """
    return _without_pool
