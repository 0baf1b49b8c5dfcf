"""Task and plan of a recipe, and checks for faults that would fail on every rank."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.checkpoint.tensor_file import is_storable
from trainer.config.models import MODELS
from trainer.config.recipe import Recipe, of_set
from trainer.config.registry import named
from trainer.config.sizes import shares_a_tree
from trainer.config.tasks import TASKS
from trainer.data.check import CheckedData, check_data
from trainer.data.dataset import Dataset, limited
from trainer.data.left_out import LeftOut
from trainer.data.sampling.class_order import ClassDraws, weigh
from trainer.data.sampling.mix_order import MixDraws, mixed
from trainer.data.sampling.plan import Plan, Share
from trainer.data.sources import order_of
from trainer.distributed.sharding import check_sharding
from trainer.errors import BadInputError
from trainer.host.torch_build import NO_GPU
from trainer.models.activation_checkpointing import blocks, candidates
from trainer.models.finetune import fine_tune
from trainer.models.modes import begin_training
from trainer.models.precision import fp32_modules
from trainer.models.pretrained import find_weights
from trainer.models.weights import load_initial
from trainer.runs.differences import other_task
from trainer.runs.manifest import Manifest, Pretrained, RunFolder, TaskIdentity
from trainer.tasks import Checked, Extensible, Task
from trainer.tasks.custom import CustomTask
from trainer.train.components.operations import blank_batch, shapes_only
from trainer.train.components.updates import brings_optimizer, check_updates
from trainer.train.hooks import find_hooks, load_sinks

_TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = "initial weights"  # in the fingerprint of a run


def make_task(recipe: Recipe, own: Task | None = None) -> Task:
    """Opens the data with all evaluation sets, and makes the task that a recipe names.

    Args:
        recipe: The configuration.
        own: A custom task that was made already; None: the one that the recipe names.

    Raises:
        BadInputError: If data is missing or has another format than the recipe says.
    """
    task = own or _task_of(recipe)
    sets = dict[str, Dataset]()
    for name, one in recipe.evaluation.sets.items():
        assert isinstance(task, Extensible)
        try:
            sets[name] = task.more_data(recipe.data_of_set(name), one.split)
        except BadInputError as error:
            raise BadInputError(of_set(name, str(error))) from error
    if sets:
        task.evaluation_sets = sets  # type: ignore[attr-defined]
    return limit_data(task, recipe.data.limit)


def limit_data(task: Task, limit: int | None) -> Task:
    """Limits each data set of a task to so many samples, in place; returns the task."""
    if limit is not None:
        task.train_data = limited(task.train_data, limit)
        task.evaluation_data = limited(task.evaluation_data, limit)
        for name, data in more_sets(task).items():
            task.evaluation_sets[name] = limited(data, limit)  # type: ignore[attr-defined]
    return task


def more_sets(task: Task) -> Mapping[str, Dataset]:
    """Returns the additional evaluation sets, by name."""
    sets: Mapping[str, Dataset] = getattr(task, "evaluation_sets", {})
    return sets


def _task_of(recipe: Recipe) -> Task:
    if recipe.task == "own":
        raise BadInputError(
            "task=own: its class was passed to trainer.fit; put the class into a file, and give task=FILE.py"
        )
    if recipe.task not in TASKS:
        from trainer.tasks.custom import custom_task

        return custom_task(recipe.task)
    kind = TASKS[recipe.task]
    task: Task = named(kind.opens)(recipe.data, recipe.model, getattr(recipe, kind.section), recipe.seed)
    return task


def data_of(recipe: Recipe, task: Task, pretrained: Pretrained | None = None) -> dict[str, str]:
    """Returns fingerprints of data, shuffling and initial weights, by name: they must be equal on resume."""
    draws, (_, shards_per_block) = draws_of(recipe, task), order_of(task.train_data)
    source = getattr(task, "source_hash", None)
    return {
        **({"task": source} if source else {}),
        "training data": task.train_data.fingerprint(),
        "evaluation data": task.evaluation_data.fingerprint(),
        **{f"evaluation data {name}": data.fingerprint() for name, data in more_sets(task).items()},
        "order": draws.fingerprint() if draws else _order(recipe, task.train_data, shards_per_block),
        **({WEIGHTS: pretrained.sha256} if pretrained else {}),
    }


def identity_of_task(task: Task) -> TaskIdentity | None:
    """Returns the identity of a custom task for the manifest; None for others."""
    identity = getattr(task, "identity", None)
    if identity is None:
        return None
    return TaskIdentity(
        compiler=identity.compiler,
        code=identity.code,
        values=identity.values,
        unknown=list(identity.unknown),
        tried=dict(getattr(task, "tried", {})),
    )


def refuse_other_task(run: RunFolder, task: Task) -> None:
    """Refuses another custom task than the one that a run was trained with.

    Raises:
        BadInputError: If their identities differ; or their files, where these can't be compared.
    """
    stored, now = run.manifest, identity_of_task(task)
    changes = task_changes(stored, task)
    before, here = stored.fingerprint.get("task"), getattr(task, "source_hash", "")
    if stored.identity is None or now is None or stored.identity.compiler != now.compiler:
        changes += [f"task: {before}, now {here}"] if before and before != here else []
    if changes:
        raise BadInputError(
            f"{run.path}: its task isn't the one that the run was trained with ({'; '.join(changes)}); bring "
            "that back, or give its file as task"
        )


def methods_of(task: Task) -> list[str]:
    """Returns the digests of a custom task's methods, which are equal on all ranks; values needn't be."""
    identity = identity_of_task(task)
    return [] if identity is None else [one for name, one in identity.code.items() if name[:7] == "method "]


def task_changes(stored: Manifest, task: Task) -> list[str]:
    """Returns the changes in a run's custom task, in the format of `differences`.

    Left out are values that are new each time that an object is made.
    """
    now = identity_of_task(task)
    if stored.identity is None or now is None or not (changes := other_task(stored.identity, now)):
        return []
    varying = frozenset[str]()
    if not changes.keys() <= {*stored.identity.code, *now.code}:
        varying = getattr(task, "varying", varying)
    return [line for name, line in changes.items() if name not in varying]


def task_notes(stored: Manifest | None, task: Task) -> list[str]:
    """Returns lines for the user on what of a custom task isn't compared when its run is resumed."""
    now = identity_of_task(task)
    if now is None:
        return []
    if stored is None:
        names = ", ".join(now.unknown)
        return [f"without a value that can be compared on resume: {names}"] if names else []
    if stored.identity is None:
        return ["begun by an earlier version of trainer: whether its task's code was changed isn't known"]
    notes = []
    if stored.identity.compiler != now.compiler:
        notes.append(
            f"{stored.identity.compiler}, now {now.compiler}: instructions and constants of the task's code "
            "differ anyway and weren't compared"
        )
    changes = other_task(stored.identity, now)
    if varying := [name for name in changes if name in getattr(task, "varying", ())]:
        notes.append(f"not compared, as new each time that the task is made: {', '.join(varying)}")
    return notes


def left_out_of(task: Task) -> dict[str, Sequence[LeftOut]]:
    """Returns the files of each data set that aren't read, by its name."""
    sets = {"training data": task.train_data, "evaluation data": task.evaluation_data}
    sets |= {f"evaluation data {name}": data for name, data in more_sets(task).items()}
    return {name: found for name, data in sets.items() if (found := getattr(data, "left_out", ()))}


def described_data(task: Task) -> dict[str, Any]:
    """Returns the manifest's description of the data: classes and the like, and files that aren't read."""
    left_out = {name: [one.model_dump() for one in found] for name, found in left_out_of(task).items()}
    return {**task.describe(), "left_out": left_out}


def _order(recipe: Recipe, dataset: Dataset, shards_per_block: int) -> str:
    if not recipe.data.shuffle:
        return "not shuffled"
    buckets = getattr(dataset, "buckets", ())
    if buckets:
        return f"shuffled in {len(buckets)} buckets of {' '.join(map(str, buckets))} samples"
    return f"shuffled in blocks of {shards_per_block} shards" if shards_per_block else "shuffled"


def check_files(recipe: Recipe, task: Task) -> None:
    """Checks the files that the data names, as data.check says; in the launcher, once on each node.

    Raises:
        BadInputError: If files are missing, or samples can't be decoded.
    """

    def part(what: str, dataset: Dataset) -> CheckedData:
        return CheckedData(what, dataset, recipe.data.corrupt_samples(len(dataset)))

    parts = [part("training", task.train_data), part("evaluation", task.evaluation_data)]
    check_data(recipe.data.check, isinstance(recipe.data.path, str), parts)
    for name, dataset in more_sets(task).items():
        data = recipe.data_of_set(name)
        try:
            check_data(data.check, isinstance(data.path, str), [part(f"evaluation.sets.{name}", dataset)])
        except BadInputError as error:
            raise BadInputError(of_set(name, str(error))) from error


def draws_of(recipe: Recipe, task: Task) -> ClassDraws | MixDraws | None:
    """Returns the distribution of data.class_weights or data.mix; None without these keys.

    Raises:
        BadInputError: If the samples have no classes, or their order is fixed by other keys.
    """
    data, weights = task.train_data, recipe.data.class_weights
    if (mix := recipe.data.mix) is not None:
        sizes = np.bincount(np.asarray(getattr(data, "labels", ())), minlength=len(mix))
        return mixed(list(mix), sizes.tolist(), list(mix.values()))
    if weights is None:
        return None
    labels = getattr(data, "labels", None)
    if labels is None:
        what = (
            "these data have no classes to draw by; leave it out"
            if recipe.data.name != "own"
            else "the training data has no classes: give arrays a field 'label', or a data set an attribute "
            "`labels` or `targets`, one whole number for each sample"
        )
        raise BadInputError(f"data.class_weights: {what}")
    if order_of(data)[1]:
        raise BadInputError(
            "data.class_weights draws from all shards, and data.cache_limit keeps a few of them at a time: "
            "leave one of them out"
        )
    if getattr(data, "buckets", ()):
        raise BadInputError("data.class_weights: these data are read in buckets of like length; leave it out")
    classes = task.describe().get("classes")
    names = [str(name) for name in classes] if isinstance(classes, Collection) else []
    return weigh(labels, names, weights, len(data))


def make_plan(recipe: Recipe, task: Task) -> Plan:
    """Makes the plan of a run: its steps, and the samples of each."""
    shards, shards_per_block = order_of(task.train_data)
    buckets = getattr(task.train_data, "buckets", ())
    if buckets and not recipe.data.shuffle:
        raise BadInputError(
            "data.shuffle=false: language.text=padded reads texts in buckets of like length; leave it out, "
            "or use language.text=packed"
        )
    return Plan(
        samples=len(task.train_data),
        global_batch_size=recipe.data.global_batch_size,
        micro_batch_size=recipe.data.micro_batch_size,
        epochs=recipe.epochs,
        last=recipe.data.last_batch,
        seed=recipe.seed,
        max_steps=recipe.max_steps,
        shuffle=recipe.data.shuffle,
        shards=shards,
        shards_per_block=shards_per_block,
        buckets=buckets,
        draws=draws_of(recipe, task),
    )


def _refuse_sparse(recipe: Recipe, task: Task) -> None:
    """Refuses sparse gradients where something needs dense ones: their norm, or the recipe's optimizer."""
    sparse, anomaly = getattr(task, "sparse", ()), recipe.anomaly
    needed = {
        "optim.max_grad_norm=0": recipe.optim.max_grad_norm > 0,
        "anomaly.nonfinite=off": anomaly.nonfinite != "off",
        "anomaly.spike=off": anomaly.spike != "off",
        "an optimizer of the task's own, such as torch.optim.SGD": not brings_optimizer(task),
    }
    if sparse and any(needed.values()):
        raise BadInputError(
            f"the gradient of the model's '{sparse[0]}' is sparse, and a norm of gradients or the recipe's "
            f"optimizer needs dense ones: use sparse=False; or {', '.join(n for n in needed if needed[n])}"
        )


def refuse_padding(plan: Plan, task: Task, model: nn.Module) -> None:
    """Refuses BatchNorm where it would get samples of weight 0, or a single sample.

    From a custom task padding is cut away, but for micro-batches of nothing else.
    """
    last = plan.samples % plan.global_batch_size or plan.global_batch_size  # samples of an epoch's last step
    few = not isinstance(task, CustomTask) or last - plan.global_batch_size + plan.micro_batch_size < 2
    if (
        plan.last == "weighted"
        and few
        and any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) and (m.training or m.running_mean is None)
            for m in model.modules()
        )
    ):
        raise BadInputError(
            "data.last_batch=weighted: in the last step of an epoch BatchNorm would get padding (samples of "
            "weight 0) or a single sample; use data.last_batch=cross or drop, or a model without BatchNorm "
            "(small_resnet: model.norm=group)"
        )


def check_request(recipe: Recipe, task: Task, world_size: int, fresh: bool = True) -> None:
    """Checks for faults that would fail on every rank: on rank 0, before the ranks meet.

    Args:
        recipe: The configuration.
        task: Its task.
        world_size: Number of ranks.
        fresh: True if the model loads pretrained weights, and no checkpoint.

    Raises:
        BadInputError: If a fault is found; names it and the remedy.
    """
    if isinstance(task, Checked):
        task.check()
        _refuse_sparse(recipe, task)
    find_hooks(recipe.hooks, getattr(task, "hooks", ()))
    load_sinks(recipe.log, recipe.hooks)
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
    begin_training(model)
    _check_tensors(model, recipe.precision.mode)
    if fresh and (weights := find_weights(recipe.model)) is not None:
        load_initial(model, weights.file, recipe.model.reinit)
    fine_tune(model, recipe.model)
    refuse_padding(plan, task, model)
    candidates(recipe.memory, model)
    check_sharding(recipe.parallel, model, world_size, brings_optimizer(task))
    check_updates(recipe, task, model, plan)
    if recipe.compile.mode != "none" and recipe.compile.scope == "blocks" and not blocks(model):
        raise BadInputError(
            "compile.scope=blocks: the model has no repeated blocks (members of a Sequential or ModuleList); "
            "use compile.scope=model"
        )
    fp32_modules(model, recipe.precision.keep_fp32)
    name = recipe.model.name
    if name == "own" or (name in MODELS and MODELS[name].any_size):
        return  # these models take any data; and the next lines import for three seconds
    try:
        task.loss(model, blank_batch(task, plan.micro_batch_size, torch.device("meta")))
    except NotImplementedError:  # an operation without a kernel for the meta device: left to the ranks
        pass
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        if "meta tensors" in str(error):  # it reads a value, as .item() does, which meta tensors don't have
            return
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInputError(
            f"model.name={recipe.model.name} can't take a micro-batch of this data ({what}); "
            "change the model, data.image_size or data.micro_batch_size"
        ) from error


def _check_tensors(model: nn.Module, mode: str) -> None:
    """Refuses lazy tensors, and dtypes that optimizers can't update or safetensors can't hold."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise BadInputError(
                f"the model's '{name}' has no shape yet: a lazy module gives it one at its first call; give "
                "the sizes, or let the task's model() call the module before it returns it"
            )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        what = f"the model's parameter '{name}' is {_short(parameter)}, which"
        if parameter.is_complex():
            raise BadInputError(
                f"{what} the fused optimizers can't update; keep real and imaginary part in a float32 "
                "parameter (…, 2) for torch.view_as_complex"
            )
        if parameter.dtype not in _TRAINABLE:
            raise BadInputError(
                f"{what} no optimizer can update; give it as float32 or bfloat16, or with requires_grad=False"
            )
        if mode == "fp16" and parameter.dtype == torch.float16:
            raise BadInputError(
                f"{what} precision.mode=fp16 can't train: the loss scale needs float32 gradients; return the "
                "model from model() in float32 (.float()): autocast computes in float16"
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


def device_kind(recipe: Recipe) -> Any:
    """Returns "cuda" or "cpu", by the recipe and the GPUs of this machine.

    Raises:
        BadInputError: If the recipe asks for CUDA and there is no usable GPU.
    """
    available = torch.cuda.is_available()
    if recipe.device == "cuda" and not available:
        raise BadInputError(NO_GPU)
    return "cpu" if recipe.device == "cpu" or not available else "cuda"
