"""The tokenizer and the chat template of a model's folder, without the library that wrote them.

Rendered as `transformers` renders (jinja2's sandbox, whole lines of blocks taken away), tokenized as its fast
tokenizers do: the template writes what begins and ends a conversation, so the tokenizer adds nothing to it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.data.formats.chat_template import Spans, compiled, unmarked
from trainer.data.formats.encoders import check_known, is_lossy, one_line, parse_tokenizer, unknown_of
from trainer.errors import BadInputError, first_line
from trainer.host import strict_json
from trainer.host.files import read_inside
from trainer.rng import Ints

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

Message = Mapping[str, Any]

_LARGEST = 1 << 30  # tokenizer.json
_LARGEST_TEMPLATE = 1 << 20
TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
_BATCH = 512  # texts that are encoded side by side
_ANSWER = "\ufdd2"  # a Unicode noncharacter, so in no text that is read
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatError(ValueError):
    """Fault of a conversation; the caller adds its row."""


class Encoded(NamedTuple):
    """Tokens of a text: their numbers, and where each begins and ends in it, int64 (n,)."""

    ids: Ints
    starts: Ints
    ends: Ints


class Chat(NamedTuple):
    """A tokenizer with its chat template.

    Attributes:
        folder: Where they lie.
        sha256: Of tokenizer.json, the special tokens and the templates.
        vocabulary: Every token is below it.
        bos: The token that the tokenizer puts before a text; None if it puts none.
        eos: The token that ends a text; None if none is named.
        turn_end: The token that ends an answer's turn in the template, the last of what it writes after any
            answer; None if it writes none.
        special: Special tokens by name, such as bos_token, as the template is given them.
        ends: Texts of tokens that may end a turn, such as <|im_end|>, longest first, and their numbers: all
            special ones, and those before; text of people holds none.
        closings: What ends an answer's turn in a text, longest first: what the template writes up to
            `turn_end`, such as <|END_RESPONSE|><|END_OF_TURN_TOKEN|>, and the text of `eos`.
        templates: By name; "default" unless there is none.
        marks: Whether the default template says by {% generation %} what an assistant writes.
        asks_date: Whether it asks for today's date.
        tokenizer: Adds nothing to a text.
        reads: Names that the templates read of what they are given.
        keys: What they are given beside messages, tools and special tokens: `chat_template_kwargs`.
        lossy: True if it leaves out characters that it has no token for.
        unknown: Token that stands for what the vocabulary lacks; None if there is none.
    """

    folder: Path
    sha256: str
    vocabulary: int
    bos: int | None
    eos: int | None
    turn_end: int | None
    special: Mapping[str, str]
    ends: Mapping[str, int]
    closings: tuple[str, ...]
    templates: Mapping[str, "Template"]
    marks: bool
    asks_date: bool
    tokenizer: "Tokenizer"
    reads: Set[str]
    keys: Mapping[str, Any] = MappingProxyType({})
    lossy: bool = False
    unknown: int | None = None

    def given(self, keys: Mapping[str, Any]) -> "Chat":
        """The same with more of `chat_template_kwargs`.

        Raises:
            ChatError: If a name of what the template is given anyhow is among them.
        """
        if odd := sorted(keys.keys() & _GIVEN):
            raise ChatError(
                f"chat_template_kwargs has {odd[0]!r}, which the template is given anyhow; take it out"
            )
        return self._replace(keys={**self.keys, **keys}) if keys else self

    def render(self, messages: Sequence[Message], tools: Any = None, generation_prompt: bool = False) -> str:
        """Renders messages as text.

        Args:
            messages: Each with role and content.
            tools: What the assistant may call, as the template wants it.
            generation_prompt: Whether the begin of an assistant's turn follows.

        Raises:
            ChatError: If there is no template, or it refuses the messages.
        """
        return self.render_marked(messages, tools, generation_prompt)[0]

    def render_marked(
        self, messages: Sequence[Message], tools: Any = None, generation_prompt: bool = False
    ) -> tuple[str, Spans]:
        """Renders messages as text; and where in it {% generation %} blocks begin and end."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ChatError(
                f"{self.folder} has no chat template; put a chat_template.jinja there, or give rows of "
                "prompt and completion"
            )
        refusal: Exception | None = None
        for given in _forms(messages):
            try:
                marked = self.templates[name].render(
                    messages=given,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=generation_prompt,
                    **{**self.special, **self.keys},
                )
            except (MemoryError, KeyboardInterrupt):
                raise
            except Exception as error:  # a template is a program: it raises whatever Python raises
                refusal = refusal or error
            else:
                if not any(map(partial(_python_in, marked), _arguments(given))):
                    return unmarked(marked)
        reason = (
            first_line(refusal) if refusal else "it writes arguments of calls as Python does, not as JSON"
        )
        raise ChatError(f"the chat template refuses it ({reason})") from refusal

    def closed(self, text: str) -> int:
        """Length of what ends an answer's turn at the front of a text, with blanks before it; 0: nothing."""
        shown = text.lstrip()
        found = next((one for one in self.closings if shown.startswith(one)), "")
        return len(text) - len(shown) + len(found) if found else 0

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded]:
        """Encodes texts; special tokens in them are special tokens.

        Raises:
            BadInputError: If the tokenizer's rules fail on one, or it leaves a character out.
        """
        if self.lossy:
            check_known(texts, self.tokenizer, str(self.folder / "tokenizer.json"))
        for first in range(0, len(texts), _BATCH):
            with one_line(str(self.folder / "tokenizer.json")):
                batch = self.tokenizer.encode_batch(list(texts[first : first + _BATCH]))
            for one in batch:
                offsets = np.array(one.offsets, np.int64).reshape(-1, 2)
                yield Encoded(np.array(one.ids, np.int64), offsets[:, 0], offsets[:, 1])


def _forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yields messages with arguments of calls as objects, then as the JSON that some templates need."""
    yield messages
    if _arguments(messages):
        yield [_with_text(one) for one in messages]


def _python_in(text: str, arguments: Mapping[str, Any]) -> bool:
    """True if arguments stand in a text as Python prints them, and not as JSON."""
    return str(arguments) in text and json.dumps(arguments, ensure_ascii=False) not in text


def _arguments(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    calls = [call.get("function") or call for one in messages for call in one.get("tool_calls") or ()]
    return [found for call in calls if isinstance(found := call.get("arguments"), Mapping)]


def _with_text(value: Any) -> Any:
    """Writes arguments as JSON in a message, a call or a function; see `_forms`."""
    if isinstance(value, list):
        return [_with_text(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    changed = {key: _with_text(value[key]) for key in ("tool_calls", "function") if key in value}
    if isinstance(arguments := value.get("arguments"), Mapping):
        changed["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**value, **changed}


def open_tokenizer(folder: Path) -> Chat:
    """Opens tokenizer.json, the names of special tokens and the chat template of a model's folder.

    Raises:
        BadInputError: If a file isn't there or isn't what it should be.
    """
    content = _read(folder / "tokenizer.json", _LARGEST)
    if content is None:
        older = " (only tokenizer.model, which transformers' save_pretrained converts)"
        raise BadInputError(
            f"{folder}: no tokenizer.json{older * (folder / 'tokenizer.model').exists()}; give the folder of "
            "a model with its tokenizer"
        )
    tokenizer, first = _tokenizer(folder / "tokenizer.json", content)
    known = tokenizer.get_vocab(with_added_tokens=True)
    config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    special = {name: text for name in _NAMES if (text := _text(config.get(name)))}
    for name in ("bos_token", "eos_token"):
        if name in special and special[name] not in known:
            raise BadInputError(
                f"{folder}: tokenizer_config.json says {name} {special[name]!r}, which tokenizer.json "
                "doesn't know; the two don't belong together"
            )
    added = {one.content: (number, one) for number, one in tokenizer.get_added_tokens_decoder().items()}
    _check_added(folder, config, {text: number for text, (number, _) in added.items()})
    sources = _templates(folder, config.get("chat_template"))
    digest = hashlib.sha256(content + json.dumps([special, sources], sort_keys=True).encode())
    eos = known.get(special.get("eos_token", ""))
    longest = sorted((text for text in added if text.strip()), key=len, reverse=True)
    templates, marks, reads = compiled(folder, sources)
    chat = Chat(
        folder,
        digest.hexdigest(),
        max(known.values()) + 1,
        first,
        eos,
        None,
        special,
        {text: added[text][0] for text in longest},
        (),
        templates,
        marks,
        any("strftime_now" in source for source in sources.values()),
        tokenizer,
        reads,
    )
    closing, last = _written_after_answers(chat)
    turn_end = chat.ends.get(last)
    kept = {text: n for text, n in chat.ends.items() if added[text][1].special or n in (eos, turn_end)}
    closings = sorted(
        {closing, *(text for text, n in kept.items() if n == eos)} - {""}, key=len, reverse=True
    )
    chat = chat._replace(lossy=is_lossy(tokenizer), unknown=unknown_of(tokenizer))
    return chat._replace(turn_end=turn_end, ends=kept, closings=tuple(closings))


def _written_after_answers(chat: Chat) -> tuple[str, str]:
    """Returns what the template writes after an answer, to its last added token; and that token."""
    talk, after = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}], ["", ""]
    with suppress(ChatError):
        after = [chat.render(talk).partition(_ANSWER)[2]] * 2
        after[1] = chat.render([*talk, talk[0]]).partition(_ANSWER)[2]
    # What both have is the turn's own: the end of a conversation, or the next role, may follow it.
    alike = takewhile(lambda letters: letters[0] == letters[1], zip(*after, strict=False))
    for text in ("".join(letter for letter, _ in alike), after[0]):
        rest, last = text, ""
        while mark := next((end for end in chat.ends if rest.lstrip().startswith(end)), ""):
            rest, last = rest.lstrip().removeprefix(mark), mark
        if last:
            return text.removesuffix(rest).lstrip(), last
    return "", ""


def _tokenizer(file: Path, content: bytes) -> tuple["Tokenizer", int | None]:
    """Reads a tokenizer that adds nothing, and what it added before to the front of a text."""
    read = parse_tokenizer(content, file)
    from tokenizers.processors import TemplateProcessing

    with one_line(str(file)):
        alone, begun = (read.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    # Also the processor of GPT-2 and Llama 3, which moves offsets over blanks.
    read.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return read, begun[0] if begun[:1] != alone[:1] else None


def _check_added(folder: Path, config: Mapping[str, Any], added: Mapping[str, int]) -> None:
    """Refuses what stands in tokenizer_config.json alone, and makes other tokens in `transformers`."""
    if config.get("split_special_tokens"):
        raise BadInputError(
            f"{folder}: tokenizer_config.json says split_special_tokens, so that <|im_end|> and the like "
            "would be text; take it out"
        )
    said = config.get("added_tokens_decoder")
    for number, token in said.items() if isinstance(said, Mapping) else ():
        if (text := _text(token)) and str(added.get(text)) != str(number):
            raise BadInputError(
                f"{folder}: tokenizer_config.json says that token {number} is {text!r}, and tokenizer.json "
                "doesn't; write both again with transformers' save_pretrained"
            )


def _templates(folder: Path, said: Any) -> dict[str, str]:
    """The templates' source by name: of files for themselves, else of tokenizer_config.json."""
    found = dict[str, str]()
    for name, file in TEMPLATE_FILES.items():
        content = _read(folder / file, _LARGEST_TEMPLATE)
        try:
            found |= {} if content is None else {name: content.decode()}
        except UnicodeDecodeError as error:
            raise BadInputError(f"{folder / file}: not UTF-8 (byte {error.start})") from error
    if found:
        return found
    if isinstance(said, str):
        return {"default": said}
    if isinstance(said, list) and all(isinstance(one, Mapping) for one in said):
        return {str(one.get("name")): str(one.get("template")) for one in said}
    if said is not None:
        raise BadInputError(f"{folder / 'tokenizer_config.json'}: chat_template is no text")
    return {}


def _text(token: Any) -> str:
    """A special token's text: it stands as text, or as an object with its content."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else ""


def _read(file: Path, most: int) -> bytes | None:
    try:
        return read_inside(file, most)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"{file}: can't be read ({error.strerror})") from error


def _json(file: Path) -> dict[str, Any]:
    content = _read(file, strict_json.LARGEST)
    try:
        found = {} if content is None else strict_json.parse(content)
    except ValueError as error:
        raise BadInputError(f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise BadInputError(f"{file}: isn't a JSON object")
    return found
