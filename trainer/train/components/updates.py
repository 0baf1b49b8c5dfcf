"""Updates of the weights: the recipe's optimizer and schedule, or a task's own."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.folder import Damaged, Unreadable, read_state
from trainer.checkpoint.store import listing
from trainer.checkpoint.tensor_file import put_together
from trainer.config.recipe import Recipe
from trainer.config.task_file import OWN_LR
from trainer.config.training import OptimConfig
from trainer.data.sampling.plan import Plan
from trainer.errors import BadInputError
from trainer.optim.optimizers import LRScheduler, make_optimizer, parameter_groups, undecayed
from trainer.optim.own import ConstantSchedule, HostSchedule
from trainer.optim.schedules import schedule
from trainer.runs.folder import checkpoints_of
from trainer.runs.manifest import Manifest
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask

_OF_A_SCHEDULE = ("schedule", "warmup_steps", "final_lr", "milestones", "gamma", "decay")


def make_updates(
    recipe: Recipe,
    task: Task,
    model: nn.Module,
    plan: Plan,
    device: torch.device,
    generators: Sequence[torch.Generator] = (),
) -> tuple[torch.optim.Optimizer, LRScheduler | HostSchedule]:
    """Makes optimizer and learning rates of a run: the recipe's, or those of the task's methods.

    Args:
        recipe: The configuration.
        task: May have methods `optimizer` and `scheduler`.
        model: The bare model, on its device.
        plan: Gives the number of updates.
        device: Where the learning rate is kept.
        generators: Random generators that a task's own optimizer may draw from.

    Raises:
        BadInputError: If a method of the task doesn't return an optimizer or a scheduler.
    """
    brings = _brings(task)
    if "optimizer" in brings:
        optimizer = task.optimizer(model)  # type: ignore[attr-defined]
    else:
        groups = parameter_groups(recipe.optim, model)
        if not brings:
            factors = tuple({group["factor"] for group in groups})
            lr = LRScheduler(schedule(recipe.optim, plan.steps, plan.epoch_length), device, factors)
            return make_optimizer(recipe.optim, groups, lr), lr
        optimizer = make_optimizer(recipe.optim, groups, ConstantSchedule(recipe.optim.lr))
    scheduler = None
    if "scheduler" in brings:
        scheduler = task.scheduler(optimizer, plan.steps, plan.epoch_length)  # type: ignore[attr-defined]
    own = "optimizer" in brings
    return optimizer, HostSchedule(optimizer, scheduler, device, plan.seed, generators, own)


def check_updates(recipe: Recipe, task: Task, model: nn.Module, plan: Plan) -> None:
    """Checks for keys that a task's own optimizer or scheduler makes idle; the launcher tries both.

    Args:
        recipe: The configuration.
        task: Its task.
        model: The model on the meta device.
        plan: Gives the number of updates.

    Raises:
        BadInputError: If a key has no effect, or a method fails; names the remedy.
    """
    brings = _brings(task)
    if "optimizer" not in brings:
        parameter_groups(recipe.optim, model)
    if not brings:
        return
    unread: tuple[str, ...] = _OF_A_SCHEDULE
    if "optimizer" in brings:
        unread = tuple(name for name in OptimConfig.model_fields if name != "max_grad_norm")
    usual = OptimConfig(lr=OWN_LR if recipe.optim.lr == OWN_LR else OptimConfig().lr)
    for name in unread:
        if (value := getattr(recipe.optim, name)) != getattr(usual, name):
            raise BadInputError(
                f"optim.{name}={value}: nothing reads it, as the task has a method {brings[0]} of its own; "
                "leave the key out, or the method"
            )
    if isinstance(task, CustomTask):
        cpu = torch.device("cpu")

        def make(model: nn.Module) -> HostSchedule:
            _, rates = make_updates(recipe, task, model, plan, cpu, [torch.default_generator])
            assert isinstance(rates, HostSchedule)
            if reason := _ends_early(rates.last_update, plan.steps):
                raise BadInputError(f"the task's own scheduler {reason}; give it as many as the run makes")
            return rates

        task.check_updates(make)


def check_end(folder: Path, stored: Manifest, task: Task, steps: int) -> None:
    """Checks, before any rank starts, that the scheduler in the newest checkpoint doesn't end before the run.

    Args:
        folder: Folder of a run that is resumed.
        stored: Its manifest.
        task: Its task.
        steps: Number of steps at which it is to end now.

    Raises:
        BadInputError: If the task's own scheduler ends before.
    """
    if "scheduler" not in _brings(task):
        return
    with suppress(OSError, Unreadable):  # reported by the ranks
        for entry in listing(checkpoints_of(folder)):
            with suppress(Damaged, KeyError, ValueError, TypeError):
                state = read_state(entry.path)
                if stored.foreign(state) is None:
                    kept = put_together(state["own"], defaultdict(lambda: torch.empty(0)))["scheduler"]
                    refuse_later_end(entry.path, kept.get("total_steps"), steps)
                    return


def refuse_later_end(checkpoint: Path, last_update: Any, steps: int) -> None:
    """Refuses a checkpoint whose scheduler ends before the run.

    Args:
        checkpoint: The checkpoint's folder.
        last_update: The scheduler's `total_steps`; anything but an int if it has no end.
        steps: Number of steps of the run.

    Raises:
        BadInputError: If the scheduler ends before.
    """
    if reason := _ends_early(last_update, steps):
        raise BadInputError(
            f"{checkpoint}: the task's own scheduler {reason}; a run that is extended keeps its schedule: "
            "keep the run's end, or begin a new run from this one by --init-from"
        )


def _ends_early(last_update: Any, steps: int) -> str:
    if not isinstance(last_update, int) or last_update >= steps:
        return ""
    return f"ends after {last_update} updates (its total_steps), and the run after {steps} steps"


def words_for(
    task: Task, config: OptimConfig, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[str]:
    """Returns lines on the task's own optimizer and scheduler, the recipe's optimizer, and weight decay."""
    lines = [optimizer.note] if "optimizer" not in _brings(task) and hasattr(optimizer, "note") else []
    if (config.no_decay or config.decay_1d) and "optimizer" not in _brings(task):
        kept = {*undecayed(config, model)}
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        lines.append(
            f"without weight decay: {len(kept)} of {len(sizes)} tensors, "
            f"{sum(sizes[name] for name in kept):,} of {sum(sizes.values()):,} parameters"
            if config.weight_decay
            else "optim.no_decay and decay_1d have no effect: optim.weight_decay=0"
        )
    if brings := " and ".join(_brings(task)):
        lines.append(f"the task's own {brings}: updates by {type(optimizer).__name__}")
    return lines


def brings_optimizer(task: Task) -> bool:
    """True if the optimizer is the task's own: its state is unknown before its first step."""
    return "optimizer" in _brings(task)


def _brings(task: Task) -> list[str]:
    return [name for name in ("optimizer", "scheduler") if hasattr(task, name)]
