"""Promise: fixed prompts are answered at each evaluation, for the report, and training keeps its bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.chat_folders import CHATML, chat_folder
from tests.helpers.forked import attempt
from tests.helpers.refusals import refused
from tests.helpers.rows import read_rows
from tests.helpers.run_folders import same
from tests.helpers.small_gpt import SMALL
from tests.helpers.steps import ALONE
from tests.helpers.toys import build_alone, make_recipe
from tests.helpers.world import Ranks
from trainer.config.recipe import Recipe
from trainer.distributed.parallel import World
from trainer.runs.report.page import page
from trainer.runs.report.read import read_recorded_run
from trainer.train.answers import answers
from trainer.train.components.run import build
from trainer.train.components.task import make_task

ASKED = ("what is <b>it</b>?", "who")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat_folder(tmp_path / "chat", template=CHATML)
    talk = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the cat"}]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 20)
    return tmp_path


def recipe_of(folder: Path, *prompts: str, **sections: Any) -> Recipe:
    data: dict[str, Any] = {"name": "conversations", "path": f"{folder}/a.jsonl"}
    data |= {"global_batch_size": 2, "micro_batch_size": 1}
    language = {**SMALL, "sequence_length": 64, "tokenizer": f"{folder}/chat"}
    language |= {"prompts": prompts, "answer_tokens": 9}
    more = {"epochs": 20, "optim": {"lr": 0.02, "schedule": "constant"}, **sections}
    return make_recipe(task="language", data=data, language=language, **more)


def test_prompts_are_answered_and_the_bits_are_those_without(folder: Path) -> None:
    short: dict[str, Any] = {"log": {"every": 1, "to": ["jsonl"]}, "ema": {"decay": 0.5}}
    short |= {"evaluation": {"every": "10 epochs"}}
    asked, plain = folder / "asked", folder / "plain"
    for run, prompts in ((asked, ASKED), (plain, ())):
        attempt(run, recipe_of(folder, *prompts, **short), code=0)
    assert same(asked, plain)
    rows = read_rows(asked, ("answers",))
    assert [row["step"] for row in rows] == [row["step"] for row in read_rows(asked, ("eval",))]
    assert rows[-1]["answer/what is <b>it</b>?"] == "the cat", "to the token that ends the turn"
    assert rows[-1].keys() == {"kind", "step", "epoch", "seconds", *(f"answer/{one}" for one in ASKED)}
    assert not read_rows(plain, ("answers",))
    text = page([read_recorded_run(asked)])
    assert "what is &lt;b&gt;it&lt;/b&gt;?" in text and "the cat" in text


def rank_answers(world: World, recipe: Recipe) -> Any:
    run = build(recipe, make_task(recipe), world, workers=0)
    torch.manual_seed(3)
    found = answers(run)
    return None if found is None else {name: text for name, text in found.items() if name != "seconds"}


def test_of_several_ranks_the_first_answers_and_a_sharded_model_the_same(ranks: Ranks, folder: Path) -> None:
    recipe = recipe_of(folder, *ASKED)
    alone = rank_answers(ALONE, recipe)
    assert ranks.run(2, rank_answers, recipe) == [alone, None]
    sharded = recipe_of(folder, *ASKED, parallel={"strategy": "fsdp", "threads": 1})
    assert ranks.run(2, rank_answers, sharded)[0] == alone


def test_what_cannot_be_answered_is_refused(folder: Path) -> None:
    with refused("language.prompts 64"):
        build_alone(recipe := recipe_of(folder, "a " * 99), make_task(recipe))
    with refused("language.prompts data.name=conversations"):
        language = {**SMALL, "prompts": ["a"]}
        make_task(make_recipe(task="language", data={"name": "synthetic"}, language=language))
