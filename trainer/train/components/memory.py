"""Memory and disk space that a run needs, warnings where they don't suffice, and the table of the model."""

import contextlib
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import nn

from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World, is_sharded
from trainer.distributed.sharding import own_rows, weights
from trainer.errors import BadInputError
from trainer.host.memory_room import Room, read_room
from trainer.host.stacks import numbers
from trainer.models.activation_checkpointing import blocks
from trainer.models.activations import KeptBytes
from trainer.models.modes import begin_training
from trainer.models.parts import Part, parameters_of, parts
from trainer.models.precision import gathered_in
from trainer.observe.console import ProgressBar
from trainer.observe.flops import Count
from trainer.observe.text import DASH, count, rough_size, scaled, table as as_table
from trainer.optim.average import average_dtype
from trainer.optim.optimizers import bytes_of_moments, moments_kept
from trainer.runs.folder import checkpoints_of
from trainer.tasks import Task
from trainer.train.components.operations import blank_batch
from trainer.train.components.updates import brings_optimizer

ROWS = 14  # most rows of the table of the model, without the total


class RankMemory(NamedTuple):
    """Peak memory of a rank in bytes, in its backward pass, without activations.

    Attributes:
        kept: Weights, optimizer state and average, which are held between steps, too.
        gathered: Unsharded parameters during the pass.
        gradients: This rank's rows of the gradients, and unsharded gradients during the pass.
    """

    kept: int
    gathered: int
    gradients: int


def rank_memory(
    blocks: Sequence[int], rest: int, ranks: int, copies: int, *, accumulates: bool, low: bool = False
) -> RankMemory:
    """Estimates the peak memory of a rank of a sharded model whose parameters are all trained.

    In the backward pass of a block, its parameters are unsharded, those of the block before are being
    gathered, its gradient is being computed, and the gradient of the block after is being reduced. Parameters
    outside of blocks are unsharded all the time.

    Args:
        blocks: Bytes of each block's parameters.
        rest: Bytes of the parameters outside of blocks.
        ranks: Ranks that share the model; 1: it isn't sharded.
        copies: Further tensors that are kept for each parameter: the optimizer's moments, an average.
        accumulates: True if a step has several micro-batches: gradients are unsharded until the last one.
        low: True if blocks are gathered in bfloat16, half their bytes; gradients are reduced in full.
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
    """Returns an upper bound of the memory that a rank allocates in its first step, in bytes by purpose.

    Activations are counted with shapes only, in the precision of the weights. They are left out on a GPU, if
    the model needs values, if it or its task is the user's own, with activation checkpointing, and if they
    fit into `spare` bytes by far: counting makes torch import its compiler, a second of CPU.
    """
    learned = sum(p.nbytes for p in weights(model).values() if p.requires_grad)
    own_optimizer = brings_optimizer(task)
    sharded = is_sharded(recipe.parallel, world)
    copies = 1 + (world.group is not None and not sharded)  # with DDP's buckets
    state = copies * learned + (0 if own_optimizer else bytes_of_moments(recipe.optim, model, own=True))
    activations = 0
    own = recipe.model.name == "own" or recipe.task not in ("classification", "language", "audio")
    numbers = recipe.data.micro_batch_size * sum(math.prod(f.shape) for f in task.train_data.fields.values())
    # A layer multiplies its input at most by its number of weights; what is kept is 50 to 100,000 times less.
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
    """Returns the bytes of unsharded parameters and gradients in the backward pass of a sharded run."""
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks(model).values()]
    rest = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    accumulates = recipe.data.global_batch_size > recipe.data.micro_batch_size * world.size
    low = gathered_in(recipe.precision, model, world.device) is not None
    ranks = recipe.parallel.shard or world.size
    needs = rank_memory(sizes, rest, ranks, 0, accumulates=accumulates, low=low)
    return needs.gathered + needs.gradients - needs.kept  # rows of gradients are as large as rows of weights


def could_be_sharded(recipe: Recipe, task: Task, ranks: int) -> bool:
    """True if a run of several ranks holds the whole model on each and could shard it."""
    if recipe.parallel.strategy != "ddp" or ranks == 1 or brings_optimizer(task):
        return False
    values = recipe.model_dump()
    values["parallel"] |= {"strategy": "fsdp"}
    try:
        Recipe.model_validate(values)
    except ValidationError:
        return False
    # By the version: to try, as check_sharding does, takes an import of seconds.
    return numbers(torch.__version__) >= [2, 9]


def memory_warning(recipe: Recipe, task: Task, model: nn.Module, world: World, loading_bytes: int) -> str:
    """Returns a warning, on the first rank of a host, if memory may not suffice for a run; else "".

    Args:
        recipe: The configuration.
        task: Its task.
        model: The model, on its device.
        world: The ranks.
        loading_bytes: Memory that the loaders of a rank will take, of the container's.
    """
    gpu = world.device.type == "cuda"
    if world.local_rank:
        return ""
    room, sharing = (room_of_gpu(world.device), 1) if gpu else (read_room(), world.local_size)
    needs = memory_to_come(recipe, task, model, world, room.spare_bytes / sharing)
    if loading_bytes and not gpu:
        needs["loading"] = loading_bytes
    return too_much(room, sharing, needs, could_be_sharded(recipe, task, world.size), gpu)


def room_of_gpu(device: torch.device) -> Room:
    """Returns a GPU's memory; torch's cached blocks count as free."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Room(total, total - free - kept, f"GPU {device.index}")


def too_much(
    room: Room, ranks: int, needs: Mapping[str, int], could_share: bool = False, gpu: bool = False
) -> str:
    """Returns a warning if memory may not suffice; "" if it does.

    Args:
        room: Memory of the container or a GPU, when the ranks have their models.
        ranks: Number of ranks that use it.
        needs: Bytes that each rank will allocate in addition, by purpose.
        could_share: True if the ranks could share the model, from `could_be_sharded`.
        gpu: True for a GPU's memory.
    """
    if ranks * sum(needs.values()) <= room.spare_bytes:
        return ""
    shared = ", or share the model among the ranks by parallel.strategy=fsdp" * could_share
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
    """Checks that checkpoints and final weights will fit on the disk.

    Files of earlier attempts count as free: they are replaced. The state of a task's own optimizer isn't
    counted, as it is unknown before its first step.

    Raises:
        BadInputError: If they don't fit.
    """
    more = " and the state of the task's own optimizer" * own_optimizer
    kept = recipe.checkpoint.keep + recipe.checkpoint.best + 1
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    average = 0
    if recipe.ema.decay:
        average = sum(p.numel() * average_dtype(p).itemsize for p in model.parameters() if p.requires_grad)
    state = 0 if own_optimizer else bytes_of_moments(recipe.optim, model)
    final = whole * (2 if recipe.ema.decay else 1)
    ours = [*folder.glob("*.safetensors"), *checkpoints_of(folder).rglob("*")]
    wanted = final + kept * (whole + average + state) + (4 << 20)
    taken = sum(path.lstat().st_size for path in ours if path.is_file())
    free = shutil.disk_usage(folder).free + taken
    if free < wanted:
        raise BadInputError(
            f"{folder}: {free >> 20} MiB are free but the run writes about {(wanted >> 20) + 1} MiB{more}; "
            f"give another run folder"
        )


def top_parts(model: nn.Module) -> list[Part]:
    """Returns the parts that the table of the model shows."""
    return parts(model, ROWS)


def describe_model(
    recipe: Recipe,
    model: nn.Module,
    shown: Sequence[Part],
    counted: Count,
    own_optimizer: bool = False,
    could_share: int = 0,
) -> dict[str, Any]:
    """Describes a model as a table, for manifest and console.

    Args:
        recipe: The configuration.
        model: The model.
        shown: The parts that are its rows.
        counted: FLOPs of a sample, by part.
        own_optimizer: True if the optimizer is the task's own: its state is unknown before its first step.
        could_share: Number of ranks that hold the whole model and could shard it; 0 if it can't be sharded.

    Returns:
        `rows` and `total`, each with its `block`, `kind`, `parameters`, `trainable`, `flops` of a step of all
        ranks (None where they couldn't be counted), and `bytes`: of weights, gradients and optimizer state on
        each rank, with the average of the weights if it lies on the device. Activations aren't among them.
    """
    held, samples = parameters_of(model, list(shown)), recipe.data.global_batch_size
    moments: Mapping[int, float] = {} if own_optimizer else moments_kept(recipe.optim, model)

    def copies(p: nn.Parameter) -> float:  # gradient, average and moments, in sizes of the parameter
        average = average_dtype(p).itemsize / p.element_size() if recipe.ema.decay else 0
        return 1 + average + moments.get(id(p), 0)

    rows: list[dict[str, Any]] = []
    for part in shown:
        own = held[part.name]
        flops = counted.by_part.get(part.name, 0.0) * samples
        if not own and not flops:  # such as an activation or a pooling
            continue
        trained = [p for p in own if p.requires_grad]
        rows.append(
            {
                "block": part.name or "(besides)",
                "kind": part.kind,
                "parameters": sum(p.numel() for p in own),
                "trainable": sum(p.numel() for p in trained),
                "flops": flops if counted.per_sample else None,
                "bytes": sum(map(_here, own)) + sum(round(_here(p) * copies(p)) for p in trained),
            }
        )
    total = {name: sum(row[name] for row in rows) for name in ("parameters", "trainable", "bytes")}
    memory = "weights, gradients" + ", optimizer state" * (not own_optimizer)
    memory += ", average of the weights" * (recipe.ema.decay > 0)
    memory += "; not the state of the task's own optimizer" * own_optimizer
    if could_share:
        each = rough_size(-(-total["bytes"] // could_share))
        memory += f"; {each} with parallel.strategy=fsdp, shared by {could_share} ranks"
    last_row: dict[str, Any] = {"block": "all", "kind": type(model).__name__, **total}
    last_row["flops"] = counted.per_sample * samples or None
    return {"rows": rows, "total": last_row, "memory": memory}


def _here(parameter: nn.Parameter) -> int:
    """Returns the bytes of a parameter on this rank, between steps."""
    return own_rows(parameter.detach()).nbytes


def show_model(table: Mapping[str, Any], progress_bar: ProgressBar, device: torch.device) -> None:
    """Prints the table of `describe_model`."""
    heads = ("part", "", "parameters", "trainable", "FLOPs a step", "memory")
    rows = [_cells(row) for row in (*table["rows"], table["total"])]
    for line in as_table(heads, rows, left=(0, 1)).splitlines():
        progress_bar.say(f"  {line}")
    where = "GPU" if device.type == "cuda" else "rank"
    progress_bar.say(f"  memory of a {where}: {table['memory']}; activations come on top of that")


def _cells(row: Mapping[str, Any]) -> list[str]:
    flops = DASH if row["flops"] is None else scaled(row["flops"]).replace("\u00a0", " ")
    figures = [count(row["parameters"]), count(row["trainable"]), flops, rough_size(row["bytes"])]
    return [row["block"], row["kind"], *figures]
