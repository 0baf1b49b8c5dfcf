"""`--fast-dev-run`: one step and one evaluation of a real recipe, in a folder that goes away again."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.observe.console import say

FLAG = "--fast-dev-run"


def fast_settings(recipe: Recipe) -> list[str]:
    """Returns the settings of a fast try, which the user's override: of each data set the samples of one
    step.
    """
    limit = f"data.limit={recipe.data.global_batch_size}"
    return ["max_steps=1", limit, "evaluation.every=end", "log.to=[]"]


def check_alone(**given: object) -> None:
    """Refuses flags that are about a run that stays.

    Raises:
        BadInputError: Names the first.
    """
    for name, value in given.items():
        if value:
            raise BadInputError(
                f"{FLAG} and --{name.replace('_', '-')}: give one of them; a fast try keeps nothing and is "
                "of one machine"
            )


@contextmanager
def folder_for_a_try() -> Iterator[Path]:
    """A run folder to come, and its end."""
    with tempfile.TemporaryDirectory(prefix="trainer-try-", ignore_cleanup_errors=True) as beside:
        yield Path(beside) / "run"
    say(f"  {FLAG}: one step and one evaluation were tried, and their run folder is removed")
