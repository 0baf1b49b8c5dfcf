"""Loss mask of a conversation: spans of the rendered text that the assistant writes, and their tokens."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.formats.chat import Chat, ChatError, Encoded, Message
from trainer.data.formats.chat_template import Spans
from trainer.data.formats.messages import THOUGHT
from trainer.rng import Ints

_PROBE = "\ufdd2"  # a Unicode noncharacter, so in no text that is read; inserted to find content in the text


class Counted(NamedTuple):
    """Tokens of a text, which of them count in the loss, and how many tokens and spans are doubtful.

    Attributes:
        ids: int64 (n,), token numbers.
        counts: bool (n,), True for tokens that count in the loss.
        straddling: Number of tokens that are partly in a span; they don't count.
        unended: Number of spans that don't end in an added token such as <|im_end|>.
    """

    ids: Ints
    counts: npt.NDArray[np.bool_]
    straddling: int
    unended: int


def turns(
    chat: Chat, messages: Sequence[Message], counting: Sequence[int], tools: Any = None
) -> tuple[str, Spans]:
    """Renders a conversation, and finds the spans of the text that count in the loss.

    Args:
        chat: The tokenizer and its chat template.
        messages: Each with role and content.
        counting: Indices of the assistant's messages that count, ascending.
        tools: Tools that the assistant may call, as the template takes them; None without any.

    Returns:
        The text, and begin and end in it, in characters, of each message that counts: what the template
        marks by {% generation %}; else from the end of the generation prompt to the end of the turn.

    Raises:
        ChatError: If the template refuses the conversation, leaves a message out, or marks another number of
            turns than the assistant has; or if a turn isn't found in the text.
    """
    text, marked = chat.render_marked(messages, tools)
    _check_kept(chat, messages, tools, text)
    if chat.marks and counting:
        _check_marks(chat, messages, tools)
        assistants = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
        if len(marked) > len(assistants) and len(counting) == len(assistants):
            return text, marked  # a turn in several blocks
        if len(marked) != len(assistants):
            raise ChatError(
                f"the chat template marks {len(marked)} turns by {{% generation %}}, but the assistant has "
                f"{len(assistants)}"
            )
        return text, [marked[assistants.index(number)] for number in counting]
    return text, [_turn(chat, messages, number, tools, text) for number in counting]


def _check_marks(chat: Chat, messages: Sequence[Message], tools: Any) -> None:
    """Refuses a template that marks by {% generation %} what others say."""
    others = [
        one if one["role"] == "assistant" else {**one, "content": one["content"] + _PROBE} for one in messages
    ]
    try:
        text, marked = chat.render_marked(others, tools)
    except ChatError:
        return
    if any(_PROBE in text[begin:end] for begin, end in marked):
        raise ChatError(
            "the chat template marks by {% generation %} what others than the assistant say; mend "
            "chat_template.jinja"
        )


def _turn(chat: Chat, messages: Sequence[Message], number: int, tools: Any, text: str) -> tuple[int, int]:
    """Returns begin and end of an assistant's turn in the text, for a template without {% generation %}.

    The turn begins after the messages before it, rendered with the generation prompt. It ends where the
    messages up to and with it end, rendered alone.
    """
    try:
        before = chat.render(messages[:number], tools, generation_prompt=True)
    except ChatError as error:
        raise ChatError(
            f"{error}, where message {number + 1} is to be written; it has nothing to answer, so use "
            "language.learn=last, or take it out"
        ) from error
    upto = _rendered(chat, messages[: number + 1], tools) or ""
    if not text.startswith(before):
        raise ChatError(
            f"the chat template renders what comes before message {number + 1} otherwise than in the whole "
            "conversation; mark what the assistant writes by {% generation %} in chat_template.jinja, or use "
            "language.learn=all"
        )
    end = len(upto) if text.startswith(upto) and upto.startswith(before) else 0
    if not end and number + 1 < len(messages):
        end = _end(chat, messages, number, tools, text, len(before))
    if end <= len(before):
        raise ChatError(
            f"the chat template changes message {number + 1} by what follows it (as where earlier thinking "
            "is taken out); use language.learn=last, or mark what the assistant writes by {% generation %} "
            "in chat_template.jinja"
        )
    # Some templates end a turn only where another follows.
    return len(before), end + chat.closed(text[end:])


def _end(chat: Chat, messages: Sequence[Message], number: int, tools: Any, text: str, begin: int) -> int:
    """Finds the end of a turn that the template renders differently as the last one; 0 if it isn't found.

    A probe after its content shows where the content ends in the text; the token that ends the turn follows,
    if the template writes one. The next role's, as <|user|>, isn't one.
    A turn with tool calls ends with the token that it would end with as the last one, found before the
    content of the next message.
    """
    content = messages[number]["content"]
    if not messages[number].get("tool_calls"):
        for kept in (content, content.rstrip()):
            place = _probed(chat, messages, number, kept + _PROBE, tools, text)
            if place > 0 and text[:place].rstrip().endswith(kept.strip()):
                return place + chat.closed(text[place:])
        return 0
    upto, following = _rendered(chat, messages[: number + 1], tools) or "", messages[number + 1]["content"]
    mark = next((one for one in chat.ends if upto.rstrip().endswith(one)), "")
    if not mark or mark in content:
        return 0
    # It may also end each call: it is as often in the turn as where that is the last one.
    times = upto.count(mark) - text.count(mark, 0, begin)
    end = begin + len(mark.join([*text[begin:].split(mark, times)[:times], ""]))
    before = _probed(chat, messages, number + 1, _PROBE + following, tools, text)
    return end if begin < end <= before else 0


def _rendered(chat: Chat, messages: Sequence[Message], tools: Any) -> str | None:
    """Renders messages that were changed or cut to try the template; None if it refuses them."""
    try:
        return chat.render(messages, tools)
    except ChatError:
        return None


def _probed(chat: Chat, messages: Sequence[Message], number: int, content: str, tools: Any, text: str) -> int:
    """Returns the place in the text of the probe in a message's `content`.

    It is -1 if the template drops the probe, or renders anything else differently because of it.
    """
    found = _rendered(chat, _with(messages, number, content=content), tools) or ""
    return found.find(_PROBE) if found.replace(_PROBE, "", 1) == text else -1


def _with(messages: Sequence[Message], number: int, **changed: Any) -> list[Message]:
    return [*messages[:number], {**messages[number], **changed}, *messages[number + 1 :]]


def _check_kept(chat: Chat, messages: Sequence[Message], tools: Any, text: str) -> None:
    """Checks that the text holds every message; some templates leave out those of a role.

    Raises:
        ChatError: If one is left out.
    """
    probed = [
        {**one, "content": f"{one['content']}{_PROBE}{number}{_PROBE}"} if one["content"].strip() else one
        for number, one in enumerate(messages)
    ]
    rendered = _rendered(chat, probed, tools) or ""
    for number, message in enumerate(messages):
        if not message["content"].strip() or f"{_PROBE}{number}{_PROBE}" in rendered:
            continue
        if _rendered(chat, _with(messages, number, **probed[number]), tools) == text:
            raise ChatError(
                f"the chat template leaves message {number + 1} (role {message['role']!r}) out; take it out, "
                "or put it into another message"
            )


def unread_keys(chat: Chat, messages: Sequence[Message], tools: Any, text: str) -> Iterator[str]:
    """Yields what the template doesn't read, in words for a message: keys of messages, and the tools.

    Raises:
        ChatError: If tool calls are among them: the assistant would learn to write nothing in their place.
    """
    for number, one in enumerate(messages):
        calls = one.get("tool_calls") or []
        for nth in range(len(calls)):
            fewer = _with(messages, number, tool_calls=[*calls[:nth], *calls[nth + 1 :]])
            if _rendered(chat, fewer, tools) == text:
                raise ChatError(
                    f"the chat template leaves tool_calls out (call {nth + 1} of message {number + 1}); use "
                    "the template of a model that calls tools, or put the calls into content"
                )
    given = {key for one in messages for key, value in one.items() if value not in ("", [], {})}
    keys = sorted(given - {"role", "content", "weight", "tool_calls"})
    for group in dict.fromkeys(THOUGHT if key in THOUGHT else (key,) for key in keys):
        without = [{key: one[key] for key in one if key not in group} for one in messages]
        if _rendered(chat, without, tools) == text:
            yield f"{group[0]!r} in messages"
    if tools and _rendered(chat, messages, None) == text:
        yield "'tools'"


def counted(chat: Chat, text: str, encoded: Encoded, spans: Spans) -> Counted:
    """Returns which tokens of a text count in the loss: those that lie wholly in a span.

    White space after the token that ends a turn doesn't count: the template adds it, and generation stops
    before it.
    """
    ids, starts, ends = encoded
    ended, counts = set(chat.ends.values()), starts < 0
    straddling = unended = 0
    for begin, end in spans:
        inside = (starts >= begin) & (ends <= end) & (starts < end)
        for place in ((starts >= begin) & (starts < end) & (ends > end)).nonzero()[0].tolist():
            # A token may be written to take the blanks behind it.
            inside[place] = int(ids[place]) in ended and text[end : int(ends[place])].isspace()
        straddling += int(((starts < end) & (ends > begin) & ~inside).sum())
        places = inside.nonzero()[0].tolist()
        last = next((place for place in reversed(places) if int(ids[place]) in ended), None)
        if last is not None and text[int(ends[last]) : end].isspace():
            inside[last + 1 :] = False
        unended += last is None or bool(inside[last + 1 :].any())
        counts |= inside
    return Counted(ids, counts, straddling, unended)
