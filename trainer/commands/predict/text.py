"""Completions by a language model."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from trainer.data.formats.chat import Chat, Message
from trainer.data.formats.encoders import Encoder, read_tokenizer
from trainer.data.formats.messages import Talk
from trainer.data.formats.text import decode_text as decode, encode_text as encode
from trainer.errors import EXIT_DONE, BadInputError
from trainer.models.gpt import GPT, cut_after, generated, places_of, room_after
from trainer.models.hf_files import end_tokens
from trainer.observe.console import warn
from trainer.observe.text import printable
from trainer.tasks.conversations import check_room, prompt_tokens, prompts_of
from trainer.train.components.task import device_kind
from trainer.train.model_of_run import OpenedRun


def show_text(run: OpenedRun, options: argparse.Namespace) -> int:
    """Prints the prompt and the model's completion, up to the end of a document; returns the exit code."""
    if options.files:
        raise BadInputError("a language model takes --prompt TEXT; leave out files")
    if options.tokens < 1 or not 0 <= options.temperature < 1000:
        raise BadInputError("--tokens: give a number from 1 on; --temperature: from 0 on")
    if not 0 <= options.seed < 1 << 63:
        raise BadInputError(f"--seed {options.seed}: give a number from 0 to 2^63 - 1")
    facts = run.task.describe()
    if not 0 < options.top_p <= 1:
        raise BadInputError(f"--top-p {options.top_p}: give a number above 0, to 1")
    device = torch.device(device_kind(run.recipe))
    if (chat := getattr(run.task, "chat", None)) is not None:
        return _chat(run, chat, options, device)
    for flag, given in (("--system", options.system), ("--prompts", options.prompts), ("--prompt", None)):
        if given is not None or (flag == "--prompt" and len(options.prompt or ()) > 1):
            raise BadInputError(
                f"{flag}: the run isn't on conversations; give one --prompt TEXT to go on with"
            )
    encoder = encoder_of(options.tokenizer, facts)
    prompt = _tokens((options.prompt or [""])[0], facts, encoder)
    begun = torch.tensor(prompt or [_first(facts)], device=device)
    window = isinstance(run.model, GPT)  # a sample begins anywhere in the text, so it may go on from a part
    places = places_of(run.model)
    if not window:
        check_room(run.model, len(begun), "--prompt")
    elif places is not None and len(begun) > places:
        warn(
            f"--prompt has {len(begun):,} tokens, of which the model sees the last {places:,} "
            "(language.sequence_length)"
        )
    tokens = _drawn(run, begun, options, torch.Generator(device).manual_seed(options.seed), window)
    added = list(takewhile(lambda token: token != facts["end_of_document"], tokens))
    print(printable(_text([*prompt, *added], facts, encoder)))
    if not window:
        _tell_end(run, begun, len(added), options)
    return EXIT_DONE


def _chat(run: OpenedRun, chat: Chat, options: argparse.Namespace, device: torch.device) -> int:
    """Prints an assistant's answers: to each --prompt in turn as it comes, or to those of a file as JSON."""
    if options.tokenizer is not None:
        raise BadInputError("--tokenizer: a run on conversations has its own; leave it out")
    if (options.prompts is None) == (not all(options.prompt or [""])):
        raise BadInputError(
            "a model of conversations answers: give --prompt TEXT, what a user says, or --prompts FILE"
        )
    system = [{"role": "system", "content": options.system}] if options.system is not None else []
    ends = end_tokens(run.recipe.model.name, chat.eos, chat.turn_end)

    def answer(talk: Talk, what: str, show: bool) -> str:
        begun = torch.from_numpy(prompt_tokens(chat, talk, what)).to(device)
        check_room(run.model, len(begun), what)
        return _answer(run, chat, begun, ends, options, show)

    if options.prompts is not None:
        return _file(run, chat, options, system, answer)
    talk = Talk(system, [])
    for prompt in options.prompt:
        talk = talk._replace(messages=[*talk.messages, {"role": "user", "content": prompt}])
        said = {"role": "assistant", "content": answer(talk, "--prompt", True)}
        talk = talk._replace(messages=[*talk.messages, said])
    return EXIT_DONE


def _file(
    run: OpenedRun,
    chat: Chat,
    options: argparse.Namespace,
    system: Sequence[Message],
    answer: Callable[[Talk, str, bool], str],
) -> int:
    """Answers a file of prompts; all of them fit before the first is answered."""
    talks = [
        (where, talk._replace(messages=[*system, *talk.messages]) if system else talk)
        for where, talk in prompts_of(options.prompts)
    ]
    if not talks:
        raise BadInputError(f"--prompts {options.prompts}: holds no prompt")
    for where, talk in talks:
        if system and talk.messages[1]["role"] == "system":
            raise BadInputError(f"{where}: has a system prompt of its own; leave --system out")
        check_room(run.model, len(prompt_tokens(chat, talk, where)), where)
    for where, talk in talks:
        said = {"messages": [dict(one) for one in talk.messages], "answer": answer(talk, where, False)}
        print(json.dumps(said, ensure_ascii=sys.stdout.isatty()), flush=True)
    return EXIT_DONE


def _answer(
    run: OpenedRun, chat: Chat, begun: torch.Tensor, ends: set[int], options: argparse.Namespace, show: bool
) -> str:
    """The answer to a conversation, which draws what it would draw alone; printed as it comes with `show`."""
    random = torch.Generator(begun.device).manual_seed(options.seed)
    added, shown = list[int](), ""
    for token in _drawn(run, begun, options, random):
        if token in ends:
            break
        added.append(token)
        text_so_far = chat.tokenizer.decode(added)
        if show and not text_so_far.endswith("\ufffd"):  # or a letter of several tokens has only begun
            print(printable(text_so_far[len(shown) :]), end="", flush=True)
            shown = text_so_far
    said: str = chat.tokenizer.decode(added)
    if show:
        print(printable(said[len(shown) :]))
    _tell_end(run, begun, len(added), options)
    return said


def _drawn(
    run: OpenedRun,
    begun: torch.Tensor,
    options: argparse.Namespace,
    random: torch.Generator,
    window: bool = False,
) -> Iterator[int]:
    model = run.model.to(begun.device)
    return generated(
        model, begun, options.tokens, options.temperature, random, window=window, top_p=options.top_p
    )


def _tell_end(run: OpenedRun, begun: torch.Tensor, added: int, options: argparse.Namespace) -> None:
    """Says so where an answer isn't as long as --tokens because the model's places are full."""
    if added == room_after(run.model, len(begun), options.tokens) < options.tokens:
        warn(f"the answer {cut_after(run.model, added)}")


def encoder_of(given: str | None, facts: Mapping[str, Any]) -> Encoder | None:
    """Returns the tokenizer of --tokenizer; None without one.

    Raises:
        BadInputError: If it isn't the one that the run's tokens are of.
    """
    if given is None:
        return None
    encoder = read_tokenizer(given)
    if encoder.name != facts["tokenizer"]:
        raise BadInputError(f"--tokenizer {given}: the run's tokens are of {facts['tokenizer']}")
    if facts["tokenizer_sha256"] not in (None, encoder.sha256):
        raise BadInputError(
            f"--tokenizer {given}: isn't the file that the run's tokens are of, which has the SHA-256 "
            f"{facts['tokenizer_sha256']}"
        )
    return encoder


def _tokens(text: str, facts: Mapping[str, Any], encoder: Encoder | None) -> list[int]:
    if encoder is not None and encoder.tokenizer is not None:
        return list(encoder.tokenizer.encode(text, add_special_tokens=False).ids)
    if facts["tokenizer"] == "bytes":
        return list(os.fsencode(text))  # the terminal's bytes, whatever their encoding
    return encode(text, str(facts["tokenizer"]), str(facts["characters"])) if text else []


def _text(tokens: Sequence[int], facts: Mapping[str, Any], encoder: Encoder | None) -> str:
    if encoder is not None and encoder.tokenizer is not None:
        return str(encoder.tokenizer.decode(list(tokens)))
    return str(decode(tokens, str(facts["tokenizer"]), str(facts["characters"])))


def _first(facts: Mapping[str, Any]) -> int:
    """Returns the token before a text: end of document, or where there are no documents, end of line."""
    end = facts["end_of_document"]
    if isinstance(end, int):
        return end
    return max(0, str(facts["characters"]).find("\n"))
