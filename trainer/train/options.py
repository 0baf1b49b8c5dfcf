"""Options of `trainer train` other than keys of the recipe. Imports no torch."""

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
        word: The value of --from as it was typed.
    """

    run: Path
    which: str
    word: str


def parse_source(word: str) -> StartingPoint:
    """Reads RUN, RUN@STEP or RUN@best.

    Raises:
        BadInputError: If the word has none of these forms.
    """
    if not (Path(word) / MANIFEST).is_file() and "@" in word:
        name, _, which = word.rpartition("@")
        if which not in ("best", "last") and not (which.isascii() and which.isdigit()):
            raise BadInputError(f"--from {word}: after the @ stands a step, best or last")
        return StartingPoint(Path(name), which, word)
    return StartingPoint(Path(word), "last", word)


@dataclass(frozen=True)
class TrainOptions:
    """Flags of `trainer train`, as its parser read them.

    Attributes:
        recipe: Name of a recipe, or its file.
        set: KEY=VALUE settings; those of a tuned file come first.
        values: The configuration of the run to resume or to begin from, in place of a recipe's.
        tuned: A file that `trainer tune` wrote, or None.
        out: The run folder; None: a new one.
        resume: The flag --resume, which says what may differ from the run in the folder.
        source: The checkpoint that `--from` names, or None.
        max_restarts: How often to restart the ranks after a failure.
        grace: Seconds from a signal until ranks are killed.
        gpus: A number of GPUs, or a list of them.
        nproc_per_node: Number of ranks on this host, on CPUs.
        stop_after: The step after which to stop with a checkpoint, or None.
        profile: Kind of profile of some steps, or None.
        nnodes: Number of nodes, or MIN:MAX.
        node_rank: Number of this node, from 0.
        master_addr: Host name or address of node 0.
        master_port: Port on node 0.
        join_timeout: Seconds to wait for the other nodes.
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
