"""Is this machine quiet? Times of a busy one say little."""

import hashlib
import threading
import time

from trainer.host.limits import read_limits

_BLOCK = bytes(4 << 20)  # hashed without the interpreter's lock, in some milliseconds


def share_of_cpus(seconds: float = 1.0) -> float:
    """Returns the fraction of its CPUs that this process gets under full load: 1 on a quiet machine."""
    cpus = read_limits().cpus
    threads = max(1, int(cpus))
    used = [0.0] * threads

    def work(which: int) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            hashlib.sha256(_BLOCK)
        used[which] = time.thread_time()

    began = time.perf_counter()
    workers = [threading.Thread(target=work, args=(which,)) for which in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return min(1.0, sum(used) / (time.perf_counter() - began) / min(cpus, threads))
