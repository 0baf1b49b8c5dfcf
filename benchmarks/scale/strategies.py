"""Bytes that each GPU sends in a step and holds, by formulas: DDP, FSDP, and HSDP with a group on each node.

Sums and gatherings go round on rings, in a node first and then between the GPUs of one place in their nodes:
as `formulas.all_reduce_s` counts them. An all-reduce is a reduce-scatter and a gathering.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.scale.figures import Figures
from benchmarks.scale.formulas import nodes_of
from trainer.observe.text import size


class Sent(NamedTuple):
    """Bytes that a GPU sends in a step: over its node's own links, and over the network."""

    within: float
    between: float


def sent(figures: Figures, gpus: int, strategy: str) -> Sent:
    """Returns the bytes that a GPU sends with a parallel.strategy: ddp, fsdp or hsdp.

    Gradients cross once a step. FSDP gathers the parameters for each forward and each backward pass besides:
    3 (n - 1) / n of them with one micro-batch, where DDP sends 2 (n - 1) / n.
    """
    whole = sum(figures.bucket_bytes)
    local = min(figures.gpus_per_node, gpus)
    nodes = nodes_of(figures, gpus)
    once = Sent((local - 1) / local * whole, (nodes - 1) / nodes * whole / local)
    gathered = 2 * figures.micro_batches_per_step
    times = {"ddp": Sent(2, 2), "fsdp": Sent(gathered + 1, gathered + 1), "hsdp": Sent(gathered + 1, 2)}
    return Sent(times[strategy].within * once.within, times[strategy].between * once.between)


def held(figures: Figures, gpus: int, strategy: str) -> float:
    """Bytes of weights, gradients and optimizer state that a GPU holds between steps."""
    sharing = {"ddp": 1, "fsdp": gpus, "hsdp": min(figures.gpus_per_node, gpus)}[strategy]
    return (figures.checkpoint_bytes + sum(figures.bucket_bytes)) / sharing


def strategies_table(figures: Figures, gpus: Sequence[int]) -> str:
    """Markdown: a row for each figure and strategy, a column for each number of GPUs."""
    lines = [f"| | {' | '.join(f'{one:,} GPUs' for one in gpus)} |", "|" + "---|" * (len(gpus) + 1)]
    for strategy in ("ddp", "fsdp", "hsdp"):
        told = [(sent(figures, one, strategy), held(figures, one, strategy)) for one in gpus]
        for label, values in (
            ("sends a step, within a node", [way.within for way, _ in told]),
            ("sends a step, between nodes", [way.between for way, _ in told]),
            ("holds between steps", [own for _, own in told]),
        ):
            cells = " | ".join(size(value).replace("\u00a0", " ") for value in values)
            lines.append(f"| {strategy}: {label} | {cells} |")
    return "\n".join(lines)
