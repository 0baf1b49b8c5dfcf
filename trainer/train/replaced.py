"""Number of corrupt samples that were replaced by others, for the end of a run."""

from collections.abc import Mapping

from trainer.config.data import DataConfig
from trainer.data.corrupt import Quarantine
from trainer.distributed.parallel import World, words_of_ranks
from trainer.runs.report.read import REPLACED
from trainer.train.state import Run


def gather_replaced(run: Run) -> dict[str, float]:
    """Counts replaced samples over all ranks, by data set, for data sets that had any; collective.

    With data.on_corrupt=quarantine those of earlier attempts count, too: quarantine.jsonl has them.
    """
    if run.recipe.data.on_corrupt == "fail":
        return {}
    return count_replaced(run.quarantines, run.world)


def count_replaced(quarantines: Mapping[str, Quarantine], world: World) -> dict[str, float]:
    """Counts the samples of quarantines over all ranks, as `gather_replaced`; collective."""
    counts = {}
    for what, quarantine in quarantines.items():
        words = words_of_ranks(" ".join(map(str, sorted(quarantine.samples))), world)
        counts[what] = len(set(" ".join(words).split()))
    return {f"{REPLACED}{what}": float(count) for what, count in counts.items() if count}


def replaced_line(metrics: Mapping[str, float], data: DataConfig) -> str:
    """Returns a line for the console; "" if no sample was replaced."""
    counts = [
        f"{count:,.0f} {name.removeprefix(REPLACED)}"
        for name, count in metrics.items()
        if name.startswith(REPLACED)
    ]
    if not counts:
        return ""
    named = "; quarantine.jsonl names them" if data.on_corrupt == "quarantine" else ""
    return f"  replaced     {', '.join(counts)} samples, which can't be decoded{named}\n"
