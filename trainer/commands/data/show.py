"""`trainer data show`: samples of text as the model sees them, the tokens that count in the loss marked."""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from trainer.config.recipe import Recipe
from trainer.data.dataset import LENGTH, NUM_ITEMS
from trainer.data.formats.documents import NO_TARGET
from trainer.data.formats.text import decode_text as decode
from trainer.errors import BadInputError
from trainer.observe.text import printable
from trainer.tasks.language import Language
from trainer.train.components.task import left_out_of, make_plan, make_task
from trainer.train.model_of_run import read_samples

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_MARKS = "⟦", "⟧"


class SampleDocument(NamedTuple):
    """Tokens of one document in a sample, and which of them count."""

    ids: list[int]
    counts: list[bool]


def shown_samples(recipe: Recipe, count: int) -> Iterator[str]:
    """Yields lines: what the data is, and the first samples that the run would learn from.

    Raises:
        BadInputError: If they aren't text.
    """
    task = make_task(recipe)
    if not isinstance(task, Language):
        raise BadInputError(
            f"task={recipe.task}: samples of text are shown; trainer data stats describes images"
        )
    plan = make_plan(recipe, task)
    size = min(count, len(task.train_data))
    numbers = plan.read(np.arange(-(-size // plan.micro_batch_size))).sample.reshape(-1)[:size]
    marks = (_GREEN, _PLAIN) if sys.stdout.isatty() else _MARKS
    for number in numbers.tolist():
        documents = list(documents_of(task, number))
        tokens, counting = (sum(len(one.ids) for one in documents), sum(sum(one.counts) for one in documents))
        yield f"sample {number:,}: {tokens:,} tokens, {counting:,} of which count"
        for document in documents:
            yield _text(document, _decoder(task), marks)
            yield "--"
    yield from task.notes
    for name, found in left_out_of(task).items():
        yield f"{name}: left out: {', '.join(map(str, found))}"


def documents_of(task: Language, sample: int) -> Iterator[SampleDocument]:
    """The documents of a training sample, each with what the model is given first."""
    batch = read_samples(task.train_data, np.array([sample]))
    tokens, targets, segment = task.given(batch)
    used = batch.fields.get(LENGTH, batch.fields.get(NUM_ITEMS))
    length = tokens.shape[1] if used is None else int(used[0])
    of = [0] * length if segment is None else segment[0, :length].tolist()
    given, expected = tokens[0].tolist(), targets[0].tolist()
    for _, places in groupby(range(length), of.__getitem__):
        places_here = list(places)
        first, last = places_here[0], places_here[-1]
        ids = given[first : last + 1] + [expected[last]] * (expected[last] != NO_TARGET)
        counts = [False, *(expected[place] != NO_TARGET for place in places_here)]
        yield SampleDocument(ids, counts[: len(ids)])


def _decoder(task: Language) -> Callable[[Sequence[int]], str]:
    if task.chat is not None:
        tokenizer: Any = task.chat.tokenizer
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    facts = task.describe()
    return lambda ids: decode(ids, facts["tokenizer"], facts["characters"])


def _text(document: SampleDocument, decoded: Callable[[Sequence[int]], str], marks: tuple[str, str]) -> str:
    parts, at = list[str](), 0
    for counts, run in groupby(document.counts):
        begin = len(decoded(document.ids[:at]))  # decoded by itself, a part may lose the blank before it
        at += len(list(run))
        text = printable(decoded(document.ids[:at])[begin:])
        parts.append(f"{marks[0]}{text}{marks[1]}" if counts else text)
    return "".join(parts)
