"""Loss mask of a conversation: spans of the rendered text that the assistant writes, and their tokens."""

import re
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.formats.chat import Chat, ChatError, Encoded, Message
from trainer.data.formats.chat_template import Spans
from trainer.data.formats.messages import KWARGS, THOUGHT, Talk
from trainer.rng import Ints

_PROBE = "\ufdd2"  # a Unicode noncharacter, so in no text that is read; inserted to find content in the text
_OF_ALL = ("role", "content", "weight", "tool_calls")  # keys of a message that are checked for themselves
_UNREAD = "which the chat template doesn't write into what is learned"
_GREETING = "conversation{s} whose assistant speaks first: that turn doesn't count"
_BEFORE_USERS = ("system", "developer", "assistant")
_STAND_IN = "\ufdd3"  # for content, where a template would take a part of it out
_MARK = "mark what the assistant writes by {% generation %} in chat_template.jinja"


class TurnError(ChatError):
    """Turn that wouldn't be learned as it is asked for at inference.

    Args:
        fault: What is wrong.
        remedy: What helps where no key of the recipe does.
    """

    def __init__(self, fault: str, remedy: str = _MARK) -> None:
        super().__init__(fault)
        self.remedy = remedy


class Learned(NamedTuple):
    """A sample of a conversation.

    Attributes:
        text: As the template renders it.
        spans: Begin and end in it, in characters, of what counts.
        reasons: What of the conversation isn't learned, for `LeftOut`.
        otherwise: Number of turns that are rendered otherwise than as the last one.
    """

    text: str
    spans: Spans
    reasons: Sequence[str]
    otherwise: int = 0


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


def learned(chat: Chat, talk: Talk, learn: str, each: bool) -> Iterator[Learned]:
    """Yields the samples of a conversation: one, or with `each` one for each turn that counts.

    With `each` a turn is rendered as the last message, after the generation prompt: as at inference.

    Raises:
        ChatError: If the template refuses it, or what counts wouldn't be learned whole.
    """
    chat = chat.given(talk.keys)
    try:
        yield from _samples(chat, talk, learn, each)
    except ChatError as error:
        asked = next((n for n, one in enumerate(talk.messages) if one["role"] not in _BEFORE_USERS), 0)
        rest = [number for number in talk.counting if number > asked]
        if learn != "all" and 0 < len(rest) < len(talk.counting):
            for nth, sample in enumerate(learned(chat, talk._replace(counting=rest), learn, each)):
                yield sample._replace(reasons=[*sample.reasons, *[_GREETING] * (not nth)])
            return
        if not isinstance(error, TurnError):
            raise
        remedies = [("language.turns=each", talk, True)] * (not each and learn != "all")
        remedies += [("language.learn=last", talk._replace(counting=talk.counting[-1:]), each)]
        for name, other, alone in remedies:
            with suppress(TurnError):
                _samples(chat, other, "", alone)
                raise ChatError(f"{error}; use {name}, or {_MARK}") from error
        raise ChatError(f"{error}; {error.remedy}") from error


def _samples(chat: Chat, talk: Talk, learn: str, each: bool) -> list[Learned]:
    return [_of_turn(chat, talk, one) for one in talk.counting] if each else [_together(chat, talk, learn)]


def _together(chat: Chat, talk: Talk, learn: str) -> Learned:
    """A conversation as one sample."""
    messages, counting, tools, _ = talk
    text, spans, alone = _turns(chat, messages, () if learn == "all" else counting, tools)
    if learn == "all":
        return Learned(text, every := [(0, len(text))], _unlearned(chat, talk, text, every))
    otherwise = 0
    for last, (begin, end) in zip(alone, spans, strict=False):
        closing = next((one for one in chat.closings if text[begin:end].endswith(one)), "")
        otherwise += not last.startswith(text[begin:end].removesuffix(closing).rstrip(), begin)
    return Learned(text, spans, _unlearned(chat, talk, text, spans), otherwise)


def _of_turn(chat: Chat, talk: Talk, number: int) -> Learned:
    """A turn as the last message of a sample of its own."""
    part = talk._replace(messages=talk.messages[: number + 1], counting=[number])
    looked = {number} if number != talk.counting[-1] else {number, *range(number)} - {*talk.counting[:-1]}
    said = ""
    try:
        text, spans = turns(chat, part.messages, [number], part.tools)
        head = text[: spans[0][0]]
    except TurnError:
        head = chat.render(part.messages[:-1], part.tools, generation_prompt=True)
        part, said = _as_asked(chat, part, head)
        text = chat.render(part.messages, part.tools)
        if said:
            _check_kept(chat, part.messages, part.tools, text)
            begin = text.index(_STAND_IN)
            spans = [(begin, begin + 1 + chat.closed(text[begin + 1 :]))]
        else:
            _, spans = turns(chat, part.messages, [number], part.tools)
    reasons = _unlearned(chat, part, text, spans, looked)
    moved = len(head) - spans[0][0]
    text = head + text[spans[0][0] :].replace(_STAND_IN, said)
    begin, end = spans[-1][0] + moved, spans[-1][1] + moved + len(said) - bool(said)
    ended = any(text[begin:end].rstrip().endswith(mark) for mark in chat.ends)
    if not ended and (mark := _next_turn(chat, talk, number, text[begin:end].rstrip())):
        text = text[:end].rstrip() + mark
        end = len(text)
    return Learned(text, [*spans[:-1], (begin, end)], reasons)


def _as_asked(chat: Chat, part: Talk, prompt: str) -> tuple[Talk, str]:
    """What is rendered for a last message that doesn't follow the generation prompt in the rendered text.

    Returns:
        The messages without the thinking of those before it, and "", if the template takes that out where an
        answer is there, as gpt-oss'. Else the message with `_STAND_IN` for its content, and the content after
        the prompt, if the prompt begins the thinking, as DeepSeek-R1's does.

    Raises:
        TurnError: If it is neither.
        ChatError: If the message has no thinking, and the prompt begins it.
    """
    *before, one = part.messages
    bare = [{key: value for key, value in each.items() if key not in THOUGHT} for each in part.messages]
    without = part._replace(messages=[*bare[:-1], one])
    alone = _rendered(chat, without.messages, part.tools) or ""
    asked = chat.render(bare[:-1], part.tools, generation_prompt=True)
    if alone == chat.render(part.messages, part.tools) and alone.startswith(asked) and asked != prompt:
        return without, ""
    stand_in = part._replace(messages=[*before, {**bare[-1], "content": _STAND_IN}])
    shown, found, _ = (_rendered(chat, stand_in.messages, part.tools) or "").partition(_STAND_IN)
    opening = prompt.removeprefix(shown)
    tag = re.search(r"<(\w+)>\s*$", opening)
    if not found or not prompt.startswith(shown) or tag is None:
        raise TurnError(_otherwise(len(before)))
    content, thought, close = one["content"], _thought(one), f"</{tag[1]}>"
    if thought:
        return stand_in, f"{thought}\n{close}\n\n{content.lstrip()}"
    if content.startswith(opening):
        return stand_in, content[len(opening) :]
    rest = content.lstrip().removeprefix(opening.rstrip())
    if close not in rest:
        raise ChatError(
            f"the chat template begins an answer by {opening!r}, and message {len(before) + 1} has no "
            f"thinking; add it as {THOUGHT[0]}, or {opening + close!r} to the begin of content, and use "
            f"language.turns=each; or {_MARK}"
        )
    return stand_in, rest.lstrip("\n")


def _unlearned(
    chat: Chat, talk: Talk, text: str, spans: Spans, looked: Container[int] | None = None
) -> list[str]:
    """Reasons for `LeftOut`: what of a conversation its sample holds nothing of."""
    words = [*unread_keys(chat, talk, text, spans, looked)]
    words += [f"{name!r} in {KWARGS}" for name in talk.keys if name not in chat.reads]
    return [f"conversation{{s}} with {what}, {_UNREAD}" for what in words]


def _next_turn(chat: Chat, talk: Talk, number: int, said: str) -> str:
    """The special token by which the next turn begins, with blanks before it; "" if there is none.

    A model whose template has no ends of turns stops by it, as GLM's.
    """
    follows = [one["role"] for one in talk.messages[number + 1 : number + 2] if one["role"] != "assistant"]
    probe = {"role": follows[0] if follows else "user", "content": _STAND_IN}
    shown = _rendered(chat, [*talk.messages[: number + 1], probe], talk.tools) or ""
    before = shown.partition(_STAND_IN)[0]
    # The begin of the turn may be another one where a turn follows.
    tail = said[bisect_left(range(len(said)), True, key=lambda cut: said[cut:] in before) :]
    between = before[before.rfind(tail) + len(tail) :]
    places = [(place, -len(end), end) for end in chat.ends if (place := between.find(end)) >= 0]
    if not places:
        return ""
    place, _, mark = min(places)
    blanks = between[:place]
    return blanks[len(blanks.rstrip()) :] + mark


def with_stop(chat: Chat) -> Chat:
    """The same with the token by which a turn ends that is a sample; see `_next_turn`."""
    talk = Talk([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], [1])
    with suppress(ChatError):
        if chat.turn_end is None:
            text = _of_turn(chat, talk, 1).text
            return chat._replace(
                turn_end=next((chat.ends[end] for end in chat.ends if text.endswith(end)), None)
            )
    return chat


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
    return _turns(chat, messages, counting, tools)[:2]


def _turns(
    chat: Chat, messages: Sequence[Message], counting: Sequence[int], tools: Any
) -> tuple[str, Spans, list[str]]:
    """Returns what `turns` does; and without marks for each span the text where its message is the last."""
    text, marked = chat.render_marked(messages, tools)
    _check_kept(chat, messages, tools, text)
    if chat.marks and counting:
        _check_marks(chat, messages, tools)
        assistants = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
        if len(marked) > len(assistants) and len(counting) == len(assistants):
            return text, marked, []  # a turn in several blocks
        if len(marked) != len(assistants):
            raise ChatError(
                f"the chat template marks {len(marked)} turns by {{% generation %}}, but the assistant has "
                f"{len(assistants)}"
            )
        return text, [marked[assistants.index(number)] for number in counting], []
    found = [_turn(chat, messages, number, tools, text) for number in counting]
    return text, [(begin, end) for begin, end, _ in found], [last for *_, last in found]


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


def _turn(
    chat: Chat, messages: Sequence[Message], number: int, tools: Any, text: str
) -> tuple[int, int, str]:
    """Returns begin and end of an assistant's turn in a text without marks, and the text that ends with it.

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
        raise TurnError(_otherwise(number))
    end = len(upto) if text.startswith(upto) and upto.startswith(before) else 0
    if not end and number + 1 < len(messages):
        end = _end(chat, messages, number, tools, text, len(before))
    if end <= len(before):
        raise TurnError(
            f"the chat template changes message {number + 1} by what follows it (as where earlier thinking "
            "is taken out)"
        )
    # Some templates end a turn only where another follows.
    return len(before), end + chat.closed(text[end:]), upto


def _otherwise(number: int) -> str:
    return (
        f"the chat template renders what comes before message {number + 1} otherwise than in the whole "
        "conversation"
    )


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


def unread_keys(
    chat: Chat, talk: Talk, text: str, spans: Spans, looked: Container[int] | None = None
) -> Iterator[str]:
    """Yields what the template doesn't read, in words for a message: keys of messages and calls, the tools.

    Each key is taken out of one message at a time: the template may read it in one and not in another, as
    Qwen 3's does with earlier thinking. A key of a message that counts is read if it changes its span.

    Args:
        chat: The tokenizer and its chat template.
        talk: The conversation.
        text: From `turns`.
        spans: From `turns`; or one of all the text, where all of it counts.
        looked: Messages that are looked at, by number; None: all.

    Raises:
        ChatError: If a message that counts isn't whole in its span: a part of its content, its thinking or a
            part of its calls is left out, so the assistant would learn to leave it out. Also if the calls of
            another message are.
    """
    messages, tools = talk.messages, talk.tools
    own = dict(zip(talk.counting, ([one] for one in spans), strict=False))
    if len(spans) != len(talk.counting):  # turns in several blocks, or all of the text
        own = dict.fromkeys(talk.counting, spans)
    for number in talk.counting:
        _check_whole(chat, messages, number, tools, text, own[number])
    unread = dict[str, None]()
    for number, one in enumerate(messages):
        counts = own.get(number)
        for part in _parts(one, counts is not None) if looked is None or number in looked else ():
            found, shown = (
                _rendered(chat, [*messages[:number], changed, *messages[number + 1 :]], tools)
                for changed in (part.without, part.probed or part.without)
            )
            elsewhere = counts and _PROBE in (shown or "") and not _shown_within(shown or "", text, counts)
            if found is None or (_differs(found, text, counts) and not elsewhere):
                continue
            if part.needed:
                raise ChatError(
                    f"the chat template leaves {part.what} out (message {number + 1}); use the template of a "
                    "model that calls tools, or put the calls into content"
                )
            unread[part.what] = None
    yield from unread
    if tools and _rendered(chat, messages, None) == text:
        yield "'tools'"


def _check_whole(
    chat: Chat, messages: Sequence[Message], number: int, tools: Any, text: str, spans: Spans
) -> None:
    """Checks that content and thinking of a message that counts are in its span, but for blanks."""
    one, content = messages[number], _dense(messages[number]["content"])
    # Its begin may stand before the span: some generation prompts open the thinking.
    before = len(_dense(text[: spans[0][0]]))
    found = _dense(text[: spans[-1][1]]).rfind(content)
    if found < 0 or (content and found + len(content) <= before):
        raise TurnError(
            f"the chat template leaves a part of the content of message {number + 1} out (as where thinking "
            "is taken out)"
        )
    if thought := _thought(one):
        marked = {
            key: one[key].replace(thought, f"{_PROBE}{thought}{_PROBE}", 1) for key in THOUGHT if key in one
        }
        if not _shown_within(_rendered(chat, _with(messages, number, **marked), tools) or "", text, spans):
            raise TurnError(
                f"the chat template leaves the thinking of message {number + 1} out ({THOUGHT[0]}, as where "
                "others follow), or outside of what counts",
                "write it into content, as the model does",
            )


def _dense(text: str) -> str:
    return "".join(text.split())


def _thought(message: Message) -> str:
    """Returns what a model thought, in a message, without blanks around it."""
    return next((str(message[key]).strip() for key in THOUGHT if key in message), "")


def _shown_within(found: str, text: str, spans: Spans) -> bool:
    """Whether what stands between the first and the last probe in `found` lies in a span of `text`."""
    begin, last = found.find(_PROBE), found.rfind(_PROBE)
    if begin == last:  # none, or half of it
        return False
    rest = found[last + 1 :]
    end = len(text) - len(rest)
    alike = text.startswith(found[:begin]) and text.endswith(rest)
    return alike and any(first <= begin <= end <= stop for first, stop in spans)


class _Part(NamedTuple):
    """A part of a message: in words, the message without it, with probes around it; if it must be read."""

    what: str
    without: Message
    probed: Message | None = None
    needed: bool = False


def _parts(message: Message, counts: bool) -> Iterator[_Part]:
    """Yields what may be read of a message, but its role, its content, and its thinking if it counts."""
    calls, emptied = message.get("tool_calls") or [], {"arguments": {}, "name": ""}
    for nth, call in enumerate(calls):
        inner, found = call.get("function"), [_Part(f"call {nth + 1} of tool_calls", {}, None, needed=True)]
        for key, value in (call if inner is None else {**inner, **call}).items():
            if key not in ("function", "type") and value not in ("", [], {}, None):
                within = call if key in call else inner
                changed = {name: one for name, one in within.items() if name != key}
                changed |= {key: emptied[key]} if key in emptied else {}
                changed = changed if key in call else {**call, "function": changed}
                found.append(_Part(f"{key!r} in tool_calls", changed, None, key in emptied))
        for part in found:
            instead = [*calls[:nth], *([part.without] if part.without else []), *calls[nth + 1 :]]
            yield part._replace(without={**message, "tool_calls": instead})
    for key in sorted({*message} - {*_OF_ALL, *THOUGHT}):
        if (value := message[key]) not in ("", [], {}):
            without = {name: one for name, one in message.items() if name != key}
            yield _Part(f"{key!r} in messages", without, {**message, key: f"{_PROBE}{value}{_PROBE}"})
    if not counts and _thought(message):
        without = {name: one for name, one in message.items() if name not in THOUGHT}
        yield _Part(f"{THOUGHT[0]!r} in messages that don't count", without)


def _alike(one: str, other: str) -> int:
    """Returns how many letters two texts begin alike with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _differs(found: str, text: str, spans: Spans | None) -> bool:
    """Whether two texts differ; where spans are given, in one of those."""
    if found == text or spans is None:
        return found != text
    begin, end = _alike(found, text), len(text) - _alike(found[::-1], text[::-1])
    # What both have may reach over an end, where the same letters follow.
    return any(first <= max(begin, end) and min(begin, end) <= stop for first, stop in spans)


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
