"""Python code that a recipe names: a task's file, hooks, sinks. A run folder names none: its user does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.recipe import Recipe
from trainer.config.task_file import is_own
from trainer.config.training import is_place
from trainer.errors import UnnamedCodeError


def own_code(recipe: Recipe) -> dict[str, Any]:
    """Returns the keys of a recipe that name code of the user, with their values."""
    hooks = recipe.hooks.use if recipe.hooks.enabled else []
    return {
        **({"task": recipe.task} if is_own(recipe.task) else {}),
        **({"hooks.use": list(hooks)} if hooks else {}),
        **({"log.to": list(recipe.log.to)} if any(map(is_place, recipe.log.to)) else {}),
    }


def refuse_unnamed(
    source: Path | str, recipe: Recipe, given: Mapping[str, Any], name: str = "", flag: str = "--task"
) -> None:
    """Refuses code that the recipe of a run folder names, and the settings don't.

    Args:
        source: The run folder, or the recipe in it.
        recipe: The recipe, with the settings.
        given: The settings, as nested values.
        name: Name of the class, of a run of a notebook's class.
        flag: Flag for the task's file; "" for a command that has --set alone.

    Raises:
        UnnamedCodeError: If there is such code; with the words that name it.
    """
    code = {key: value for key, value in own_code(recipe).items() if not _is_given(key, given)}
    if not code:
        return
    words, why = list[str](), ""
    if code.get("task") == "own":
        code["task"] = f"FILE.py:{name or 'CLASS'}"
        why = "; its task was the class of a notebook: put that class into a file"
    for key, value in code.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        shown = shown if shown.isprintable() else "FILE"
        words += [flag, shown] if flag and key == "task" else ["--set", f"{key}={shown}"]
    raise UnnamedCodeError(
        f"{source}: names Python code ({', '.join(code)}), which runs only where the command names it: read "
        f"it if the run isn't yours{why}",
        words,
    )


def _is_given(key: str, given: Mapping[str, Any]) -> bool:
    value: Any = given
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True
