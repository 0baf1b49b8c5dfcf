"""Program of a rank of `trainer evaluate`: `python -m trainer.commands.evaluate.rank LAUNCH_FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

from trainer.launch.worker import Worker

RESULT = "result.json"
_WORKERS = 2  # as in training, whose evaluations take two at most
_TIMEOUT_SECONDS = 1800.0


def measure_run(opened: Any, world: Any, results: bool = False) -> dict[str, Any]:
    """Measures a model with all ranks, and returns the same result on each.

    Args:
        opened: Result of `asked`; its model is moved to this rank's device.
        world: The ranks, a `trainer.distributed.parallel.World`.
        results: True for the entries of COCO's results file, too.
    """
    import torch

    from trainer.commands.evaluate.details import add_pictures, with_details
    from trainer.data.corrupt import Quarantine
    from trainer.data.loader import Source, make_loader
    from trainer.data.sampling.plan import evaluation_share
    from trainer.models.pointwise import mend_pointwise
    from trainer.models.precision import check_precision, fp32_modules, keep_in_fp32, set_matmul_mode
    from trainer.tasks import Deriving
    from trainer.train.components.run import set_determinism
    from trainer.train.evaluate import evaluate
    from trainer.train.summary import count_replaced

    recipe = opened.recipe
    torch.set_num_threads(opened.threads)
    check_precision(recipe.precision, world.device)
    set_matmul_mode(recipe.precision)
    set_determinism(recipe, world.device)
    layout = torch.channels_last if recipe.model.channels_last else torch.preserve_format
    model = opened.model.to(device=world.device, memory_format=layout)
    mend_pointwise(model)
    if kept := fp32_modules(model, recipe.precision.keep_fp32):
        keep_in_fp32(kept.values(), world.device)
    data = opened.task.evaluation_data
    size = min(recipe.data.eval_batch_size, len(data))
    share = evaluation_share(len(data), size, world.rank, world.size)
    quarantine = Quarantine("evaluation", recipe.data.corrupt_samples(len(data)), None)
    workers = 0 if data.arrays is not None else _WORKERS
    loader = make_loader(Source(data, share), world.device, recipe.data, workers, quarantine)
    task = with_details(opened.task, results)
    metrics = evaluate(task, model, loader, share, world, recipe.precision)
    if isinstance(task, Deriving):
        metrics |= task.derived(metrics)
    if world.rank == 0:
        add_pictures(task.details.get("mistakes", ()), opened.task)
    return {
        "run": str(opened.folder),
        "weights": opened.weights,
        "set": recipe.evaluation.decides,
        "samples": len(data),
        "left_out": [one.model_dump() for one in getattr(data, "left_out", ())],
        "replaced": int(sum(count_replaced({"evaluation": quarantine}, world).values())),
        "metrics": metrics,
        "classes": list(getattr(task, "classes", ())),
        **task.details,
    }


def asked(request: dict[str, Any]) -> Any:
    """Opens what a request names: a run, or a recipe and a file of weights."""
    if request["file"] is not None:
        from trainer.commands.evaluate.weights import open_weights

        return open_weights(request["what"], request["file"], request["settings"], request["on"])
    from trainer.train.model_of_run import open_run

    which = {name: request[name] for name in ("settings", "checkpoint", "weights", "on")}
    return open_run(Path(request["what"]), **which)


def main(request: dict[str, Any]) -> int:
    """Measures as a rank; the first rank writes the result to a file."""
    import os

    from trainer.distributed.parallel import joined_world
    from trainer.host.files import write_whole
    from trainer.train.components.task import device_kind

    opened = asked(request)
    with joined_world(device_kind(opened.recipe), _TIMEOUT_SECONDS) as world:
        result = measure_run(opened, world, request["results"])
    if os.environ["RANK"] == "0":
        write_whole(Path(request["result"]), json.dumps(result))
    return 0


if __name__ == "__main__":
    with Worker(sys.argv[1]) as worker:
        worker.code = main(worker.request)
    sys.exit(worker.exit_code)
