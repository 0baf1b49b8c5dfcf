"""Promise: every key is shown, every recipe is valid, overrides mean what they say."""

import contextlib
from pathlib import Path

import pytest
import yaml

import trainer
from tests.helpers.hf_models import folder_of
from tests.helpers.refusals import refusal, refused
from trainer.cli import COMMANDS, main, make_parser
from trainer.config.elsewhere import COMMAND_WORDS, SETTING_WORDS, setting_meant
from trainer.config.formats import FORMATS
from trainer.config.models import HF
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import (
    make_recipe,
    override,
    parse_recipe,
    read_recipe,
    recipe_names,
    recipe_text,
)
from trainer.config.section import _nearest_key, config_hash, describe, validated
from trainer.config.suggest import distance
from trainer.config.tasks import TASKS
from trainer.errors import BadInputError
from trainer.train.components.task import check_request, make_task


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_what_is_unlike_its_source(name: str) -> None:
    text = (Path(trainer.__file__).parent / f"recipes/{name}.yaml").read_text()
    comment = " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    assert "nlike it" in comment or "after no" in comment


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_trained(name: str, tmp_path: Path) -> None:
    values = read_recipe(name)
    if values.get("model", {}).get("name", "").startswith(HF):  # a model that is here stands in
        pytest.importorskip("transformers")
        folder = folder_of("llama", tmp_path, vocab_size=256, max_position_embeddings=4096)
        values = override(values, [f"model.name={HF}{folder}"])
    assert values["about"]
    recipe = validated(Recipe, values, name)
    if (
        FORMATS[recipe.data.name].place != "nowhere"
    ):  # the real ones: random data of the same shapes stands in
        recipe = validated(Recipe, override(values, ["data.name=synthetic", "data.path=null"]), name)
    check_request(recipe, make_task(recipe), world_size=1)


def test_every_key_has_a_description() -> None:
    keys = list(describe(Recipe))
    assert len(keys) > 40
    assert all(key.description and key.type for key in keys)
    assert {"seed", "optim.lr", "data.micro_batch_size", "precision.mode", "log.every"} <= {
        key.name for key in keys
    }


def test_help_config_shows_every_key_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--help-config"]) == 0
    out = capsys.readouterr().out
    keys = [key.name for key in describe(Recipe)]
    assert [line.split()[0] for line in out.splitlines() if line[:3].rstrip() and line[:2] == "  "] == keys
    rate = out.partition("  optim.lr ")[2].partition("\n  optim.")[0]
    assert all(word in rate for word in ("float", "default 0.001", "digits: 0.006", "peak learning rate"))


@pytest.mark.parametrize(
    ("section", "first", "count"), [("optim", "optim.name", 17), ("optim.lr", "optim.lr", 1)]
)
def test_help_config_shows_a_section_within_the_width(
    section: str, first: str, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["train", "digits", "--help-config", section]) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [line.split()[0] for line in lines if line[:2] == "  " and line[2] != " "]
    assert keys[0] == first and len(keys) == count
    assert max(map(len, lines)) <= 60
    refusal(main(["train", "digits", "--help-config", "optm"]), capsys.readouterr().err, "optm 'optim'")


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_that_is_printed_is_that_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", name]) == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text(capsys.readouterr().out)
    assert read_recipe(str(mine)) == read_recipe(name)
    assert mine.read_text() == recipe_text(name)


@pytest.mark.parametrize("name", ["digist", "mine.yaml", "../recipes/digits", ""])
def test_what_is_no_recipe_is_not_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("epochs: 1\n")
    assert main(["recipes", name]) == 2
    told = capsys.readouterr()
    assert not told.out
    refusal(2, told.err, name)


def test_overrides_are_typed_and_leave_the_rest() -> None:
    settings = [
        "optim.lr=1e-3",
        "compile.mode=default",
        "model.blocks=[2, 2]",
        "data.path=/x",
        "data.name=folder",
        "about='a: b'",
    ]
    recipe = validated(Recipe, override(read_recipe("digits"), settings), "digits")
    assert (recipe.optim.lr, recipe.compile.mode, recipe.model.blocks, recipe.about) == (
        0.001,
        "default",
        (2, 2),
        "a: b",
    )
    assert recipe.data.path == Path("/x")
    assert recipe.optim.name == "adamw"


def test_a_mapping_changes_what_it_names_and_keeps_the_rest() -> None:
    recipe = validated(Recipe, override(read_recipe("digits"), ["optim={lr: 0.5}"]), "digits")
    assert (recipe.optim.lr, recipe.optim.max_grad_norm) == (0.5, 1.0)


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


def test_aliases_work_within_bounds() -> None:
    assert parse_recipe("a: &x {lr: 0.1}\nb: *x", "x") == {"a": {"lr": 0.1}, "b": {"lr": 0.1}}
    # A key is its text: 010 and 10 may be two classes.
    assert parse_recipe("{010: 1, 10: 2, 1e3: 3, null: 4, &y 5: *y}", "x") == {
        "010": 1,
        "10": 2,
        "1e3": 3,
        "null": 4,
        "5": 5,
    }


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
    "optim.beta": "optim.betas",
    "optim.weight_decy": "optim.weight_decay",
    "optim.learning_rate": "optim.lr=0.001",
    "optim.clip": "optim.max_grad_norm=1.0",
    "optim.foo": "",
    "optim.scheduler": "optim.schedule=cosine",
    "optim.max_grad_nrom": "optim.max_grad_norm",
    "data.global_batch_size": "data.global_batch_size",
    "data.microbatch": "data.micro_batch_size=N",
    "data.num_workers": "data.workers=N",
    "data.shufle": "data.shuffle",
    "data.lr": "optim.lr",
    "lr": "optim.lr",
    "lrr": "optim.lr",
    "momentun": "optim.momentum",
    "epoch": "epochs",
    "max_windows": "max_steps=N",
    "batch_size": "data.global_batch_size=N",
    "gradient_accumulation_steps": "data.micro_batch_size=N",
    "sead": "seed",
    "zzzz": "",
    "name": "data.name",
    "model.depth": "",
    "model.widht": "model.width",
    "checkpoint.evry": "checkpoint.every",
    "parallel.backend": "",
    "log.wandb": "log.to=[jsonl, wandb]",
}


def flags_of(command: str) -> set[str]:
    (commands,) = (one.choices for one in make_parser()._actions if isinstance(one.choices, dict))
    return set(commands[command]._option_string_actions)


@pytest.mark.parametrize(
    "here", sorted({*SETTING_WORDS.values(), *COMMAND_WORDS.values()} - {"examples/links"})
)
def test_what_stands_for_others_words_can_be_typed(here: str) -> None:
    if here.startswith("trainer "):
        words = here.partition(" > ")[0].replace("RECIPE", "digits").split()[1:]
        assert words[0] in {*COMMANDS, "--version", "--help"}
        if len(words) > 1:
            make_parser().parse_args(words)
    elif here.startswith("--"):
        assert here.split(maxsplit=1)[0] in flags_of("train")
    else:
        assert here.partition("=")[0] in {key.name for key in describe(Recipe)}


@pytest.mark.parametrize("word", ["--ckpt-path", "ckpt_path", "--CKPT_PATH", "trainer.ckpt_path"])
def test_a_word_of_others_is_known_as_flag_and_as_key(word: str) -> None:
    assert setting_meant(word) == "--resume RUN"


@pytest.mark.parametrize(
    "words", [["fit"], ["train", "digits", "--opt", "sgd"], ["train", "digits", "model=vit"]]
)
def test_others_words_are_told_in_ours(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    told = {"fit": "trainer train", "--opt": "optim.name=", "model=vit": "model.name="}
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(str(ended))
    refusal(code, capsys.readouterr().err, next(here for word, here in told.items() if word in words))


@pytest.mark.parametrize("words", [[], ["help"], ["help", "train"]])
def test_help_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(words)
    assert f"usage: trainer {'train' if words[1:] else ''}".rstrip() in capsys.readouterr().out


def test_distance_is_letters_changed_and_neighbors_swapped() -> None:
    found = [
        distance(*pair.split())
        for pair in ("lr lr", "lrr lr", "sead seed", "evry every", "nrom norm", "lr schedule")
    ]
    assert found == [0, 1, 1, 1, 1, 7]


@pytest.mark.parametrize("typed", SLIPS)
def test_a_slip_is_told_what_was_meant_and_another_word_nothing(typed: str) -> None:
    said = _nearest_key(typed, [key.name for key in describe(Recipe)])
    meant = SLIPS[typed]
    hints = ("; --help-config shows every key", f"; did you mean '{meant}'?", f"; here it is {meant}")
    assert said == (hints[1 + ("=" in meant)] if meant else hints[0])


def test_a_key_with_a_dot_in_a_mapping_is_told_its_section() -> None:
    with refused("optim.lr optim: {lr:"):
        make_recipe({"epochs": 1, "optim.lr": 0.1})


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_key_and_its_value_alone_are_a_setting(command: str) -> None:
    words = [command, "digits", "optim.lr=0.1", "--set", "epochs=2", "--out", "x", "max_steps=3"]
    options = make_parser().parse_args(words)
    assert options.set == ["optim.lr=0.1", "epochs=2", "max_steps=3"]  # in the order of the words
    assert options.recipe == "digits"
    assert make_parser().parse_args([command, "digits"]).set == []
    assert make_parser().parse_args([command, "seed=3", "digits"]).set == ["seed=3"]


def test_where_words_may_look_like_settings_they_are_not_taken_for_some() -> None:
    files = make_parser().parse_args(["predict", "RUN", "a=b.png"])
    assert (files.files, files.set) == ([Path("a=b.png")], [])


@pytest.mark.parametrize("value", [1e308, 1e-308, 10**400])
def test_no_number_is_too_large_for_the_checks(value: float) -> None:
    for key in describe(Recipe):
        if "int" in key.type or "float" in key.type:
            section, _, name = key.name.rpartition(".")
            task = section if section in TASKS else "classification"
            with contextlib.suppress(BadInputError):
                make_recipe(
                    {"epochs": 1, "task": task, **({section: {name: value}} if section else {name: value})}
                )


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
        ("RECIPE = {'epochs': 3}\nclass Mine:\n    RECIPE = RECIPE\n    def loss(self): ...", "", 3),
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
