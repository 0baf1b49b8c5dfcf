"""How many samples of a run others stood in for, told at its end."""

from trainer.config.data import DataConfig
from trainer.distributed.parallel import words_of_ranks
from trainer.train.state import Run

_PREFIX = "replaced/"


def gather_replaced(run: Run) -> dict[str, float]:
    """Corrupt samples of each data set in which there were any, over all ranks; collective.

    With data.on_corrupt=quarantine over all attempts, too: the run folder's file has them.
    """
    if run.recipe.data.on_corrupt == "fail":
        return {}
    counts = {}
    for what, quarantine in run.quarantines.items():
        words = words_of_ranks(" ".join(map(str, sorted(quarantine.samples))), run.world)
        counts[what] = len(set(" ".join(words).split()))
    return {f"{_PREFIX}{what}": float(count) for what, count in counts.items() if count}


def replaced_line(metrics: dict[str, float], data: DataConfig) -> str:
    """A line for the console; "" if none was replaced."""
    counts = [
        f"{count:,.0f} {name.removeprefix(_PREFIX)}"
        for name, count in metrics.items()
        if name.startswith(_PREFIX)
    ]
    if not counts:
        return ""
    named = "; quarantine.jsonl names them" if data.on_corrupt == "quarantine" else ""
    return f"  replaced     {', '.join(counts)} samples, which can't be decoded{named}\n"
