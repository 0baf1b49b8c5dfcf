"""Options of `trainer train` in addition to the keys of the recipe; `--fast-dev-run`. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.runs.folder import MANIFEST

Mode = Literal["auto", "newest", "force", "never"]  # values of --resume, see `trainer train --help`


class StartingPoint(NamedTuple):
    """Checkpoint that `--init-from` names.

    Attributes:
        run: Folder of the run.
        which: "last", "best" or a step in decimal digits.
        word: The value of --init-from as it was typed.
    """

    run: Path
    which: str
    word: str


def parse_source(word: str) -> StartingPoint:
    """Parses the value of --init-from: RUN, RUN@STEP, RUN@best or RUN@last; RUN alone is its last checkpoint.

    Raises:
        BadInputError: If it has none of these forms.
    """
    try:
        is_run = (Path(word) / MANIFEST).is_file()
    except OSError:  # such as a name that is too long
        is_run = False
    if not is_run and "@" in word:
        name, _, which = word.rpartition("@")
        if which not in ("best", "last") and not (which.isascii() and which.isdigit()):
            raise BadInputError(f"--init-from {word}: after the @ stands a step, best or last")
        return StartingPoint(Path(name), which, word)
    return StartingPoint(Path(word), "last", word)


@dataclass(frozen=True)
class TrainOptions:
    """Flags of `trainer train`, as its parser read them.

    Attributes:
        recipe: Name of a recipe, or path of its file.
        set: Settings KEY=VALUE, of which later ones win.
        values: Configuration of the run to resume or to begin from, in place of the recipe's; else None.
        out: The run folder; None for a new one, named by the trainer.
        resume: The flag --resume: whether to resume the run in the folder, even if its configuration differs.
        source: The checkpoint that `--init-from` names, or None.
        max_restarts: Largest number of restarts of the ranks after failures.
        grace: Seconds from a signal to stop until ranks are killed.
        gpus: Number of GPUs, or which, such as "0,1" or "id:1"; None for all.
        nproc_per_node: Number of ranks on this host if they train on CPUs, or None.
        stop_after: The step after which to stop with a checkpoint, or None.
        profile: Profiler for a few steps, or None.
        nnodes: Number of nodes; None to read it from the environment.
        node_rank: Number of this node, from 0.
        master_addr: Host name or address of node 0.
        master_port: Port on node 0.
        join_timeout: Seconds to wait for the other nodes.
    """

    recipe: str
    set: list[str]
    values: dict[str, Any] | None = None
    out: Path | None = None
    resume: Mode = "auto"
    source: StartingPoint | None = None
    max_restarts: int = 0
    grace: float = 25.0
    gpus: str | None = None
    nproc_per_node: int | None = None
    stop_after: int | None = None
    profile: Literal["torch", "nvtx"] | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    join_timeout: float = 600.0


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
