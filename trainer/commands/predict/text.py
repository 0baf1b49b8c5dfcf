"""Completions by a language model."""

import argparse
import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from trainer.data.formats.encoders import Encoder, read_tokenizer
from trainer.data.formats.text import decode_text as decode, encode_text as encode
from trainer.errors import EXIT_DONE, BadInputError
from trainer.models.gpt import GPT, cut_after, generated, places_of, room_after
from trainer.models.hf_files import end_tokens
from trainer.observe.console import warn
from trainer.observe.text import printable
from trainer.tasks.conversations import check_room, prompt_tokens
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
    device = torch.device(device_kind(run.recipe))
    random = torch.Generator(device).manual_seed(options.seed)
    if (chat := getattr(run.task, "chat", None)) is not None:
        return _chat(run, chat, options, device, random)
    encoder = encoder_of(options.tokenizer, facts)
    prompt = _tokens(options.prompt or "", facts, encoder)
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
    tokens = generated(
        run.model.to(device), begun, options.tokens, options.temperature, random, window=window
    )
    added = list(takewhile(lambda token: token != facts["end_of_document"], tokens))
    print(printable(_text([*prompt, *added], facts, encoder)))
    if not window:
        _tell_end(run, begun, len(added), options)
    return EXIT_DONE


def _chat(
    run: OpenedRun, chat: Any, options: argparse.Namespace, device: torch.device, random: torch.Generator
) -> int:
    """Prints an assistant's answer as it comes: one turn of a run on conversations."""
    if not options.prompt:
        raise BadInputError("a model of conversations answers: give --prompt TEXT, what a user says")
    if options.tokenizer is not None:
        raise BadInputError("--tokenizer: a run on conversations has its own; leave it out")
    begun = torch.from_numpy(prompt_tokens(chat, options.prompt, "--prompt")).to(device)
    check_room(run.model, len(begun), "--prompt")
    ends = end_tokens(run.recipe.model.name, chat.eos, chat.turn_end)
    added, shown = list[int](), ""
    for token in generated(run.model.to(device), begun, options.tokens, options.temperature, random):
        if token in ends:
            break
        added.append(token)
        text_so_far = chat.tokenizer.decode(added)
        if not text_so_far.endswith("\ufffd"):  # or a letter of several tokens has only begun
            print(printable(text_so_far[len(shown) :]), end="", flush=True)
            shown = text_so_far
    print(printable(chat.tokenizer.decode(added)[len(shown) :]))
    _tell_end(run, begun, len(added), options)
    return EXIT_DONE


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
