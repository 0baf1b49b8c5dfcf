"""Conversations as tokens, some of which count in the loss; kept in a cache by what they are made from."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from trainer.data.formats.chat import Chat, ChatError, Encoded
from trainer.data.formats.chat_template import TODAY
from trainer.data.formats.conversations import RowSplit
from trainer.data.formats.messages import (
    Continuation,
    RowError,
    SkippedError,
    sample_of,
    unknown_roles,
    unread_names,
)
from trainer.data.formats.text import Text, smallest_type
from trainer.data.formats.turns import Counted, counted, learned
from trainer.data.left_out import LeftOut, by_suffix, one, tally
from trainer.errors import BadInputError
from trainer.host import strict_json
from trainer.host.files import cache_folder, written_whole
from trainer.observe.console import say

_LAYOUT = 7  # of the cache: raised where the same rows become other tokens, or other notes
_BATCH = 512  # rows that are tokenized together
_MANY = 100  # rows refused, after which a file most of whose rows are refused isn't read on
_READ, _REFUSED = "rows", "refused"  # numbers of rows beside those of what is odd
_DETAILS = re.compile(r"'.*'|\".*\"|[\d.,]+")  # of an error, in which those for one reason may differ


class Tokenized(NamedTuple):
    """Rows as tokens.

    Attributes:
        text: Each row a document, with which of its tokens count.
        left_out: Rows that aren't learned from, by reason.
        notes: What is odd about the others.
    """

    text: Text
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


class _Prepared(NamedTuple):
    """A row as text, with the spans that count and whether the tokenizer adds begin and end tokens."""

    where: str
    text: str
    spans: list[tuple[int, int]]
    plain: bool
    whole: bool  # all of it counts: then it may be cut into samples


# What follows a number in a note.
_STRADDLING = "tokens are partly of a prompt and partly of what follows it, and don't count"
_UNENDED = (
    "assistant turns end without a token of their own such as <|im_end|> that counts, so the model isn't "
    "taught to stop, which language.turns=each may do"
)
_OTHERWISE = (
    "assistant turns are written otherwise than as the last one of a conversation; language.turns=each "
    "learns each as the last one"
)
_UNKNOWN = "tokens stand for what the tokenizer's vocabulary lacks"
_CUT = "texts are longer than language.sequence_length, and cut into several samples"
_CONTROLS = "rows hold the text of a special token in their content, which becomes that token"

_ROLE = "conversation{{s}} with the role {role}, which isn't system, developer, user, assistant or tool"


class _Tally(NamedTuple):
    """Numbers of rows.

    Attributes:
        left_out: Rows that are left out.
        odd: Numbers of what is odd.
        controls: Rows that hold the text of a special token.
        refused: Place and fault of the first row that can't be meant, such as "a.jsonl: line 2: not JSON".
        reasons: The first fault of each reason.
    """

    left_out: list[LeftOut]
    odd: Counter[str]
    controls: list[LeftOut]
    refused: list[str]
    reasons: dict[str, str]


def _notes(totals: _Tally, chat: Chat, size: str) -> Iterator[str]:
    """Yields lines for people."""
    yield size
    odd = ((totals.odd[what], what) for what in (_STRADDLING, _UNENDED, _OTHERWISE, _UNKNOWN, _CUT))
    yield from (f"{count:,} {what}" for count, what in odd if count)
    yield from map(str, tally(totals.controls))
    if chat.asks_date:
        yield f"the chat template asks for today's date and is given {TODAY}, so that runs repeat"


def tokenized(
    split: RowSplit, chat: Chat, learn: str, length: int, each: bool = False, budget: float = 0.0
) -> Tokenized:
    """Returns rows as tokens, from the cache if they are there.

    Args:
        split: The rows.
        chat: Tokenizer and template.
        learn: As language.learn.
        length: Tokens that a sample predicts at most; longer conversations are left out.
        each: Whether each turn that counts is a sample of its own.
        budget: Fraction of the rows that may be refused, and are left out.

    Raises:
        BadInputError: If more rows can't be meant, or none is left; names file and row.
    """
    made_from = [_LAYOUT, split.sha256(), chat.sha256, learn, length, each, budget]
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
    file = cache_folder("conversations") / f"{name}.safetensors"
    if (kept := _kept(file)) is not None:
        tokens, begins, counts, left_out, notes = kept
    else:
        tokens, begins, counts, left_out, notes = _made(split, chat, learn, length, each, budget)
        _keep(file, {"tokens": tokens, "begins": begins, "counts": counts}, left_out, notes)
    text = Text(
        tokens, chat.vocabulary, chat.eos, "bpe:tokenizer.json", begins=begins, counts=counts.view(np.bool_)
    )
    return Tokenized(text, left_out, notes)


_Parts = tuple["np.ndarray", "np.ndarray", "np.ndarray", tuple[LeftOut, ...], tuple[str, ...]]


def _made(split: RowSplit, chat: Chat, learn: str, length: int, each: bool, budget: float) -> _Parts:
    totals, found = _Tally([], Counter(), [], [], {}), list[Counted]()
    batch = list[_Prepared]()
    for row in _prepared(split, chat, learn, each, budget, totals):
        batch.append(row)
        if len(batch) == _BATCH:
            found += _counted(batch, chat, length, totals)
            batch = []
    found += _counted(batch, chat, length, totals)
    left_out = tally(totals.left_out)
    if totals.odd[_REFUSED] > (allowed := math.ceil(budget * totals.odd[_READ])):
        raise _too_many(totals, f"data.corrupt_budget allows {allowed}")
    if not found:
        why = "; ".join(map(str, left_out)) or (
            "its only row is held back to measure on; give two, or train.jsonl and val.jsonl in a folder"
            if split.tenth is False and any(True for _ in split._replace(tenth=None).rows())
            else "it has no rows"
        )
        raise BadInputError(f"{split.files[0]}: nothing to learn from is left ({why})")
    beside = (one(f"{by_suffix(name)} beside the files that are read", name) for name in split.beside)
    left_out = tally([*left_out, *beside])
    sizes = np.array([len(each.ids) for each in found], np.int64)
    tokens = np.concatenate([each.ids for each in found]).astype(smallest_type(chat.vocabulary))
    counts = np.concatenate([each.counts for each in found]).astype(np.uint8)
    begins = np.cumsum(sizes) - sizes
    counting = int(counts.sum() - counts[begins].sum())
    what = "turns" if each else "rows"
    size = f"{len(found):,} {what} of {len(tokens):,} tokens, {counting:,} of which count in the loss"
    return tokens, begins, counts, left_out, tuple(_notes(totals, chat, size))


def _too_many(totals: _Tally, why: str) -> BadInputError:
    count, rows = totals.odd[_REFUSED], totals.odd[_READ]
    rest = f" ({count:,} of {rows:,} rows are refused, and {why})" * (count > 1)
    return BadInputError(totals.refused[0] + rest)


def _prepared(
    split: RowSplit, chat: Chat, learn: str, each: bool, budget: float, totals: _Tally
) -> Iterator[_Prepared]:
    for where, row in split.rows():
        totals.odd[_READ] += 1
        try:
            if isinstance(row, RowError):
                raise row
            sample = sample_of(row, learn, split.column)
            names = unread_names(row, split.column)
            totals.left_out.extend(
                _left(f"row{{s}} with {name!r}, which isn't read", where) for name in names
            )
            if isinstance(sample, Continuation):
                contents = [sample.prompt + sample.completion]
                yield _plain(where, sample, chat)
            else:
                contents = [message["content"] for message in sample.messages]
                found = list(learned(chat, sample, learn, each))
                reasons = dict.fromkeys(reason for one in found for reason in one.reasons)
                totals.left_out.extend(_left(reason, where) for reason in reasons)
                totals.odd[_OTHERWISE] += sum(one.otherwise for one in found)
                totals.controls.extend(
                    _left(_ROLE.format(role=role), where) for role in unknown_roles(sample.messages)
                )
                yield from (_Prepared(where, one.text, one.spans, plain=False, whole=False) for one in found)
        except SkippedError as skipped:
            totals.left_out.append(_left(str(skipped), where))
            continue
        except (RowError, ChatError, RecursionError) as error:  # the last of JSON in a string
            totals.odd[_REFUSED] += 1
            totals.refused[:] = totals.refused or [f"{where}: {error}"]
            reason = totals.reasons.setdefault(
                _DETAILS.sub("", str(error)), f"row{{s}} that can't be meant ({error})"
            )
            totals.left_out.append(_left(reason, where))
            if _MANY <= totals.odd[_REFUSED] > totals.odd[_READ] * max(0.5, budget):
                raise _too_many(totals, "the others aren't looked at") from error
            continue
        if ends := [end for end in chat.ends if any(end in content for content in contents)]:
            totals.controls.append(one(_CONTROLS, f"{_name(where)}: {ends[0]}"))


def _left(reason: str, where: str) -> LeftOut:
    return one(reason, _name(where))


def _name(where: str) -> str:
    """A row by its file's name alone: what is kept in the cache holds wherever that lies."""
    return where.rpartition("/")[2]


def _plain(where: str, sample: Continuation, chat: Chat) -> _Prepared:
    if chat.eos is None:
        raise RowError(
            f"{chat.folder}: tokenizer_config.json names no eos_token, by which a text ends; add it"
        )
    text = sample.prompt + sample.completion
    return _Prepared(where, text, [(len(sample.prompt), len(text))], plain=True, whole=not sample.prompt)


def _counted(batch: Sequence[_Prepared], chat: Chat, length: int, totals: _Tally) -> Iterator[Counted]:
    for row, encoded in zip(batch, chat.encode([row.text for row in batch]), strict=True):
        found = counted(chat, row.text, encoded, row.spans)
        if row.plain:
            found = _with_ends(found, chat)
        targets = len(found.ids) - 1
        if not found.counts[1:].any():
            totals.left_out.append(_left("row{s} without a token that counts", row.where))
        elif targets > length and not row.whole:
            totals.left_out.append(_left(f"conversation{{s}} of more than {length:,} tokens", row.where))
        else:
            totals.odd[_STRADDLING] += found.straddling
            totals.odd[_UNENDED] += found.unended
            totals.odd[_UNKNOWN] += _unknown(chat, row.text, encoded)
            totals.odd[_CUT] += targets > length
            yield found


def _unknown(chat: Chat, text: str, encoded: Encoded) -> int:
    """Counts tokens that stand for what the vocabulary lacks, but for those that the text names."""
    places = (encoded.ids == chat.unknown).nonzero()[0]
    named = "" if chat.unknown is None else chat.tokenizer.id_to_token(chat.unknown)
    return sum(text[encoded.starts[place] : encoded.ends[place]] != named for place in places)


def _with_ends(found: Counted, chat: Chat) -> Counted:
    """Puts the token that begins a text before it, if the tokenizer does and none is there; and its end."""
    ids, counts, straddling, _ = found
    if chat.bos is not None and (not len(ids) or ids[0] != chat.bos):
        ids, counts = np.append(chat.bos, ids), np.append(False, counts)
    if chat.eos is not None and ids[-1] != chat.eos:
        ids, counts = np.append(ids, chat.eos), np.append(counts, True)
    return Counted(ids, counts, straddling, 0)


def _kept(file: Path) -> _Parts | None:
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="numpy") as opened:
            about = strict_json.parse((opened.metadata() or {})["about"].encode())
            tokens, begins, counts = (opened.get_tensor(name) for name in ("tokens", "begins", "counts"))
        if about["sha256"] != _hash(tokens, begins, counts):
            raise ValueError("another hash")
        left_out = tuple(LeftOut.model_validate(one) for one in about["left_out"])
        return tokens, begins, counts, left_out, tuple(map(str, about["notes"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        say(f"{file}: is damaged ({error}), and made again")
        return None


def _keep(
    file: Path, arrays: dict[str, "np.ndarray"], left_out: Sequence[LeftOut], notes: Sequence[str]
) -> None:
    about = {
        "sha256": _hash(*arrays.values()),
        "left_out": [one.model_dump() for one in left_out],
        "notes": list(notes),
    }
    content = safetensors.numpy.save(arrays, {"about": json.dumps(about)})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file, lasting=False) as beside:
            beside.write_bytes(content)
    except OSError as error:
        say(f"{file}: can't be written ({error.strerror}), so each process tokenizes for itself")


def _hash(*arrays: "np.ndarray") -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape};".encode() + array.tobytes())
    return digest.hexdigest()
