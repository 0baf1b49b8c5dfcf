"""Trains the variants of `trainer check`, and gives the verdict on each."""

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.commands.check import plain
from trainer.commands.check.compare import Compared, compare
from trainer.commands.check.formulas import evaluations
from trainer.commands.check.happened import Evidence
from trainer.commands.check.order import odd_order, told_order
from trainer.commands.check.plain import StepTensors
from trainer.commands.check.training import STEPS, Edits, Subject, Training, changed, train_steps
from trainer.commands.check.variants import (
    BAD,
    VARIANT_BY_NAME,
    VARIANTS,
    RowVerdict,
    Trained,
    Variant,
    VariantLaunch,
    VariantRow,
)
from trainer.data.sampling.plan import Plan
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.rng import Ints
from trainer.train.components.task import check_request, make_plan

_CRASH = "crash: "
_ALONE = World(0, 1, 0, torch.device("cpu"), None)
_SCALES = range(-24, 120)  # powers of two
_COUNTED = ("updates", "lr", "scale")


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
    if not only or "order" in only:
        tell("the order of the samples")
        odd = odd_order(subject.plan)
        yield VariantRow(
            "order",
            "the order of the samples",
            "differs" if odd else "equal",
            odd or told_order(subject.plan),
        )
    chosen = [variant for variant in VARIANTS if not only or variant.name in only]
    with tempfile.TemporaryDirectory(prefix="trainer-check-", ignore_cleanup_errors=True) as temporary:
        trainings = Trainings(subject, chosen, launches, Path(temporary), tell)
        for variant in chosen:
            try:
                yield trainings.row(variant)
            except BadInputError:
                raise
            except Exception as error:  # the user's code
                yield VariantRow(
                    variant.name, variant.what, "not compared", f"the plain loop fails: {_line(error)}"
                )


class Trainings:
    """The trainings of a check, each made when it is first asked for."""

    def __init__(
        self,
        subject: Subject,
        chosen: list[Variant],
        launches: dict[str, VariantLaunch | str],
        folder: Path,
        tell: Callable[[str], object],
    ) -> None:
        """Takes what `check_all` takes, and a folder for checkpoints."""
        self._subject, self._chosen, self._launches = subject, chosen, launches
        self._folder, self._tell = folder, tell
        self._found = dict[str, tuple[Trained, Subject]]()
        self._references = dict[str, list[StepTensors]]()

    def row(self, variant: Variant) -> VariantRow:
        """Compares a variant."""
        got, subject = self._trained(variant)
        if isinstance(got, str):
            crash = got.startswith(_CRASH)
            error = self._error_of_plain(variant, subject) if crash else ""
            if error:
                return VariantRow(
                    variant.name, variant.what, "not compared", f"plain PyTorch fails, too: {error}"
                )
            verdict: RowVerdict = "crashed" if crash else "not compared"
            return VariantRow(variant.name, variant.what, verdict, got.removeprefix(_CRASH))
        row = self._same_bits(variant, got) if variant.same_as else self._against_plain(variant, got, subject)
        if row.verdict in BAD:
            return row
        seen = [need(self._evidence(variant, got, subject)) for need in variant.needs]
        if lacking := [one.what for one in seen if not one.enough]:
            return VariantRow(variant.name, variant.what, "not compared", "; ".join(lacking))
        told = [row.detail, *(one.what for one in seen if one.what)]
        if subject.double != of(self._subject, variant.edits).double:
            told.append(f"in float32, as in float64 it fails: {subject.why}")
        return VariantRow(variant.name, variant.what, row.verdict, "; ".join(told), row.tensor, row.step)

    def _trained(self, variant: Variant) -> tuple[Trained, Subject]:
        if variant.name not in self._found:
            self._tell(variant.what)
            subject = of(self._subject, variant.edits)
            self._train(variant, subject)
            got = self._found[variant.name][0]
            if isinstance(got, str) and got.startswith(_CRASH) and subject.double and not variant.same_as:
                self._train(variant, subject.single(got.removeprefix(_CRASH)))
        return self._found[variant.name]

    def _train(self, variant: Variant, subject: Subject) -> None:
        """Trains a variant, and those that a launch can train beside it."""
        if variant.where == "here":
            edits = self._edits(variant)
            got = edits if isinstance(edits, str) else tried(lambda: train_steps(subject, edits, _ALONE))
            self._found[variant.name] = got, subject
            return
        beside = [one for one in self._chosen if one.where == variant.where and one.name not in self._found]
        for name, got in self._launched(subject, beside or [variant]).items():
            self._found[name] = got, subject

    def _error_of_plain(self, variant: Variant, subject: Subject) -> str:
        """Returns the error of the plain loop with a variant's settings, or ""."""
        try:
            self._reference(subject, variant.edits)
        except Exception as error:  # the user's code
            return _line(error)
        return ""

    def _edits(self, variant: Variant) -> Edits | str:
        """Returns a variant's changed keys, or why there are none: with fp16 a scale that overflows."""
        if variant.edits.get("precision.mode") != "fp16":
            return variant.edits
        if (scale := self._overflowing_scale) is None:
            return "nothing overflows in float16, whatever the loss scale"
        return {**variant.edits, "precision.initial_scale": scale}

    @cached_property
    def _overflowing_scale(self) -> float | None:
        """Returns the smallest power of two with which the plain loop skips the first step."""

        def skips(power: int) -> bool:
            edits = {"precision.mode": "fp16", "precision.initial_scale": 2.0**power}
            return not int(train_plainly(of(self._subject, edits), edits, most=1)[0]["updates"])

        low, high = _SCALES.start, _SCALES.stop
        if skips(low) or not skips(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if skips(middle) else (middle, high)
        return 2.0**high

    def _reference(
        self,
        subject: Subject,
        edits: Edits,
        nudged: bool = False,
        ruled: bool = True,
    ) -> list[StepTensors]:
        recipe = changed(subject.recipe, edits)
        sections = recipe.model_dump(
            mode="json", include={"data", "ema", "precision", "evaluation", "memory"}
        )
        name = json.dumps([sections, subject.double, nudged, ruled], sort_keys=True)
        if name not in self._references:
            self._references[name] = train_plainly(subject, edits, nudged, ruled)
        return self._references[name]

    def _launched(self, subject: Subject, variants: list[Variant]) -> dict[str, Trained]:
        """Trains variants in other processes; one that can't be trained there gets its error instead."""
        launch = self._launches[variants[0].where]
        if isinstance(launch, str):
            return {variant.name: launch for variant in variants}
        found, able = dict[str, Trained](), []
        ranks = 2 if variants[0].where == "ranks" else 1
        for variant in variants:
            try:
                check_request(changed(subject.recipe, variant.edits), subject.narrow, ranks)
                if variant.stop_after:
                    folder, after, edits = self._folder / variant.name, variant.stop_after, variant.edits
                    folder.mkdir()
                    stopped = tried(lambda: train_steps(subject, edits, _ALONE, folder, stop_after=after))  # noqa: B023
                    if isinstance(stopped, str):
                        raise BadInputError(stopped)
                able.append(variant)
            except BadInputError as error:
                found[variant.name] = str(error)
        return {**found, **(launch(subject, able, self._folder) if able else {})}

    def _same_bits(self, variant: Variant, got: Training) -> VariantRow:
        base, _ = self._trained(VARIANT_BY_NAME[variant.same_as])
        if isinstance(base, str):
            detail = f"{variant.same_as} has no result: {base.removeprefix(_CRASH)}"
            return VariantRow(variant.name, variant.what, "not compared", detail)
        compared = compare(got.steps, base.steps, begin=variant.stop_after)
        if (first := compared.first) is not None:
            detail = f"not the bits of {variant.same_as}: {first}"
            return VariantRow(variant.name, variant.what, "differs", detail, first.tensor, first.step)
        return VariantRow(variant.name, variant.what, "equal", f"bit for bit as {variant.same_as}")

    def _against_plain(self, variant: Variant, got: Training, subject: Subject) -> VariantRow:
        edits = self._edits(variant)
        assert not isinstance(edits, str)
        self._tell(f"{variant.what}: by the plain loop")
        plainly = {name: value for name, value in edits.items() if not name.startswith("memory.")}
        compared = self._compared(subject, got.steps, plainly)
        if (first := compared.first) is not None:
            return VariantRow(variant.name, variant.what, "differs", str(first), first.tensor, first.step)
        recipe = changed(subject.recipe, edits)
        count = recipe.data.global_batch_size // recipe.data.micro_batch_size
        wanted = self._reference(subject, plainly)
        if count > 1 and (first := self._compared(subject, wanted, {}).first) is not None:
            why = f"may be: {'; or '.join(causes(subject))}"
            detail = f"as plain PyTorch with {count} micro-batches ({compared}); with one, {first}: {why}"
            return VariantRow(variant.name, variant.what, "documented", detail, first.tensor, first.step)
        unruled = self._reference(subject, plainly, ruled=False)
        moved = [f"model/{name}" for name in plain.untrained(subject.task.model())]
        if (first := compare(unruled, wanted, moved=moved).first) is not None:
            detail = (
                f"as plain PyTorch ({compared}) where what training changes is put back after an evaluation; "
                f"without that rule, {first}"
            )
            return VariantRow(variant.name, variant.what, "documented", detail, first.tensor, first.step)
        return VariantRow(variant.name, variant.what, "equal", str(compared))

    def _compared(self, subject: Subject, found: list[StepTensors], edits: Edits) -> Compared:
        """Compares with the plain loop that has these settings; in low precision up to the first update.

        From the second update on rounding decides there, but not the number of updates, rate and loss scale.
        """
        wanted = self._reference(subject, edits)
        nudged = self._reference(subject, edits, nudged=True)
        moved = [f"model/{name}" for name in plain.untrained(subject.task.model())]
        if "precision.mode" not in edits:
            return compare(found, wanted, nudged, subject.eps, moved=moved)
        cut = 1 + next((step for step, seen in enumerate(wanted) if seen["updates"]), STEPS)
        compared = compare(found, wanted[:cut], nudged[:cut], subject.eps, moved=moved)
        ours, theirs = (
            [{n: step[n] for n in _COUNTED if n in step} for step in steps] for steps in (found, wanted)
        )
        if compared.first is not None:
            return compared
        return compared.and_then(compare(ours, theirs, theirs, subject.eps))

    def _evidence(self, variant: Variant, got: Training, subject: Subject) -> Evidence:
        edits = self._edits(variant)
        assert not isinstance(edits, str)
        order = real_order(make_plan(changed(subject.recipe, edits), subject.task))
        epochs = len({int(one) for step in order for epoch, _ in step for one in epoch})
        most = max(sum(len(samples) > 0 for _, samples in step) for step in order)

        def base() -> Training:
            training = self._trained(VARIANT_BY_NAME["plain"])[0]
            if isinstance(training, str):
                raise RuntimeError(training)
            return training

        def wanted(own: bool) -> list[StepTensors]:
            return self._reference(subject, edits if own else {})

        return Evidence(got, epochs, most, base, wanted)


def causes(subject: Subject) -> list[str]:
    """Returns what may make a difference between one micro-batch and several, in plain PyTorch too."""
    model = subject.task.model().train()
    found = list[str]()
    if any(isinstance(part, _BatchNorm) and part.training for part in model.modules()):
        found.append("BatchNorm sees one micro-batch at a time")
    if draws(subject):
        found.append("random numbers are drawn for each micro-batch")
    if plain.untrained(model):
        found.append("a forward pass changes buffers, and each micro-batch begins with the same ones")
    return [*found, "the loss compares the samples of a micro-batch"]


def real_order(plan: Plan) -> list[list[tuple[Ints, Ints]]]:
    """Returns epochs and indices of the samples in the micro-batches of each step, without padding."""
    order = []
    for step in range(plan.steps):
        epoch, sample, weight = plan.read(
            np.arange(step * plan.micro_batches, (step + 1) * plan.micro_batches)
        )
        order.append([(e[w > 0], s[w > 0]) for e, s, w in zip(epoch, sample, weight, strict=True)])
    return order


def of(subject: Subject, edits: Edits) -> Subject:
    """Returns the subject for these edits: in float32 where autocast is to lower that."""
    return subject.single() if "precision.mode" in edits else subject


def train_plainly(
    subject: Subject,
    edits: Edits,
    nudged: bool = False,
    ruled: bool = True,
    most: int = STEPS,
) -> list[StepTensors]:
    """Trains by the plain loop, with the samples that the plan gives; `most`: only the first steps."""
    recipe = changed(subject.recipe, edits)
    torch.set_num_threads(int(recipe.parallel.threads))
    plan = make_plan(recipe, subject.task)
    order = real_order(plan)[:most]
    due = evaluations(recipe.evaluation.interval, plan.steps, plan.epoch_length)
    with torch.random.fork_rng(devices=[]):
        return plain.reference_steps(
            subject.task, recipe, order, plan.epoch_length, due, nudged, ruled, subject.pretend
        )


def tried(train: Callable[[], Training]) -> Trained:
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
        return f"{_CRASH}{_line(error)}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:200]}"


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
