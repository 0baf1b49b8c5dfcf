"""Promise: whatever a recipe says, a run that was stopped anywhere ends with the bits of one that wasn't, and
can be replayed."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.helpers.files import contents
from tests.helpers.forked import attempt, small
from trainer.commands.verify.recorded import read_recorded
from trainer.commands.verify.replay import replay_config

POOL: dict[str, list[Any]] = {
    "seed": [0, 7],
    "data.last_batch": ["cross", "drop"],
    "data.micro_batch_size": [2, 4, 8],
    "data.limit": [None, 50],
    "data.class_weights": [None, "balanced"],
    "data.augment": ["none", "flip", "crop", "affine"],
    "data.jitter": [0.0, 0.3],
    "data.policy": ["none", "randaugment", "trivialaugment"],
    "data.policy_group": [1, 3],
    "model.norm": ["batch", "group"],
    "model.dropout": [0.0, 0.2],
    "model.freeze": [[], ["stem*"]],
    "memory.checkpointing": ["none", "blocks"],
    "precision.mode": ["fp32", "bf16", "fp16"],
    "optim.name": ["sgd", "adamw", "muon"],
    "optim.schedule": ["cosine", "one-cycle", "step", "wsd", "constant"],
    "optim.warmup_steps": [0, 3, 0.2],
    "optim.layer_decay": [1.0, 0.8],
    "optim.max_grad_norm": [0.0, 0.5],
    "ema.decay": [0.9, 0.99],
    "ema.every": [1, 3],
    "evaluation.every": ["1 epoch", "4 steps", "end"],
    "regularization.label_smoothing": [0.0, 0.1],
    "regularization.stochastic_depth": [0.0, 0.3],
    "parallel.reduction": ["all_reduce", "tree"],
    "anomaly.nonfinite": ["stop", "skip", "rollback"],
    "log.every": [1, 2, 5],
    "checkpoint.every": [0, 3, 4],
    "checkpoint.best": [True, False],
}


@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 60))]
)
def test_a_random_recipe_goes_on_with_the_same_bits_and_can_be_replayed(number: int, tmp_path: Path) -> None:
    draw, whole, parts = random.Random(number), tmp_path / "whole", tmp_path / "parts"
    while True:  # until the keys go together
        sections: dict[str, Any] = {"max_steps": 12}
        for key in draw.sample(sorted(POOL), draw.randint(6, 18)):
            section, _, name = key.rpartition(".")
            (sections.setdefault(section, {}) if section else sections)[name] = draw.choice(POOL[key])
        stop = draw.randint(1, 11)
        with contextlib.suppress(ValidationError):
            recipe = small(**sections)
            if (done := attempt(whole, recipe)).code != 2:
                break
    assert done.code == 0, (sections, done.said)
    assert attempt(parts, recipe, stop_after=stop).code == 75, sections
    done = attempt(parts, recipe)
    assert done.code == 0, (sections, done.said)
    for name in ("model.safetensors", "ema.safetensors"):
        assert contents(whole).get(name) == contents(parts).get(name), (name, stop, sections)
    rows = [
        [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
        for run in (whole, parts)
    ]
    assert [{**row, "time": 0} for row in rows[0]] == [{**row, "time": 0} for row in rows[1]], (
        stop,
        sections,
    )
    replay_config(read_recorded(parts), [], trust=False)  # which refuses another recipe or other data
