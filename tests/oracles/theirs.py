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
from tests.helpers.hf_models import folder_of
from tests.train.test_hf import WORDS, recipe_of
from trainer.config.recipe import Recipe

FIGURES = Path(__file__).with_name("figures.json")
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


def figures() -> Iterator[tuple[str, dict[str, Any]]]:
    """All that is recorded, by name."""
    for family in LORA:
        with tempfile.TemporaryDirectory() as temporary:
            yield f"peft/{family}", peft_figures(family, Path(temporary))


if __name__ == "__main__":
    FIGURES.write_text(json.dumps(dict(figures()), indent=1) + "\n")
