"""Meaning of rows: a conversation of messages, a prompt and its completion, or a text."""

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from trainer.host import strict_json

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ROLES |= {"model": "assistant"}  # of Gemini's and Gemma's form
_KNOWN = {*_ROLES.values(), "developer", "tool"}
_ALPACA = ("instruction", "input", "output")
KWARGS = "chat_template_kwargs"  # what a row gives its chat template
THOUGHT = ("reasoning_content", "thinking", "reasoning")  # names of what a model thought, in a message
_TOLD = 6  # names, in a message
# Half of a pair, which is no text; and what Unicode reserves, which marks places here.
_NO_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")


class RowError(ValueError):
    """Fault of a row; the caller adds its number."""


class SkippedError(Exception):
    """Reason to leave a row out."""


class Talk(NamedTuple):
    """A conversation.

    Attributes:
        messages: Each with role, and content as text.
        counting: The messages that count in the loss, by number.
        tools: What the assistant may call.
        keys: What else the template is given.
    """

    messages: Sequence[Mapping[str, Any]]
    counting: Sequence[int]
    tools: Any = None
    keys: Mapping[str, Any] = MappingProxyType({})


class Continuation(NamedTuple):
    """A text, or a prompt and its completion, which alone counts in the loss."""

    prompt: str
    completion: str


def sample_of(row: Mapping[str, Any], learn: str, column: str | None = None) -> Talk | Continuation:
    """Parses a row.

    Args:
        row: Its keys and values.
        learn: As language.learn.
        column: The key that is read; None: whichever is there.

    Raises:
        RowError: If it can't be meant.
        SkippedError: If there is nothing to learn from in it.
    """
    if not row:
        raise SkippedError("empty row{s}")
    if _NO_TEXT.search(json.dumps(row, ensure_ascii=False, default=lambda _: "")):
        raise RowError(
            "holds half of a surrogate pair, or a character that Unicode reserves (U+FDD0 to U+FDEF)"
        )
    kind = _kind(row, column)
    if kind in ("messages", "conversations"):
        return _talk(_messages(row[column or kind], kind), 0, row, learn)
    if kind == "alpaca":
        said = _string(row.get("output") or "", "output")
        talk = [{"role": "user", "content": _asked(row)}, {"role": "assistant", "content": said}]
        return _talk(talk, 0, row, learn)
    if kind == "text":
        text = _string(row[column or kind], kind)
        if not text.strip():
            raise SkippedError("row{s} of empty text")
        return Continuation("", text)
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        return _talk([*before, *after], len(before), row, learn)
    prompt, completion = _string(prompt, "prompt"), _string(completion, "completion")
    if not completion.strip():
        raise SkippedError("row{s} with an empty completion")
    return Continuation("", prompt + completion) if learn == "all" else Continuation(prompt, completion)


def asked_of(row: Mapping[str, Any]) -> Talk:
    """Parses a row as what is to be answered: without the assistant's turns at its end.

    Raises:
        RowError: If it can't be meant, or holds nothing to answer.
        SkippedError: If it is empty.
    """
    if not row:
        raise SkippedError("empty row{s}")
    value = next((row[name] for name in ("prompt", "messages", "conversations") if name in row), None)
    if value is None and "instruction" in row:
        value = _asked(row)
    if value is None:
        raise RowError(f"has {_names(row)}; a prompt is in prompt, messages, conversations or instruction")
    messages = _messages([{"role": "user", "content": value}] if isinstance(value, str) else value, "prompt")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise RowError("has nothing to answer, as no one but the assistant speaks")
    return Talk(messages, [], _tools(row), _keys(row))


def _asked(row: Mapping[str, Any]) -> str:
    """What alpaca's columns ask."""
    asked, given = (_string(row.get(name) or "", name) for name in _ALPACA[:2])
    return f"{asked}\n{given}" if given.strip() else asked


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    return _objects(row["tools"], "tools") if row.get("tools") else None


def _keys(row: Mapping[str, Any]) -> dict[str, Any]:
    keys = _parsed(row.get(KWARGS) or {}, KWARGS)
    if not isinstance(keys, dict):
        raise RowError(f"{KWARGS} is {_shown(keys)}, and should be an object")
    return keys


def unread_names(row: Mapping[str, Any], column: str | None) -> list[str]:
    """Names in a row that `sample_of` reads nothing of."""
    kind = _kind(row, column)
    several = {"prompt": ("prompt", "completion"), "alpaca": _ALPACA}
    read = several.get(kind, (column or kind,))
    talk = kind in ("messages", "conversations", "alpaca") or any(
        isinstance(row.get(one), list) for one in read
    )
    return [name for name in row if name not in (*read, *("tools", KWARGS) * talk)]


def _kind(row: Mapping[str, Any], column: str | None) -> str:
    if column == "instruction" and row.keys() >= {"instruction", "output"}:
        return "alpaca"
    if column not in (None, "prompt", "completion"):
        if column not in row:
            raise RowError(f"has {_names(row)}, and no {column!r}, which data.input_column names")
        return "messages" if isinstance(row[column], list) else "text"
    kinds = [kind for kind in ("text", "messages", "conversations") if kind in row and not column]
    kinds += ["prompt"] * (row.keys() >= {"prompt", "completion"})
    kinds += ["alpaca"] * (not kinds and row.keys() >= {"instruction", "output"})
    if len(kinds) != 1:
        what = f"has {' and '.join(kinds)}: name one by data.input_column" if kinds else f"has {_names(row)}"
        raise RowError(
            f"{what}; a row has text, or prompt and completion, or instruction and output, or messages"
        )
    return kinds[0]


def _talk(messages: Sequence[Mapping[str, Any]], first: int, row: Mapping[str, Any], learn: str) -> Talk:
    said = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    if any(
        not str(messages[n].get("content") or "").strip() and not messages[n].get("tool_calls") for n in said
    ):
        raise SkippedError("conversation{s} with an empty assistant turn")
    counting = [number for number in said if number >= first and messages[number].get("weight", 1)]
    if not counting:
        roles = f" (of the role {', '.join(odd)})" if (odd := unknown_roles(messages)) else ""
        raise SkippedError("conversation{s} without an assistant turn to learn from" + roles)
    return Talk(messages, counting[-1:] if learn == "last" else counting, _tools(row), _keys(row))


def unknown_roles(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Roles that aren't the field's own, as people are shown them; the template writes them as they are."""
    return [_shown(role) for role in sorted({one["role"] for one in messages} - _KNOWN)][:_TOLD]


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RowError(f"{key} is {_shown(value)}, and should be a list of messages with role and content")
    if not value:
        raise SkippedError("conversation{s} without messages")
    return [_message(one, f"{key}[{number}]") for number, one in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{where} is {_shown(value)}, and should have role and content")
    value = {key: one for key, one in value.items() if one is not None}  # as columns have it
    if "from" in value and "role" not in value:
        role = _ROLES.get(str(value["from"]).lower())
        if role is None:
            raise RowError(
                f"{where}: from is {_shown(value['from'])}, and should be human, gpt or system; give "
                "others as role and content"
            )
        value = {"content": value.get("value"), **value, "role": role}
        value = {key: one for key, one in value.items() if key not in ("from", "value")}
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not role:
        raise RowError(f"{where}: role is {_shown(role)}, and should be user, assistant or system")
    role = _ROLES.get(role.lower(), role.lower() if role.lower() in _KNOWN else role)
    if value.get("weight", 1) not in (0, 1):
        raise RowError(f"{where}: weight is {_shown(value['weight'])}, and should be 0 or 1")
    if calls := value.get("tool_calls"):
        calls = [_call(one, f"{where}: tool_calls") for one in _objects(calls, f"{where}: tool_calls")]
        value = {**value, "tool_calls": calls}
    if content is None and not calls and role != "assistant":  # of an assistant it is an empty turn
        raise RowError(f"{where}: has no content")
    if isinstance(content, list):
        content = "".join(_part(one, where) for one in content)
    text = "" if content is None else _string(content, f"{where}: content")
    return {**value, **_thought(value, where), "role": role, "content": text}


def _thought(message: Mapping[str, Any], where: str) -> dict[str, str]:
    """Returns what a model thought by each name that templates read, as transformers gives it to them."""
    given = {name: _string(message[name], f"{where}: {name}") for name in THOUGHT if message.get(name)}
    if len(set(given.values())) > 1:
        raise RowError(f"{where}: {' and '.join(given)} have unlike texts; keep one of them")
    return {name: text for text in given.values() for name in THOUGHT[:2]}


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects; files of columns hold the list, or each object, as JSON in a string."""
    found = _parsed(value, where)
    if not isinstance(found, list):
        raise RowError(f"{where} is {_shown(found)}, and should be a list of objects")
    found = [_parsed(one, where) for one in found]
    if odd := [one for one in found if not isinstance(one, dict)]:
        raise RowError(f"{where} holds {_shown(odd[0])}, and should hold objects")
    return found


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call of a tool with its arguments as an object: a string would be quoted again by a template."""
    if (inner := call.get("function")) is not None:
        if not isinstance(inner, dict):
            raise RowError(f"{where}: function is {_shown(inner)}, and should be an object")
        return {**call, "function": _call(inner, where)}
    if "arguments" not in call:
        return call
    arguments = _parsed(call["arguments"] or {}, f"{where}: arguments")
    if not isinstance(arguments, dict):
        raise RowError(f"{where}: arguments is {_shown(arguments)}, and should be an object")
    return {**call, "arguments": arguments}


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return strict_json.parse(value.encode())
    except ValueError as error:
        raise RowError(f"{where} is {_shown(value)}: {error}") from error


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict):
        part = {key: one for key, one in part.items() if one is not None}
        if part.get("type") == "text" and set(part) == {"type", "text"}:
            return _string(part["text"], f"{where}: text")
    kind = part.get("type") if isinstance(part, dict) else part
    raise RowError(f"{where}: content holds {_shown(kind)}, and only parts of type text are read")


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{where} is {_shown(value)}, and should be text")
    return value


def _names(row: Mapping[str, Any]) -> str:
    names = [repr(name) for name in row]
    return ", ".join(names[:_TOLD]) + ", …" * (len(names) > _TOLD) or "no keys"


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
