"""A run: assembled from its recipe, trained, and written to its folder."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.tensor_file import is_storable
from trainer.config.recipe import Recipe
from trainer.data.check import Part, check_data
from trainer.data.corrupt import Quarantine
from trainer.data.dataset import Dataset
from trainer.data.loader import Loader, Source, make_loader
from trainer.data.sampling.plan import Plan, Share, evaluation_share
from trainer.data.sources import order_of
from trainer.distributed.parallel import World, replicate
from trainer.distributed.tree import TreeReduction, shares_a_tree
from trainer.errors import BadInputError
from trainer.launch.rank import is_rank
from trainer.models.activation_checkpointing import blocks, candidates
from trainer.models.batchnorm import StepStatistics, batchnorm_buffers
from trainer.models.precision import autocast, check_precision, fp32_modules, make_scaler, set_matmul_mode
from trainer.models.weights import load_initial
from trainer.optim.optimizers import Rates, make_optimizer, parameter_groups, schedule
from trainer.tasks import Checked, Task
from trainer.train.anomaly import make_ring
from trainer.train.changing import find_changing
from trainer.train.prepare import blank_batch, prepare_model, shapes_only
from trainer.train.step import LossOf, Training


def make_task(recipe: Recipe) -> Task:
    """Opens the data and makes the task that a recipe names.

    Raises:
        BadInputError: If the data isn't there or isn't what it should be.
    """
    data, model, seed = recipe.data, recipe.model, recipe.seed
    if recipe.task == "classification":
        from trainer.tasks.classification import Classification

        return Classification(data, model, recipe.regularization, seed)
    if recipe.task == "language":
        from trainer.tasks.language import Language

        return Language(data, model, recipe.language, seed)
    if recipe.task == "audio":
        from trainer.tasks.audio import Audio

        return Audio(data, model, recipe.audio, seed)
    if recipe.task == "detection":
        from trainer.tasks.detection import Detection

        return Detection(data, model, recipe.detection, seed)
    if recipe.task == "own":
        raise BadInputError("task=own: its class was given to trainer.fit, which alone can go on with it")
    from trainer.tasks.custom import custom_task

    return custom_task(Path(recipe.task))


def data_of(task: Task) -> dict[str, str]:
    """What the data is and how it is shuffled, for comparison with that of another attempt."""
    _, together = order_of(task.train_data)
    source = getattr(task, "source_hash", None)
    return {
        **({"task": source} if source else {}),
        "training data": task.train_data.fingerprint(),
        "evaluation data": task.evaluation_data.fingerprint(),
        "order": _order(task.train_data, together),
    }


def _order(dataset: Dataset, together: int) -> str:
    buckets = getattr(dataset, "buckets", ())
    if buckets:
        return f"shuffled in {len(buckets)} buckets of {' '.join(map(str, buckets))} samples"
    return f"shuffled within {together} pieces" if together else "shuffled"


def check_files(recipe: Recipe, task: Task) -> None:
    """Looks up what the data names, as data.check says; in the launcher, once on each node.

    Raises:
        BadInputError: If files are missing, or samples can't be decoded.
    """
    parts = (("training", task.train_data), ("evaluation", task.evaluation_data))
    check_data(
        recipe.data.check,
        isinstance(recipe.data.path, str),
        [Part(what, dataset, recipe.data.corrupt_samples(len(dataset))) for what, dataset in parts],
    )


def make_plan(recipe: Recipe, task: Task) -> Plan:
    """The order of a run."""
    pieces, together = order_of(task.train_data)
    return Plan(
        samples=len(task.train_data),
        global_batch_size=recipe.data.global_batch_size,
        micro_batch_size=recipe.data.micro_batch_size,
        epochs=recipe.epochs,
        last=recipe.data.last_batch,
        seed=recipe.seed,
        max_steps=recipe.max_steps,
        pieces=pieces,
        together=together,
        buckets=getattr(task.train_data, "buckets", ()),
    )


def check_request(recipe: Recipe, task: Task, world_size: int) -> None:
    """Finds what would fail on every rank, before there are any.

    Raises:
        BadInputError: What is wrong, and the remedy.
    """
    if isinstance(task, Checked) and not is_rank(os.environ):
        task.check()  # once, in the launcher
    plan = make_plan(recipe, task)
    if world_size > plan.samples:
        raise BadInputError(
            f"{world_size} ranks for {plan.samples} samples: use at most {plan.samples} "
            f"rank{'s' * (plan.samples > 1)}"
        )
    each = Share(plan, 0, world_size).gradient_accumulation_steps
    if recipe.parallel.reduction == "tree" and not shares_a_tree(plan.micro_batches, world_size):
        raise BadInputError(
            f"parallel.reduction=tree: {plan.micro_batches} micro-batches a step are {each} for each "
            f"of {world_size} rank{'s' * (world_size > 1)}, which is no power of two; change "
            "data.micro_batch_size or the number of ranks"
        )
    model = shapes_only(task)
    _check_tensors(model)
    if plan.last == "weighted" and any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()
    ):
        raise BadInputError(
            "data.last_batch=weighted pads with samples of weight 0, which would enter BatchNorm's "
            "statistics; "
            "use data.last_batch=cross, or a model without BatchNorm (small_resnet: model.norm=group)"
        )
    candidates(recipe.memory, model)
    parameter_groups(recipe.optim, model)
    if recipe.compile.mode != "none" and recipe.compile.scope == "blocks" and not blocks(model):
        raise BadInputError(
            "compile.scope=blocks: the model has no repeated blocks (members of a Sequential or ModuleList); "
            "use compile.scope=model"
        )
    fp32_modules(model, recipe.precision.keep_fp32)
    if recipe.model.pretrained is not None:
        load_initial(model, recipe.model.pretrained, recipe.model.reinit)
    if recipe.parallel.static_graph and plan.micro_batches > world_size:
        raise BadInputError(
            "parallel.static_graph doesn't go with gradient accumulation (here "
            f"{plan.micro_batches // world_size} "
            "micro-batches a step): DDP can't tell a step from a part of one; leave it out"
        )
    if recipe.model.name in ("small_resnet", "own", "gpt"):
        return  # take any of their data; and the imports behind the next lines take three seconds
    try:
        task.loss(model, blank_batch(task, plan.micro_batch_size, torch.device("meta")))
    except NotImplementedError:  # an operation that has no shapes-only form: the ranks will see
        pass
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        if "meta tensors" in str(error):  # it asks for a value, with .item() say, which shapes don't have
            return
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInputError(
            f"model.name={recipe.model.name} can't take a micro-batch of this data ({what}); "
            "change the model, data.image_size or data.micro_batch_size"
        ) from error


def _check_tensors(model: nn.Module) -> None:
    """Refuses what has no shape, what the fused optimizers can't update and what safetensors can't hold."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise BadInputError(
                f"the model's '{name}' has no shape yet: a lazy module gives it one at its first call; give "
                "the sizes, or let the task's model() call the module before it returns it"
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise BadInputError(
                f"the model's parameter '{name}' is {_short(parameter)}, which the fused optimizers can't "
                "update; keep real and imaginary part in a float32 parameter (…, 2) for torch.view_as_complex"
            )
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            raise BadInputError(
                f"the model's '{name}' is a {type(tensor).__name__}, which a checkpoint can't hold: only "
                "tensors; make it a buffer"
            )
        if not is_storable(tensor):
            raise BadInputError(
                f"the model's '{name}' is {_short(tensor)}, which safetensors can't hold; use another type, "
                "such as complex64 or float32"
            )


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Parts:
    """What a run is assembled from; tests put in their own."""

    training: Training
    loader: Loader
    evaluation_loader: Loader
    evaluation_share: Share
    compiled: bool
    notes: list[str]


def assemble(recipe: Recipe, task: Task, world: World, workers: int, folder: Path | None = None) -> Parts:
    """Builds everything that a rank trains with, on its device; `folder` is for what it writes down."""
    device = world.device
    plan = make_plan(recipe, task)
    share = Share(plan, world.rank, world.size)
    check_precision(recipe.precision, device)
    set_matmul_mode(recipe.precision)
    set_determinism(recipe)
    prepared = prepare_model(recipe, task, world)
    found = find_changing(
        task,
        prepared.model,
        batchnorm_buffers(prepared.model),
        recipe.data.micro_batch_size,
        autocast(recipe.precision, device),
        world,
    )
    groups = parameter_groups(recipe.optim, prepared.model)
    in_tree = recipe.parallel.reduction == "tree"
    rates = Rates(schedule(recipe.optim, plan.steps), device, tuple({group["factor"] for group in groups}))
    training = Training(
        task=task,
        model=prepared.model,
        replica=replicate(LossOf(task, prepared.call), world.group, recipe.parallel, device),  # type: ignore[arg-type]
        optimizer=make_optimizer(recipe.optim, groups, rates),
        rates=rates,
        scaler=make_scaler(recipe.precision, device),
        autocast=autocast(recipe.precision, device),
        average=prepared.average,
        statistics=StepStatistics(prepared.model, None if in_tree else world.group, found),
        share=share,
        max_grad_norm=recipe.optim.max_grad_norm,
        group=world.group,
        ragged="num_items" in task.train_data.fields,
        nonfinite=prepared.nonfinite,
        cuda_graphs=prepared.cuda_graphs,
        ring=make_ring(recipe.anomaly, recipe.log.every, device),
        skips=recipe.anomaly.nonfinite == "skip",
        tree=TreeReduction(world.group, recipe.parallel.bucket_mb) if in_tree else None,
    )
    source = Source(task.train_data, share, task.train_data.uniforms + task.uniforms)
    measured = len(task.evaluation_data)
    batch = min(recipe.data.eval_batch_size, measured)
    held = evaluation_share(measured, batch, world.rank, world.size)
    training_quarantine, evaluation_quarantine = (
        Quarantine(what, recipe.data.corrupt_samples(count), _quarantine_file(recipe, folder))
        for what, count in (("training", plan.samples), ("evaluation", measured))
    )
    measuring = Source(task.evaluation_data, held)
    return Parts(
        training,
        make_loader(source, device, recipe.data, workers, training_quarantine),
        make_loader(measuring, device, recipe.data, min(workers, 2), evaluation_quarantine),
        held,
        prepared.compiled,
        [*getattr(task, "notes", ()), *prepared.notes, *found.notes],
    )


def _quarantine_file(recipe: Recipe, folder: Path | None) -> Path | None:
    return folder / "quarantine.jsonl" if folder and recipe.data.on_corrupt == "quarantine" else None


def set_determinism(recipe: Recipe) -> None:
    """Lets kernels be chosen by speed, or only those that repeat their results.

    See https://docs.pytorch.org/docs/stable/notes/randomness.html. Without it a run on GPUs goes on from the
    same state with the same samples and randomness, but atomic additions come in another order each time.
    """
    # cuDNN's timing may choose another algorithm in the next process; and it asks the allocator what is free,
    # which one that is plugged in doesn't tell (pytorch#98481).
    plugged_in = recipe.memory.allocator == "managed"
    torch.backends.cudnn.benchmark = recipe.cudnn_benchmark and not recipe.deterministic and not plugged_in
    torch.use_deterministic_algorithms(recipe.deterministic)
    if recipe.deterministic:
        # Read when cuBLAS starts, which nothing has done yet.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Nothing here reads memory that it didn't write (a test fills it with NaN).
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def device_kind(recipe: Recipe) -> Any:
    """ "cuda" or "cpu", from the recipe and what is there.

    Raises:
        BadInputError: If CUDA is asked for where there is none.
    """
    available = torch.cuda.is_available()
    if recipe.device == "cuda" and not available:
        raise BadInputError(
            "device=cuda but no usable GPU was found: use device=cpu, or check nvidia-smi and the driver"
        )
    return "cpu" if recipe.device == "cpu" or not available else "cuda"
