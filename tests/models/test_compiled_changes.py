"""Promise: a forward pass that reads its buffers and changes them gives the same compiled as not.

Such passes are drawn; eager code in float64 is the oracle. More of them:
`python -m tests.models.test_compiled_changes FIRST COUNT`, and by torch's compiler alone with a third word.
"""

import random
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

from tests.models.test_compiling import needs_a_compiler
from trainer.models.compiling import set_up_torch

# Batch x, activations a (5, 4); buffers w (4, 4), q (9, 4), v (4), c (1); rows i, j, k.
BEGIN = """w, q, v, c = self.w, self.q, self.v, self.c; a = (x @ self.p).tanh(); y, s = a * 1, w * 1
i, j = x.argmax(1), x.argmin(1) + torch.arange(5); k = i[:4]"""
# What is read to (5, 4), what to (4, 4), and what changes a buffer by that.
USES = """w[i]; nn.functional.embedding(i, w); a.detach() @ w.t(); q[j]; q[:5]; w.sum(0).expand(5, 4)
v[i][:, None].expand(5, 4); q.roll(2, 0)[:5]; (c * 0.1).expand(5, 4); torch.cdist(a.detach(), w)"""
READS = """w; q[:4]; w.flip(0); w.cumsum(0); w.softmax(1); w.roll(1, 0); w[k]; w.clone(); w @ w * 0.2
s.detach(); q.flip(0)[:4]; v[:, None] * w; w.sort(0)[0]; torch.where(w > 0, w, q[:4]); w.mean(0).expand(4, 4)
torch.cat([w[1:], w[:1]]); q.gather(0, k[:, None].expand(4, 4)); a[:4].detach()"""
CHANGES = """w.add_($); w.mul_(0.9).add_($, alpha=0.1); w.copy_($); w.lerp_($, 0.1); w[:2] = $[:2] * 1
c.add_(1); w.index_add_(0, k, $ * 1); w[k] = $ * 1; w.scatter_add_(0, k[:, None].expand(4, 4), $ * 1)
q[4:8] = $; q.index_copy_(0, j[:4], $ * 1); q.copy_(torch.cat([a.detach(), q[:4].clone()]))
v.copy_($.norm(dim=1)); w.diagonal().copy_($[0] * 1); self.w = w = $.clone()
torch._foreach_add_([w, v], [$ * 1, w.sum(0)]); w.index_put_((k, k), $[1] * 1, accumulate=True)
w[0], w[1] = w[1].clone(), w[0].clone()"""


def drawn(seed: int) -> tuple[nn.Module, list[str]]:
    """Returns a module, and the three to seven lines of its forward pass that read or change something."""
    of, lines = random.Random(seed), list[str]()
    for _ in range(of.randint(3, 7)):
        use, read, change = (of.choice(one.replace("\n", "; ").split("; ")) for one in (USES, READS, CHANGES))
        reads = (f"y = y * torch.sigmoid({use})", f"y = y + {use}", f"s = {read}", "y = y + s[i] * a")
        lines.append(of.choice((of.choice(reads), change.replace("$", f"({read})"))))
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec("\n    ".join(("def forward(self, x):", *BEGIN.split("\n"), *lines, "return y + s[i]")), names)
    torch.manual_seed(seed)
    module: nn.Module = type("Drawn", (nn.Module,), {"forward": names["forward"]})()
    module.p = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    for name, size in (("w", (4, 4)), ("q", (9, 4)), ("v", (4,)), ("c", (1,))):
        module.register_buffer(name, torch.randn(size, dtype=torch.float64))
    return module, lines


def two_steps(seed: int, compiled: bool) -> list[torch.Tensor]:
    """Returns outputs, gradients and buffers of two steps; torch.compile takes nothing from its caches."""
    torch._dynamo.reset()
    module, _ = drawn(seed)
    found, call = list[torch.Tensor](), torch.compile(module, dynamic=False) if compiled else module
    with config.patch(force_disable_caches=True):
        for _ in range(2):
            y = call(torch.randn(5, 4, dtype=torch.float64))
            gradients = torch.autograd.grad(
                (y * torch.arange(1, 21).view(5, 4)).sum(), [*module.parameters()]
            )
            found += [y.detach(), *gradients, *(buffer.clone() for buffer in module.buffers())]
    return found


def is_same(seed: int) -> bool:
    """Whether a drawn module gives the same compiled, or eager code refuses it."""
    try:
        eager = two_steps(seed, compiled=False)
    except RuntimeError:  # backward needs a value that has changed
        return True
    pairs = zip(eager, two_steps(seed, compiled=True), strict=True)
    return all(torch.allclose(*pair, rtol=1e-9, atol=1e-9) for pair in pairs)


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("seed", range(12))
def test_buffers_are_read_and_changed_in_order(seed: int) -> None:
    set_up_torch()
    assert is_same(seed), drawn(seed)[1]


if __name__ == "__main__":
    first, count, *alone = sys.argv[1:]
    if not alone:
        set_up_torch()
    seeds = range(int(first), int(first) + int(count))
    print(f"{count} forward passes, different ones: {[seed for seed in seeds if not is_same(seed)]}")
