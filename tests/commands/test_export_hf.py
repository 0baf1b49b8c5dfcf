"""Promise: what was trained from hf/… becomes a folder that transformers or peft loads and computes alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.helpers.chat_folders import CHATML, chat_folder
from tests.helpers.commands import command, refuse
from tests.helpers.forked import attempt
from tests.helpers.hf_models import NEEDS, folder_of
from tests.helpers.planted import write
from tests.helpers.toys import make_recipe
from tests.train.test_hf import WORDS, recipe_of
from trainer.checkpoint.tensor_file import safetensors_bytes
from trainer.commands.export import hf
from trainer.commands.verify.recorded import read_recorded
from trainer.commands.verify.replay import replay_config
from trainer.data.formats.chat import open_tokenizer
from trainer.models.hf import hf_model

pytestmark = [NEEDS, pytest.mark.usefixtures("here")]
NAMED = {"rank": 2, "alpha": 8.0, "targets": ["q_proj", "lm_head"]}
SAVED = {"rank": 2, "alpha": 8.0, "modules_to_save": ["embed_tokens"]}


def trained(folder: Path, family: str, text: str = "packed", wild: float = 0.0, **model: Any) -> Path:
    """A finished run of four steps, from a folder with a tokenizer's files; `wild` is added to weights."""
    base = folder_of(family, folder / "base", wild, **WORDS)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    short: dict[str, Any] = {"log": {"every": 1, "to": ["jsonl"]}, "optim": {"lr": 0.05}, "epochs": 4}
    attempt(folder / "run", recipe_of(base, text, model=model, **short), code=0)
    return folder / "run"


@pytest.mark.parametrize(
    ("family", "text", "lora", "written"),
    [
        ("gpt_neox", "packed", {}, ["transformers-fp32", "transformers-bf16"]),
        ("llama", "packed", NAMED, ["peft-fp32", "transformers-bf16"]),
        # Its head is the embedding.
        ("qwen3", "padded", SAVED, ["transformers-fp32", "peft-fp32", "peft-bf16"]),
    ],
)
def test_the_library_computes_what_was_trained(
    family: str, text: str, lora: dict[str, Any], written: list[str], tmp_path: Path
) -> None:
    """In bfloat16 each weight is rounded, however far that moves a deep or a wild model's outputs."""
    run = trained(tmp_path, family, text, 2.0, **({"lora": lora} if lora else {}))
    for name in written:
        to, dtype = name.split("-")
        command("export", run, "--to", to, "--dtype", dtype)
        made = run / "export" / name
        checked = json.loads((made / "model.json").read_text())["checked"]
        assert checked["relative_error"] <= (1e-5 if dtype == "fp32" else checked["limit"])
        assert (made / "chat_template.jinja").read_text() == "{{ messages }}"
        if to == "peft":
            facts = json.loads((made / "adapter_config.json").read_text())
            assert facts["base_model_name_or_path"] == str((tmp_path / "base").resolve())
            layers = 14 if lora is SAVED else 3
            assert (facts["r"], facts["lora_alpha"], len(facts["target_modules"])) == (2, 8.0, layers)
            assert facts.get("modules_to_save") == (["model.embed_tokens"] if lora is SAVED else None)
            assert facts.get("ensure_weight_tying", False) == (lora is SAVED)
            continue
        low = dtype == "bf16"
        assert json.loads((made / "config.json").read_text())["dtype"] == ("bfloat16" if low else "float32")
        if low:
            assert checked["rounding"] > (2e-2 if family == "llama" else 1e-3)
            exact = load_file(run / "model.safetensors")
            for key, tensor in load_file(made / "model.safetensors").items():
                other = key.replace("embed_out.", "lm_head.") if family == "gpt_neox" else key
                assert torch.equal(tensor, exact[other].to(torch.bfloat16)), key


def test_one_bit_that_was_written_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, write = trained(tmp_path, "llama", lora={"rank": 2}), safetensors_bytes

    def other(tensors: dict[str, torch.Tensor], *facts: Any) -> Any:
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed[sorted(changed)[0]].view(torch.uint8).view(-1)[0] ^= 1  # the last bit
        return write(changed, *facts)

    monkeypatch.setattr(hf, "safetensors_bytes", other)
    for to, dtype in (("peft", "fp32"), ("transformers", "bf16")):
        command("export", run, "--to", to, "--dtype", dtype, code=1)
        assert not (run / "export" / f"{to}-{dtype}").exists()


def test_a_model_that_was_moved_is_found_by_its_name_and_must_be_the_same(tmp_path: Path) -> None:
    run, moved = trained(tmp_path, "llama"), tmp_path / "moved"
    (tmp_path / "base").rename(moved)
    evaluate, there = ["evaluate", run], ["--set", f"model.name=hf/{moved}"]
    for words in (evaluate, ["export", run, "--to", "transformers"]):
        refuse(words, tmp_path / "base")
        command(*words, *there)
    # Without model.lora there is no adapter.
    command("export", run, "--to", "peft", *there, code=2)
    assert not (run / "export" / "peft-fp32").exists()
    replay_config(read_recorded(run), there[1:])  # `verify` takes it, too, and compares the weights
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "transformers_version": "1"}))
    command(*evaluate, *there)
    (moved / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    refuse([*evaluate, *there], "model_config")


def test_the_tokenizer_is_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which language.tokenizer may have named; the base's own isn't what the model was trained with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = folder_of("llama", tmp_path / "base", vocab_size=500)
    write(base, {"chat_template.jinja": "the base's", "generation_config.json": "{}"})
    chat = chat_folder(tmp_path / "chat", template=CHATML, eos_token="<|endoftext|>")
    tools = "additional_chat_templates/tool_use.jinja"
    write(chat, {tools: CHATML})
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 12)
    one = {"global_batch_size": 1, "micro_batch_size": 1}
    recipe = make_recipe(
        task="language",
        data={"name": "conversations", "path": str(tmp_path / "a.jsonl"), **one},
        model={"name": f"hf/{base}"},
        language={"sequence_length": 48, "tokenizer": str(chat)},
        max_steps=1,
    )
    attempt(tmp_path / "run", recipe, code=0)
    for options in ([], ["--force"]):
        command("export", tmp_path / "run", "--to", "transformers", *options)
    made = tmp_path / "run" / "export" / "transformers-fp32"
    for name in ("chat_template.jinja", tools, "tokenizer.json", "tokenizer_config.json"):
        assert (made / name).read_bytes() == (chat / name).read_bytes()
    # A base model's end of a text isn't where the template's turns end, and generation is to stop there.
    opened = open_tokenizer(chat)
    ends = json.loads((made / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) == {opened.eos, opened.ends["<|im_end|>"]} and len(ends) == 2


@pytest.mark.parametrize(("family", "kind"), [("gemma", "GemmaTokenizer"), ("mistral", "LlamaTokenizerFast")])
def test_the_library_makes_the_tokens_that_were_learned(family: str, kind: str, tmp_path: Path) -> None:
    """Its classes for some models build a tokenizer of their own beside tokenizer.json."""
    import transformers

    folder = chat_folder(tmp_path, family, tokenizer_class=kind)
    model_type = {"mistral": "llama"}.get(family, family)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    chat = open_tokenizer(folder)
    text = chat.render([{"role": "user", "content": "the cat\n\n sat"}], generation_prompt=True)
    wanted = next(chat.encode([text])).ids.tolist()

    def theirs() -> Any:
        opened: Any = transformers.AutoTokenizer.from_pretrained(folder)
        return opened(text, add_special_tokens=False)["input_ids"]

    assert theirs() != wanted
    hf._keep_tokens(chat, folder)
    assert theirs() == wanted


def test_names_in_files_are_those_of_the_library(tmp_path: Path) -> None:
    """Of gpt_neox's head vLLM, llama.cpp and version 4 know the older name alone."""
    folder = folder_of("gpt_neox", tmp_path)
    model = hf_model(f"hf/{folder}", 48)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert model.in_files().keys() == set(file.keys())
