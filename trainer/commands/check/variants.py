"""The variants of `trainer check`: one changed setting each, and what must have happened."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from trainer.commands.check.happened import (
    Needed,
    average_apart,
    epoch_crossed,
    loaded_by,
    micro_batches_added,
    narrowed,
    on_two_ranks,
    overflowed,
    recomputed,
    resumed_at,
    update_made,
)
from trainer.commands.check.training import STEPS, Edits, Subject, Training

RowVerdict = Literal["equal", "documented", "differs", "crashed", "not compared"]
BAD: tuple[RowVerdict, ...] = ("differs", "crashed")
Trained = Training | str  # or why there is nothing
_HALF = STEPS // 2
_LATE = STEPS - 2  # in the second epoch


class Variant(NamedTuple):
    """A training with one changed setting, to be compared.

    Attributes:
        name: Its name for --only.
        what: The changed setting, in a few words.
        edits: Changed keys of the configuration.
        where: Place of training: this process, two ranks of a launch, or a fresh process.
        same_as: The variant that it must equal bit for bit; "": it is compared with the plain loop.
        stop_after: The step after which this process stops a training, which the variant resumes; 0: none.
        needs: What must have happened; else there is nothing to compare.
    """

    name: str
    what: str
    edits: Edits = MappingProxyType({})
    where: Literal["here", "ranks", "fresh"] = "here"
    same_as: str = ""
    stop_after: int = 0
    needs: tuple[Needed, ...] = (update_made,)


_TWO, _FOUR = {"data.micro_batch_size": 4}, {"data.micro_batch_size": 2}
_LOADED = {"data.resident": False}
# The decay counts from the third update on: before, the ramp is slower.
_EMA = {"ema.decay": 0.2, "evaluation.every": "2 steps"}
_EACH = {"evaluation.every": "1 step"}  # as autocast is compared up to the first update
_ADDED = (update_made, micro_batches_added)
_ON_RANKS = (update_made, on_two_ranks)
VARIANTS = (
    Variant("plain", "nothing: one micro-batch a step", needs=(update_made, epoch_crossed)),
    Variant("micro-batches-2", "2 micro-batches a step", _TWO, needs=_ADDED),
    Variant("micro-batches-4", "4 micro-batches a step", _FOUR, needs=_ADDED),
    Variant("ema", "EMA, evaluated every 2 steps", _EMA, needs=(update_made, average_apart)),
    Variant(
        "tree", "4 micro-batches, added in a tree", {**_FOUR, "parallel.reduction": "tree"}, needs=_ADDED
    ),
    Variant(
        "checkpointing",
        "activation checkpointing",
        {"memory.checkpointing": "blocks"},
        needs=(update_made, recomputed),
    ),
    Variant("compile", "torch.compile", {"compile.mode": "default"}),
    Variant("bf16", "bfloat16 autocast", {"precision.mode": "bf16", **_EACH}, needs=(update_made, narrowed)),
    Variant(
        "fp16",
        "float16 autocast with a loss scale",
        {"precision.mode": "fp16", "precision.growth_interval": 2, **_EACH},
        needs=(update_made, overflowed),
    ),
    Variant("again", "a second run in the same process", same_as="plain"),
    Variant("workers-0", "loaded in this process", {**_LOADED, "data.workers": 0}, same_as="plain"),
    Variant(
        "workers-2",
        "loaded by 2 workers",
        {**_LOADED, "data.workers": 2},
        "fresh",
        "plain",
        needs=(update_made, loaded_by(2)),
    ),
    Variant("hash-seed", "another process and hash seed", {}, "fresh", "plain"),
    Variant(
        "resume",
        f"stopped after step {_HALF}, resumed",
        {},
        "fresh",
        "plain",
        _HALF,
        (update_made, resumed_at(_HALF)),
    ),
    Variant(
        "resume-late",
        f"2 micro-batches a step, stopped after step {_LATE}, in the second epoch, resumed",
        _TWO,
        "fresh",
        "micro-batches-2",
        _LATE,
        (resumed_at(_LATE), epoch_crossed),
    ),
    Variant(
        "ranks-ddp",
        "2 ranks, DDP",
        {**_FOUR, "parallel.find_unused_parameters": True},
        "ranks",
        needs=_ON_RANKS,
    ),
    Variant(
        "ranks-tree",
        "2 ranks, tree",
        {**_FOUR, "parallel.reduction": "tree"},
        "ranks",
        "tree",
        needs=_ON_RANKS,
    ),
    Variant("ranks-fsdp", "2 ranks, FSDP", {**_FOUR, "parallel.strategy": "fsdp"}, "ranks", needs=_ON_RANKS),
)
VARIANT_BY_NAME = MappingProxyType({variant.name: variant for variant in VARIANTS})
NAMES = ("order", *VARIANT_BY_NAME)


@dataclass(frozen=True)
class VariantRow:
    """A line of the table.

    Attributes:
        name: Name of the variant.
        what: The changed setting.
        verdict: equal; documented (differs as the documentation says); differs; crashed; or not compared.
        detail: The bound; the first difference and its step; or why it wasn't compared.
        tensor: The first tensor that differs, or "".
        step: The step after which it differs, or 0.
    """

    name: str
    what: str
    verdict: RowVerdict
    detail: str
    tensor: str = ""
    step: int = 0


VariantLaunch = Callable[[Subject, list[Variant], Path], dict[str, Trained]]
