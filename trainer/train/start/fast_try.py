"""`--fast-dev-run`: one step and one evaluation of a real recipe, in a temporary run folder."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.observe.console import say

FLAG = "--fast-dev-run"


def fast_settings(recipe: Recipe) -> list[str]:
    """Returns settings for one step and one evaluation, each of so many samples; the user's override them."""
    limit = f"data.limit={recipe.data.global_batch_size}"
    return ["max_steps=1", limit, "evaluation.every=end", "log.to=[]"]


def check_alone(several: bool, **given: object) -> None:
    """Refuses flags that need a run folder that stays, or several machines.

    Args:
        several: Whether this process is a rank of torchrun or Slurm.
        given: Values of these flags, by name.

    Raises:
        BadInputError: If one of them is given; names the first.
    """
    if several:
        raise BadInputError(f"{FLAG} is of one machine: start it without torchrun or srun")
    for name, value in given.items():
        if value:
            raise BadInputError(
                f"{FLAG} and --{name.replace('_', '-')}: give one of them; a fast try keeps nothing and is "
                "of one machine"
            )


@contextmanager
def folder_for_a_try() -> Iterator[Path]:
    """Yields the path of a temporary run folder, which isn't made yet; removes it at the end."""
    with tempfile.TemporaryDirectory(prefix="trainer-try-", ignore_cleanup_errors=True) as beside:
        yield Path(beside) / "run"
    say(f"  {FLAG}: one step and one evaluation were tried, and their run folder is removed")
