"""Promise: the loss of a head in pieces is cross entropy's, and the logits are never whole in memory."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.small_gpt import make_model
from trainer.models import head_loss
from trainer.models.head_loss import IGNORED, in_pieces

WIDTH = 16


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that is made within it."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.numel())
        return out


def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    return F.cross_entropy(exact, targets.flatten(), reduction="sum", ignore_index=IGNORED)


def drawn(dtype: torch.dtype, places: int, words: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(places + words)
    hidden = torch.randn(2, places, WIDTH, generator=numbers, dtype=dtype)
    weight = torch.randn(words, WIDTH, generator=numbers, dtype=dtype)
    targets = torch.randint(words, (2, places), generator=numbers)
    targets[0, : places // 3] = IGNORED
    return hidden, weight, targets


def with_gradients(loss: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: Any) -> list[torch.Tensor]:
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    value = loss(*leaves, targets)
    return [value.detach(), *torch.autograd.grad(0.3 * value, leaves)]


@pytest.mark.parametrize(
    ("dtype", "autocast", "rounding", "places", "words"),
    [
        (torch.float64, False, 1e-12, 37, 101),
        (torch.float64, False, 1e-12, 1, 101),
        (torch.float32, False, 3e-6, 64, 3),
        (torch.float32, True, 2e-2, 37, 101),
        (torch.float64, True, 1e-12, 5, 1001),
        (torch.bfloat16, False, 2e-2, 37, 101),
    ],
)
def test_loss_and_gradients_are_those_of_cross_entropy(
    dtype: Any, autocast: bool, rounding: float, places: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "PIECE", 1000)
    given = drawn(dtype, places, words)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = (with_gradients(loss, *given) for loss in (head_loss.head_loss, whole))
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).abs().max() <= rounding * other.abs().max()


@pytest.mark.parametrize("learns", [True, False])
def test_logits_are_never_whole(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "PIECE", 2000)
    hidden, weight, targets = drawn(torch.float32, 100, 200)
    with torch.set_grad_enabled(learns), Largest() as seen:  # type: ignore[no-untyped-call]
        loss = head_loss.head_loss(hidden.requires_grad_(), weight.requires_grad_(), targets)
        if learns:
            loss.backward()
    assert seen.numbers <= max(2000, weight.numel(), hidden.numel())
    assert 10 * seen.numbers < 2 * 100 * 200


def test_a_piece_without_targets_or_a_frozen_side_is_no_other_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "PIECE", 500)
    hidden, weight, targets = drawn(torch.float64, 20, 50)
    targets[:] = IGNORED
    loss, *gradients = with_gradients(head_loss.head_loss, hidden, weight, targets)
    assert loss == 0 and not any(gradient.any() for gradient in gradients)
    targets[0, 3] = 7
    head_loss.head_loss(hidden.requires_grad_(), weight, targets).backward()
    assert weight.grad is None and hidden.grad is not None and hidden.grad[0, 3].any()
    assert not hidden.grad[1].any()


def test_only_what_is_large_is_computed_in_pieces() -> None:
    tokens = torch.empty(32, 1024, dtype=torch.int64, device="meta")
    assert in_pieces(tokens, 50_304) and in_pieces(tokens[:4], 128_256)
    assert not in_pieces(tokens, 4096) and not in_pieces(tokens[:2], 50_304)  # these keep torch's bits
    there = torch.empty(4, 1024, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        assert not in_pieces(there, 128_256)
    with torch.autocast("cpu", torch.bfloat16):
        assert in_pieces(there, 128_256)


def test_the_model_gives_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "PIECE", 100)
    model = make_model()
    tokens, targets = torch.randint(20, (2, 2, 12), generator=torch.Generator().manual_seed(1))
    segment = torch.arange(12).expand(2, 12) // 5
    whole = F.cross_entropy(model(tokens, segment).mT, targets, reduction="sum")
    ours, theirs = (
        [loss, *torch.autograd.grad(loss, [*model.parameters()])]
        for loss in (model(tokens, segment, targets), whole)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_what_it_returns_was_never_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by torch 2.11, it would give no gradient, without a word; on an H100 GPT-2 didn't learn so."""
    monkeypatch.setattr(head_loss, "PIECE", 500)
    for scaling in (head_loss.PLAIN, head_loss.Scaling(0.5, 30.0)):
        assert head_loss.head_loss(*drawn(torch.float32, 20, 50), scaling=scaling)._version == 0


@pytest.mark.compat
@pytest.mark.slow
def test_it_is_compiled_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "PIECE", 3000)
    given = drawn(torch.float64, 20, 101)
    compiled = torch.compile(head_loss.head_loss, backend="aot_eager", fullgraph=True)
    ours, theirs = (with_gradients(loss, *given) for loss in (compiled, whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
