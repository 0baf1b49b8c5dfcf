"""Memory of a run: what a rank holds, and whether it fits, here and on disk; the table of the model."""

import contextlib
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import nn

from trainer.checkpoint import CHECKPOINTS
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World, is_sharded
from trainer.distributed.sharding import own_rows, weights
from trainer.errors import BadInputError
from trainer.host.memory_room import Room, read_room
from trainer.models.activation_checkpointing import blocks
from trainer.models.activations import KeptBytes
from trainer.models.modes import begin_training
from trainer.models.parts import Part, parameters_of, parts
from trainer.models.precision import gathered_in
from trainer.observe.console import ProgressBar
from trainer.observe.flops import Count
from trainer.observe.text import DASH, count, rough_size, scaled
from trainer.optim.optimizers import bytes_of_moments, moments_kept
from trainer.runs.checkpoint_place import checkpoints_of
from trainer.tasks import Task
from trainer.train.components.operations import blank_batch
from trainer.train.components.updates import brings_optimizer

ROWS = 14  # of the table of the model at most, and one for all of them


class RankMemory(NamedTuple):
    """Bytes that a rank holds when it holds most, in a backward pass; activations aren't among them.

    Attributes:
        kept: Weights, moments and average: held between steps, too.
        gathered: Whole parameters, while it computes.
        gradients: This rank's rows of them, and whole ones while it computes.
    """

    kept: int
    gathered: int
    gradients: int


def rank_memory(
    blocks: Sequence[int], rest: int, ranks: int, copies: int, *, accumulates: bool, low: bool = False
) -> RankMemory:
    """The memory of one of the ranks that share a model, all of it trained.

    While a block is computed backward it is whole, the one before it is being gathered, its gradient grows,
    and that of the one after it is being summed over the ranks. The rest of the model is whole all the time.

    Args:
        blocks: Bytes of each block's parameters.
        rest: Bytes of the parameters outside of blocks.
        ranks: How many share the model; 1: nothing is gathered.
        copies: Tensors kept of a parameter besides it: the optimizer's moments, an average.
        accumulates: Whether a step has several micro-batches: until the last one gradients are whole.
        low: Whether blocks are gathered in half their bytes (bfloat16); gradients are summed in full.
    """
    whole = sum(blocks) + rest
    if ranks == 1:
        return RankMemory((1 + copies) * whole, 0, whole)
    own, largest = -(-whole // ranks), max(blocks, default=0)
    computed = largest // 2 if low else largest
    before = whole if accumulates else own + rest
    return RankMemory((1 + copies) * own, rest + 2 * computed, before + computed + largest)


def memory_to_come(
    recipe: Recipe, task: Task, model: nn.Module, world: World, spare: float = 0
) -> dict[str, int]:
    """Bytes of memory that a rank will want in its first step, by what for: an upper bound.

    Activations are counted with shapes alone, in the precision of the weights; not where the model needs
    values, where it or its task is the user's own, nor where they are computed again, nor where they fit into
    `spare` bytes by far: counting makes torch import its compiler, a second of CPU. Of a GPU they aren't.
    """
    learned = sum(p.nbytes for p in weights(model).values() if p.requires_grad)
    own_optimizer = brings_optimizer(task)
    sharded = is_sharded(recipe.parallel, world)
    copies = 1 + (world.group is not None and not sharded)  # with DDP's buckets
    state = copies * learned + (0 if own_optimizer else bytes_of_moments(recipe.optim, model, own=True))
    activations = 0
    own = recipe.model.name == "own" or recipe.task not in ("classification", "language", "audio")
    numbers = recipe.data.micro_batch_size * sum(math.prod(f.shape) for f in task.train_data.fields.values())
    # A layer makes no more of a number than it has weights; those kept are 50 to 100,000 times fewer.
    most = 4 * numbers * sum(p.numel() for p in model.parameters())
    counted = world.device.type == "cpu" and recipe.memory.checkpointing == "none"
    if not own and most + state >= spare and counted:
        with contextlib.suppress(RuntimeError, ValueError, TypeError, AttributeError, AssertionError):
            meta = torch.device("meta")
            with meta:
                shapes = task.model()
                begin_training(shapes)
            kept = KeptBytes(shapes.parameters())
            with kept.counting():
                task.loss(shapes, blank_batch(task, recipe.data.micro_batch_size, meta))
            activations = kept.bytes_without()
    what = "gradients (the state of the task's own optimizer comes on top)"
    return {
        "activations": activations,
        **({"gathered parameters and gradients": _gathered(recipe, model, world)} if sharded else {}),
        what if own_optimizer else "gradients and optimizer state": state,
    }


def _gathered(recipe: Recipe, model: nn.Module, world: World) -> int:
    """Bytes of whole parameters and gradients that a rank of a sharded run holds while it computes."""
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks(model).values()]
    rest = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    accumulates = recipe.data.global_batch_size > recipe.data.micro_batch_size * world.size
    low = gathered_in(recipe.precision, model, world.device) is not None
    ranks = recipe.parallel.shard or world.size
    needs = rank_memory(sizes, rest, ranks, 0, accumulates=accumulates, low=low)
    return needs.gathered + needs.gradients - needs.kept  # the rows of weights and gradients are as many


def could_be_sharded(recipe: Recipe, task: Task, ranks: int) -> bool:
    """Whether a run of several ranks holds the same model on each of them, and needn't."""
    if recipe.parallel.strategy != "ddp" or ranks == 1 or brings_optimizer(task):
        return False
    values = recipe.model_dump()
    values["parallel"] |= {"strategy": "fsdp"}
    try:
        Recipe.model_validate(values)
    except ValidationError:
        return False
    # By the number: to look, as check_sharding does, takes an import of seconds.
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)


def saved_by_sharding(recipe: Recipe, task: Task, model: nn.Module, world: World) -> int:
    """Bytes that a rank of a DDP run would hold less at most with parallel.strategy=fsdp; 0: nothing."""
    if not could_be_sharded(recipe, task, world.size):
        return 0
    whole = sum(p.nbytes for p in model.parameters())
    learned = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    kept = whole + _averages(recipe) * learned + bytes_of_moments(recipe.optim, model)
    ddp = kept + 2 * learned  # with DDP's buckets
    rows = (kept + learned) / world.size
    return max(0, int(ddp - rows) - _gathered(recipe, model, world))


def _averages(recipe: Recipe) -> int:
    """How many averages of the weights a rank holds on its device."""
    return int(recipe.ema.decay > 0)


def memory_warning(recipe: Recipe, task: Task, model: nn.Module, world: World, loading_bytes: int) -> str:
    """A line about memory that won't be enough for a model that lies on its device, or nothing.

    Args:
        loading_bytes: What the loaders of a rank will take of the container's memory.
    """
    gpu = world.device.type == "cuda"
    if world.local_rank:
        return ""
    room, sharing = (room_of_gpu(world.device), 1) if gpu else (read_room(), world.local_size)
    needs = memory_to_come(recipe, task, model, world, room.spare_bytes / sharing)
    if loading_bytes and not gpu:
        needs["loading"] = loading_bytes
    return too_much(room, sharing, needs, saved_by_sharding(recipe, task, model, world), world.size, gpu)


def room_of_gpu(device: torch.device) -> Room:
    """A GPU's memory; what torch keeps for the next tensor counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Room(total, total - free - kept, f"GPU {device.index}")


def too_much(
    room: Room, ranks: int, needs: Mapping[str, int], saved: int = 0, shared_by: int = 0, gpu: bool = False
) -> str:
    """A line about memory that won't be enough, or nothing.

    Args:
        room: The container's memory, or a GPU's, once the ranks have their models.
        ranks: How many use it.
        needs: Bytes that each of them will want besides, by what for.
        saved: From `saved_by_sharding`.
        shared_by: Ranks that would share the model then.
        gpu: Whether it is a GPU's.
    """
    if ranks * sum(needs.values()) <= room.spare_bytes:
        return ""
    fitting = saved and ranks * (sum(needs.values()) - saved) <= room.spare_bytes
    shared = (
        f", or share weights, gradients and moments among the {shared_by} ranks by parallel.strategy=fsdp, "
        f"which takes {saved / 1e9:.2f} GB less on each and would be enough"
        if fitting
        else ""
    )
    parts = ", ".join(f"{size / 1e9:.2f} GB of {what}" for what, size in needs.items() if size)
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    full = (
        "and activations on top; when it is full, the step ends with an error: lower "
        "data.micro_batch_size, or set memory.checkpointing=blocks, which spares activations alone"
        if gpu
        else "when it is full, the kernel kills a process: lower data.micro_batch_size, data.workers or "
        "data.prefetch, or start fewer ranks"
    )
    return (
        f"memory may not be enough: of {room.limit_bytes / 1e9:.2f} GB ({room.source}) "
        f"{room.others_bytes / 1e9:.2f} GB are in use, and{each} come up to {parts}{', ' if gpu else '; '}"
        f"{full}{shared}"
    )


def check_space(folder: Path, recipe: Recipe, model: nn.Module, own_optimizer: bool = False) -> None:
    """Makes sure that checkpoints and final weights will fit on the disk.

    What earlier attempts left of them counts as free: it is replaced. The state of a task's own optimizer
    isn't counted: nobody knows it yet.

    Raises:
        BadInputError: If they won't.
    """
    more = " and the state of the task's own optimizer" * own_optimizer
    kept = recipe.checkpoint.keep + recipe.checkpoint.best + 1
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    average = sum(p.nbytes for p in model.parameters() if p.requires_grad) if recipe.ema.decay else 0
    state = 0 if own_optimizer else bytes_of_moments(recipe.optim, model)
    final = whole * (2 if recipe.ema.decay else 1)
    place, saved = checkpoints_of(folder), kept * (whole + average + state)
    ours, inside = [*folder.glob("*.safetensors")], place == folder / CHECKPOINTS
    if not inside:
        _check_room(place, [*place.rglob("*")], saved, more, "checkpoint.folder")
    ours, saved = ([*ours, *place.rglob("*")], saved) if inside else (ours, 0)
    _check_room(folder, ours, final + saved + (4 << 20), more, "--out")


def _check_room(folder: Path, ours: Sequence[Path], wanted: int, more: str, key: str) -> None:
    taken = sum(path.lstat().st_size for path in ours if path.is_file())
    free = shutil.disk_usage(folder).free + taken
    if free < wanted:
        raise BadInputError(
            f"{folder}: {free >> 20} MiB are free but the run writes about {(wanted >> 20) + 1} MiB{more}; "
            f"give another {key}"
        )


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
    averages = _averages(recipe)
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
    progress_bar.say(f"  memory of a {where}: {told['memory']}; activations come on top of that")


def _cells(row: Mapping[str, Any]) -> list[str]:
    flops = DASH if row["flops"] is None else scaled(row["flops"]).replace("\u00a0", " ")
    figures = [count(row["parameters"]), count(row["trainable"]), flops, rough_size(row["bytes"])]
    return [row["block"], row["kind"], *figures]
