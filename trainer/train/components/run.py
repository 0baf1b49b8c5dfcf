"""Construction of a run on this rank, with all that it trains with, on its device."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainer.config.data import LoaderConfig
from trainer.config.recipe import Recipe
from trainer.config.training import MAIN_SET
from trainer.data.corrupt import Quarantine
from trainer.data.items import HostGenerators, draws_alone
from trainer.data.left_out import left_out_lines
from trainer.data.loader import Source, make_loader
from trainer.data.sampling.plan import Share, evaluation_share
from trainer.data.workers import EVALUATION_WORKERS
from trainer.distributed.parallel import World, is_sharded, replicate
from trainer.distributed.sharding import shard
from trainer.errors import BadInputError
from trainer.host.allocator import CUBLAS_WORKSPACE
from trainer.models.activation_checkpointing import blocks, recompute
from trainer.models.batchnorm import StepStatistics
from trainer.models.buffers import StillTensors, tensor_slot
from trainer.models.precision import (
    check_precision,
    gathered_in,
    make_precision,
    set_matmul_mode,
)
from trainer.optim.average import WeightAverage
from trainer.rng import Purpose, key
from trainer.tasks import Task, loss_rows
from trainer.tasks.custom import DRAWS, CustomTask
from trainer.train.anomaly import make_recent_losses
from trainer.train.components.changing import find_changing
from trainer.train.components.loading import for_more_sets
from trainer.train.components.model import Prepared, prepare_model
from trainer.train.components.task import left_out_of, make_plan, more_sets
from trainer.train.components.updates import make_updates, words_for
from trainer.train.reduction import (
    AllReduce,
    FixedGradients,
    GivenCount,
    Gradients,
    ItemCount,
    RaggedItemCount,
    ReduceScatter,
    Reduction,
    ShardedGradients,
    TreeSum,
)
from trainer.train.state import EvaluationSet, Run, TrainState
from trainer.train.step import LossOf, ValuesOf


def build(
    recipe: Recipe,
    task: Task,
    world: World,
    workers: int,
    folder: Path | None = None,
    prefetch: int | None = None,
    fresh: bool = True,
) -> Run:
    """Builds the run of a rank: model, optimizer, loaders, reduction and state.

    Args:
        recipe: The configuration.
        task: Its task.
        world: The ranks.
        workers: Number of loader workers in place of data.workers=auto; the evaluation takes at most two.
        folder: The run folder, for the list of samples that can't be decoded; or None.
        prefetch: Batches that each loader worker prepares ahead; None: as configured.
        fresh: True to load pretrained weights; False if a checkpoint replaces them.

    Raises:
        BadInputError: If the recipe can't be trained with this model, data or device.
    """
    device, share = world.device, Share(make_plan(recipe, task), world.rank, world.size)
    plan, loading = share.plan, recipe.data.model_copy(update={"prefetch": prefetch or recipe.data.prefetch})
    check_precision(recipe.precision, device)
    set_matmul_mode(recipe.precision)
    set_determinism(recipe, device)
    prepared = prepare_model(recipe, task, world, fresh)
    model, in_tree = prepared.model, recipe.parallel.reduction == "tree"
    found = find_changing(recipe, task, model, plan, world)
    _checkpoint(prepared, found.changing)
    # The CPU's always: a model on a GPU may draw there (stochastic depth).
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    losses = loss_rows(task)
    gives_values = hasattr(task, "parts")
    loss_of = (ValuesOf if gives_values else LossOf)(task, prepared.call)  # type: ignore[arg-type]
    rows = None
    if is_sharded(recipe.parallel, world):
        parts, kind = blocks(model).values(), gathered_in(recipe.precision, model, device)
        rows = shard(model, parts, world, recipe.parallel, kind)
    replica = replicate(loss_of, world.group, recipe.parallel)
    average = WeightAverage(model, recipe.ema) if recipe.ema.decay else None
    optimizer, lr = make_updates(recipe, task, model, plan, device, generators)
    host_generators = HostGenerators() if _draws_on_host(task) and draws_alone() else None
    skips, sharing = recipe.anomaly.skips_updates, None if rows is None else rows.group
    precision = make_precision(recipe.precision, device, skips, sharing)
    statistics = StepStatistics(model, None if in_tree else world.group, found)
    # A CUDA graph that is replayed before its gradients are used would overwrite them.
    overwritten = prepared.cuda_graphs and (share.gradient_accumulation_steps > 1 or world.group is not None)
    gradients = FixedGradients(model) if overwritten else Gradients(model)
    reduction: Reduction = AllReduce(replica, world, statistics)
    if rows is not None:
        gradients = ShardedGradients(model, rows)
        reduction = ReduceScatter(model, world, statistics, share.gradient_accumulation_steps > 1)
    if in_tree:
        reduction = TreeSum(gradients, world, statistics, recipe.parallel.bucket_mb)
    count_items = RaggedItemCount if "num_items" in task.train_data.fields else ItemCount
    items = count_items(plan, task.train_data.num_items, world.group)
    if gives_values:
        items = GivenCount(items, len(losses), reduction.loss_group)
    # Below 2**62, so that adding the micro-batch's number never overflows.
    first_key = (key(plan.seed, Purpose.MICRO_BATCH) >> 2) + share.rank * share.gradient_accumulation_steps
    source = Source(task.train_data, share, task.train_data.uniforms + task.uniforms)
    file = folder / "quarantine.jsonl" if folder and recipe.data.on_corrupt == "quarantine" else None

    def quarantine(what: str, samples: int) -> Quarantine:
        return Quarantine(what, recipe.data.corrupt_samples(samples), file)

    in_training = quarantine("training", plan.samples)
    loader = make_loader(source, device, loading, workers, in_training)
    (main, *others), in_evaluation = _evaluation_sets(recipe, task, world, loading, workers, quarantine)
    return Run(
        state=TrainState(
            model=model,
            optimizer=optimizer,
            lr=lr,
            scaler=precision.scaler,
            average=average,
            statistics=statistics,
            loss=torch.zeros((1 + len(losses),) if losses else (), dtype=torch.float64, device=device),
            norm=torch.zeros((), device=device),
            left_out=torch.zeros((), dtype=torch.float64, device=device) if skips else None,
            rows=rows,
        ),
        recipe=recipe,
        task=task,
        world=world,
        share=share,
        replica=replica,
        gradients=gradients,
        reduction=reduction,
        precision=precision,
        items=items,
        recent=make_recent_losses(recipe.anomaly, recipe.log.every, device),
        nonfinite=prepared.nonfinite,
        generators=(*generators, *([host_generators] if host_generators else [])),
        host_generators=host_generators,
        still=StillTensors(model, found.still) if found.still else None,
        first_key=first_key,
        loader=loader,
        evaluation_loader=main.loader,
        evaluation_share=main.share,
        compiled=prepared.compiled,
        notes=(
            *getattr(task, "notes", ()),
            *left_out_lines(left_out_of(task)),
            *([] if plan.draws is None else [plan.draws.told()]),
            *prepared.notes,
            *found.notes,
            *([] if rows is None else [rows.note]),
            *words_for(task, recipe.optim, model, optimizer),
        ),
        losses=losses,
        quarantines={"training": in_training, **in_evaluation},
        evaluation_sets=tuple(others),
    )


def _draws_on_host(task: Task) -> bool:
    """True if a custom task's loss draws from numpy's or Python's generators, or wasn't tried."""
    return isinstance(task, CustomTask) and (not task.tried or DRAWS in task.tried)


def _checkpoint(prepared: Prepared, changing: Sequence[str]) -> None:
    """Checkpoints the chosen modules, with the tensors in them that a forward pass changes."""
    slots = [tensor_slot(prepared.model, name) for name in changing]
    for module in prepared.checkpointed:
        inside = {*module.modules()}
        own = [slot for slot in slots if slot.module in inside]
        if own and prepared.compiled:
            raise BadInputError(
                f"memory.checkpointing: a module changes '{own[0].key}', from whose earlier values backward "
                "repeats it, which compiled code can't: use compile.mode=none, or leave it out"
            )
        recompute(module, own)


def _evaluation_sets(
    recipe: Recipe,
    task: Task,
    world: World,
    loading: LoaderConfig,
    workers: int,
    quarantine: Callable[[str, int], Quarantine],
) -> tuple[list[EvaluationSet], dict[str, Quarantine]]:
    """Returns the evaluation sets with their loaders, the main one first, and their quarantines by name."""
    sets, quarantines = list[EvaluationSet](), dict[str, Quarantine]()
    for name, dataset in {MAIN_SET: task.evaluation_data, **more_sets(task)}.items():
        what = "evaluation" if name == MAIN_SET else f"evaluation.sets.{name}"
        size = min(recipe.data.eval_batch_size, len(dataset))
        source = Source(dataset, evaluation_share(len(dataset), size, world.rank, world.size))
        quarantines[what] = quarantine(what, len(dataset))
        config = loading if name == MAIN_SET else for_more_sets(loading)
        loader = make_loader(
            source, world.device, config, min(workers, EVALUATION_WORKERS), quarantines[what]
        )
        sets.append(EvaluationSet(name, loader, source.share))
    return sets, quarantines


def set_determinism(recipe: Recipe, device: torch.device) -> None:
    """Sets torch's switches for deterministic algorithms and for cuDNN's kernels.

    See https://docs.pytorch.org/docs/stable/notes/randomness.html. Without deterministic=true a run on GPUs
    resumes with the same state, samples and randomness, but atomic additions vary in their order.

    Raises:
        BadInputError: If cuBLAS was used before in this process without its workspace setting.
    """
    # cuDNN's benchmark may choose another algorithm in the next process.
    torch.backends.cudnn.benchmark = recipe.cudnn_benchmark and not recipe.deterministic
    # From torch 2.11 on it is the first choice on an H100, where its gradients can be NaN with a mask
    # (https://github.com/pytorch/pytorch/issues/196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(recipe.deterministic)
    if recipe.deterministic:
        os.environ.setdefault(*CUBLAS_WORKSPACE)
        # Nothing here reads memory that it didn't write (a test fills it with NaN).
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if device.type == "cuda":
            _try_cublas(device)


def _try_cublas(device: torch.device) -> None:
    """Multiplies once, as torch reads the variable only at the first multiplication of a process."""
    try:
        torch.mm(*[torch.ones(1, 1, device=device)] * 2)
    except RuntimeError as error:
        name, value = CUBLAS_WORKSPACE
        if name not in str(error):
            raise
        raise BadInputError(
            f"deterministic=true: this process has multiplied on a GPU without {name}={value}; set that in "
            "its environment before it starts, or use trainer train, which does"
        ) from error
