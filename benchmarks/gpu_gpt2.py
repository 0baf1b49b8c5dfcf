"""GPT-2 124M beside a plain loop of the same weights and samples: losses, norms, tokens a second, MFU.

The plain loop is GPT-2 written out, with nanoGPT's step: whole logits, one compiled model, fused AdamW,
clipping. It shares nothing with the trainer but the samples. Both do some steps in turn, in one process.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.claims.measuring import Scene, Side, Turns
from benchmarks.paired import median_interval
from benchmarks.setting import now
from trainer.models import head_loss
from trainer.observe.flops import peak_flops
from trainer.train.step import train_step

_COMMON = "data.name=synthetic optim.schedule=constant optim.warmup_steps=0 evaluation.every=end"
_LARGE = f"{_COMMON} data.global_batch_size=64 data.micro_batch_size=32"
_SMALL = (
    f"{_COMMON} data.global_batch_size=4 data.micro_batch_size=2 data.eval_batch_size=2 device=cpu "
    "language.layers=2 language.heads=2 language.width=32 language.sequence_length=32 language.vocabulary=300"
)
SCENE = Scene("gpt2-124m", _SMALL.split(), _LARGE.split())
_CLOSE = 1e-2  # of losses and gradient norms


class Layer(nn.Module):
    """Attention and MLP, each after a LayerNorm, with residual connections; no biases, as in nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        """Makes the layers."""
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.joined = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps float (n, length, width) to the same shape."""
        n, length, width = x.shape
        parts = self.qkv(self.before(x)).split(width, 2)
        query, key, value = (one.view(n, length, self.heads, -1).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).reshape(n, length, width))
        result: torch.Tensor = x + self.narrow(F.gelu(self.wide(self.between(x))))
        return result


class GPT2(nn.Module):
    """GPT-2: the head is the embedding's matrix."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        """Makes the layers."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats of int64 (n, length) targets."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.last(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


_NAMES = {
    "embedding": "tokens",
    "positions": "places",
    "norm": "last",
    "norm1": "before",
    "norm2": "between",
    "attention.qkv": "qkv",
    "attention.out": "joined",
    "mlp.into": "wide",
    "mlp.out": "narrow",
}


def _copied(turns: Turns) -> GPT2:
    """A plain model with the weights of a run's."""
    config = turns.recipe.language
    state = {}
    for name, tensor in turns.run.state.model.state_dict().items():
        place, _, kind = name.rpartition(".")
        block, number, inner = "", "", place
        if place.startswith("blocks."):
            block, number, inner = place.split(".", 2)
        state[f"layers.{number}.{_NAMES[inner]}.{kind}" if block else f"{_NAMES[inner]}.{kind}"] = tensor
    sizes = (config.sequence_length, config.width, config.layers, config.heads)
    model = GPT2(len(state["tokens.weight"]), *sizes).to(turns.device)
    model.load_state_dict(state)
    return model


class Losses:
    """Losses and gradient norms of a side's steps, on the device until they are asked for."""

    def __init__(self) -> None:
        """Begins empty."""
        self.loss, self.norm = list[torch.Tensor](), list[torch.Tensor]()

    def add(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Keeps those of a step."""
        self.loss.append(loss.detach().clone().float())
        self.norm.append(norm.detach().clone().float())

    def read(self) -> tuple[list[float], list[float]]:
        """Reads them."""
        return torch.stack(self.loss).tolist(), torch.stack(self.norm).tolist()


def by_trainer(turns: Turns, found: Losses) -> Callable[[int], float]:
    """The trainer's step; a call does some, and returns the seconds."""
    run, done = turns.run, [0]
    batches = run.loader(run.share.batches())

    def turn(steps: int) -> float:
        began = now(turns.device)
        for step in range(done[0], done[0] + steps):
            run.state.loss.zero_()
            train_step(run, batches, step)
            found.add(run.state.loss, run.state.norm)
        done[0] += steps
        return now(turns.device) - began

    return turn


def by_hand(turns: Turns, other: Turns, found: Losses) -> Callable[[int], float]:
    """The plain loop over the samples of another run of the same recipe."""
    optim, device = turns.recipe.optim, turns.device
    model, accumulated = _copied(turns), turns.run.share.gradient_accumulation_steps
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=device.type == "cuda")
    compiled, batches = torch.compile(model), other.run.loader(other.run.share.batches())

    def step() -> None:
        loss = torch.zeros((), device=device)
        for _ in range(accumulated):
            tokens = next(batches).fields["tokens"].long()
            with torch.autocast(device.type, torch.bfloat16):
                part = compiled(tokens[:, :-1], tokens[:, 1:]) / accumulated
            part.backward()
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.add(loss, norm)

    def turn(steps: int) -> float:
        began = now(device)
        for _ in range(steps):
            step()
        return now(device) - began

    return turn


def gpt2(whole: bool = False) -> dict[str, Any]:
    """Trains both for 60 steps, in turns of 10 (on a CPU for 6, in turns of 2).

    Args:
        whole: True for the trainer's loss by torch's whole logits, not by pieces.

    Returns:
        losses: first and last loss of both; loss_apart, norm_apart: largest relative differences.
        tokens_per_s and mfu of both, without the first turn; ratio, low, high: of the turns' tokens a second.
    """
    cuda = torch.cuda.is_available()
    turn, rounds = (10, 6) if cuda else (2, 3)
    if whole:
        head_loss.PIECE = 1 << 62
    with ExitStack() as stack:
        ours, samples = (Turns(SCENE, Side(), stack) for _ in range(2))
        found = {"trainer": Losses(), "by_hand": Losses()}
        plain = by_hand(ours, samples, found["by_hand"])  # before a step changes the weights
        sides = {"trainer": by_trainer(ours, found["trainer"]), "by_hand": plain}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                seconds[name].append(side(turn))
        config, batch = ours.recipe.language, ours.recipe.data.global_batch_size
        weights = sum(p.numel() for p in ours.run.state.model.parameters())
    tokens = batch * config.sequence_length
    # 6 N for the weights, and 12 L H Q T for attention (Chowdhery et al., 2022, appendix B).
    per_token = 6 * weights + 12 * config.layers * config.width * config.sequence_length
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if cuda else None
    speed = {name: turn * tokens * (rounds - 1) / sum(each[1:]) for name, each in seconds.items()}
    pairs = zip(seconds["by_hand"][1:], seconds["trainer"][1:], strict=True)
    ratio, low, high = median_interval([hand / own for hand, own in pairs])
    (own, own_norms), (hand, norms) = (found[name].read() for name in sides)
    return {
        "losses": {"trainer": [own[0], own[-1]], "by_hand": [hand[0], hand[-1]]},
        "loss_apart": max(_apart(own, hand)),
        "norm_apart": max(_apart(own_norms, norms)),
        "close": max(*_apart(own, hand), *_apart(own_norms, norms)) <= _CLOSE,
        "tokens_per_s": speed,
        "mfu": {name: None if peak is None else one * per_token / peak for name, one in speed.items()},
        **{
            "ratio": ratio,
            "low": low,
            "high": high,
            "steps": turn * rounds,
            "whole": whole,
            "measured": cuda,
        },
    }


def _apart(ours: list[float], theirs: list[float]) -> Iterator[float]:
    """Yields relative differences; inf where one is no number."""
    for own, other in zip(ours, theirs, strict=True):
        apart = abs(own - other) / max(abs(other), 1e-12)
        yield math.inf if math.isnan(apart) else apart
