"""The variants of `trainer check`, one changed setting each, and the verdict on each."""

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.commands.check import plain
from trainer.commands.check.compare import compare, odd_order
from trainer.commands.check.plain import StepTensors
from trainer.commands.check.training import STEPS, Edits, Subject, changed, evaluated, train_steps
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.train.components.task import check_request, make_plan

_Verdict = Literal["equal", "documented", "differs", "not compared"]
Trained = list[StepTensors] | str  # or why there is nothing
_ALONE = World(0, 1, 0, torch.device("cpu"), None)
_HALF = STEPS // 2


class Variant(NamedTuple):
    """A training with one changed setting, to be compared.

    Attributes:
        name: Its name for --only.
        what: The changed setting, in a few words.
        edits: Changed keys of the configuration.
        where: Place of training: this process, two ranks of a launch, or a fresh process.
        same_as: The variant that it must equal bit for bit; "": it is compared with the plain loop.
        resumed: Whether it resumes from a checkpoint that this process wrote.
    """

    name: str
    what: str
    edits: Edits = MappingProxyType({})
    where: Literal["here", "ranks", "fresh"] = "here"
    same_as: str = ""
    resumed: bool = False


_TWO, _FOUR = {"data.micro_batch_size": 4}, {"data.micro_batch_size": 2}
_LOADED = {"data.resident": False}
VARIANTS = (
    Variant("plain", "nothing: one micro-batch a step"),
    Variant("micro-batches-2", "2 micro-batches a step", _TWO),
    Variant("micro-batches-4", "4 micro-batches a step", _FOUR),
    Variant("ema", "EMA, evaluated every 2 steps", {"ema.decay": 0.9, "evaluation.every": "2 steps"}),
    Variant("tree", "2 micro-batches, added in a tree", {**_TWO, "parallel.reduction": "tree"}),
    Variant("checkpointing", "activation checkpointing", {"memory.checkpointing": "blocks"}),
    Variant("compile", "torch.compile", {"compile.mode": "default"}),
    Variant("bf16", "bfloat16 autocast", {"precision.mode": "bf16"}),
    Variant("fp16", "float16 autocast with a loss scale", {"precision.mode": "fp16"}),
    Variant("again", "a second run in the same process", same_as="plain"),
    Variant("workers-0", "loaded in this process", {**_LOADED, "data.workers": 0}, same_as="plain"),
    Variant("workers-2", "loaded by 2 workers", {**_LOADED, "data.workers": 2}, "fresh", "plain"),
    Variant("hash-seed", "another process and hash seed", {}, "fresh", "plain"),
    Variant("resume", f"stopped after step {_HALF}, resumed", {}, "fresh", "plain", resumed=True),
    Variant("ranks-ddp", "2 ranks, DDP", {**_TWO, "parallel.find_unused_parameters": True}, "ranks"),
    Variant("ranks-tree", "2 ranks, tree", {**_TWO, "parallel.reduction": "tree"}, "ranks", "tree"),
    Variant("ranks-fsdp", "2 ranks, FSDP", {**_TWO, "parallel.strategy": "fsdp"}, "ranks"),
)
NAMES = ("order", *(variant.name for variant in VARIANTS))


@dataclass(frozen=True)
class VariantRow:
    """A line of the table.

    Attributes:
        name: Name of the variant.
        what: The changed setting.
        verdict: equal; documented (differs as the documentation says); differs; or not compared.
        detail: The bound; the first difference and its step; or why it wasn't compared.
        tensor: The first tensor that differs, or "".
        step: The step after which it differs, or 0.
    """

    name: str
    what: str
    verdict: _Verdict
    detail: str
    tensor: str = ""
    step: int = 0


VariantLaunch = Callable[[Subject, list[Variant], Path], dict[str, Trained]]


def check_all(
    subject: Subject,
    only: Collection[str],
    launches: dict[str, VariantLaunch | str],
    tell: Callable[[str], object],
) -> Iterator[VariantRow]:
    """Trains and compares all variants, and yields a row for each.

    Args:
        only: Names of variants to run; empty: all.
        launches: The launch for "ranks" and for "fresh", or why there is none.
        tell: Called with the name of each variant as it starts.
    """
    chosen = [variant for variant in VARIANTS if not only or variant.name in only]
    found, references = dict[str, Trained](), dict[str, tuple[list[StepTensors], list[StepTensors]]]()
    if not only or "order" in only:
        plan = make_plan(subject.recipe, subject.task)
        odd = odd_order(plan)
        samples = f"each of {plan.samples:,} samples once an epoch"
        if plan.draws is not None:
            samples = f"{plan.samples:,} draws by class_weights an epoch"
        yield VariantRow("order", "the order of the samples", "differs" if odd else "equal", odd or samples)
    with tempfile.TemporaryDirectory(prefix="trainer-check-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)

        def trained(variant: Variant) -> Trained:
            if variant.name not in found:
                tell(variant.what)
                found[variant.name] = tried(
                    lambda: train_steps(of(subject, variant.edits), variant.edits, _ALONE)
                )
            return found[variant.name]

        def reference(edits: Edits) -> tuple[list[StepTensors], list[StepTensors]]:
            recipe = changed(subject.recipe, edits)
            micro, ema, mode = recipe.data.micro_batch_size, recipe.ema, recipe.precision.mode
            of = json.dumps([micro, ema.model_dump(), mode, recipe.evaluation.every])
            if of not in references:
                plainly = (train_plainly(subject, edits, nudged) for nudged in (False, True))
                references[of] = next(plainly), next(plainly)
            return references[of]

        for variant in chosen:
            if variant.where != "here" and variant.name not in found:
                tell(variant.what)
                beside = [one for one in chosen if one.where == variant.where]
                found.update(_launched(subject, beside, launches[variant.where], folder))
            got = trained(variant)
            if isinstance(got, str):
                crashed = got.startswith("crash: ")
                yield VariantRow(variant.name, variant.what, "differs" if crashed else "not compared", got)
            elif variant.same_as:
                base = trained(next(one for one in VARIANTS if one.name == variant.same_as))
                yield _same_bits(variant, got, base)
            else:
                tell(f"{variant.what}: by the plain loop")
                try:
                    yield _against_plain(subject, variant, got, reference)
                except BadInputError:
                    raise
                except Exception as error:  # somebody's code
                    yield VariantRow(
                        variant.name, variant.what, "not compared", f"the plain loop fails: {_line(error)}"
                    )


def of(subject: Subject, edits: Edits) -> Subject:
    """Returns the subject for these edits: in float32 where autocast is to lower that."""
    return subject.single() if "precision.mode" in edits else subject


def train_plainly(subject: Subject, edits: Edits, nudged: bool = False) -> list[StepTensors]:
    """Trains by the plain loop, with the samples that the plan gives."""
    recipe, task = changed(subject.recipe, edits), of(subject, edits).task
    torch.set_num_threads(int(recipe.parallel.threads))
    plan, order = make_plan(recipe, task), []
    for step in range(plan.steps):
        epoch, sample, weight = plan.read(
            np.arange(step * plan.micro_batches, (step + 1) * plan.micro_batches)
        )
        order.append([(e[w > 0], s[w > 0]) for e, s, w in zip(epoch, sample, weight, strict=True)])
    with torch.random.fork_rng(devices=[]):
        return plain.reference_steps(task, recipe, order, plan.epoch_length, evaluated(recipe, plan), nudged)


def tried(train: Callable[[], list[StepTensors]]) -> Trained:
    """Returns the result of a training, or its error as one line."""
    try:
        with (
            torch.random.fork_rng(devices=[]),
            contextlib.redirect_stderr(io.StringIO()),
        ):  # the same each time
            return train()
    except BadInputError as error:
        return " ".join(str(error).split())
    except Exception as error:
        return f"crash: {_line(error)}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:200]}"


def _launched(
    subject: Subject, variants: list[Variant], launch: VariantLaunch | str, folder: Path
) -> dict[str, Trained]:
    """Trains variants in other processes; one that can't be trained there gets its error instead."""
    if isinstance(launch, str):
        return {variant.name: launch for variant in variants}
    found, able = dict[str, Trained](), []
    ranks = 2 if variants[0].where == "ranks" else 1
    for variant in variants:
        try:
            check_request(changed(subject.recipe, variant.edits), subject.narrow, ranks)
            if variant.resumed:
                stopped = tried(lambda: train_steps(subject, {}, _ALONE, folder, stop_after=_HALF))
                if isinstance(stopped, str):
                    raise BadInputError(stopped)
            able.append(variant)
        except BadInputError as error:
            found[variant.name] = str(error)
    return {**found, **(launch(subject, able, folder) if able else {})}


def _same_bits(variant: Variant, got: list[StepTensors], base: Trained) -> VariantRow:
    if isinstance(base, str):
        return VariantRow(
            variant.name, variant.what, "not compared", f"{variant.same_as} has no result: {base}"
        )
    compared = compare(got, base, begin=_HALF if variant.resumed else 0)
    if (first := compared.first) is not None:
        detail = f"not the bits of {variant.same_as}: {first}"
        return VariantRow(variant.name, variant.what, "differs", detail, first.tensor, first.step)
    return VariantRow(variant.name, variant.what, "equal", f"bit for bit as {variant.same_as}")


def _against_plain(
    subject: Subject,
    variant: Variant,
    got: list[StepTensors],
    reference: Callable[[Edits], tuple[list[StepTensors], list[StepTensors]]],
) -> VariantRow:
    wanted, nudged = reference(variant.edits)
    moved = [f"model/{name}" for name in plain.untrained(subject.task.model())]
    if "precision.mode" in variant.edits:  # from the second update on, rounding has the say
        wanted = wanted[: 1 + next((step for step, seen in enumerate(wanted) if seen["updates"]), STEPS)]
    compared = compare(got, wanted, nudged, of(subject, variant.edits).eps, moved=moved)
    if (first := compared.first) is not None:
        return VariantRow(variant.name, variant.what, "differs", str(first), first.tensor, first.step)
    recipe = changed(subject.recipe, variant.edits)
    count = recipe.data.global_batch_size // recipe.data.micro_batch_size
    if count > 1:
        one_batch = compare(wanted, *reference({}), subject.eps, moved=moved)
        if (first := one_batch.first) is not None:
            detail = (
                f"as plain PyTorch with {count} micro-batches ({compared}); with one, {first}: {why(subject)}"
            )
            return VariantRow(variant.name, variant.what, "documented", detail, first.tensor, first.step)
    return VariantRow(variant.name, variant.what, "equal", str(compared))


def why(subject: Subject) -> str:
    """Explains why several micro-batches per step give another result than one, in plain PyTorch too."""
    model = subject.task.model().train()
    if any(isinstance(part, _BatchNorm) and part.training for part in model.modules()):
        return "BatchNorm sees one micro-batch at a time"
    if draws(subject):
        return "random numbers are drawn for each micro-batch"
    return "the loss compares the samples of a micro-batch, or keeps something from one to the next"


def draws(subject: Subject) -> bool:
    """Returns True if a training loss draws random numbers."""
    few = np.arange(min(2, len(subject.task.train_data)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = subject.task.model().train()
        batch = plain.plain_samples(
            subject.task.train_data, np.zeros_like(few), few, 0, subject.task.uniforms
        )
        before: Any = torch.get_rng_state()
        plain.losses(subject.task, model, batch)
        return not torch.equal(before, torch.get_rng_state())
