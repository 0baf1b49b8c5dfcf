"""Conversations for the task language: tokenizer and chat template, and several sets joined into one."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from trainer.config.data import HUB_SET, DataConfig, at_home
from trainer.config.model import ModelConfig
from trainer.config.recipe import Recipe
from trainer.config.tasks import LanguageConfig
from trainer.data.dataset import ArrayDataset
from trainer.data.formats.chat import Chat, ChatError, open_tokenizer
from trainer.data.formats.conversations import RowSplit
from trainer.data.formats.messages import RowError, SkippedError, Talk, asked_of
from trainer.data.formats.turns import with_stop
from trainer.data.left_out import tally
from trainer.errors import BadInputError, reading
from trainer.models.gpt import room_after
from trainer.models.hub import hub_rows
from trainer.rng import Ints


def concatenate_sets(sets: Sequence[ArrayDataset], labeled: bool = False) -> ArrayDataset:
    """Concatenates data sets; with `labeled` each sample has the number of its set as its label."""
    if len(sets) == 1 and not labeled:
        return sets[0]
    arrays = [dataset.arrays or {} for dataset in sets]
    concatenated = {name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]}
    if labeled:
        concatenated["label"] = np.repeat(np.arange(len(sets)), [len(dataset) for dataset in sets])
    together = ArrayDataset(concatenated)
    together.left_out = tally(left_out for dataset in sets for left_out in dataset.left_out)
    return together


def prompt_tokens(chat: Chat, prompt: str | Talk, what: str) -> Ints:
    """Tokens of what a user says, or of a conversation, to where an assistant goes on.

    Args:
        what: Whose wish it is, for errors.

    Raises:
        BadInputError: If the template refuses it.
    """
    talk = prompt if isinstance(prompt, Talk) else Talk([{"role": "user", "content": prompt}], [])
    try:
        text = chat.given(talk.keys).render(talk.messages, talk.tools, generation_prompt=True)
    except ChatError as error:
        raise BadInputError(f"{what}: {error}") from error
    return next(chat.encode([text])).ids


def prompts_of(file: Path) -> Iterator[tuple[str, Talk]]:
    """Yields what is to be answered in a file of prompts, each after its place.

    Args:
        file: Lines of text (.txt), or rows as those that are learned from, whose last answer isn't read.

    Raises:
        BadInputError: If it can't be read, or a row holds nothing to answer.
    """
    if file.suffix == ".txt":
        with reading(file, "give a file of prompts"):
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        rows: Iterable[tuple[str, Any]] = (
            (f"{file}: line {number}", {"prompt": line})
            for number, line in enumerate(lines, 1)
            if line.strip()
        )
    else:
        rows = RowSplit((file,)).rows()
    for where, row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            yield where, asked_of(row)
        except SkippedError:
            continue
        except RowError as error:
            raise BadInputError(f"{where}: {error}") from error


def open_chat(data: DataConfig, model: ModelConfig, config: LanguageConfig) -> Chat | None:
    """Opens the tokenizer and chat template of conversations; returns None for other data."""
    if data.name != "conversations":
        for key in ("prompts", "turns", "chat_template_kwargs"):
            if getattr(config, key) != LanguageConfig.model_fields[key].default:
                raise BadInputError(f"language.{key} is for data.name=conversations; leave it out")
        return None
    if config.text == "stream":
        raise BadInputError(
            "language.text=stream cuts anywhere, also within a conversation; use packed or padded for "
            "data.name=conversations"
        )
    if config.text == "padded" and data.mix is not None:
        raise BadInputError(
            "data.mix: padded samples are read in buckets of like length; use language.text=packed"
        )
    chat, keys = open_tokenizer(_chat_folder(model, config)), config.chat_template_kwargs
    chat = with_stop(chat) if config.turns == "each" else chat
    what = "language.chat_template_kwargs"
    if odd := sorted(keys.keys() - chat.reads):
        raise BadInputError(
            f"{what}: the chat template of {chat.folder} reads no {odd[0]!r}; it reads "
            f"{', '.join(sorted(chat.reads))}"
        )
    try:
        given = chat.given(keys)
    except ChatError as error:
        raise BadInputError(f"language.{error}") from error
    said = json.dumps([chat.sha256, keys], sort_keys=True)
    return given._replace(sha256=hashlib.sha256(said.encode()).hexdigest()) if keys else chat


def check_prompts(chat: Chat, prompts: Sequence[str], model: nn.Module) -> None:
    """Checks that a model has a place for each token of `language.prompts`.

    Raises:
        BadInputError: If it hasn't, or the template refuses one.
    """
    for prompt in prompts:
        what = f"language.prompts: {prompt!r:.60}"
        check_room(model, len(prompt_tokens(chat, prompt, what)), what)


def check_room(model: nn.Module, tokens: int, what: str) -> None:
    """Checks that a prompt of so many tokens fits into a model; nothing of it is cut.

    Raises:
        BadInputError: If it doesn't; it begins with `what`.
    """
    try:
        room_after(model, tokens, 1)
    except ValueError as error:
        raise BadInputError(f"{what}: {error}; shorten it") from error


def local_path(path: Path, key: str = "data.path") -> Path:
    """Where data lie on this machine; a data set of the hub is fetched.

    Raises:
        BadInputError: If it can't be had.
    """
    named = HUB_SET.fullmatch(str(path))
    return at_home(path, key) if named is None else hub_rows(f"{key}={path}", **named.groupdict())[0]


def with_commits(recipe: Recipe, stored: Mapping[str, Any] | None) -> Recipe:
    """The recipe with a commit in place of a branch in each data set of the hub.

    Args:
        recipe: As it was given.
        stored: The configuration of the run before, whose commits are kept; None without one.

    Raises:
        BadInputError: If a set can't be had.
    """
    known = {one["repository"]: one["revision"] for one in HUB_SET.finditer(json.dumps(stored or {}))}

    def exact(path: Any) -> Any:
        if (named := HUB_SET.fullmatch(str(path))) is None:
            return path
        revision = known.get(named["repository"], named["revision"])
        _, commit = hub_rows(f"data.path={path}", named["repository"], revision, named["below"])
        return type(path)(
            f"hub:{named['repository']}@{commit}{':' * bool(named['below'])}{named['below'] or ''}"
        )

    mix = recipe.data.mix and {exact(name): weight for name, weight in recipe.data.mix.items()}
    data = recipe.data.model_copy(update={"path": exact(recipe.data.path), "mix": mix})
    sets = {
        name: one.model_copy(update={"path": exact(one.path)}) for name, one in recipe.evaluation.sets.items()
    }
    evaluation = recipe.evaluation.model_copy(update={"sets": sets})
    return recipe.model_copy(update={"data": data, "evaluation": evaluation})


def _chat_folder(model: ModelConfig, config: LanguageConfig) -> Path:
    if config.tokenizer is not None:
        return at_home(config.tokenizer, "language.tokenizer")
    if not model.name.startswith("hf/"):
        raise BadInputError(
            "data.name=conversations needs a tokenizer: language.tokenizer=FOLDER, with the "
            "tokenizer.json and chat template of a model"
        )
    from trainer.models.hf_files import find_model

    return find_model(model.name).folder
