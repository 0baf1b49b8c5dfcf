"""Options of `trainer train`, besides its recipe's keys. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainer.errors import BadInputError
from trainer.runs.folder import MANIFEST

Mode = Literal["auto", "newest", "force", "never"]


class StartingPoint(NamedTuple):
    """Checkpoint that `--from` names.

    Attributes:
        run: A run folder.
        which: "last", "best" or a step.
        word: As it was given.
    """

    run: Path
    which: str
    word: str


def parse_source(word: str) -> StartingPoint:
    """Reads RUN, RUN@STEP or RUN@best.

    Raises:
        BadInputError: If it is none of these.
    """
    if not (Path(word) / MANIFEST).is_file() and "@" in word:
        name, _, which = word.rpartition("@")
        if which not in ("best", "last") and not (which.isascii() and which.isdigit()):
            raise BadInputError(f"--from {word}: after the @ stands a step, best or last")
        return StartingPoint(Path(name), which, word)
    return StartingPoint(Path(word), "last", word)


@dataclass(frozen=True)
class TrainOptions:
    """The flags of `trainer train`, as its parser read them.

    Attributes:
        recipe: Its name, or a file.
        set: KEY=VALUE, those of a tuned file first.
        values: The configuration of the run to resume or to begin from, in place of a recipe's.
        tuned: The file that `trainer tune` wrote.
        out: The run folder, or None.
        source: What `--from` names.
        gpus: How many, or which.
        profile: Whether to look at some steps, and how.
    """

    recipe: str
    set: list[str]
    values: dict[str, Any] | None = None
    tuned: Path | None = None
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
