"""Promise: LoRA trains what peft trains, and as it does, by figures that peft and TRL gave (see `theirs`)."""

import json
from pathlib import Path

import pytest

from tests.helpers.forked import attempt
from tests.helpers.hf_models import NEEDS
from tests.helpers.toys import build_alone
from tests.oracles.theirs import FIGURES, LORA, lora_recipe
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
