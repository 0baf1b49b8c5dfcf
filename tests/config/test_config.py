"""Promise: every key is shown, every recipe is valid, overrides mean what they say."""

from pathlib import Path

import pytest
import yaml

from tests.helpers.hf_models import folder_of
from tests.helpers.refusals import named, refusal, refused
from trainer.cli import COMMANDS, main, make_parser
from trainer.config.elsewhere import COMMAND_WORDS, SETTING_WORDS, setting_meant
from trainer.config.formats import FORMATS
from trainer.config.models import HF
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import make_recipe, override, parse_recipe, read_recipe, recipe_names
from trainer.config.section import _nearest_key, config_hash, describe, validated
from trainer.train.components.task import check_request, make_task


@pytest.mark.parametrize("name", recipe_names())
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


def test_a_key_with_a_dot_in_a_mapping_is_told_its_section() -> None:
    with refused("optim.lr optim: {lr:"):
        make_recipe({"epochs": 1, "optim.lr": 0.1})


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
        (
            "class Base:\n    RECIPE = {'epochs': 3}\n    def loss(self): ...\nclass Mine(Base): ...",
            ":Mine",
            3,
        ),
        ("class A:\n    RECIPE = {'epochs': 4}\nclass Mine:\n    def loss(self): ...", "", 30),
        ("RECIPE = {'epochs': 3}\nclass Mine:\n    def loss(self): ...", ":Mine", 3),
    ],
)
def test_a_recipe_in_the_class_counts(tmp_path: Path, text: str, name: str, epochs: int) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert read_recipe(f"{file}{name}").get("epochs", 30) == epochs


def test_a_recipe_in_class_and_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "RECIPE = {'epochs': 3}\nclass Mine:\n    RECIPE = {'epochs': 4}\n    def loss(self): ..."
    )
    with refused(file, "1", "3", "RECIPE"):
        read_recipe(str(file))
