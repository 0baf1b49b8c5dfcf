"""What transformers, TRL and peft compute; `python -m tests.oracles.theirs` records it in figures.json.

It runs in the environment of tests/compat/oracles, which `make oracles` makes; fast tests read what it wrote.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.sft import plain_losses
from tests.helpers.chat_folders import chat_folder
from tests.helpers.hf_models import folder_of
from tests.helpers.toys import make_recipe
from tests.train.test_hf import WORDS, recipe_of
from trainer.config.recipe import Recipe

FIGURES = Path(__file__).with_name("figures.json")
TALKS = Path(__file__).parents[2] / "examples" / "conversations" / "conversations.jsonl"
LORA: dict[str, dict[str, Any]] = {
    "llama": {"targets": ["q_proj", "v_proj"]},
    "mistral": {"targets": ["self_attn.q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
    "qwen2": {"targets": ["all-linear"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "qwen3": {"targets": ["all-linear"], "modules_to_save": ["embed_tokens"]},  # which the head is tied to
    "gpt_neox": {"targets": ["query_key_value"], "modules_to_save": ["embed_in", "lm_head"]},
}


def lora_recipe(family: str, folder: Path) -> Recipe:
    """LoRA on a tiny model of a family, four steps of all rows."""
    made = folder_of(family, folder, **WORDS)
    optim = {"lr": 0.02, "schedule": "constant", "weight_decay": 0.0}
    model = {"lora": {"rank": 2, "alpha": 8.0, **LORA[family]}}
    return recipe_of(made, model=model, epochs=4, optim=optim, log={"every": 1, "to": ["jsonl"]})


def with_peft(model: nn.Module, learned: Mapping[str, torch.Tensor], recipe: Recipe) -> Any:
    """Puts peft's LoRA into a model of the library, with a run's matrices."""
    import peft

    lora = recipe.model.lora
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="all-linear" if "all-linear" in lora.targets else list(lora.targets),
        modules_to_save=list(lora.modules_to_save) or None,
        ensure_weight_tying=bool(getattr(model.config, "tie_word_embeddings", False)),
    )
    made = peft.get_peft_model(model, config)
    for name, parameter in made.named_parameters():
        if ".lora_A." in name:
            parameter.data.copy_(learned[f"{_own(name)}.lora_a"])
    return made


def _own(name: str) -> str:
    return name.removeprefix("base_model.model.").partition(".lora_A.")[0]


def peft_figures(family: str, folder: Path) -> dict[str, Any]:
    """Which layers peft adapts, and the losses of a plain loop with it."""
    found = dict[str, Any]()

    def adapt(*values: Any) -> Any:
        made = with_peft(*values)
        found["adapted"] = sorted(_own(name) for name, _ in made.named_parameters() if ".lora_A." in name)
        found["learned"] = sum(one.numel() for one in made.parameters() if one.requires_grad)
        return made

    found["losses"] = list(plain_losses(lora_recipe(family, folder), adapt))
    return found


def talks_recipe(folder: Path) -> Recipe:
    """A tiny model and 16 conversations of examples/, whole in each of four steps."""
    whole = chat_folder(folder / "model", "marked")
    model = folder_of("llama", whole, vocab_size=500, max_position_embeddings=512)
    lines = TALKS.read_text().splitlines()
    rows = [line for line in lines if line.startswith('{"messages"')]
    for name, some in (("train", rows[:16]), ("val", rows[:5])):
        (folder / f"{name}.jsonl").write_text("\n".join(some))
    optim: dict[str, Any] = {"lr": 0.005, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0}
    optim |= {"betas": (0.9, 0.999)}
    sizes = {"global_batch_size": 16, "micro_batch_size": 4}
    return make_recipe(
        **{"task": "language", "epochs": 4, "language": {"text": "padded", "sequence_length": 512}},
        data={"name": "conversations", "path": str(folder), **sizes},
        **{"model": {"name": f"hf/{model}"}, "optim": optim, "evaluation": {"every": "end"}},
        log={"every": 1, "to": ["jsonl"]},
    )


def trl_figures(folder: Path) -> dict[str, Any]:
    """Losses, tokens and the share of tokens that are found, of TRL's SFTTrainer on the same rows."""
    import transformers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    recipe = talks_recipe(folder)
    model = recipe.model.name.removeprefix("hf/")
    texts = [(folder / f"{name}.jsonl").read_text().splitlines() for name in ("train", "val")]
    train, held = (Dataset.from_list([json.loads(line) for line in lines]) for lines in texts)
    plain: dict[str, Any] = {
        "learning_rate": recipe.optim.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
    }
    off = {"max_grad_norm": 0.0, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 4}
    plain |= {"output_dir": str(folder / "trl"), "report_to": "none", "use_cpu": True, "logging_steps": 1}
    sizes |= {"per_device_eval_batch_size": 5}
    config = SFTConfig(assistant_only_loss=True, max_length=None, **plain, **off, **sizes)
    trainer = SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=train,
        eval_dataset=held,
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    end = trainer.evaluate()
    found = {"losses": [row["loss"] for row in rows], "tokens": [int(row["num_tokens"]) for row in rows]}
    return {**found, "loss": end["eval_loss"], "token_accuracy": end["eval_mean_token_accuracy"]}


def figures() -> Iterator[tuple[str, dict[str, Any]]]:
    """All that is recorded, by name."""
    for family in LORA:
        with tempfile.TemporaryDirectory() as temporary:
            yield f"peft/{family}", peft_figures(family, Path(temporary))
    with tempfile.TemporaryDirectory() as temporary:
        yield "trl", trl_figures(Path(temporary))


if __name__ == "__main__":
    FIGURES.write_text(json.dumps(dict(figures()), indent=1) + "\n")
