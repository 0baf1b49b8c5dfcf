"""Language models of the library transformers: its own modules, kept to documents and to our loss.

The library builds the model and computes everything but two things. Attention is computed here, because which
place sees which is known here: documents side by side in a row are kept apart, and layers with a sliding
window see no further. And the head is applied here, so that the logits of many words are never whole in
memory. Names of parameters are those of the library's files.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trainer.errors import BadInputError, first_line
from trainer.models.gpt import TiedHead, pairs_mask, place_in_segment
from trainer.models.head_loss import Scaling, head_loss
from trainer.models.hf_files import CONFIG, find_model, read_config
from trainer.models.modes import Uninitialized

# Their logits for documents side by side are held against those for each alone (tests/models/test_hf.py).
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "gpt2", "gpt_neox"),
    *("phi", "phi3", "olmo2", "olmo3", "granite", "cohere", "cohere2", "starcoder2"),
)
_NEOX_HEAD = "embed_out."  # the head of gpt_neox in files; the library's module is lm_head from version 5 on
_ATTENTION = "trainer"  # under which the library knows our function
_OLDEST_TORCH = (2, 6)  # the library takes older ones for absent
# Angles that depend on the longest text of the batch: a document beside others wouldn't be what it is alone.
_MOVING_ROPE = ("dynamic", "longrope")
_Masks = Mapping[int, torch.Tensor | None]


class HfLanguage(nn.Module):
    """A causal language model of transformers, called as our own GPT is.

    Attributes:
        places: Tokens that it is called with at most; None: any number.
        tied: The embedding's name by that of the head's weight, if the two are one.
        read: Names of modules whose weight is read where they aren't called: the head's, by `head_loss`.
    """

    gives_loss = True

    def __init__(self, causal: Any, name: str) -> None:
        """Takes over the parts of a model of the library.

        Args:
            causal: From AutoModelForCausalLM.
            name: As model.name has it, for errors.
        """
        super().__init__()
        config = causal.config
        self.places = _places(config)
        self._body, self._head = causal.base_model_prefix, _head_of(causal)
        self.read = (self._head,)
        self._legacy = [re.compile(one) for one in causal._keys_to_ignore_on_load_unexpected or ()]
        window = getattr(config, "sliding_window", None)
        self._windows = (int(window),) if window else ()
        taken = inspect.signature(type(causal.base_model).forward).parameters
        self._cached = "cache" if "cache" in taken else "past_key_values"  # before 5.24 of the library
        divided, factor = (getattr(config, key, None) for key in ("logits_scaling", "logit_scale"))
        factor = (1.0 if factor is None else float(factor)) / (1.0 if divided is None else float(divided))
        self._scaling = Scaling(factor, getattr(config, "final_logit_softcapping", None))
        for part, module in causal.named_children():
            self.add_module(part, module)
        self.tied = dict[str, str]()
        if config.tie_word_embeddings:
            if causal.get_output_embeddings().bias is not None:
                raise BadInputError(
                    f"model.name={name}: a head with a bias whose weight is the embedding's isn't read here; "
                    "choose another model"
                )
            setattr(self, self._head, TiedHead())
            embedding = causal.base_model.get_input_embeddings().weight
            self.tied[f"{self._head}.weight"] = next(
                n for n, one in self.named_parameters() if one is embedding
            )

    def forward(
        self,
        tokens: torch.Tensor,
        segment: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        right: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predicts the token after each; see `GPT.forward`."""
        hidden = self._hidden(tokens, segment)
        if targets is None:
            return self._logits(hidden)
        weight, bias = self._of_head()
        return head_loss(hidden, weight, targets, bias, self._scaling, right)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = getattr(self, self._head)
        return self._scaling.of(head(hidden, self._of_head()[0]) if self.tied else head(hidden))

    def cache(self) -> Any:
        """Returns an empty cache of keys and values, for `following`."""
        from transformers import DynamicCache

        return DynamicCache()

    def following(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits (vocabulary,) after the last token of a text whose earlier tokens are in `cache`.

        Args:
            tokens: int64 (1, length); of length 1 unless the cache is empty.
            cache: From `cache`; what these tokens add is put into it.
        """
        return self._logits(self._hidden(tokens, None, cache)[0, -1])

    def _hidden(self, tokens: torch.Tensor, segment: torch.Tensor | None, cache: Any = None) -> torch.Tensor:
        before = 0 if cache is None else cache.get_seq_length()
        place = (before + torch.arange(tokens.shape[1], device=tokens.device)).expand(tokens.shape)
        if segment is not None:
            place = place_in_segment(segment)
        body = getattr(self, self._body)
        # Embedded here: the library would look for padding among the tokens, and wait for the device.
        made = body(
            inputs_embeds=body.get_input_embeddings()(tokens),
            position_ids=place,
            use_cache=cache is not None,
            **({} if cache is None else {self._cached: cache}),
            seen=_seen(segment, tokens, self._windows, before),
        )
        hidden: torch.Tensor = made.last_hidden_state
        return hidden

    def _of_head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the head's weight (with LoRA's product, see `finetune`), and its bias."""
        if self.tied:
            return getattr(self, self._body).get_input_embeddings().weight, None
        head = getattr(self, self._head)
        return head.weight, head.bias

    def in_files(self) -> dict[str, torch.Tensor]:
        """Returns the state_dict by the names that the library's files have."""
        own, theirs = f"{self._head}.", _NEOX_HEAD if self._body == "gpt_neox" else f"{self._head}."
        return {name.replace(own, theirs): tensor for name, tensor in self.state_dict().items()}

    def named_in_files(
        self, names: Sequence[str], read: Callable[[str], torch.Tensor], what: Path
    ) -> tuple[dict[str, str], str]:
        """Names of tensors in the library's files by our own, and a note for people.

        Tensors of older versions that no module reads are left out; files of a body alone lack its prefix.

        Args:
            names: Of all tensors in the files.
            read: Gives one of them.
            what: Where they lie, for errors.

        Raises:
            BadInputError: If nothing of the model is there, or a tied head has values of its own.
        """
        wanted, prefix = self.state_dict(keep_vars=True), f"{self._body}."
        bare = not any(name.startswith(prefix) for name in names)
        given, head = dict[str, str](), ""
        for name in names:
            own = f"{self._head}.{name[10:]}" if name.startswith(_NEOX_HEAD) else name
            if bare and not own.startswith(f"{self._head}."):
                own = prefix + own
            legacy = own.endswith("rotary_emb.inv_freq") or any(one.search(own) for one in self._legacy)
            if own in self.tied:
                head = name
            elif own in wanted or not legacy:
                given[own] = name
        tied = next(iter(self.tied.values()), "")
        if head and tied not in given:  # as safetensors' save_model() stores what is tied, under one name
            given[tied], head = head, ""
        if not given.keys() & wanted.keys():
            raise BadInputError(f"{what} holds nothing of this model; give the files that belong together")
        if head and not torch.equal(read(head), read(given[tied])):
            raise BadInputError(
                f"{what}: {CONFIG} says tie_word_embeddings, and {head} has other values than {given[tied]}; "
                "bring back the configuration that belongs to the weights"
            )
        return given, f", {len(names) - len(given)} that aren't used" * (len(names) > len(given))


def hf_model(name: str, sequence_length: int) -> HfLanguage:
    """Builds a model whose weights are zero, to be loaded.

    Args:
        name: As model.name has it.
        sequence_length: Tokens of a sample at most.

    Raises:
        BadInputError: If it isn't there, or is no model that can be trained here.
    """
    folder = find_model(name).folder
    raw = read_config(name, folder)
    _check_config(name, raw)
    library = _library(name)
    try:
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check_lengths(name, config, sequence_length)
        config.return_dict, config.output_hidden_states = True, False  # what the body returns
        with Uninitialized():
            causal = library.AutoModelForCausalLM.from_config(
                config, attn_implementation=_ATTENTION, dtype=torch.float32, trust_remote_code=False
            )
        model = HfLanguage(causal, name)
    except BadInputError:
        raise
    except Exception as error:  # the library's, of whatever a configuration says
        raise BadInputError(
            f"model.name={name}: transformers {library.__version__} can't make a model of {folder / CONFIG} "
            f"({first_line(error)[:200]}); mend the configuration, or choose another model"
        ) from error
    for parameter in model.parameters():
        if not parameter.is_meta:  # new zeros, which take no memory until they are written to
            parameter.data = torch.zeros_like(parameter)
    return model


def _library(name: str) -> Any:
    """Imports the library, and registers our attention with it."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        raise BadInputError(
            f"model.name={name} needs torch 2.6 or newer, as transformers does (this is "
            f"{torch.__version__}): "
            "use another stack (docs/install.md)"
        )
    try:
        import transformers
    except ImportError as error:
        raise BadInputError(
            f"model.name={name} needs the package transformers ({first_line(error)[:200]}): "
            "pip install 'reproducible-trainer[language]'"
        ) from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # No function for masks is registered beside it: then the library makes none.
    transformers.AttentionInterface.register(_ATTENTION, _attend)
    return transformers


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """Refuses what would be computed otherwise than the model means it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise BadInputError(
            f"model.name={name}: model_type {kind!r} isn't one that is held against transformers here; "
            f"choose one of {', '.join(FAMILIES)}"
        )
    odd = {
        "quantization_config": "weights of 8 bits or fewer, which aren't trained here; take the repository "
        "in bfloat16 or float32",
        "add_cross_attention": "attention to an encoder; choose a model that reads text alone",
        "use_bidirectional_attention": "attention to later tokens; choose a model that predicts the next one",
        "alibi": "biases of attention by distance, which aren't computed here; choose another model",
    }
    for key, why in odd.items():
        if config.get(key):
            raise BadInputError(f"model.name={name}: {CONFIG} says {key}: {why}")


def _check_lengths(name: str, config: Any, sequence_length: int) -> None:
    places = _places(config)
    if places is not None and sequence_length > places:
        raise BadInputError(
            f"language.sequence_length={sequence_length}: {name} knows {places} places "
            "(max_position_embeddings); set it to at most that"
        )
    for one in _rotary(config):
        if (kind := one.get("rope_type")) in _MOVING_ROPE:
            raise BadInputError(
                f"model.name={name}: rotary positions of type {kind} depend on the longest text of a batch, "
                "so that a document beside others isn't computed as it is alone; choose another model"
            )


def _places(config: Any) -> int | None:
    """Returns the number of places that a configuration says; None if it says none.

    Rotary positions that are scaled reach `factor` times as far as those that the model was made with, which
    some configurations leave in max_position_embeddings (Qwen 2.5 with YaRN, Vicuna 16k).
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return None
    scaled = (
        (one.get("original_max_position_embeddings") or longest) * (one.get("factor") or 1)
        for one in _rotary(config)
    )
    return max(int(one) for one in (longest, *scaled))


def _rotary(config: Any) -> list[dict[str, Any]]:
    """Returns the settings of rotary positions: of all layers, and of each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def _head_of(causal: Any) -> str:
    head = causal.get_output_embeddings()
    return str(next(name for name, module in causal.named_children() if module is head))


# --- attention ---


def _seen(
    segment: torch.Tensor | None, tokens: torch.Tensor, windows: Sequence[int], before: int = 0
) -> _Masks:
    """Attention masks by the width of a window (0: none), bool (n or 1, 1, length, before + length).

    None is a causal mask. `before` is the number of tokens in a cache, in columns before those of `tokens`.
    """
    length, device = before + tokens.shape[1], tokens.device
    every = None if segment is None else pairs_mask(segment)
    masks: dict[int, torch.Tensor | None] = {0: every}
    for window in windows:
        masks[window] = every
        if window < length:
            place = torch.arange(length, device=device)
            back = place[before:, None] - place
            near = (back >= 0) & (back < window)
            masks[window] = near[None, None] if every is None else near & every
    return masks


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  (the library makes none for us)
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    seen: _Masks | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as the library calls it: (n, heads, length, channels) to (n, length, heads, channels).

    Args:
        sliding_window: Places that a layer sees; None: all.
        softcap: Scores are capped at it, softly.
        seen: From `_seen`, handed on by the model.
    """
    if seen is None:
        raise RuntimeError(f"{type(module).__name__} doesn't hand on what its attention is called with")
    mask, groups = seen[sliding_window or 0], query.shape[1] // key.shape[1]
    if groups > 1 and (mask is not None or softcap is not None):
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    if softcap is not None:
        mixed = _capped(query, key, value, mask, dropout, scaling, softcap)
    else:
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            dropout,
            is_causal=mask is None and query.shape[2] > 1,  # a single query is the last place, and sees all
            scale=scaling,
            enable_gqa=groups > 1 and mask is None,
        )
    return mixed.transpose(1, 2).contiguous(), None


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    cap: float,
) -> torch.Tensor:
    """Attention with capped scores, which torch's kernels don't have: all pairs at once."""
    if mask is None:
        queries, keys = query.shape[2], key.shape[2]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scaling(scale, cap).of(query @ key.transpose(2, 3))
    scores = scores.masked_fill(~mask, float("-inf"))
    exact = torch.promote_types(scores.dtype, torch.float32)
    return F.dropout(scores.softmax(-1, dtype=exact).to(query.dtype), dropout) @ value
