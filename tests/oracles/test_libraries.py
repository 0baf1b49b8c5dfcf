"""Promise: peft opens what we export and merges it to our weights; recorded figures still hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.forked import attempt
from tests.oracles import theirs
from trainer.cli import main

pytestmark = pytest.mark.oracles


def same(found: Any, wanted: Any) -> bool:
    """Whether figures are equal: numbers to float32's last digits."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == (pytest.approx(wanted, rel=1e-5) if isinstance(wanted, float) else wanted))


def test_the_libraries_give_what_was_recorded() -> None:
    wanted = json.loads(theirs.FIGURES.read_text())
    assert [name for name, found in theirs.figures() if not same(found, wanted.pop(name))] == []
    assert not wanted


@pytest.mark.parametrize("family", theirs.LORA)
def test_peft_merges_to_our_weights(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft
    import transformers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run, base = tmp_path / "run", tmp_path / "model"
    assert attempt(run, theirs.lora_recipe(family, base)).code == 0
    assert main(["export", str(run), "--to", "peft"]) == 0
    opened: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    merged = peft.PeftModel.from_pretrained(opened, run / "export" / "peft-fp32").merge_and_unload()
    state, before = merged.state_dict(), load_file(base / "model.safetensors")
    ours = load_file(run / "model.safetensors")
    assert ours.keys() <= state.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, state[name])] == []
    assert [name for name in ours if name in before and not torch.equal(ours[name], before[name])]
    if family == "qwen3":
        assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
