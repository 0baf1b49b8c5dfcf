"""Promise: token and text files are read in every way, and what is wrong with them is one line before the
start; what is generated is what the model says; the packaged recipes run.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from tests.helpers.refusals import refused
from tests.helpers.small_gpt import SMALL, make_model
from tests.helpers.toys import make_recipe
from trainer.commands.predict.text import encoder_of
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import read_recipe
from trainer.data.formats.text import decode_text, encode_text
from trainer.data.formats.tokenize import tokenize
from trainer.data.formats.tokens import TOKENS
from trainer.models.gpt import generated
from trainer.train.components.task import check_request, make_task


def run_of(folder: Path, **language: Any) -> tuple[Recipe, Any]:
    data = {"name": "tokens", "path": str(folder), "micro_batch_size": 2, "global_batch_size": 4}
    recipe = make_recipe(task="language", data=data, language=SMALL | language)
    return recipe, make_task(recipe)


def token_folder(folder: Path, text: bytes = b"to be or not to be, that is the question") -> Path:
    for name in ("train", "val"):
        source = folder / f"{name}.txt"
        source.write_bytes(text)
        tokenize(source, folder / f"{name}.bin", "bytes", force=True)
    return folder


def test_a_token_above_the_vocabulary_is_found(tmp_path: Path) -> None:
    """Before the start, and without a launcher where it is read."""
    folder = token_folder(tmp_path)
    tokens = np.fromfile(folder / "train.bin", np.uint16)
    tokens[26] = 300
    tokens.tofile(folder / "train.bin")
    recipe, task = run_of(folder, text="stream")
    with refused("train.bin", "sample 2", 300, 257):
        check_request(recipe, task, 1)
    with refused("sample 2", 300, 257):
        task.train_data.read(np.array([2]), None, {TOKENS: np.zeros((1, 13), np.uint16)})


@pytest.mark.parametrize(
    ("name", "language", "names"),
    [
        ("tokens", {"sequence_length": 99}, "train.bin 99"),
        ("tokens", {"stride": 2}, "language.stride"),
        ("characters", {"text": "packed"}, "language.text=packed"),
        ("short", {}, "input.txt 8"),
        ("none", {}, "data.path"),
    ],
)
def test_bad_input_is_one_line(name: str, language: Any, names: str, tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text("abcd" * (100 if name == "characters" else 2))
    path = {"tokens": token_folder(tmp_path), "none": None}.get(name, text)
    kind = "tokens" if name in ("tokens", "none") else "text"
    with refused(names):
        make_task(make_recipe(task="language", data={"name": kind, "path": path}, language=SMALL | language))


def test_nanogpts_files_need_their_dtype_and_vocabulary(tmp_path: Path) -> None:
    for name in ("train", "val"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    with refused("language.dtype language.vocabulary"):
        run_of(tmp_path)
    _, task = run_of(tmp_path, dtype="uint16", vocabulary=50257)
    assert task.describe()["vocabulary"] == 50257
    assert (task.metric, task.lower_is_better) == ("loss", True)


def test_a_character_file_is_shared_as_in_nanogpt(tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text("the quick brown føx: " * 20)
    recipe = Recipe.model_validate(read_recipe("gpt-char"))
    recipe.data.path, recipe.language.sequence_length = text, 16
    task = make_task(recipe)
    about, content = task.describe(), text.read_text()
    assert about["characters"] == "".join(sorted(set(content)))
    assert about["vocabulary"] == len(about["characters"])
    assert len(task.train_data) == int(0.9 * len(content)) - 16, "a sample at every character"
    out = {TOKENS: np.zeros((1, 17), np.uint8)}
    task.train_data.read(np.array([3]), None, out)
    assert decode_text(out[TOKENS][0].tolist(), "characters", about["characters"]) == content[3:20]
    assert task.metric == "loss"


def test_text_becomes_tokens_and_text_again() -> None:
    assert decode_text(encode_text("größer", "bytes"), "bytes") == "größer"
    assert decode_text([103, 195], "bytes") == "g\ufffd"
    assert decode_text(encode_text("cab", "characters", "abc"), "characters", "abc") == "cab"
    with refused("'x'"):
        encode_text("x", "characters", "abc")


def test_generating_is_what_the_model_says() -> None:
    model, prompt = make_model().eval(), torch.tensor([3, 1, 4])
    likeliest = [*generated(model, prompt, 20, 0.0, window=True)]
    whole = [*prompt.tolist(), *likeliest]
    for end in range(3, 3 + 20):
        seen = torch.tensor([whole[max(0, end - 12) : end]])  # no further back than a sample is long
        assert whole[end] == int(model(seen)[0, -1].argmax())
    seeds = (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
    one, again, other = ([*generated(model, prompt, 9, 1.0, seed, window=True)] for seed in seeds)
    assert one == again != other


def test_another_tokenizer_of_the_same_name_and_size_is_refused(tmp_path: Path) -> None:
    for name, words in (("one", ("a", "b")), ("two", ("b", "a"))):
        numbers = {word: number for number, word in enumerate((*words, "</s>"))}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, "a"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        (folder := tmp_path / name).mkdir()
        made.save(str(folder / "tokenizer.json"))
        (folder / "text.txt").write_text("a b " * 30)
        for split in ("train", "val"):
            tokenize(folder / "text.txt", folder / f"{split}.bin", f"bpe:{folder / 'tokenizer.json'}")
    recipe, task = run_of(tmp_path / "one", text="packed")
    assert task.more_data(recipe.data, None).fingerprint() == task.evaluation_data.fingerprint()
    with refused("tokenizer_sha256"):
        task.more_data(recipe.data.model_copy(update={"path": tmp_path / "two"}), None)
    facts = task.describe()
    assert encoder_of(f"bpe:{tmp_path / 'one' / 'tokenizer.json'}", facts)
    with refused(tmp_path / "two" / "tokenizer.json"):
        encoder_of(f"bpe:{tmp_path / 'two' / 'tokenizer.json'}", facts)
