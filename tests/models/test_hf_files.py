"""Promise: of a model's files nothing is run, nothing leads elsewhere; what can't be trained is one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.helpers.hf_models import NEEDS, PLACES, WORDS, folder_of, made
from tests.helpers.refusals import refused
from tests.helpers.steps import assert_same_bits
from tests.models import test_pretrained
from tests.models.test_pretrained import NEW, OLD, Hub
from trainer.config.recipe import Recipe
from trainer.models.hf import hf_model
from trainer.models.hf_files import files_hash, find_model, hf_vocabulary, weight_files
from trainer.models.hub import FILE
from trainer.models.weights import load_initial

pytestmark = NEEDS
hub = test_pretrained.hub


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(keys)
    (folder / "config.json").write_text(json.dumps(config))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def to_shards(folder: Path, names: tuple[str, ...] = ("a.safetensors", "b.safetensors")) -> None:
    state = stored(folder)
    (folder / "model.safetensors").unlink()
    place = {key: names[number % 2] for number, key in enumerate(state)}
    for name in set(names):
        part = {key: tensor for key, tensor in state.items() if place[key] == name}
        safetensors.torch.save_file(part, folder / Path(name).name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))


def link_outward(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


ROPE = {"factor": 2.0, "rope_theta": 1e4}
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (lambda f: change(f, auto_map={"AutoModelForCausalLM": "own.Model"}), "auto_map"),
    "kind": (lambda f: change(f, model_type="mamba"), "mamba llama"),
    "bits": (lambda f: change(f, quantization_config={"bits": 4}), "quantization_config"),
    "rope": (lambda f: change(f, rope_parameters={**ROPE, "rope_type": "dynamic"}), "dynamic"),
    "short": (lambda f: change(f, max_position_embeddings=9), "sequence_length=48 18"),
    "heads": (lambda f: change(f, num_attention_heads="four"), "config.json"),
    "outward": (link_outward, "model.safetensors"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin"),
    "shard_outward": (lambda f: to_shards(f, ("../a.safetensors", "b.safetensors")), "../a.safetensors"),
    "missing": (
        lambda f: safetensors.torch.save_file(
            {key: one for key, one in stored(f).items() if "norm" not in key}, f / "model.safetensors"
        ),
        "model.layers.0.input_layernorm.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_model_to_train_is_one_line(fault: str, tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model")
    make, line = FAULTS[fault]
    make(folder)
    with refused(line):
        load_initial(hf_model(f"hf/{folder}", PLACES), folder, None)


def takes_over(folder: Path, family: str) -> str:
    """Loads a folder's files into a model, which then is the library's; returns what is said of them."""
    model, theirs = hf_model(f"hf/{folder}", PLACES), made(family).state_dict()
    said = load_initial(model, folder, None)
    found = {**model.state_dict()}
    assert_same_bits(found, {name: theirs[name] for name in found})
    return said


def test_shards_are_one_model(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    before = files_hash(folder)
    to_shards(folder)
    assert [file.name for file in weight_files(folder)] == ["a.safetensors", "b.safetensors"]
    assert takes_over(folder, "llama") == "21 tensors"
    changed = files_hash(folder)
    change(folder, rms_norm_eps=1e-3)
    assert len({before, changed, files_hash(folder)}) == 3


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_what_older_versions_wrote_is_read(family: str, tmp_path: Path) -> None:
    """Of the body alone, without its prefix; with masks and angles that nobody reads; with the tied head."""
    folder = folder_of(family, tmp_path)
    prefix = "transformer." if family == "gpt2" else "model."
    state = {key.removeprefix(prefix): one for key, one in stored(folder).items()}
    state["h.0.attn.bias" if family == "gpt2" else "layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    embedding = next(one for one in state.values() if one.shape[0] == WORDS)
    safetensors.torch.save_file({**state, "lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    assert takes_over(folder, family).endswith(", 2 that aren't used")
    # The embedding under the name of the head that is tied to it.
    safetensors.torch.save_model(made(family), str(folder / "model.safetensors"), metadata={"format": "pt"})
    takes_over(folder, family)


def test_a_head_of_its_own_in_the_files_of_a_tied_model_is_refused(tmp_path: Path) -> None:
    folder = folder_of("gemma", tmp_path)
    state = stored(folder)
    head = torch.zeros_like(state["model.embed_tokens.weight"])
    safetensors.torch.save_file({**state, "lm_head.weight": head}, folder / "model.safetensors")
    with refused("tie_word_embeddings"):
        load_initial(hf_model(f"hf/{folder}", PLACES), folder, None)


def test_text_of_more_tokens_than_it_knows_is_refused(tmp_path: Path) -> None:
    name = f"hf/{folder_of('llama', tmp_path)}"
    assert hf_vocabulary(name, WORDS) == WORDS
    with refused(67, 68):
        hf_vocabulary(name, WORDS + 1)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"language": {"layers": 3}}, "language.layers GPT"),
        ({"model": {"name": "hf/x", "pretrained": "a.safetensors"}}, "model.pretrained"),
        ({"task": "classification"}, "task=language"),
    ],
)
def test_keys_that_do_not_go_with_it_are_refused(keys: dict[str, Any], line: str) -> None:
    with refused(line, by=ValueError):
        Recipe.model_validate({"task": "language", "epochs": 1, "model": {"name": "hf/x"}, **keys})


def test_a_repository_is_fetched_once_and_its_commit_kept(tmp_path: Path, hub: Hub) -> None:
    folder = folder_of("llama", tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    to_shards(folder)
    hub.others = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != FILE}
    hub.files = {("org/name", OLD): None, ("org/name", NEW): None}
    found = find_model("hf/org/name@main")
    assert (found.exact, found.revision) == (f"hf/org/name@{OLD}", OLD)
    assert {file.name for file in found.folder.iterdir()} == {file.name for file in folder.iterdir()}
    takes_over(found.folder, "llama")
    hub.commits["main"] = NEW
    hub.asked.clear()
    assert find_model(found.exact).folder == found.folder
    assert not hub.asked  # neither what is there nor what isn't
    del hub.others["config.json"]
    with refused("org/name config.json"):
        find_model("hf/org/name@main")


def test_an_older_torch_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    name = f"hf/{folder_of('llama', tmp_path)}"
    with refused(f"model.name={name}", "2.6", "2.5.1"):
        hf_model(name, PLACES)
