"""Predictions for many GPUs, by simulation: times, messages and queues, without the table's formulas.

Nothing of `formulas` is imported. The steps are simulated message by message (`messages`), failures and
checkpoints event by event (`life`), what the ranks ask of rank 0's store and of the storage in queues (here).
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.scale.figures import DEFAULT_S, Estimate, Figures
from benchmarks.scale.life import best_interval, failure_times, live
from benchmarks.scale.messages import simulate_steps

FAILURES = 4000  # that a job lives through: its mean time between them is then known to 1.6 %
_CHUNK = 16 << 20
_MOST_CHUNKS = 4096
_DAY = 86400.0


def simulate(figures: Figures, gpus: int, every: int, seed: int = 0, failures: int = FAILURES) -> Estimate:
    """Simulates a job on so many GPUs.

    Args:
        figures: Of the job.
        gpus: A multiple of those of a node, or fewer than that.
        every: Steps between two checkpoints.
        seed: Of the failures.
        failures: How many it lives through.
    """
    steps = simulate_steps(figures, gpus)
    step_s = steps.plain_s + steps.row_s / figures.steps_per_row
    requests, sockets, met_s = _meet(figures, gpus)
    copy_s, write_s, restart_s = _durations(figures, gpus, met_s)
    times = _failures(figures, gpus, seed, failures)
    lived = live(every * step_s, copy_s, write_s, restart_s, times)
    busy = figures.micro_batches_per_step * (figures.forward_s + figures.backward_s) + figures.update_s
    day = _DAY / step_s
    return Estimate(
        exposed_s=steps.exposed_s,
        step_s=step_s,
        stall_s=lived.stall_s,
        mtbf_s=float(np.mean(np.diff([0.0, *times]))),
        interval_s=best_interval(copy_s, write_s, restart_s, times),
        lost_share=lived.lost_share,
        lost_by_default=live(DEFAULT_S, copy_s, write_s, restart_s, times).lost_share,
        restart_s=restart_s,
        store_requests=requests,
        sockets_per_node=sockets * min(gpus, figures.gpus_per_node),
        rendezvous_s=met_s,
        goodput=busy / step_s * (1 - lived.lost_share),
        log_bytes_per_day=_written(figures, day),
        data_bytes_per_s=_read(figures, gpus, step_s),
        loader_cpus_per_gpu=_loading(figures, step_s),
    )


def simulate_losses(
    figures: Figures, gpus: int, intervals: Sequence[float], seed: int = 0, failures: int = FAILURES
) -> list[float]:
    """Share of the time lost at each of some intervals, in seconds of training between two checkpoints."""
    durations = _durations(figures, gpus, _meet(figures, gpus)[2])
    times = _failures(figures, gpus, seed, failures)
    return [live(interval, *durations, times).lost_share for interval in intervals]


def simulate_stragglers(figures: Figures, gpus: int, spread: float, seed: int = 0) -> float:
    """Seconds of a step whose ranks differ at random by `spread` (standard deviation, a share)."""
    random = np.random.Generator(np.random.Philox(key=[seed, gpus]))
    return simulate_steps(figures, gpus, spread, 8, random).plain_s


def _failures(figures: Figures, gpus: int, seed: int, count: int) -> list[float]:
    random = np.random.Generator(np.random.Philox(key=[seed, gpus]))
    nodes = max(1, gpus // figures.gpus_per_node)
    return failure_times(nodes, figures.node_mtbf_hours * 3600, count, random)


def _durations(figures: Figures, gpus: int, met_s: float) -> tuple[float, float, float]:
    """Seconds of a checkpoint's copy, of its write, and of a restart in which the ranks meet in `met_s`."""
    nodes = max(1, gpus // figures.gpus_per_node)
    copy_s = _transferred([figures.checkpoint_bytes], figures.host_copy_bytes_per_s)
    write_s = _transferred([figures.checkpoint_bytes], figures.disk_bytes_per_s)
    load_s = _transferred([figures.checkpoint_bytes] * nodes, figures.read_bytes_per_s)
    return copy_s, write_s, figures.detect_s + figures.start_s + met_s + load_s


def _transferred(sizes: list[float], bytes_per_s: float) -> float:
    """Seconds until a channel has moved everyone's bytes, a chunk of each in turn."""
    left, now = list(sizes), 0.0
    chunk = max(float(_CHUNK), sum(sizes) / _MOST_CHUNKS)
    while left:
        for one in left:
            now += min(one, chunk) / bytes_per_s
        left = [one - chunk for one in left if one > chunk]
    return now


def _meet(figures: Figures, gpus: int) -> tuple[float, float, float]:
    """Requests to the store, connections of a rank, and seconds until every rank has met every other.

    The store serves one request at a time, in the order in which they come; a rank asks again when it has
    its answer. It leaves its address, then waits for each other rank's and takes it.
    """
    requests, sockets = 0, np.zeros(gpus)
    at: npt.NDArray[np.float64] = np.zeros(gpus)  # when each rank asks next
    place = figures.store_request_s * np.arange(gpus)
    free = 0.0
    for _ in range(figures.gloo_groups):
        for number in range(2 * gpus + 1):
            order = np.argsort(at, kind="stable") if number == 0 else slice(None)
            came = np.maximum(at[order], free)
            # Each is served when it is there and the one before it has been.
            served = np.maximum.accumulate(came - place) + place + figures.store_request_s
            at[order] = served
            free = float(served[-1])
            requests += gpus
            if number and number % 2 == 0:
                sockets += 1
                sockets[number // 2 - 1] -= 1  # nobody connects to itself
    return float(requests), float(sockets.max()), float(at.max())


def _written(figures: Figures, steps: float) -> float:
    """Bytes of the rows of so many steps."""
    written, step = 0.0, figures.steps_per_row
    while step <= steps and written < 1e18:
        written += figures.row_bytes
        step += figures.steps_per_row
        if step > 10_000_000:  # a day of very short steps: as many more as there were
            return written * steps / step
    return written


def _read(figures: Figures, gpus: int, step_s: float) -> float:
    """Bytes per second that the ranks ask storage for, over some steps."""
    steps, asked = 8, 0.0
    for _ in range(steps):
        for _ in range(figures.micro_batches_per_step):
            asked += gpus * figures.samples_per_micro_batch_size * figures.stored_bytes_per_sample
    return asked / (steps * step_s)


def _loading(figures: Figures, step_s: float) -> float:
    """CPUs that a GPU's loader workers keep busy: each sample goes to the worker that is free first."""
    workers, samples = 1, min(2000, figures.samples_per_step)
    cost = figures.loader_cpu_s_per_sample * figures.samples_per_step / samples
    while True:
        free, busy, late = [0.0] * workers, 0.0, 0.0
        for step in range(4):
            for _ in range(samples):
                start = max(free[0], step * step_s)
                heapq.heapreplace(free, start + cost)
                busy += cost
            late = max(free) - (step + 1) * step_s
        if late <= max(cost, 1e-9) or workers >= 4096:
            return busy / max(4 * step_s, *free)
        workers *= 2
