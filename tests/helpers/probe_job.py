"""A job to be probed for its memory."""

from typing import Any

from tests.helpers.forked import small
from trainer.host.memory_room import Room
from trainer.launch.launcher import LocalRanks
from trainer.train.start.tune.job import Job


def job(room: Room | None = None, ranks: int = 1, workers: int = 1, **sections: Any) -> Job:
    """A real one, of a model that takes memory by the sample: little to compute, much to keep."""
    sizes = {"global_batch_size": 256, "micro_batch_size": 256, "eval_batch_size": 4}
    data: dict[str, Any] = {
        "image_size": 256,
        "samples": 64,
        "resident": False,
        "workers": workers,
        "prefetch": 1,
        **sizes,
    }
    data |= sections.pop("data", {})
    recipe = small(data=data, model={"width": 4}, **sections)
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    return Job(recipe, LocalRanks(ranks, 1, environment), 600.0, *([lambda: room] if room else []))
