"""Tiny random language models of each family that `model.name=hf/…` takes, in folders of transformers."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

WORDS, PLACES = 67, 48
_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)
_LACKS = _OLD or importlib.util.find_spec("transformers") is None
NEEDS = pytest.mark.skipif(_LACKS, reason="needs transformers, and torch 2.6 for it")

_LLAMA = {"num_key_value_heads": 2, "intermediate_size": 40, "tie_word_embeddings": False}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 8}
_PHI = {"intermediate_size": 40, "tie_word_embeddings": False, "partial_rotary_factor": 0.5}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# What makes each unlike the others is on: windows, soft caps, scales, biases, tied heads.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    "mistral": {**_LLAMA, "sliding_window": 5},
    "qwen2": {**_LLAMA, **_SLIDING, "use_sliding_window": True},
    "qwen3": {**_LLAMA, **_SLIDING, "use_sliding_window": True, "tie_word_embeddings": True},
    "gemma": {"num_key_value_heads": 1, "intermediate_size": 40, "head_dim": 8},
    "gemma2": {
        **_SLIDING,
        **{"num_key_value_heads": 2, "intermediate_size": 40, "query_pre_attn_scalar": 9},
        **{"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7},
    },
    "gemma3_text": {**_SLIDING, "num_key_value_heads": 2, "intermediate_size": 40},
    "smollm3": {**_LLAMA, "no_rope_layers": [1, 0]},
    "gpt2": {},
    "gpt_neox": {"intermediate_size": 40, "tie_word_embeddings": False},
    "phi": _PHI,
    "phi3": {**_LLAMA, "sliding_window": 6},
    "olmo2": _LLAMA,
    "olmo3": {**_LLAMA, **_SLIDING},
    "granite": {**_LLAMA, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "cohere": {"intermediate_size": 40, "num_key_value_heads": 2, "logit_scale": 0.3},
    "cohere2": {"intermediate_size": 40, "num_key_value_heads": 2, "logit_scale": 0.3, **_SLIDING},
    "starcoder2": {"intermediate_size": 40, "num_key_value_heads": 2, "sliding_window": 5, "use_bias": True},
}


def made(family: str, wild: float = 0.0, **changed: Any) -> Any:
    """A random model of the library, float32, in evaluation mode; the same each time, with keys changed.

    `wild` is the deviation of what is added to its matrices: of large weights, outputs depend on each bit.
    """
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    keys = {**sizes, "max_position_embeddings": PLACES, **_ENDS, **FAMILIES[family], **changed}
    config = transformers.AutoConfig.for_model(family, **keys)
    torch.manual_seed(5)
    # "eager" is the library's own formula, soft caps included.
    opens: Any = transformers.AutoModelForCausalLM
    model = opens.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: what is one or zero hides faults
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.05 + wild))
    return model.eval()


def folder_of(family: str, folder: Path, wild: float = 0.0, **changed: Any) -> Path:
    """Writes such a model into a folder."""
    made(family, wild, **changed).save_pretrained(folder)
    return folder


class Exactly64(TorchFunctionMode):
    """A context in which the library's own float32, in norms, angles and softmax, is float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        exact = (torch.float64 if one is torch.float32 else one for one in args)
        return func(*exact, **kwargs)


@functools.cache
def lengths() -> tuple[int, ...]:
    """Of documents that fill a row of `PLACES` but for three places."""
    return (11, 20, 1, 13)
