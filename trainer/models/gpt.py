"""GPT: a decoder-only transformer, and generation of text."""

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from typing_extensions import assert_never

from trainer.config.tasks import GPTConfig
from trainer.models.head_loss import head_loss

_ROTARY_BASE = 10_000.0
_STD = 0.02  # of the weights at first (Radford et al., 2019)


class GPT(nn.Module):
    """Decoder-only transformer with pre-normalization and tied embeddings.

    Rotary positions: Su et al., 2021; RMSNorm: Zhang and Sennrich, 2019; SwiGLU: Shazeer, 2020; tied
    embeddings: Press and Wolf, 2017. With learned positions, LayerNorm, GELU and biases it is GPT-2 (Radford
    et al., 2019) with an exact GELU, as nanoGPT.

    Attributes:
        places: Tokens that it is called with at most; it was trained on no more.
    """

    gives_loss = True  # called with targets, it returns the loss without the whole logits

    def __init__(self, config: GPTConfig, vocabulary: int) -> None:
        """Initializes weights from a normal distribution of 0.02, smaller in residual projections."""
        super().__init__()
        self.places = config.sequence_length
        self.head_width = config.width // config.heads
        self.embedding = _embedding(vocabulary, config.width)
        self.positions = _positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = TiedHead()
        if not self.embedding.weight.is_meta:  # random numbers on the meta device import for seconds
            self._draw(_STD / math.sqrt(2 * config.layers))

    def _draw(self, residual: float) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=residual if name.endswith(".out.weight") else _STD)

    def forward(
        self,
        tokens: torch.Tensor,
        segment: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        right: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predicts the next token at each position.

        Args:
            tokens: int64 (n, length), with learned positions at most `places` long.
            segment: Integers (n, length): neighbors with the same number belong to one document, whose
                positions start at 0, and attend to each other only; None where a row is one document.
            targets: int64 (n, length), -100 where a token doesn't count; None: to return logits.
            right: With targets: see `head_loss`.

        Returns:
            Logits (n, length, vocabulary), in autocast's dtype; with targets the loss, see `head_loss`.
        """
        place = torch.arange(tokens.shape[1], device=tokens.device)
        mask = None
        if segment is not None:
            place = place_in_segment(segment)
            mask = pairs_mask(segment)
        hidden = self.embedding(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(place)
        hidden = self.dropout(hidden)
        turn = None
        if self.positions is None:
            turn = rotary_table(place, self.head_width, torch.promote_types(hidden.dtype, torch.float32))
        for block in self.blocks:
            hidden = block(hidden, turn, mask)
        hidden = self.norm(hidden)
        if targets is not None:
            return head_loss(hidden, self.embedding.weight, targets, right=right)
        logits: torch.Tensor = self.head(hidden, self.embedding.weight)
        return logits


class TiedHead(nn.Linear):
    """Linear layer that is called with the embedding's weight, which is stored and updated once.

    It is a subclass of nn.Linear, so that Muon finds it as the last layer.
    """

    def __init__(self) -> None:
        """Skips nn.Linear's parameters."""
        nn.Module.__init__(self)

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Maps float (..., width) by the weight (vocabulary, width) to (..., vocabulary)."""
        return F.linear(hidden, weight)

    def extra_repr(self) -> str:
        """Returns "", as nn.Linear's sizes are unknown."""
        return ""


class Block(nn.Module):
    """Transformer block: attention and MLP with residual connections."""

    def __init__(self, config: GPTConfig) -> None:
        """Builds both with a normalization before each."""
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = Attention(config)
        self.norm2 = _norm(config)
        self.mlp = MLP(config)

    def forward(
        self, hidden: torch.Tensor, turn: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Maps float (n, length, width) to the same shape; see `Attention`."""
        hidden = hidden + self.attention(self.norm1(hidden), turn, mask)
        result: torch.Tensor = hidden + self.mlp(self.norm2(hidden))
        return result


class Attention(nn.Module):
    """Causal self-attention, by torch's fused kernels."""

    def __init__(self, config: GPTConfig) -> None:
        """Builds one matrix for queries, keys and values."""
        super().__init__()
        self.heads, self.rate = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: torch.Tensor, turn: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes attention.

        Args:
            hidden: Float (n, length, width).
            turn: From `rotary_table`; None without rotary positions.
            mask: From `pairs_mask`; None: causal.

        Returns:
            Float (n, length, width).
        """
        n, length, width = hidden.shape
        qk, value = self.qkv(hidden).view(n, length, 3 * self.heads, -1).tensor_split([2 * self.heads], 2)
        if turn is not None:
            qk = rotate(qk, turn)
        query, key = qk.chunk(2, 2)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, rate, is_causal=mask is None)
        result: torch.Tensor = self.dropout(self.out(mixed.transpose(1, 2).reshape(n, length, width)))
        return result


class MLP(nn.Module):
    """MLP of two layers, or three with a gate (SwiGLU)."""

    def __init__(self, config: GPTConfig) -> None:
        """Builds the layers; the gated form is narrower, for about as many weights."""
        super().__init__()
        match config.mlp:
            case "swiglu":
                self.gated = True
            case "gelu":
                self.gated = False
            case _:
                assert_never(config.mlp)
        inner = 8 * -(-config.width // 3) if self.gated else 4 * config.width
        self.into = nn.Linear(config.width, 2 * inner if self.gated else inner, bias=config.bias)
        self.out = nn.Linear(inner, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps float (..., width) to the same shape."""
        inner = self.into(hidden)
        if self.gated:
            gate, value = inner.chunk(2, -1)
            inner = F.silu(gate) * value
        else:
            inner = F.gelu(inner)
        result: torch.Tensor = self.dropout(self.out(inner))
        return result


def rotary_table(place: torch.Tensor, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns cosines and sines of the rotary angles at positions.

    Args:
        place: Positions, integers (length,) or (n, length).
        channels: Channels of a head; channel i and i + channels / 2 are a pair.
        dtype: Dtype of the result.

    Returns:
        (2, 1 or n, length, 1, channels).
    """
    half = channels // 2
    speed = _ROTARY_BASE ** (-torch.arange(half, device=place.device, dtype=dtype) / half)
    angle = place.view(-1, place.shape[-1], 1, 1).to(dtype) * speed
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))


def rotate(heads: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotates queries or keys by their position, so that their product depends on the distance.

    Args:
        heads: (n, length, heads, channels).
        turn: From `rotary_table`; float32 at least: bfloat16 would round positions from 256 on.

    Returns:
        Shape and dtype of `heads`.
    """
    exact = heads.to(turn.dtype)
    first, second = exact.chunk(2, -1)
    # Not roll(): its C++ from Inductor of torch 2.9 doesn't compile for some shapes.
    swapped = torch.cat((second, first), -1)
    return torch.addcmul(exact * turn[0], swapped, turn[1]).to(heads.dtype)


def documents(segment: torch.Tensor) -> torch.Tensor:
    """Numbers the documents of each row from 0 on in their order; padding is the last one.

    Args:
        segment: Integers (n, length): neighbors with the same number belong to one document.

    Returns:
        int32 (n, length), nondecreasing along a row.
    """
    begins = F.pad(segment[:, 1:] != segment[:, :-1], (1, 0))
    return begins.cumsum(1, dtype=torch.int32)


def pairs_mask(segment: torch.Tensor) -> torch.Tensor:
    """Returns the causal mask: a token attends to itself and to those before it in its document.

    Args:
        segment: As in `documents`.

    Returns:
        bool (n, 1, length, length), True where the query attends to the key.
    """
    document, length = documents(segment), segment.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
    return ((document[:, None, :] == document[:, :, None]) & before)[:, None]


def place_in_segment(segment: torch.Tensor) -> torch.Tensor:
    """Returns positions from 0 on within each document: integers (n, length) to int64 (n, length)."""
    place = torch.arange(segment.shape[1], device=segment.device).expand(segment.shape)
    begins = F.pad(segment[:, 1:] != segment[:, :-1], (1, 0), value=True)
    first: torch.Tensor = torch.where(begins, place, 0).cummax(1).values
    return place - first


def _embedding(count: int, width: int) -> nn.Embedding:
    """Returns an embedding with uninitialized weights, for `GPT._draw`."""
    return nn.Embedding.from_pretrained(torch.empty(count, width), freeze=False)  # type: ignore[no-any-return]


def _positions(config: GPTConfig) -> nn.Embedding | None:
    match config.positions:
        case "learned":
            return _embedding(config.sequence_length, config.width)
        case "rotary":
            return None
        case _:
            assert_never(config.positions)


def _norm(config: GPTConfig) -> nn.Module:
    match config.norm:
        case "rms":
            return nn.RMSNorm(config.width, eps=1e-6)
        case "layer":
            return nn.LayerNorm(config.width, bias=config.bias)
        case _:
            assert_never(config.norm)


def places_of(model: nn.Module) -> int | None:
    """Returns the number of tokens that a language model is called with at most; None: any number."""
    places = model.places
    assert places is None or isinstance(places, int)
    return places


def room_after(model: nn.Module, prompt: int, count: int) -> int:
    """Returns how many of `count` tokens a model can generate after a prompt of so many.

    The last one of a text is computed from those before it, so a text may have one token more than the model
    has places.

    Raises:
        ValueError: If the prompt has more tokens than the model has places.
    """
    places = places_of(model)
    if places is None:
        return count
    if prompt > places:
        raise ValueError(f"the prompt has {prompt:,} tokens, and the model has {places:,} places")
    return min(count, places - prompt + 1)


def cut_after(model: nn.Module, tokens: int) -> str:
    """Returns a line for people on a text that ends because a model's places are full."""
    return f"ends after {tokens:,} tokens, where the model's {places_of(model):,} places are full"


def _likeliest(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits (vocabulary,) of the fewest tokens of probability `top_p` together at least; others are -inf."""
    if top_p >= 1:
        return logits
    ordered, places = logits.sort()
    others = ordered.softmax(0).cumsum(0) <= 1 - top_p
    others[-1] = False
    return logits.masked_fill(others.scatter(0, places, others), float("-inf"))


@torch.no_grad()
def generated(
    model: nn.Module,
    prompt: torch.Tensor,
    count: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    whole: bool = False,
    window: bool = False,
    top_p: float = 1.0,
) -> Iterator[int]:
    """Generates tokens after a prompt, one by one; without `window` until the model's places are full.

    Args:
        model: GPT or HfLanguage in evaluation mode.
        prompt: int64 (length,), at least one token, on the model's device.
        count: Number of tokens to generate.
        temperature: Divisor of the logits; 0 takes the most likely token.
        generator: Random generator on the same device.
        whole: True to compute the whole text again for each token, by a call of the model as in training.
        window: True to go on beyond the model's places, where it sees the last `places` tokens alone.
        top_p: Probability of the likeliest tokens that are drawn from, above 0.

    Yields:
        Each generated token.

    Raises:
        ValueError: If the prompt alone has more tokens than the model has places, without `window`.
    """
    seen = places_of(model) if window else None  # None: all
    count = count if window else room_after(model, len(prompt), count)
    cached = hasattr(model, "following") and not whole and seen is None
    tokens, done, cache = prompt, 0, model.cache() if cached else None  # type: ignore[operator]
    for _ in range(count):
        if cached:
            logits = model.following(tokens[None, done:], cache).float()  # type: ignore[operator]
            done = len(tokens)
        else:
            logits = model(tokens[None] if seen is None else tokens[None, -seen:])[0, -1].float()
        if temperature == 0:
            chosen = logits.argmax().view(1)
        else:
            drawn = _likeliest(logits / temperature, top_p).softmax(0)
            chosen = torch.multinomial(drawn, 1, generator=generator)
        tokens = torch.cat((tokens, chosen))
        yield int(chosen)
