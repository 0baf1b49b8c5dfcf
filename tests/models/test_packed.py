"""Promise: packed documents are kept apart by blocks as by a mask of all pairs: the same places, losses and
gradients; on a CPU by torch's own formula, on a GPU by its kernel (tests/gpu/test_packed.py).
"""

import functools
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention import flex_attention as flex

from tests.helpers.toys import make_recipe
from tests.helpers.world import Ranks
from trainer.config.model import PrecisionConfig
from trainer.config.tasks import GPTConfig, LanguageConfig
from trainer.distributed.parallel import World, words_of_ranks
from trainer.models import gpt
from trainer.models.activation_checkpointing import recompute
from trainer.models.gpt import GPT, fault_of_blocks
from trainer.models.packed import attend_by_blocks, blocks_mask, documents, missing_for_blocks, pairs_mask
from trainer.models.precision import autocast
from trainer.train.components import model as prepare

LENGTH = 384
SMALL: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32, "sequence_length": LENGTH}
ROWS = [[100, 130, 20, 134], [128, 128, 64, 1, 63], [384], [1, 127, 255, 1]]

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula has a backward pass there; torch from 2.10 on refuses to use it."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None, raising=False)


def segments(rows: list[list[int]], length: int = LENGTH) -> torch.Tensor:
    """Documents of so many places; what is left is padding, 0."""
    found = torch.zeros(len(rows), length, dtype=torch.int16)
    for row, counts in zip(found, rows, strict=True):
        numbers = torch.arange(1, len(counts) + 1, dtype=torch.int16)
        document = numbers.repeat_interleave(torch.tensor(counts))[:length]
        row[: len(document)] = document
    return found


def make_model(by_blocks: bool, **keys: Any) -> GPT:
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL | keys), 50).double()
    model.by_blocks = by_blocks
    return model


def tokens_of(segment: torch.Tensor) -> torch.Tensor:
    return torch.randint(50, segment.shape, generator=torch.Generator().manual_seed(0))


def gradients(model: GPT, segment: torch.Tensor, call: Any = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logits = (model if call is None else call)(tokens_of(segment), segment)
    logits.square().sum().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def same(
    one: tuple[torch.Tensor, list[torch.Tensor]], other: tuple[torch.Tensor, list[torch.Tensor]]
) -> None:
    assert torch.allclose(one[0], other[0], rtol=1e-12, atol=1e-14)
    assert len(one[1]) == len(other[1]) > 0
    for a, b in zip(one[1], other[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10 * float(b.abs().max()))


def test_documents_are_numbered_in_their_order() -> None:
    segment = torch.tensor([[1, 1, 2, 3, 3, 0, 0], [7, 7, 7, 7, 7, 7, 7]], dtype=torch.int16)
    assert documents(segment).tolist() == [[0, 0, 1, 2, 2, 3, 3], [0] * 7]
    assert documents(segment).dtype == torch.int32


@settings(max_examples=60)
@given(
    rows=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=9), min_size=1, max_size=3),
    blocks=st.integers(1, 4),
)
def test_the_blocks_are_those_of_the_mask(rows: list[list[int]], blocks: int) -> None:
    """Pair by pair; and a block whose pairs are all alike isn't looked at by pairs."""
    segment = segments(rows, 128 * blocks)
    wanted, mask = pairs_mask(segment), blocks_mask(segment)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    tiles = wanted.view(len(rows), blocks, 128, blocks, 128).transpose(2, 3).flatten(3).to(torch.int8)
    kind = tiles.amin(3) + tiles.amax(3)  # 0: none sees another, 1: some do, 2: all do
    for row in range(len(rows)):
        for query in range(blocks):
            mixed = mask.kv_indices[row, 0, query, : mask.kv_num_blocks[row, 0, query]]
            whole = mask.full_kv_indices[row, 0, query, : mask.full_kv_num_blocks[row, 0, query]]
            assert mixed.tolist() == (kind[row, query] == 1).nonzero().flatten().tolist()
            assert whole.tolist() == (kind[row, query] == 2).nonzero().flatten().tolist()
    by_pairs = flex.create_mask(mask.mask_mod, len(rows), 1, *wanted.shape[2:], device="cpu")  # type: ignore[misc]
    assert torch.equal(by_pairs, wanted)


@pytest.mark.parametrize("keys", [{}, {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True}])
def test_both_ways_give_one_loss_and_one_gradient(keys: dict[str, Any]) -> None:
    segment = segments(ROWS)
    same(gradients(make_model(True, **keys), segment), gradients(make_model(False, **keys), segment))


def test_each_document_is_computed_as_if_it_stood_alone() -> None:
    segment = segments(ROWS)
    model, tokens = make_model(True), tokens_of(segment)
    together = model(tokens, segment)
    for row, counts in enumerate(ROWS):
        for document in torch.arange(sum(counts)).split(counts):
            alone = model(tokens[row : row + 1, document])[0]
            assert torch.allclose(together[row, document], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.slow  # half a minute of tracing
def test_it_is_compiled_as_one() -> None:
    """With the blocks' activations computed again. Traced whole; Inductor has no backward pass for a CPU."""
    wanted = gradients(make_model(False), segments(ROWS))
    model = make_model(True)
    compile_ = functools.partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    for block in model.blocks:
        block.forward = compile_(block.forward)
        recompute(block)
    same(gradients(model, segments(ROWS)), wanted)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    other = segments([[60, 200], [384], [5, 5, 5], [200]])
    again = make_model(False)
    model.zero_grad()
    same(gradients(model, other), gradients(again, other))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("keys", "device", "missing"),
    [
        ({}, GPU, None),
        ({}, torch.device("cpu"), "on a GPU only"),
        ({"dropout": 0.1}, GPU, r"language\.dropout is 0\.1"),
        ({"sequence_length": 100}, GPU, r"language\.sequence_length=100 is not a multiple of 128"),
        ({"width": 96}, GPU, r"a head has 48 channels .*, and not a power of two from 16 to 256"),
    ],
)
def test_where_it_is_taken(
    keys: dict[str, Any], device: torch.device, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log says why not; on a CPU, where it never is, it says nothing."""
    monkeypatch.setattr("trainer.models.packed.missing_for_compiling", lambda _: None)
    monkeypatch.setattr(prepare, "fault_of_blocks", lambda *_: None)
    config = LanguageConfig(**SMALL | keys, text="packed")
    recipe = make_recipe(task="language", language=config.model_dump())
    notes: list[str] = []
    taken = prepare._can_attend_by_blocks(recipe, World(0, 1, 0, device, None), notes)
    assert taken == (missing is None)
    found = missing_for_blocks(config, device)
    if missing is None:
        assert found is None and notes == [
            "packed text: attends by blocks (FlexAttention), compiled and tried at the start"
        ]
    else:
        assert found and re.search(missing, found)
        assert all(found in note and "with a mask of" in note for note in notes)
        assert bool(notes) == (device == GPU)
    recipe.language.attention = "mask"
    assert not prepare._can_attend_by_blocks(recipe, World(0, 1, 0, GPU, None), notes)


class FailsBackward(torch.autograd.Function):
    """As Triton's kernels of wide heads do on GPUs with little shared memory."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, *__: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376")


def test_it_is_tried_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu = GPTConfig(**SMALL), torch.device("cpu")
    contexts: list[AbstractContextManager[object]] = [
        autocast(PrecisionConfig(mode="bf16"), cpu),
        nullcontext(),
    ]
    seen: list[torch.dtype] = []
    attend = attend_by_blocks

    def noted(query: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(query.dtype)
        return attend(query, *others)

    monkeypatch.setattr(gpt, "attend_by_blocks", noted)
    before = torch.get_rng_state()
    assert fault_of_blocks(config, 2, cpu, contexts) is None
    assert seen == [torch.bfloat16, torch.float32]
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(gpt, "attend_by_blocks", lambda query, *_: FailsBackward.apply(query))  # type: ignore[no-untyped-call]
    assert "shared memory, Required: 147456" in str(fault_of_blocks(config, 2, cpu, contexts))
    monkeypatch.setattr(gpt, "attend_by_blocks", mock.Mock(side_effect=torch.OutOfMemoryError("no more")))
    with pytest.raises(torch.OutOfMemoryError):
        fault_of_blocks(config, 2, cpu, contexts)


def can_attend(world: World, failing: int) -> tuple[bool, list[str]]:
    notes: list[str] = []
    recipe = make_recipe(task="language", language=SMALL | {"text": "packed"})
    fault = "FlexAttention fails here (OutOfResources)" if world.rank == failing else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "missing_for_blocks", lambda *_: None)
        patch.setattr(prepare, "fault_of_blocks", lambda *_: fault)
        patch.setattr(prepare, "prepare_cache", lambda: None)
        patch.setattr(prepare, "words_of_ranks", lambda word, _: words_of_ranks(word, world))
        return prepare._can_attend_by_blocks(recipe, replace(world, device=GPU), notes), notes


def test_where_it_fails_on_one_rank_all_take_the_mask(ranks: Ranks) -> None:
    assert [taken for taken, _ in ranks.run(2, can_attend, -1)] == [True, True]
    found = ranks.run(2, can_attend, 1)
    assert [taken for taken, _ in found] == [False, False]
    for (_, notes), who in zip(found, ("rank 1: ", ""), strict=True):
        assert len(notes) == 1 and notes[0].endswith(f"{who}FlexAttention fails here (OutOfResources)")
