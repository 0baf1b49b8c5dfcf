"""A run's model as a table: for the start of a run, its manifest and its report."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer.config.recipe import Recipe
from trainer.distributed.sharding import own_rows
from trainer.models.parts import Part, parameters_of, parts
from trainer.observe.console import ProgressBar
from trainer.observe.flops import Count
from trainer.observe.text import DASH, count, rough_size, scaled
from trainer.optim.optimizers import moments_kept

ROWS = 14  # at most, and one for all of them


def top_parts(model: nn.Module) -> list[Part]:
    """The parts that a table of the model shows."""
    return parts(model, ROWS)


def describe_model(
    recipe: Recipe,
    model: nn.Module,
    shown: Sequence[Part],
    counted: Count,
    own_optimizer: bool = False,
    could_share: int = 0,
) -> dict[str, Any]:
    """The table as plain data.

    Args:
        counted: FLOPs by these parts.
        own_optimizer: Whether the optimizer is the task's own: nobody knows yet what that will keep.
        could_share: Ranks that hold the same each and needn't; 0: they don't, or it can't be shared.

    Returns:
        `rows` and `total`, each with its `block`, `kind`, `parameters`, `trainable`, `flops` of a step of all
        ranks (None where they couldn't be counted), and `bytes`: of weights, gradients and optimizer state on
        each rank, with the average of the weights if it lies on the device. Activations aren't among them.
    """
    held, samples = parameters_of(model, list(shown)), recipe.data.global_batch_size
    moments: Mapping[int, float] = {} if own_optimizer else moments_kept(recipe.optim, model)
    averages = int(recipe.ema.decay > 0 and not recipe.ema.on_cpu)
    rows: list[dict[str, Any]] = []
    for part in shown:
        own = held[part.name]
        flops = counted.by_part.get(part.name, 0.0) * samples
        if not own and not flops:  # an activation, a pooling: nothing to be told
            continue
        trained = [p for p in own if p.requires_grad]
        rows.append(
            {
                "block": part.name or "(besides)",
                "kind": part.kind,
                "parameters": sum(p.numel() for p in own),
                "trainable": sum(p.numel() for p in trained),
                "flops": flops if counted.per_sample else None,
                "bytes": sum(map(_here, own))
                + sum(round(_here(p) * (1 + averages + moments.get(id(p), 0))) for p in trained),
            }
        )
    total = {name: sum(row[name] for row in rows) for name in ("parameters", "trainable", "bytes")}
    memory = "weights, gradients" + ", optimizer state" * (not own_optimizer)
    memory += ", average of the weights" * averages
    memory += "; not the state of the task's own optimizer" * own_optimizer
    if could_share:
        each = rough_size(-(-total["bytes"] // could_share))
        memory += f"; {each} with parallel.strategy=fsdp, shared by {could_share} ranks"
    all_of_it: dict[str, Any] = {"block": "all", "kind": type(model).__name__, **total}
    all_of_it["flops"] = counted.per_sample * samples or None
    return {"rows": rows, "total": all_of_it, "memory": memory}


def _here(parameter: nn.Parameter) -> int:
    """Bytes of a parameter on this rank, between steps."""
    return own_rows(parameter.detach()).nbytes


def show_model(told: Mapping[str, Any], progress_bar: ProgressBar, device: torch.device) -> None:
    """Shows what `describe_model` gave, with what its memory is of."""
    heads = ("part", "", "parameters", "trainable", "FLOPs a step", "memory")
    rows = [_cells(row) for row in (*told["rows"], told["total"])]
    progress_bar.table(heads, rows, right=(2, 3, 4, 5), last_is_total=True)
    where = "GPU" if device.type == "cuda" else "rank"
    progress_bar.say(f"  memory of a {where}: {told['memory']}; activations come on top")


def _cells(row: Mapping[str, Any]) -> list[str]:
    flops = DASH if row["flops"] is None else scaled(row["flops"]).replace("\u00a0", " ")
    figures = [count(row["parameters"]), count(row["trainable"]), flops, rough_size(row["bytes"])]
    return [row["block"], row["kind"], *figures]
