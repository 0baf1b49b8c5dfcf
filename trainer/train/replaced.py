"""How many samples of a run others stood in for, told at its end."""

from collections.abc import Mapping

import torch.distributed as dist

from trainer.config.data import DataConfig
from trainer.data.corrupt import Quarantine
from trainer.distributed.parallel import World
from trainer.train.report.record import REPLACED
from trainer.train.state import Run


def gather_replaced(run: Run) -> dict[str, float]:
    """Corrupt samples of each data set in which there were any, over all ranks; collective.

    With data.on_corrupt=quarantine over all attempts, too: the run folder's file has them.
    """
    if run.recipe.data.on_corrupt == "fail":
        return {}
    return count_replaced(run.quarantines, run.world)


def count_replaced(quarantines: Mapping[str, Quarantine], world: World) -> dict[str, float]:
    """See `gather_replaced`; collective."""
    found = {what: quarantine.samples for what, quarantine in quarantines.items()}
    everywhere = [found]
    if world.group is not None:
        everywhere = [{} for _ in range(world.size)]
        dist.all_gather_object(everywhere, found, group=world.control or world.group)
    counts = {what: len(set().union(*(rank[what] for rank in everywhere))) for what in found}
    return {f"{REPLACED}{what}": float(count) for what, count in counts.items() if count}


def replaced_line(metrics: Mapping[str, float], data: DataConfig) -> str:
    """A line for the console; "" if none was replaced."""
    counts = [
        f"{count:,.0f} {name.removeprefix(REPLACED)}"
        for name, count in metrics.items()
        if name.startswith(REPLACED)
    ]
    if not counts:
        return ""
    named = "; quarantine.jsonl names them" if data.on_corrupt == "quarantine" else ""
    return f"  replaced     {', '.join(counts)} samples, which can't be decoded{named}\n"
