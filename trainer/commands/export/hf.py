"""A language model for transformers and peft: a folder as they write it, with the files that belong to it."""

import json
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.store import newest_good
from trainer.checkpoint.tensor_file import safetensors_bytes
from trainer.config.models import HF
from trainer.data.formats.chat import Chat, ChatError
from trainer.errors import BadInputError
from trainer.host import strict_json
from trainer.host.files import read_inside, write_file
from trainer.models.finetune import saved_modules
from trainer.models.hf import HfLanguage
from trainer.models.hf_files import CONFIG, GENERATION, TEXT_FILES, end_tokens, find_model, read_config
from trainer.models.hub import FILE
from trainer.models.names import chosen
from trainer.observe.console import warn
from trainer.runs.folder import checkpoints_of
from trainer.train.model_of_run import OpenedRun

LIBRARIES = ("transformers", "peft")
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PEFT, _PEFT_A, _PEFT_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # in its names
_LARGEST = 256 << 20  # of a tokenizer's files
_NUMBERS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TRIED = " Two  words\n\nand 34.5 <b>é🐈</b>: don't "  # what tokenizers tell apart


def write_for_library(to: str, run: OpenedRun, model: nn.Module, folder: Path) -> Path:
    """Writes a model, or what LoRA learned beside it, with configuration, tokenizer and chat template.

    Args:
        to: Of `LIBRARIES`.
        model: With LoRA merged, in the type of number that is to be written.
        folder: To write into.

    Returns:
        The file with the weights.

    Raises:
        BadInputError: If a file of the model's folder can't be read.
    """
    name = run.recipe.model.name
    base = find_model(name)
    dtype = next(model.parameters()).dtype
    if to == "peft":
        file = _write_adapter(run, base.folder, base.revision, dtype, folder)
    else:
        assert isinstance(model, HfLanguage)
        write_file(folder / FILE, safetensors_bytes(model.in_files(), {"format": "pt"}))
        config = read_config(name, base.folder)
        config.pop("torch_dtype", None)
        _write_json(folder / CONFIG, {**config, "dtype": str(dtype).removeprefix("torch.")})
        file = folder / FILE
    chat: Chat | None = getattr(run.task, "chat", None)
    for one in TEXT_FILES:
        # What the run's text was made with, which language.tokenizer may have named.
        source = base.folder if chat is None or one == GENERATION else chat.folder
        if (source / one).exists():
            (folder / one).parent.mkdir(exist_ok=True)
            write_file(folder / one, [read_inside(source / one, _LARGEST)])
    if chat is not None and to != "peft":
        _write_ends(name, chat, folder)
        _keep_tokens(chat, folder)
    return file


def tensors_to_write(to: str, run: OpenedRun) -> dict[str, torch.Tensor]:
    """Tensors that a library's file is to hold, by its names, in the run's precision.

    Args:
        to: Of `LIBRARIES`.
        run: The run, with LoRA merged into its model.

    Raises:
        BadInputError: If the run has no such model, or nothing that LoRA learned.
    """
    name = run.recipe.model.name
    if not name.startswith(HF):
        raise BadInputError(f"--to {to}: {run.folder} trained model.name={name}; it is for hf/… only")
    if to == "peft":
        return _learned(run)
    assert isinstance(run.model, HfLanguage)
    return run.model.in_files()


def add_rounding(run: OpenedRun) -> None:
    """Moves the merged weights of a run's model to those of its adapter in bfloat16, in place."""
    learned, lora = _learned(run), run.manifest.config["model"]["lora"]
    for name, a in learned.items():
        if (own := run.model.state_dict().get(name.removeprefix(_PEFT))) is not None:
            own.copy_(a.to(torch.bfloat16))
        elif name.endswith(_PEFT_A):
            layer = name.removesuffix(_PEFT_A)
            b = learned[layer + _PEFT_B]
            low = b.to(torch.bfloat16).float() @ a.to(torch.bfloat16).float()
            weight = run.model.get_parameter(f"{layer.removeprefix(_PEFT)}.weight")
            weight.add_(lora["alpha"] / lora["rank"] * (low - b @ a))


def _write_ends(name: str, chat: Chat, folder: Path) -> None:
    """Adds the token that ends a turn of the template to those at which the library stops."""
    file, config = folder / GENERATION, strict_json.parse((folder / CONFIG).read_bytes())
    given = {key: config[key] for key in _NUMBERS if key in config}
    if file.exists():
        given = strict_json.parse(file.read_bytes())
    ends, said = end_tokens(name, chat.eos, chat.turn_end), given.get("eos_token_id")
    if ends != set(said if isinstance(said, list) else [said]):
        _write_json(file, {**given, "eos_token_id": sorted(ends)})


def _keep_tokens(chat: Chat, folder: Path) -> None:
    """Names the class of tokenizer that reads tokenizer.json as the run did; some build one of their own."""
    try:
        text = chat.render([{"role": "user", "content": _TRIED}], generation_prompt=True)
    except ChatError:
        return
    wanted, file = next(chat.encode([text])).ids.tolist(), folder / "tokenizer_config.json"
    if _library_tokens(folder, text) == wanted:
        return
    config = strict_json.parse(file.read_bytes()) if file.exists() else {}
    _write_json(file, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    if _library_tokens(folder, text) != wanted:
        warn(
            "export: transformers makes other tokens of a conversation than the run was trained on; give the "
            "served model tokens that tokenizer.json made"
        )


def _library_tokens(folder: Path, text: str) -> list[int] | None:
    from transformers import AutoTokenizer

    try:
        opened: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return list(opened(text, add_special_tokens=False)["input_ids"])
    except Exception:  # the library's, of whatever the files say
        return None


def versions() -> dict[str, str]:
    """Versions of the libraries that an export is checked with."""
    return {library: metadata.version(library) for library in LIBRARIES if find_spec(library)}


def _learned(run: OpenedRun) -> dict[str, torch.Tensor]:
    """Returns what LoRA learned, and the modules that were trained as a whole, by the names of peft."""
    lora = run.manifest.config.get("model", {}).get("lora", {})
    if not lora.get("rank"):
        raise BadInputError(f"--to peft: {run.folder} was trained without model.lora; use --to transformers")
    found, _ = newest_good(checkpoints_of(run.folder), run.manifest.foreign)
    if found is None:
        raise BadInputError(
            f"--to peft: {run.folder} has no checkpoint any more, which alone keeps what LoRA learned apart; "
            "use --to transformers"
        )
    averaged = found.tensors["ema"] if run.weights.endswith("ema.safetensors") else {}
    learned = {**found.tensors["model"], **averaged}
    whole = chosen(_saved(run))
    made = {
        _PEFT + key.replace(".lora_a", _PEFT_A).replace(".lora_b", _PEFT_B): tensor
        for key, tensor in learned.items()
        if key.endswith((".lora_a", ".lora_b")) or whole(key)
    }
    assert isinstance(run.model, HfLanguage)
    same = {_PEFT + name: made.get(_PEFT + other) for name, other in run.model.tied.items()}
    return {**made, **{name: tensor for name, tensor in same.items() if tensor is not None}}


def _saved(run: OpenedRun) -> list[str]:
    return saved_modules(run.model, run.manifest.config["model"]["lora"].get("modules_to_save", ()))


def _write_adapter(run: OpenedRun, base: Path, revision: str | None, dtype: torch.dtype, to: Path) -> Path:
    lora, learned = run.manifest.config["model"]["lora"], _learned(run)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in learned.items()}
    repository = run.recipe.model.name.removeprefix(HF).rpartition("@")[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": repository if revision else str(base.resolve()),
        "revision": revision,
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora.get("dropout", 0.0),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(
            key.removeprefix(_PEFT).removesuffix(_PEFT_A) for key in learned if key.endswith(_PEFT_A)
        ),
    }
    assert isinstance(run.model, HfLanguage)
    if saved := _saved(run):  # the head is to follow an embedding that it is tied to
        config |= {"modules_to_save": saved, "ensure_weight_tying": bool(run.model.tied)}
    _write_json(to / ADAPTER_CONFIG, config)
    write_file(to / ADAPTER, safetensors_bytes(tensors))
    return to / ADAPTER


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.unlink(missing_ok=True)
    write_file(file, [(json.dumps(value, indent=2) + "\n").encode()])
