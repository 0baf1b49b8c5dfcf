"""Promise: the model sees no later token; packed, padded and one big batch give one loss and one gradient;
every token is a target once.
"""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

from tests.helpers.forked import attempt
from tests.helpers.refusals import refused
from tests.helpers.rows import read_rows
from tests.helpers.small_gpt import SGD, SMALL, first_step, make_model
from tests.helpers.toys import build_alone, make_recipe
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import read_recipe
from trainer.config.tasks import LanguageConfig
from trainer.data.batch import Batch
from trainer.data.dataset import NUM_ITEMS
from trainer.data.formats import documents
from trainer.data.formats.documents import SEGMENT, TARGETS, StreamDataset, packed, padded
from trainer.data.formats.text import Text
from trainer.data.formats.tokens import TOKENS
from trainer.data.sampling.group_order import in_buckets
from trainer.data.sampling.plan import Plan
from trainer.host.limits import read_limits
from trainer.models.gpt import GPT, place_in_segment, rotary_table, rotate
from trainer.tasks.language import Language
from trainer.train.components.task import make_plan, make_task
from trainer.train.evaluate import evaluate_run
from trainer.train.outputs import token_counter

END = 0
SYNTHETIC = {"name": "synthetic", "samples": 24, "global_batch_size": 4, "micro_batch_size": 2}
GPT2: dict[str, Any] = {"positions": "learned", "norm": "layer", "mlp": "gelu"}
KINDS: list[dict[str, Any]] = [{}, GPT2, {**GPT2, "bias": True}]


def a_text(lengths: list[int], seed: int = 0) -> Text:
    """Documents of so many tokens besides their ends."""
    random = np.random.default_rng(seed)
    parts = [np.append(random.integers(1, 20, n), END) for n in lengths]
    return Text(np.concatenate(parts).astype(np.uint8), 20, END, "bytes")


@pytest.mark.compat
@pytest.mark.parametrize("keys", KINDS)
def test_a_later_token_changes_no_earlier_logit(keys: dict[str, Any]) -> None:
    model = make_model(**keys)
    tokens = torch.randint(20, (3, 12))
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 20
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(-1).any(), "and every later one does change"


@pytest.mark.compat
@given(first=st.integers(0, 500), second=st.integers(0, 500), shift=st.integers(1, 5000))
def test_turned_products_depend_on_the_distance_alone(first: int, second: int, shift: int) -> None:
    torch.manual_seed(first)
    query, key = torch.randn(2, 1, 1, 2, 8, dtype=torch.float64)

    def product(at: int, to: int) -> torch.Tensor:
        places = (rotary_table(torch.tensor([place]), 8, torch.float64) for place in (at, to))
        q, k = (rotate(x, turn) for x, turn in zip((query, key), places, strict=True))
        return (q * k).sum(-1)

    assert torch.allclose(product(first, second), product(first + shift, second + shift))
    assert torch.allclose(product(5, 5), (query * key).sum(-1))
    assert not torch.allclose(product(0, 3), product(0, 4))


def test_each_document_is_computed_as_if_it_stood_alone() -> None:
    segment = torch.tensor([[1, 1, 1, 2, 3, 3, 0, 0], [7, 2, 2, 2, 2, 2, 2, 2]])
    model, tokens = make_model().double(), torch.randint(20, segment.shape)
    together = model(tokens, segment)
    for row in range(2):
        for number in segment[row].unique():
            inside = segment[row] == number
            assert torch.allclose(together[row, inside], model(tokens[row : row + 1, inside])[0], rtol=1e-10)


def test_places_begin_anew_in_each_document() -> None:
    segment = torch.tensor([[1, 1, 1, 2, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2]])
    assert place_in_segment(segment).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]


def test_the_head_is_the_embedding() -> None:
    model = make_model()
    logits = model(torch.tensor([[1, 2, 3]]))
    assert not any(name.startswith("head") for name in model.state_dict()), "stored once"
    with torch.no_grad():
        model.embedding.weight[7] *= 2
    again = model(torch.tensor([[1, 2, 3]]))
    assert torch.allclose(again[..., 7], logits[..., 7] * 2)
    (gradient,) = torch.autograd.grad(again[..., 7].sum(), model.embedding.weight)
    assert bool(gradient[7].any())


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@given(lengths=LENGTHS, length=st.integers(1, 16), way=st.sampled_from([packed, padded]))
def test_every_token_is_a_target_once_and_sees_its_own_document(lengths: Any, length: int, way: Any) -> None:
    # Tokens that are all different, but for the ends, tell where they come from.
    count = sum(lengths)
    ends = np.cumsum([n + 1 for n in lengths]) - 1
    tokens = np.zeros(count + len(lengths), np.uint16)
    tokens[np.setdiff1d(np.arange(len(tokens)), ends)] = np.arange(1, count + 1)
    document = np.repeat(np.arange(len(lengths)), [n + 1 for n in lengths])
    of_token = dict(zip(tokens.tolist(), document.tolist(), strict=True))
    dataset = way(Text(tokens, 1 << 16, END, "bytes"), length)
    arrays = dataset.arrays
    assert arrays is not None
    valid = np.arange(length) < arrays[NUM_ITEMS][:, None]
    assert sorted(arrays[TARGETS][valid].tolist()) == sorted(tokens.tolist())
    assert not arrays[TARGETS][~valid].any()
    segments = arrays[SEGMENT] if way is packed else valid.astype(int)
    assert ((segments > 0) == valid).all()
    for given_, wanted, segment in zip(arrays[TOKENS], arrays[TARGETS], segments, strict=True):
        for number in range(1, segment.max() + 1):
            here = segment == number
            inside = [t for t in (*given_[here], *wanted[here]) if t != END]
            assert len({of_token[t] for t in inside}) <= 1, "one document"
            follows = np.flatnonzero(tokens == wanted[here][0])
            assert (given_[here][1:] == wanted[here][:-1]).all()
            if wanted[here][0] != END:
                before = tokens[follows[0] - 1] if follows[0] else END
                assert given_[here][0] == before
    if way is packed:
        fullest = np.sort(arrays[NUM_ITEMS])
        assert len(fullest) < 2 or fullest[0] + fullest[1] > length, "no two samples that would fit in one"


@given(
    buckets=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    micro_batch=st.integers(1, 9),
    epoch=st.integers(0, 5),
    cross=st.booleans(),
    seed=st.integers(0, 3),
)
def test_buckets_keep_their_samples_together(
    buckets: list[int], micro_batch: int, epoch: int, cross: bool, seed: int
) -> None:
    count = sum(buckets)
    position = np.arange(count)
    found = in_buckets(seed, np.full(count, epoch), position, tuple(buckets), micro_batch, cross)
    assert sorted(found.tolist()) == list(range(count))
    one = in_buckets(seed, np.full(1, epoch), position[-1:], tuple(buckets), micro_batch, cross)
    assert one[0] == found[-1], "looked up, not built"
    bucket = np.searchsorted(np.cumsum(buckets), found, "right")
    run = position + (epoch * count if cross else 0)
    mixed = sum(
        len(set(bucket[run // micro_batch == number])) > 1 for number in np.unique(run // micro_batch)
    )
    assert mixed <= len(buckets) + 2, "but for the rests"


def test_documents_that_do_not_fit_are_told_before_they_are_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = read_limits()
    monkeypatch.setattr(documents, "read_limits", lambda: replace(limits, memory_bytes=1000))
    with refused("language.text=packed"):
        packed(Text(np.array([1, 0] * 200, np.uint16), 2, 0, "toy"), 64)


class InFloat64(Language):
    """The task on documents of its own, in float64."""

    def __init__(self, text: Text, config: LanguageConfig) -> None:
        self._config, self._about, self._vocabulary, self._bytes = config, text, text.vocabulary, True
        self.train_data = self._samples(text, measured=False)
        self.evaluation_data = self._samples(text, measured=True)
        self.metric, self.padding, self.notes = "bits_per_byte", 0.0, ()

    def model(self) -> torch.nn.Module:
        return super().model().double()


DOCUMENTS = a_text([3, 11, 1, 0, 7, 30, 12, 5, 2, 9, 4, 8], seed=4)


def step_of(way: Any, micro_batch: int, batch: int, **keys: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step that has every document in it."""
    config = LanguageConfig(**SMALL, text=way, buckets=3, **keys)
    task = InFloat64(DOCUMENTS, config)
    assert len(task.train_data) < batch, "the last micro-batch is filled up"
    data = {"global_batch_size": batch, "micro_batch_size": micro_batch, "last_batch": "weighted"}
    recipe = make_recipe(task="language", language=config.model_dump(), data=data, optim=SGD)
    return first_step(build_alone(recipe, task))


def one_big_batch(**keys: Any) -> tuple[float, dict[str, Any]]:
    """The same by hand: each piece on its own, summed, over the number of tokens."""
    torch.manual_seed(0)
    config = LanguageConfig(**SMALL, **keys)
    task = InFloat64(DOCUMENTS, config.model_copy(update={"text": "padded"}))
    recipe = make_recipe(task="language", language=config.model_dump())
    model = build_alone(recipe, task).state.model
    tokens, length = DOCUMENTS.tokens.astype(np.int64), config.sequence_length
    total = torch.zeros((), dtype=torch.float64)
    ends = [-1, *np.flatnonzero(tokens == END).tolist()]
    for before, end in pairwise(ends):
        document = torch.tensor([END, *tokens[before + 1 : end + 1]])
        for first in range(0, len(document) - 1, length):
            piece = document[first : first + length + 1]
            total = total + F.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="sum")
    (total / len(tokens)).backward()
    return float(total.detach()) / len(tokens), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.compat
@pytest.mark.parametrize("keys", KINDS)
@pytest.mark.parametrize(("way", "micro_batch", "batch"), [("padded", 3, 18), ("packed", 2, 12)])
def test_ragged_documents_weigh_as_in_one_big_batch(
    way: str, micro_batch: int, batch: int, keys: Any
) -> None:
    """In micro-batches of unequal numbers of tokens, the last one padded with samples of weight 0."""
    wanted_loss, wanted = one_big_batch(**keys)
    loss, found = step_of(way, micro_batch, batch, **keys)
    assert loss == pytest.approx(wanted_loss, rel=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", ["packed", "padded"])
def test_evaluation_counts_each_token_once(way: Any) -> None:
    wanted, _ = one_big_batch()
    config, data = LanguageConfig(**SMALL, text=way), {"eval_batch_size": 4, "micro_batch_size": 2}
    recipe = make_recipe(task="language", language=config.model_dump(), data=data)
    run = build_alone(recipe, InFloat64(DOCUMENTS, config))
    metrics, _ = evaluate_run(run)
    assert metrics["loss"] == pytest.approx(wanted, rel=1e-12)
    bits, found = by_documents(run.state.model.eval())
    assert metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert metrics["bits_per_byte"] != pytest.approx(wanted / math.log(2), rel=1e-6)
    assert 0 < metrics["padding"] < 0.6 and metrics["token_accuracy"] == found > 0


def by_documents(model: torch.nn.Module) -> tuple[float, float]:
    """Bits per byte as nanochat has them, of the targets that are bytes; and the share that is found."""
    length = SMALL["sequence_length"]
    nats, count, found = 0.0, 0, 0
    for document in np.split(DOCUMENTS.tokens, np.flatnonzero(DOCUMENTS.tokens == END) + 1):
        whole = torch.tensor([END, *document.tolist()])
        for first in range(0, len(document), length):
            piece, targets = whole[first : first + length + 1], whole[first + 1 : first + length + 1]
            with torch.no_grad():
                logits = model(piece[None, :-1])[0]
            nats += float(F.cross_entropy(logits, targets, reduction="none")[targets != END].sum())
            count += int((targets != END).sum())
            found += int((logits.argmax(1) == targets).sum())
    return nats / math.log(2) / count, found / len(DOCUMENTS.tokens)


def test_the_loss_is_computed_in_float32_whatever_the_logits_are() -> None:
    """Under autocast they come in bfloat16, in which a sum over a vocabulary has two digits."""
    task = make_task(make_recipe(task="language", language=SMALL, data={"name": "synthetic", "samples": 8}))
    tokens = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(2, 12, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    loss = task.loss(lambda _: logits, Batch({TOKENS: tokens}, None, None, 24))  # type: ignore[arg-type]
    wanted = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    assert loss.dtype == torch.float32 and torch.equal(loss, wanted)


@pytest.mark.parametrize(("text", "last"), [("stream", "cross"), ("padded", "weighted"), ("packed", "drop")])
def test_tokens_that_were_seen_are_those_that_the_loader_gave(text: Any, last: Any) -> None:
    data = {**SYNTHETIC, "samples": 14, "last_batch": last}
    recipe = make_recipe(epochs=3, task="language", language={**SMALL, "text": text}, data=data)
    run = build_alone(recipe, make_task(recipe))
    count, each = token_counter(run.plan, run.task.train_data), run.plan.micro_batches
    assert count is not None
    by_hand = []
    for batch in run.loader(run.share.batches()):
        weight = torch.ones(2) if batch.weight is None else batch.weight
        lengths = batch.fields.get(NUM_ITEMS, torch.full((2,), SMALL["sequence_length"]))
        by_hand.append(int((lengths * weight).sum()))
    steps = [sum(by_hand[first : first + each]) for first in range(0, len(by_hand), each)]
    assert [count(range(step, step + 1)) for step in range(run.steps)] == steps
    assert count(range(1, run.steps)) == sum(steps[1:]) and count(range(0)) == 0


def test_a_resumed_run_goes_on_counting_tokens(tmp_path: Path) -> None:
    task: dict[str, Any] = {"task": "language", "language": {**SMALL, "text": "padded"}, "data": SYNTHETIC}
    recipe = make_recipe(epochs=2, **task, log={"every": 2, "to": ["jsonl"]})
    assert attempt(tmp_path / "run", recipe, stop_after=5).code == 75
    assert attempt(tmp_path / "run", recipe).code == 0
    seen = [row["tokens_seen"] for row in read_rows(tmp_path / "run", ("train",))]
    assert seen == sorted({*seen}) and len(seen) >= 5
    run = build_alone(recipe, make_task(recipe))
    count = token_counter(run.plan, run.task.train_data)
    assert count is not None and seen[-1] == count(range(run.steps))


@pytest.mark.parametrize(("name", "wanted"), [("gpt2-124m", 124_439_808), ("gpt2-1.5b", 1_557_611_200)])
def test_it_has_as_many_parameters_as_gpt2(name: str, wanted: int) -> None:
    """Small and XL, as their weights are published."""
    config = Recipe.model_validate(read_recipe(name)).language.model_copy(update={"bias": True})
    with torch.device("meta"):
        model = GPT(config, 50257)
    assert sum(p.numel() for p in model.parameters()) == wanted


def test_the_order_of_buckets_is_another_in_each_epoch() -> None:
    plan = Plan(64, 4, 4, 2, "cross", 3, buckets=(32, 32))
    first, second = (plan.read(np.arange(16) + 16 * epoch).sample for epoch in range(2))
    assert {tuple(sorted(row)) for row in first.tolist()} != {tuple(sorted(row)) for row in second.tolist()}
    assert not np.array_equal(first // 32, np.sort(first // 32, axis=0)), "micro-batches of both come mixed"


def test_a_padded_batch_is_cut_to_its_longest() -> None:
    recipe = make_recipe(
        task="language",
        language={**SMALL, "text": "padded", "buckets": 4, "sequence_length": 64},
        data={"name": "synthetic", "samples": 64, "micro_batch_size": 4, "global_batch_size": 8},
    )
    task = make_task(recipe)
    assert sum(make_plan(recipe, task).buckets) == len(task.train_data)
    run = build_alone(recipe, task)
    num_items, widths = 0, list[int]()
    for batch in run.loader(range(len(task.train_data) // 4)):
        num_items += batch.num_items
        widths.append(task.inputs(batch)[0].shape[1])  # type: ignore[attr-defined]
    assert {*widths} <= {16, 32, 48, 64}
    share = task.describe()["padding"]
    assert share == pytest.approx(1 - num_items / (4 * sum(widths)), abs=1e-6)
    assert task.train_data.arrays is not None
    full = 1 - np.asarray(task.train_data.arrays[NUM_ITEMS]).mean() / 64
    assert share < full / 2, "similar lengths together"


@given(count=st.integers(2, 90), length=st.integers(1, 20), stride=st.integers(1, 25), whole=st.booleans())
def test_a_stream_in_memory(count: int, length: int, stride: int, whole: bool) -> None:
    tokens = np.arange(count, dtype=np.uint8)
    length = min(length, count - 1)
    data = StreamDataset(tokens, length, None if whole else stride, whole=whole)
    out = {name: np.full((len(data), *f.shape), 7, f.dtype) for name, f in data.fields.items()}
    data.read(np.arange(len(data)), None, out)
    if whole:
        valid = np.arange(length) < out[NUM_ITEMS][:, None]
        assert out[TOKENS][:, 1:][valid].tolist() == list(range(1, count))
        return
    firsts = range(0, count - length, stride)
    assert out[TOKENS].tolist() == [list(range(first, first + length + 1)) for first in firsts]
