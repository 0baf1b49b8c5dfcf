"""Predictions for many GPUs, by formulas.

What is left out: NCCL's trees and its choice between algorithms and protocols (a ring's latency grows with
the number of nodes, a tree's with its logarithm, so that small buckets on many nodes come out too slow here),
several rings at once, congestion, ranks that are slower than others, failures that come together.
"""

import math

from benchmarks.scale.figures import DEFAULT_S, Figures

_DAY = 86400.0


def nodes_of(figures: Figures, gpus: int) -> int:
    """Returns the number of nodes for so many GPUs."""
    return -(-gpus // figures.gpus_per_node)


def all_reduce_s(figures: Figures, gpus: int, size: float) -> float:
    """Seconds that `size` bytes take to be summed over all GPUs.

    Within a node each GPU gathers the sum of its part on a ring (g - 1 steps); between nodes the GPUs of one
    place in their nodes sum it on a ring, 2 (m - 1) steps of 1/m of it; then the parts go round in the node.
    """
    local = min(figures.gpus_per_node, gpus)
    nodes = nodes_of(figures, gpus)
    within = 2 * (local - 1) * (figures.node_alpha_s + size / local / figures.node_bytes_per_s)
    part = size / local
    between = 2 * (nodes - 1) * (figures.network_alpha_s + part / nodes / figures.network_bytes_per_s)
    return within + between


def exposed_s(figures: Figures, gpus: int) -> float:
    """Seconds that communication takes beyond the backward pass it runs beside, bucket after bucket."""
    end = 0.0
    for size, ready in zip(figures.bucket_bytes, figures.bucket_ready_share, strict=True):
        end = max(end, ready * figures.backward_s) + all_reduce_s(figures, gpus, size)
    return max(0.0, end - figures.backward_s)


def compute_s(figures: Figures) -> float:
    """Seconds of a step's own work."""
    passes = figures.micro_batches_per_step * (figures.forward_s + figures.backward_s)
    return passes + figures.update_s


def step_s(figures: Figures, gpus: int) -> float:
    """Seconds of a step, with its share of a row of metrics."""
    return compute_s(figures) + exposed_s(figures, gpus) + figures.row_s / figures.steps_per_row


def mtbf_s(figures: Figures, gpus: int) -> float:
    """Mean seconds between failures of a job that needs every node: that of one over their number."""
    return figures.node_mtbf_hours * 3600 / nodes_of(figures, gpus)


def young_s(stall: float, mtbf: float) -> float:
    """Seconds of work between two checkpoints that lose least, to first order.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * stall * mtbf)


def daly_s(stall: float, mtbf: float) -> float:
    """The same to a higher order; the mean time between failures itself where a checkpoint takes twice that.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006.
    """
    if stall >= 2 * mtbf:
        return mtbf
    small = stall / (2 * mtbf)
    return young_s(stall, mtbf) * (1 + math.sqrt(small) / 3 + small / 9) - stall


def lost_share(interval: float, stall: float, write: float, restart: float, mtbf: float) -> float:
    """Share of the time that is lost where a checkpoint is taken every `interval` seconds of work.

    Daly's expectation for failures that come at random, also during a restart, with one thing more: ours is
    written in the background, so that it counts only `write` seconds after its copy. The number of
    checkpoints that a failure finds on the disk falls by exp(-write / mtbf): the same as a restart that is
    longer by `write`. The best interval isn't moved by it. The next copy waits until the write has ended.
    """
    cycle = max(interval + stall, write)
    exponent = (restart + write) / mtbf
    if exponent > 500 or cycle / mtbf > 500:
        return 1.0
    return 1 - interval / (mtbf * math.exp(exponent) * math.expm1(cycle / mtbf))


def best_interval_s(stall: float, write: float, mtbf: float) -> float:
    """Daly's, but not so short that copies wait for the write before them."""
    return max(daly_s(stall, mtbf), write - stall)


def store_requests(figures: Figures, gpus: int) -> float:
    """Counts requests to the store: in each group every rank sets its address and reads all others' twice."""
    return figures.gloo_groups * (gpus + 2.0 * gpus * gpus)


def restart_s(figures: Figures, gpus: int) -> float:
    """Detect, start, meet, load: each node reads the checkpoint once, its ranks share the page cache."""
    load = nodes_of(figures, gpus) * figures.checkpoint_bytes / figures.read_bytes_per_s
    return figures.detect_s + figures.start_s + store_requests(figures, gpus) * figures.store_request_s + load


def stall_s(figures: Figures) -> float:
    """Seconds of the copy to host memory."""
    return figures.checkpoint_bytes / figures.host_copy_bytes_per_s


def write_s(figures: Figures) -> float:
    """Seconds of the write in the background."""
    return figures.checkpoint_bytes / figures.disk_bytes_per_s


def steps_between(figures: Figures, gpus: int) -> int:
    """The whole number of steps that is nearest to the best interval: `checkpoint.every`."""
    best = best_interval_s(stall_s(figures), write_s(figures), mtbf_s(figures, gpus))
    return max(1, round(best / step_s(figures, gpus)))


def estimate(figures: Figures, gpus: int) -> dict[str, float]:
    """Predicts a job on so many GPUs, of the whole job unless stated otherwise.

    Returns:
        exposed_s: Seconds of a step in which the GPUs only wait for gradients.
        step_s: Seconds of a step.
        stall_s: Seconds that a checkpoint stops the training for.
        mtbf_s: Mean seconds between failures.
        interval_s: Seconds of training between two checkpoints that lose least.
        lost_share: Share of the time that checkpoints, work done again and restarts take, at that interval.
        lost_by_default: The same with a checkpoint every `DEFAULT_S` seconds instead.
        restart_s: Seconds from a failure to training again, if nothing else fails.
        store_requests: Requests to rank 0's store when the ranks meet.
        sockets_per_node: Connections between ranks that a node holds, besides those of the gradients.
        rendezvous_s: Seconds that the store needs for them.
        goodput: Share of the time in which the GPUs compute what is kept.
        log_bytes_per_day: What a run folder grows by, without checkpoints.
        data_bytes_per_s: What storage delivers.
        loader_cpus_per_gpu: CPUs of a GPU's loader workers.
    """
    step, mtbf = step_s(figures, gpus), mtbf_s(figures, gpus)
    stall, write, restart = stall_s(figures), write_s(figures), restart_s(figures, gpus)
    interval = steps_between(figures, gpus) * step
    lost = lost_share(interval, stall, write, restart, mtbf)
    return {
        "exposed_s": exposed_s(figures, gpus),
        "step_s": step,
        "stall_s": stall + max(0.0, write - interval - stall),
        "mtbf_s": mtbf,
        "interval_s": best_interval_s(stall, write, mtbf),
        "lost_share": lost,
        "lost_by_default": lost_share(DEFAULT_S, stall, write, restart, mtbf),
        "restart_s": restart,
        "store_requests": store_requests(figures, gpus),
        "sockets_per_node": min(gpus, figures.gpus_per_node) * figures.gloo_groups * (gpus - 1.0),
        "rendezvous_s": store_requests(figures, gpus) * figures.store_request_s,
        "goodput": compute_s(figures) / step * (1 - lost),
        "log_bytes_per_day": figures.row_bytes * _DAY / (figures.steps_per_row * step),
        "data_bytes_per_s": gpus * figures.samples_per_step * figures.stored_bytes_per_sample / step,
        "loader_cpus_per_gpu": figures.samples_per_step * figures.loader_cpu_s_per_sample / step,
    }
