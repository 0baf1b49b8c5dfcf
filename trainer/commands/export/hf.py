"""A language model for transformers and peft: a folder as they write it, with the files that belong to it."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.store import newest_good
from trainer.checkpoint.tensor_file import safetensors_bytes
from trainer.config.models import HF
from trainer.errors import BadInputError
from trainer.host.files import read_inside, write_file
from trainer.models.hf_files import CONFIG, GENERATION, TEXT_FILES, find_model, read_config
from trainer.models.hub import FILE
from trainer.runs.checkpoint_place import checkpoints_of
from trainer.train.model_of_run import OpenedRun

LIBRARIES = ("transformers", "peft")
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LARGEST = 256 << 20  # of a tokenizer's files


def write_for_library(to: str, run: OpenedRun, model: nn.Module, folder: Path) -> Path:
    """Writes a model, or what LoRA learned beside it, with configuration, tokenizer and chat template.

    Args:
        to: Of `LIBRARIES`.
        model: With LoRA merged, in the type of number that is to be written.
        folder: To write into.

    Returns:
        The file with the weights.

    Raises:
        BadInputError: If the run has no such model, or nothing that LoRA learned.
    """
    name = run.recipe.model.name
    if not name.startswith(HF):
        raise BadInputError(f"--to {to}: {run.folder} trained model.name={name}; it is for hf/… only")
    base = find_model(name)
    dtype = next(model.parameters()).dtype
    if to == "peft":
        file = _write_adapter(run, base.folder, base.revision, dtype, folder)
    else:
        write_file(folder / FILE, safetensors_bytes(model.state_dict()))
        config = read_config(name, base.folder)
        config.pop("torch_dtype", None)
        _write_json(folder / CONFIG, {**config, "dtype": str(dtype).removeprefix("torch.")})
        file = folder / FILE
    chat = getattr(run.task, "chat", None)
    for one in TEXT_FILES:
        # What the run's text was made with, which language.tokenizer may have named.
        source = base.folder if chat is None or one == GENERATION else chat.folder
        if (source / one).exists():
            write_file(folder / one, [read_inside(source / one, _LARGEST)])
    return file


def versions() -> dict[str, str]:
    """Versions of the libraries that an export is checked with."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _write_adapter(run: OpenedRun, base: Path, revision: str | None, dtype: torch.dtype, to: Path) -> Path:
    lora = run.manifest.config.get("model", {}).get("lora", {})
    if not lora.get("rank"):
        raise BadInputError(f"--to peft: {run.folder} was trained without model.lora; use --to transformers")
    found, _ = newest_good(checkpoints_of(run.folder))
    if found is None:
        raise BadInputError(
            f"--to peft: {run.folder} has no checkpoint any more, which alone keeps what LoRA learned apart; "
            "use --to transformers"
        )
    averaged = found.tensors["ema"] if run.weights.endswith("ema.safetensors") else {}
    learned = {**found.tensors["model"], **averaged}
    tensors = {
        f"base_model.model.{key.replace('.lora_a', '.lora_A.weight').replace('.lora_b', '.lora_B.weight')}": (
            tensor.to(dtype).contiguous()
        )
        for key, tensor in learned.items()
        if key.endswith((".lora_a", ".lora_b"))
    }
    repository = run.recipe.model.name.removeprefix(HF).rpartition("@")[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": repository if revision else str(base.resolve()),
        "revision": revision,
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(key.removesuffix(".lora_a") for key in learned if key.endswith(".lora_a")),
    }
    _write_json(to / ADAPTER_CONFIG, config)
    write_file(to / ADAPTER, safetensors_bytes(tensors))
    return to / ADAPTER


def _write_json(file: Path, value: dict[str, Any]) -> None:
    write_file(file, [(json.dumps(value, indent=2) + "\n").encode()])
