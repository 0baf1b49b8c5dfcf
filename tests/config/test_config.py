"""Promise: every key is shown, every recipe is valid, overrides mean what they say."""

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.hf_models import folder_of
from tests.helpers.refusals import named, refusal, refused
from trainer.cli import COMMANDS, main, make_parser
from trainer.config import recipe_file
from trainer.config.dropped import DROPPED, DroppedKeysError
from trainer.config.elsewhere import COMMAND_WORDS, SETTING_WORDS, setting_meant
from trainer.config.formats import FORMATS
from trainer.config.idle import idle_keys, idle_length, own_defaults, typed_keys
from trainer.config.models import HF
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, make_recipe, override, parse_recipe, read_recipe
from trainer.config.section import _nearest_key, config_hash, describe, validated
from trainer.train.components.task import check_request, make_task


@pytest.mark.parametrize("name", recipe_file.recipe_names())
def test_every_recipe_can_be_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.builtin.boxes.TRAIN", 96)
    monkeypatch.setattr("trainer.data.builtin.boxes.TEST", 12)
    values = read_recipe(name)
    if values.get("model", {}).get("name", "").startswith(HF):  # a model that is here stands in
        pytest.importorskip("transformers")
        folder = folder_of("llama", tmp_path, vocab_size=256, max_position_embeddings=4096)
        values = override(values, [f"model.name={HF}{folder}"])
    assert values["about"]
    recipe = validated(Recipe, values, name)
    if FORMATS[recipe.data.name].place != "nowhere":  # random data of the same shapes stands in
        recipe = validated(Recipe, override(values, ["data.name=synthetic", "data.path=null"]), name)
    check_request(recipe, make_task(recipe), world_size=1)


def test_help_config_shows_every_key_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--help-config"]) == 0
    out = capsys.readouterr().out
    keys = [key.name for key in describe(Recipe)]
    assert [line.split()[0] for line in out.splitlines() if line[:3].rstrip() and line[:2] == "  "] == keys
    rate = out.partition("  optim.lr ")[2].partition("\n  optim.")[0]
    assert named(rate, "float 0.001 digits: 0.006")
    assert main(["train", "digits", "--help-config", "optim.lr"]) == 0
    assert "optim.eps" not in capsys.readouterr().out
    refusal(main(["train", "digits", "--help-config", "optm"]), capsys.readouterr().err, "optm optim")


def test_a_recipe_that_is_printed_is_that_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "digits"]) == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text(capsys.readouterr().out)
    assert read_recipe(str(mine)) == read_recipe("digits")
    assert main(["recipes", "digist"]) == 2


def test_overrides_are_typed_and_a_mapping_keeps_the_rest() -> None:
    settings = ["optim={lr: 1e-3}", "model.blocks=[2, 2]", "data.path=/x", "data.name=folder", "about='a: b'"]
    recipe = validated(Recipe, override(read_recipe("digits"), settings), "digits")
    assert (recipe.optim.lr, recipe.model.blocks, recipe.about) == (0.001, (2, 2), "a: b")
    assert (recipe.data.path, recipe.optim.max_grad_norm) == (Path("/x"), 1.0)


@pytest.mark.parametrize(
    ("setting", "drawn"),
    [
        ("data.class_weights={3: 5}", {"3": 5}),
        ("data={class_weights: {3: 5}}", {"3": 5}),
        ("data.class_weights.3=5", {"1": 2, "3": 5}),
    ],
)
def test_a_mapping_that_is_one_keys_value_replaces_it(setting: str, drawn: dict[str, int]) -> None:
    values = override({"data": {"class_weights": {"1": 2}, "mix": {"a": 1}}}, [setting])
    assert values == {"data": {"class_weights": drawn, "mix": {"a": 1}}}
    named = override({"data": {"class_weights": "balanced"}}, ["data.class_weights={3: 5}"])
    assert named == {"data": {"class_weights": {"3": 5}}}
    sets = override({"evaluation": {"sets": {"mix": {"path": "a"}}}}, ["evaluation.sets={mix: {split: b}}"])
    assert sets == {"evaluation": {"sets": {"mix": {"path": "a", "split": "b"}}}}
    assert override(sets, ["evaluation.sets={}"]) == {"evaluation": {"sets": {}}}


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "a: 1e-3\nb: 010\nc: 1:30\nd: on\ne: true\nf: null\ng: -.5\nh: 2026-01-01"
    assert parse_recipe(text, "x") == {
        "a": 0.001, "b": 10, "c": "1:30", "d": "on", "e": True, "f": None, "g": -0.5, "h": "2026-01-01",
    }  # fmt: skip


def test_the_hash_tells_configurations_apart_and_survives_the_run_folder() -> None:
    recipe = validated(Recipe, read_recipe("digits"), "digits")
    other = validated(Recipe, override(read_recipe("digits"), ["seed=1"]), "digits")
    assert config_hash(recipe) != config_hash(other)
    again = Recipe.model_validate(yaml.safe_load(yaml.safe_dump(recipe.model_dump(mode="json"))))
    assert config_hash(again) == config_hash(recipe)


# A key as it was typed, and the key that was meant, or what stands here for others' word; "" for none.
SLIPS = {
    "optim.lrr": "optim.lr",
    "optim.bogus": "",
    "optim.moment": "optim.momentum",
    "optim.learning_rate": "optim.lr=0.001",
    "optim.clip": "optim.max_grad_norm=1.0",
    "optim.max_grad_nrom": "optim.max_grad_norm",
    "data.lr": "optim.lr",
    "lr": "optim.lr",
    "momentun": "optim.momentum",
    "batch_size": "data.global_batch_size=N",
    "sead": "seed",
    "zzzz": "",
    "name": "data.name",
    "model.depth": "",
    "parallel.backend": "",
    "log.wandb": "log.to=[jsonl, wandb]",
    "parallel.find_unused_parmtrs": "",  # three letters are too many, however long a name is
}


def flags_of(command: str) -> set[str]:
    (commands,) = (one.choices for one in make_parser()._actions if isinstance(one.choices, dict))
    return set(commands[command]._option_string_actions)


def test_what_stands_for_others_words_can_be_typed() -> None:
    flags, keys = flags_of("train"), {key.name for key in describe(Recipe)}
    for here in {*SETTING_WORDS.values(), *COMMAND_WORDS.values()} - {"examples/links"}:
        if here.startswith("trainer "):
            words = here.partition(" > ")[0].replace("RECIPE", "digits").split()[1:]
            assert words[0] in {*COMMANDS, "--version", "--help"}, here
        elif here.startswith("--"):
            assert here.split(maxsplit=1)[0] in flags, here
        else:
            assert here.partition("=")[0] in keys, here
    assert setting_meant("trainer.ckpt_path") == setting_meant("--CKPT_PATH") == "--resume RUN"


@pytest.mark.parametrize("typed", SLIPS)
def test_a_slip_is_told_what_was_meant_and_another_word_nothing(typed: str) -> None:
    assert named(_nearest_key(typed, [key.name for key in describe(Recipe)]), SLIPS[typed] or "--help-config")


def test_a_key_and_its_value_alone_are_a_setting_but_not_where_files_are_named() -> None:
    words = ["train", "digits", "optim.lr=0.1", "--set", "epochs=2", "--out", "x", "max_steps=3"]
    options = make_parser().parse_args(words)
    assert options.set == ["optim.lr=0.1", "epochs=2", "max_steps=3"]  # in the order of the words
    assert options.recipe == "digits"
    assert make_parser().parse_args(["train", "seed=3", "digits"]).set == ["seed=3"]
    files = make_parser().parse_args(["predict", "RUN", "a=b.png"])
    assert (files.files, files.set) == ([Path("a=b.png")], [])


@pytest.mark.parametrize(
    ("text", "name", "epochs"),
    [
        ("class Mine:\n    RECIPE = {'epochs': 3}\n    def loss(self): ...", "", 3),
        ("class Base:\n    RECIPE = {'epochs': 3}\n    def loss(self): ...\nclass A(Base): ...", ":A", 3),
        ("class A:\n    RECIPE = {'epochs': 4}\nclass Mine:\n    def loss(self): ...", "", 30),
        ("\ufeffRECIPE = {'epochs': 3}\nclass Mine:\n    def loss(self): ...", ":Mine", 3),
    ],
)
def test_a_recipe_in_the_class_counts(tmp_path: Path, text: str, name: str, epochs: int) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert read_recipe(f"{file}{name}").get("epochs", 30) == epochs


def test_a_recipe_in_class_and_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("RECIPE = {'epochs': 3}\nclass A:\n    RECIPE = {'epochs': 4}\n    def loss(self): ...")
    with refused(file, "1", "3", "RECIPE"):
        read_recipe(str(file))


@pytest.mark.parametrize("key", DROPPED)
def test_each_is_refused_from_a_recipe_and_from_settings(key: str) -> None:
    section, _, name = key.rpartition(".")
    with pytest.raises(DroppedKeysError) as raised:
        make_recipe({"epochs": 1, **({section: {name: "a"}} if section else {name: "a"})}, source="mine.yaml")
    assert named(str(raised.value), "mine.yaml", key, DROPPED[key])
    assert yaml.safe_load(raised.value.recipe) == {"epochs": 1}
    with pytest.raises(DroppedKeysError) as raised:
        make_recipe({"epochs": 1}, [f"{key}={json.dumps('given')}"])
    assert named(str(raised.value), key) and not raised.value.recipe
    assert key not in {one.name for one in describe(Recipe)}


def test_a_line_for_each_and_the_recipe_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"data": {"name": "digits", "limit": 64}, "model": {"width": 4}, "max_steps": 1, "epochs": 1}
    file = tmp_path / "old.yaml"
    gone = {"parallel": {"static_graph": False}, "memory": {"history": False, "names": []}}
    file.write_text(yaml.safe_dump({**small, **gone}))
    assert main(["train", str(file), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 2 and not (tmp_path / "run").exists()
    assert named(said.err, file, "parallel.static_graph", "memory.history")
    assert yaml.safe_load(said.out) == {**small, "memory": {"names": []}}


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
