"""Promise: a step on conversations is what a plain loop over each alone gives, over the tokens that count."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.helpers.chat_folders import TEMPLATES, chat_folder
from tests.helpers.refusals import named, refused
from tests.helpers.small_gpt import SGD, SMALL, first_step
from tests.helpers.toys import build_alone, make_recipe, run_steps
from trainer.config.model import ModelConfig
from trainer.config.recipe import Recipe
from trainer.data.dataset import LENGTH, NUM_ITEMS
from trainer.data.formats.chat import open_tokenizer
from trainer.data.formats.documents import NO_TARGET, TARGETS
from trainer.data.formats.turns import counted, turns
from trainer.models import head_loss
from trainer.tasks.language import Language
from trainer.train.components.task import left_out_of, make_task
from trainer.train.evaluate import evaluate_run

ROWS = 13


class InFloat64(Language):
    """The task in the precision that equalities are told in."""

    def model(self) -> torch.nn.Module:
        return super().model().double()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Conversations of unlike lengths, with unlike numbers of tokens that count."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    random = np.random.default_rng(2)

    def said(role: str, most: int) -> dict[str, str]:
        return {"role": role, "content": "the cat " * int(random.integers(1, most))}

    made = [{"messages": [said("user", 9), said("assistant", 5)] * (1 + n % 2)} for n in range(ROWS - 1)]
    made.append({"messages": [said("user", 60), said("assistant", 2)]})
    for name, some in (("train", made), ("val", made[:3])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    chat_folder(tmp_path / "chat")
    return made


def recipe_of(folder: Path, **language: Any) -> Recipe:
    size = {**SMALL, "sequence_length": 160, "tokenizer": str(folder / "chat")}
    sizes = {"global_batch_size": 16, "micro_batch_size": 2, "last_batch": "weighted"}
    data = {"name": "conversations", "path": str(folder), **sizes}
    return make_recipe(task="language", language={**size, **language}, data=data, optim=SGD)


def told(rows: list[Any], folder: Path, learn: str = "") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens of each conversation, and the targets, of which some count."""
    chat = open_tokenizer(folder / "chat")
    for row in rows:
        numbers = [n for n, one in enumerate(row["messages"]) if one["role"] == "assistant"]
        text, spans = turns(chat, row["messages"], numbers[-1:] if learn == "last" else numbers)
        found = counted(chat, text, next(chat.encode([text])), spans if learn != "all" else [(0, len(text))])
        ids = torch.from_numpy(found.ids)
        yield ids, ids.where(torch.from_numpy(found.counts), torch.tensor(NO_TARGET))[1:]


def by_hand(model: torch.nn.Module, rows: list[Any], folder: Path, learn: str) -> tuple[float, Any]:
    """Each conversation on its own, summed, over the number of tokens that count."""
    total, number = torch.zeros((), dtype=torch.float64), 0
    for ids, targets in told(rows, folder, learn):
        number += int((targets != NO_TARGET).sum())
        total = total + F.cross_entropy(model(ids[None, :-1])[0], targets, reduction="sum")
    (total / number).backward()
    return float(total.detach()) / number, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("text", "learn"),
    [("packed", "completions"), ("padded", "completions"), ("packed", "last"), ("padded", "all")],
)
def test_a_step_is_that_of_a_plain_loop(text: str, learn: str, rows: list[Any], tmp_path: Path) -> None:
    """Over micro-batches of unlike counts, the last ones of samples of weight 0 alone."""
    recipe = recipe_of(tmp_path, text=text, learn=learn)
    task = InFloat64(recipe.data, recipe.model, recipe.language, recipe.seed)
    assert len(task.train_data) <= 16
    wanted_loss, wanted = by_hand(build_alone(recipe, task).state.model, rows, tmp_path, learn)
    loss, found = first_step(build_alone(recipe, task))
    assert loss == pytest.approx(wanted_loss, rel=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("text", "piece"), [("packed", None), ("padded", 700)])
def test_the_share_of_tokens_that_are_found(
    text: str, piece: int | None, rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that count, also where the logits are never whole."""
    if piece:
        monkeypatch.setattr(head_loss, "PIECE", piece)
    recipe = recipe_of(tmp_path, text=text).model_copy(update={"epochs": 5})
    task = InFloat64(recipe.data, recipe.model, recipe.language, recipe.seed)
    run_steps(run := build_alone(recipe, task))
    found = total = 0
    for tokens, targets in told(rows[:3], tmp_path):  # of val.jsonl
        likeliest = run.state.model.eval()(tokens[None, :-1])[0].argmax(1)
        found += int((likeliest == targets).sum())
        total += int((targets != NO_TARGET).sum())
    metrics, _ = evaluate_run(run)
    assert metrics["token_accuracy"] == found / total and 0 < found < total


@pytest.mark.usefixtures("rows")
def test_turns_and_keys_of_the_template_reach_the_samples(tmp_path: Path) -> None:
    chat_folder(tmp_path / "chat", template="{{ 'Hello ' if hello else '' }}" + TEMPLATES["qwen3"])
    plain, each, greeted = (
        make_task(recipe_of(tmp_path, **keys))
        for keys in ({}, {"turns": "each"}, {"chat_template_kwargs": {"hello": True}})
    )
    facts = [one.describe() for one in (plain, each, greeted)]
    assert [one.get("turns") for one in facts] == [None, "each", None]
    assert facts[0]["chat_sha256"] == facts[1]["chat_sha256"] != facts[2]["chat_sha256"]
    assert len({one.train_data.fingerprint() for one in (plain, each, greeted)}) == 3


def test_an_evaluation_set_of_its_own_and_what_is_left_out(rows: list[Any], tmp_path: Path) -> None:
    bad = [{"no": 1}, {"messages": rows[0]["messages"], "id": 3}, *rows]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in bad))
    values = recipe_of(tmp_path).model_dump()
    values["evaluation"]["sets"] = {"more": {"path": str(tmp_path / "val.jsonl")}, "test": {"split": "train"}}
    recipe = Recipe.model_validate(values)
    task: Any = make_task(recipe)
    assert len(task.evaluation_sets["test"]) == len(task.train_data) > len(task.evaluation_sets["more"])
    row, key, *_ = left_out_of(task)["training data"]
    assert (row.count, row.first) == (1, "train.jsonl: line 1") and named(row.reason, "'no'")
    assert (key.count, key.first) == (1, "train.jsonl: line 2") and named(key.reason, "'id'")
    recipe.data.corrupt_budget = 0.0
    with refused(tmp_path / "train.jsonl", "line 1"):
        make_task(recipe)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("language", "says"),
    [
        ({"text": "stream"}, "language.text=stream"),
        ({"vocabulary": 100}, "language.vocabulary=100"),
        ({"sequence_length": 3}, "train.jsonl 13 3"),
        ({"chat_template_kwargs": {"thinks": False}}, "language.chat_template_kwargs thinks"),
    ],
)
def test_what_does_not_go_together(language: Any, says: str, tmp_path: Path) -> None:
    with refused(says):
        make_task(recipe_of(tmp_path, **language))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("trained", [False, True])
def test_a_token_of_the_template_that_cannot_be_learned_is_told(trained: bool, tmp_path: Path) -> None:
    """As where a base model, whose tokenizer was given the template's tokens, is trained with LoRA."""
    number = open_tokenizer(tmp_path / "chat").ends["<|im_start|>"]

    class Base(Language):
        def model(self) -> torch.nn.Module:
            model = super().model()
            model.get_parameter("embedding.weight").data[[0, number]] = 0  # the first is in no conversation
            return model

    recipe = recipe_of(tmp_path)
    recipe.model = ModelConfig.model_validate({} if trained else {"lora": {"rank": 2}})
    task = Base(recipe.data, recipe.model, recipe.language, recipe.seed)
    told = [note for note in build_alone(recipe, task).notes if "can't tell them apart" in note]
    assert [note.partition("(")[2].partition(")")[0] for note in told] == ["<|im_start|>"] * (not trained)


@pytest.mark.usefixtures("rows")
def test_a_sample_and_a_micro_batch_without_a_token_that_counts_weigh_nothing(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, text="padded")
    task = InFloat64(recipe.data, recipe.model, recipe.language, recipe.seed)
    arrays: Any = task.train_data.arrays
    for silent in (1, 5):  # 5 fill a micro-batch of 2, wherever the order puts them
        arrays[TARGETS][:silent] = NO_TARGET
        arrays[NUM_ITEMS][:silent] = 0
        model = build_alone(recipe, task).state.model
        count, total = int(arrays[NUM_ITEMS].sum()), torch.zeros((), dtype=torch.float64)
        for tokens, targets, length in zip(arrays["tokens"], arrays[TARGETS], arrays[LENGTH], strict=True):
            given, said = (torch.from_numpy(one[:length].astype(np.int64)) for one in (tokens, targets))
            total = total + F.cross_entropy(model(given[None])[0], said, reduction="sum")
        (total / count).backward()
        loss, found = first_step(build_alone(recipe, task))
        wanted = {name: p.grad for name, p in model.named_parameters()}
        assert loss == pytest.approx(float(total.detach()) / count, rel=1e-12)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)
