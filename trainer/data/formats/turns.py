"""Spans of a rendered conversation that an assistant writes, as places in the text."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.formats.chat import Chat, ChatError, Encoded, Message
from trainer.data.formats.chat_template import Spans
from trainer.data.formats.messages import THOUGHT
from trainer.rng import Ints

_PROBE = "\ufdd2"  # no character, by Unicode's definition: nothing that is read holds it


class Counted(NamedTuple):
    """Tokens of a text, which of them count in the loss, and what is odd about them.

    Attributes:
        ids: int64 (n,).
        counts: bool (n,).
        straddling: Tokens that are partly in a span, which don't count.
        unended: Spans that end in no token such as <|im_end|>.
    """

    ids: Ints
    counts: npt.NDArray[np.bool_]
    straddling: int
    unended: int


def turns(
    chat: Chat, messages: Sequence[Message], counting: Sequence[int], tools: Any = None
) -> tuple[str, Spans]:
    """Renders a conversation.

    Args:
        chat: Has the template.
        messages: Each with role and content.
        counting: The assistant's messages that count, by number, rising.
        tools: What the assistant may call.

    Returns:
        The text, and where what counts begins and ends: after what the template gives an assistant to go on
        with, to the end of its turn.

    Raises:
        ChatError: If the template refuses it, leaves a message out, or its parts aren't found in the whole.
    """
    text, marked = chat.render_marked(messages, tools)
    _check_kept(chat, messages, tools, text)
    if chat.marks:
        said = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
        if len(marked) != len(said):
            raise ChatError(
                f"the chat template marks {len(marked)} turns by {{% generation %}}, and {len(said)} are an "
                "assistant's"
            )
        return text, [marked[said.index(number)] for number in counting]
    return text, [_turn(chat, messages, number, tools, text) for number in counting]


def _turn(chat: Chat, messages: Sequence[Message], number: int, tools: Any, text: str) -> tuple[int, int]:
    try:
        before = chat.render(messages[:number], tools, generation_prompt=True)
    except ChatError as error:
        raise ChatError(
            f"{error}, where message {number + 1} is to be written; it has nothing to answer, so use "
            "language.learn=last, or take it out"
        ) from error
    upto = chat.render(messages[: number + 1], tools)
    if not text.startswith(before):
        raise ChatError(
            f"the chat template renders what comes before message {number + 1} otherwise than in the whole "
            "conversation; mark what the assistant writes by {% generation %} in chat_template.jinja, or use "
            "language.learn=all"
        )
    end = len(upto) if text.startswith(upto) and upto.startswith(before) else 0
    if not end and number + 1 < len(messages) and chat.added:
        end = _end(chat, messages, number, tools, text)
    if end <= len(before):
        raise ChatError(
            f"the chat template changes message {number + 1} by what follows it (as where earlier thinking "
            "is taken out); use language.learn=last, or mark what the assistant writes by {% generation %} "
            "in chat_template.jinja"
        )
    return len(before), end


def _end(chat: Chat, messages: Sequence[Message], number: int, tools: Any, text: str) -> int:
    """Finds the end of a turn that is rendered otherwise as the last one; 0 if it isn't found.

    A probe behind its content shows where that stands whole; the token that ends a turn follows it. After
    calls of tools it is the token that the turn would end with as the last one, before what comes next.
    """
    content = messages[number]["content"]
    if not messages[number].get("tool_calls"):
        for kept in (content, content.rstrip()):
            place = _probed(chat, messages, number, kept + _PROBE, tools, text)
            ends = re.compile(r"\s*(?:" + "|".join(map(re.escape, chat.added)) + ")")
            if (
                place > 0
                and text[:place].rstrip().endswith(kept.strip())
                and (after := ends.match(text, place))
            ):
                return after.end()
        return 0
    upto, following = chat.render(messages[: number + 1], tools).rstrip(), messages[number + 1]["content"]
    mark = max((one for one in chat.added if upto.endswith(one)), key=len, default="")
    begin = len(chat.render(messages[:number], tools, generation_prompt=True))
    end = text.find(mark, begin) + len(mark)
    before = _probed(chat, messages, number + 1, _PROBE + following, tools, text)
    return end if mark and mark not in content and begin < end <= before else 0


def _probed(chat: Chat, messages: Sequence[Message], number: int, content: str, tools: Any, text: str) -> int:
    """Finds the probe of a message's content in the rendered text, if nothing else changes; else -1."""
    found = chat.render(
        [*messages[:number], {**messages[number], "content": content}, *messages[number + 1 :]], tools
    )
    return found.find(_PROBE) if found.replace(_PROBE, "", 1) == text else -1


def _check_kept(chat: Chat, messages: Sequence[Message], tools: Any, text: str) -> None:
    """Refuses a conversation of which the template leaves a message out, as some do with a role."""
    probed = [
        {**one, "content": f"{one['content']}{_PROBE}{number}{_PROBE}"} if one["content"].strip() else one
        for number, one in enumerate(messages)
    ]
    rendered = chat.render(probed, tools)
    for number, message in enumerate(messages):
        if not message["content"].strip() or f"{_PROBE}{number}{_PROBE}" in rendered:
            continue
        alone = [*messages[:number], probed[number], *messages[number + 1 :]]
        if chat.render(alone, tools) == text:
            raise ChatError(
                f"the chat template leaves message {number + 1} (role {message['role']!r}) out; take it out, "
                "or put it into another message"
            )


def unread_keys(chat: Chat, messages: Sequence[Message], tools: Any, text: str) -> Iterator[str]:
    """Yields keys of messages, and the tools, without which a conversation's text is the same.

    Raises:
        ChatError: If calls of tools are among them: the assistant would learn to say nothing there.
    """
    given = {key for one in messages for key, value in one.items() if value not in (None, "", [], {})}
    keys = sorted(given - {"role", "content", "weight"})
    for group in dict.fromkeys(THOUGHT if key in THOUGHT else (key,) for key in keys):
        without = [{key: one[key] for key in one if key not in group} for one in messages]
        try:
            unread = chat.render(without, tools) == text
        except ChatError:
            continue
        if unread and "tool_calls" in group and any(one.get("tool_calls") for one in messages):
            raise ChatError(
                "the chat template leaves tool_calls out; use the template of a model that calls tools, or "
                "put the calls into content"
            )
        if unread:
            yield f"{group[0]!r} in messages"
    if tools and chat.render(messages) == text:
        yield "'tools'"


def counted(chat: Chat, text: str, encoded: Encoded, spans: Spans) -> Counted:
    """Says which tokens of a text count: those that lie wholly in a span.

    Blanks behind the token that ends a turn don't: they are the template's, and generation ends before them.
    """
    ids, starts, ends = encoded
    ended, counts = set(chat.added.values()), starts < 0
    straddling = unended = 0
    for begin, end in spans:
        inside = (starts >= begin) & (ends <= end) & (starts < end)
        straddling += int(((starts < end) & (ends > begin) & ~inside).sum())
        places = inside.nonzero()[0].tolist()
        last = next((place for place in reversed(places) if int(ids[place]) in ended), None)
        if last is not None and text[int(ends[last]) : end].isspace():
            inside[last + 1 :] = False
        unended += last is None or bool(inside[last + 1 :].any())
        counts |= inside
    return Counted(ids, counts, straddling, unended)
