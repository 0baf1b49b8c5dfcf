"""Steps of a job simulated message by message: buckets get ready, parts of them go round on rings of links.

A link serves one message at a time. What a rank sends next it has from its neighbor, so that the messages of
all links come in rounds, and a round is a few operations on arrays of times; ranks may be at different times.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.scale.figures import Figures

Times = npt.NDArray[np.float64]


class Steps(NamedTuple):
    """Observations of simulated steps.

    Attributes:
        plain_s: Seconds of a step without a row of metrics.
        row_s: Seconds that one with a row took longer.
        exposed_s: Seconds of a step in which a rank had nothing to compute, on average.
    """

    plain_s: float
    row_s: float
    exposed_s: float


class Rings:
    """Rings of ranks, each rank with a link to its neighbor: arrays (rings, ranks)."""

    def __init__(self, rings: int, ranks: int, alpha_s: float, bytes_per_s: float) -> None:
        """Starts with all links free."""
        self._free: Times = np.zeros((rings, ranks))
        self._alpha_s, self._bytes_per_s = alpha_s, bytes_per_s

    def go_round(self, own: Times, steps: int, size: float) -> Times:
        """Every rank sends so many messages: the first when it is ready, others as one arrives.

        Args:
            own: (rings, ranks): seconds at which each is ready.
            steps: Messages of each.
            size: Bytes of each message.

        Returns:
            (rings, ranks): seconds at which each has the last message.
        """
        if steps < 1:
            return own
        free, has, busy_s = self._free, np.array(own, order="C"), size / self._bytes_per_s
        for _ in range(steps):
            np.maximum(has, free, out=free)
            free += busy_s
            np.add(free[:, :-1], self._alpha_s, out=has[:, 1:])
            np.add(free[:, -1], self._alpha_s, out=has[:, 0])
            np.maximum(has, own, out=has)
        return has


class Fabric:
    """The links of all GPUs: rings within nodes, and rings of the GPUs of one place in their nodes."""

    def __init__(self, figures: Figures, gpus: int) -> None:
        """Nobody has sent anything."""
        self.local = min(figures.gpus_per_node, gpus)
        self.nodes = max(1, gpus // figures.gpus_per_node)
        self._within = Rings(self.nodes, self.local, figures.node_alpha_s, figures.node_bytes_per_s)
        self._between = Rings(self.local, self.nodes, figures.network_alpha_s, figures.network_bytes_per_s)

    def all_reduce(self, ready: Times, size: float) -> Times:
        """Seconds at which each rank (nodes, local) has the sum of `size` bytes."""
        part = size / self.local
        gathered = self._within.go_round(ready, self.local - 1, part)
        # Once round to add, once round to tell.
        summed = self._between.go_round(gathered.T, 2 * (self.nodes - 1), part / self.nodes).T
        return self._within.go_round(summed, self.local - 1, part)


def simulate_steps(
    figures: Figures,
    gpus: int,
    spread: float = 0.0,
    steps: int = 3,
    random: np.random.Generator | None = None,
) -> Steps:
    """Simulates steps, a row of metrics after the second.

    Args:
        figures: Of the job.
        gpus: A multiple of those of a node, or fewer than that.
        spread: Standard deviation of a rank's time to compute a step, as a share of it.
        steps: How many, from 3 on.
        random: Draws it.
    """
    fabric = Fabric(figures, gpus)
    shape = (fabric.nodes, fabric.local)
    clock: Times = np.zeros(shape)
    ends, waits = [0.0], list[float]()
    for number in range(steps):
        pace: Times = np.ones(shape)
        if spread and random is not None:
            pace = np.maximum(0.1, 1 + spread * random.standard_normal(shape))
        for _ in range(figures.micro_batches_per_step - 1):
            clock = clock + (figures.forward_s + figures.backward_s) * pace
        clock = clock + figures.forward_s * pace
        computed = clock + figures.backward_s * pace
        summed = np.zeros(shape)
        for size, share in zip(figures.bucket_bytes, figures.bucket_ready_share, strict=True):
            ready = clock + share * figures.backward_s * pace
            summed = fabric.all_reduce(np.maximum(ready, summed), size)
        waits.append(float(np.mean(np.maximum(summed - computed, 0.0))))
        clock = np.maximum(summed, computed) + figures.update_s
        if number == 1:
            clock[0, 0] += figures.row_s
        ends.append(float(clock.max()))
    lengths = np.diff(ends)
    plain = np.delete(lengths, 1)
    return Steps(float(plain.mean()), float(lengths[1] - plain.mean()), float(np.mean(np.delete(waits, 2))))
