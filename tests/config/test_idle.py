"""Promise: a key that is typed has an effect, or a line names it and the choice that makes it idle."""

import pytest

from tests.helpers.refusals import named
from trainer.config.idle import idle_keys, idle_length, own_defaults, typed_keys
from trainer.config.recipe_file import load_recipe, make_recipe


@pytest.mark.parametrize(
    ("recipe", "setting", "choice"),
    [
        ("digits", "data.samples=64", "data.name=digits"),
        ("resnet50-synthetic", "model.width=64", "model.name=resnet50"),
        ("digits", "optim.momentum=0.5", "optim.name=adamw"),
        ("digits", "optim.gamma=0.5", "optim.schedule=one-cycle"),
        ("digits", "precision.initial_scale=8", "precision.mode=fp32"),
        ("digits", "data.policy_group=4", "data.policy=none"),
        ("gpt-stdlib", "language.buckets=4", "language.text=stream"),
        ("dtmf", "data.image_size=64", "task=audio"),
    ],
)
def test_an_idle_key_is_named_with_the_choice(recipe: str, setting: str, choice: str) -> None:
    (line,) = idle_keys(load_recipe(recipe, [setting]), keys := typed_keys([setting]))
    assert named(line, f"{keys.pop()}") and choice in line


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("digits", ["model.width=8", "optim.lr=0.1", "optim.betas=[0.9, 0.99]", "data.augment=flip"]),
        ("resnet50-synthetic", ["data.samples=64", "data.image_size=64", "data.classes=10"]),
        ("digits", ["precision.mode=fp16", "precision.growth_interval=9"]),
        ("digits", ["optim.name=muon", "optim.momentum=0.5", "optim.eps=1e-7", "seed=1"]),
    ],
)
def test_a_key_that_is_read_is_not(recipe: str, settings: list[str]) -> None:
    assert not list(idle_keys(load_recipe(recipe, settings), typed_keys(settings)))


def test_of_epochs_and_max_steps_the_later_end_is_idle() -> None:
    recipe = load_recipe("digits", ["max_steps=100", "epochs=1"])
    assert named(next(idle_length(recipe, {"max_steps"}, 16)), "max_steps=100 epochs=1")
    assert not list(idle_length(recipe, {"max_steps", "epochs"}, 200))
    assert named(next(idle_length(recipe, {"epochs"}, 200)), "epochs=1 200")
    assert not list(idle_length(recipe, set(), 16))


def test_defaults_of_an_own_task_are_told() -> None:
    unsaid = make_recipe({"task": "own"})
    assert (unsaid.max_steps, str(unsaid.evaluation.every)) == (2000, "200 steps")
    assert named(own_defaults(unsaid, set(), own_optimizer=False), "max_steps=2000 optim.lr=0.003")
    assert "optim.lr" not in own_defaults(unsaid, set(), own_optimizer=True)
    said = make_recipe({"epochs": 1, "task": "own", "optim": {"lr": 0.1}})
    assert not own_defaults(said, {"epochs"}, own_optimizer=False)
    assert make_recipe({"epochs": 1, "task": "own", "optim": {"name": "sgd"}}).optim.lr == 0.001
    assert (said.max_steps, said.evaluation.every) == (None, "1 epoch")
    few = make_recipe({"task": "own", "optim": {"lr": 0.1}}, ["max_steps=5", "evaluation.every=end"])
    assert (few.max_steps, few.epochs, few.evaluation.every) == (5, 1_000_000, "end")
