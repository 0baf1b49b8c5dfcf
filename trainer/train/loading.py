"""What a rank loads with: its workers and prefetch, as the launcher chose them, or by rule."""

from collections.abc import Mapping

from trainer.config.data import LoaderConfig
from trainer.config.recipe import Recipe
from trainer.data.fit import Loading, Sizes, by_rule, estimate, sizes_of
from trainer.data.loader import is_resident
from trainer.data.workers import start_method
from trainer.host.limits import Limits
from trainer.tasks import Task

# Of the launcher, for its ranks: where the values come from, and whether the workers are its choice.
SOURCE_VARIABLE = "TRAINER_LOADER"
WORKERS_VARIABLE = "TRAINER_LOADER_WORKERS"
RULE = "by rule"


def to_choose(config: LoaderConfig, task: Task) -> bool:
    """Whether there is a choice of workers or prefetch: not of what lies in memory, nor if both are given."""
    dataset = task.train_data
    if is_resident(config, dataset) or dataset.in_process or config.workers == 0:
        return False
    return "auto" in (config.workers, config.prefetch)


def sizes(recipe: Recipe, task: Task) -> Sizes:
    """Bytes of what the ranks of a recipe load."""
    measured = min(recipe.data.eval_batch_size, len(task.evaluation_data))
    return sizes_of(task.train_data, recipe.data.micro_batch_size, measured)


def forked(config: LoaderConfig) -> bool:
    """Whether a rank will fork its workers; it has no thread when it starts them."""
    return start_method(config.start_method) == "fork"


def settle(
    recipe: Recipe, task: Task, limits: Limits, ranks: int, environ: Mapping[str, str]
) -> tuple[Recipe, int, list[str]]:
    """Puts numbers for `auto`.

    Args:
        recipe: The configuration; from the launcher it holds numbers already.
        task: Has the data.
        limits: Of this container.
        ranks: In this container.
        environ: Of this process.

    Returns:
        The recipe to assemble with, the workers that its `data.workers=auto` stands for (of which the
        evaluation takes two at most), and a line for people, unless it was asked for no workers.
    """
    config = recipe.data
    if is_resident(config, task.train_data):
        return recipe, 0, []
    if task.train_data.in_process and config.workers == "auto":
        return recipe, 0, []
    if config.workers == 0 and WORKERS_VARIABLE not in environ:
        return recipe, 0, []
    source = environ.get(SOURCE_VARIABLE, RULE if to_choose(config, task) else "as configured")
    size, cheap = sizes(recipe, task), forked(config)
    setting = by_rule(config.workers, config.prefetch, size, limits, ranks, cheap)
    update: dict[str, object] = {"prefetch": setting.prefetch}
    if config.workers == "auto" or WORKERS_VARIABLE in environ:
        update["workers"] = "auto"
    line = f"loader: {estimate(setting, size, limits, ranks, cheap)} ({source})"
    settled = recipe.model_copy(update={"data": config.model_copy(update=update)})
    return settled, setting.workers, [line]


def words(before: LoaderConfig, setting: Loading, source: str) -> tuple[list[str], dict[str, str]]:
    """Settings and variables that hand a choice to ranks: `--set` words for what was `auto`."""
    told = {SOURCE_VARIABLE: source}
    settings = []
    if before.workers == "auto":
        settings.append(f"data.workers={setting.workers}")
        told[WORKERS_VARIABLE] = "auto"
    if before.prefetch == "auto":
        settings.append(f"data.prefetch={setting.prefetch}")
    return settings, told
