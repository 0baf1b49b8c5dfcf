"""Promise: LoRA trains what peft trains, and as it does, by figures that peft and TRL gave (see `theirs`)."""

import json
from pathlib import Path

import pytest

from tests.helpers.forked import attempt
from tests.helpers.hf_models import NEEDS
from tests.helpers.toys import build_alone
from tests.oracles.theirs import FIGURES, LORA, lora_recipe, talks_recipe
from trainer.models.finetune import adapted
from trainer.train.components.task import make_task

pytestmark = NEEDS
WANTED = json.loads(FIGURES.read_text())


@pytest.mark.parametrize("family", LORA)
def test_lora_is_trained_as_peft_trains_it(family: str, tmp_path: Path) -> None:
    wanted, recipe = WANTED[f"peft/{family}"], lora_recipe(family, tmp_path / "model")
    model = build_alone(recipe, make_task(recipe)).state.model
    assert sorted(adapted(model)) == wanted["adapted"]
    assert sum(one.numel() for one in model.parameters() if one.requires_grad) == wanted["learned"]
    done = attempt(tmp_path / "run", recipe)
    assert done.code == 0, done.said
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(wanted["losses"], rel=1e-5)
    assert wanted["losses"][3] < 0.999 * wanted["losses"][0]


def test_conversations_are_learned_as_trl_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted, run = WANTED["trl"], tmp_path / "run"
    done = attempt(run, talks_recipe(tmp_path))
    assert done.code == 0, done.said
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    end = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert [row["loss"] for row in rows] == pytest.approx(wanted["losses"], rel=1e-4)
    assert end["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert end["token_accuracy"] == pytest.approx(wanted["token_accuracy"], abs=1e-6)
    # TRL counts the last token of each conversation as well, which nothing is predicted from.
    assert [row["tokens_seen"] + 16 * row["step"] for row in rows] == wanted["tokens"]
