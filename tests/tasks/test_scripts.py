"""Promise: scripts of examples/scripts/ end with the weights of the loops that their originals have."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainer
from tests.helpers.hf_models import NEEDS
from tests.helpers.refusals import refused

FOLDER = Path(__file__).parents[2] / "examples" / "scripts"


class Tried:
    """A task of the examples, trained; and what its loss was called with.

    Attributes:
        run: What `fit` gave.
        own: The task.
        model: A new model with the weights that the run began with, in training mode.
        losses: Of each step.
    """

    def __init__(
        self, name: str, kind: str, settings: dict[str, Any], parts: int = 1, **changed: Any
    ) -> None:
        module = importlib.import_module(name)
        base, calls = getattr(module, kind), list[Any]()

        def loss(own: Any, model: nn.Module, batch: Any) -> Any:
            if model.training:
                start = {n: value.clone() for n, value in model.state_dict().items()}
                calls.append(({n: t.clone() for n, t in batch.fields.items()}, torch.get_rng_state(), start))
            return base.loss(own, model, batch)

        self.own = type(kind, (base,), {**changed, "loss": loss})()
        settings = {"log.every": 1, "parallel.threads": 1, "data.workers": 0, **settings}
        self.run = trainer.fit(self.own, settings, hooks=getattr(module, "hooks", []))
        self.losses = [row["loss"] for row in self.run.rows()]
        self._calls = calls[-len(self.losses) * parts :]  # what comes before is the trial's
        self.model: Any = self.own.model()
        self.model.load_state_dict(self._calls[0][2])

    def batches(self, count: int, whole: str = "") -> Iterator[Any]:
        """The next batches of the run, each with the random state that its loss began with.

        With the name of a field they must be an epoch: all samples of it, each once.
        """
        given = [self._calls.pop(0) for _ in range(count)]
        if whole:
            seen, every = torch.cat([fields[whole] for fields, *_ in given]), self.own.data()[0][whole]
            assert sorted(map(bytes, seen.numpy())) == sorted(map(bytes, every))
        for fields, state, _ in given:
            torch.set_rng_state(state)
            yield fields

    def is_held(self, losses: list[float], close: float) -> None:
        """To the loop's losses, weights and buffers."""
        assert not self._calls
        assert self.losses == pytest.approx(losses, rel=10 * close)
        torch.testing.assert_close(self.run.model().state_dict(), self.model.state_dict(), rtol=0, atol=close)


Attempt = Callable[..., Tried]


@pytest.fixture
def attempt(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:  # noqa: ARG001
    monkeypatch.syspath_prepend(FOLDER)
    with torch.random.fork_rng(devices=[]):
        yield Tried


def few(samples: int, others: int) -> Callable[[Any], Any]:
    """Fewer samples than an example has."""

    def data(own: Any) -> Any:
        train, evaluation = super(type(own), own).data()
        return {n: a[:samples] for n, a in train.items()}, {n: a[:others] for n, a in evaluation.items()}

    return data


def test_vae(attempt: Attempt) -> None:
    """Of a loss that is a sum over the batch."""
    it = attempt("vae", "Digits", {"epochs": 2}, data=few(384, 128))
    model, losses = it.model, list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        for batch in it.batches(3, "image"):
            optimizer.zero_grad()
            again, mu, logvar = model(batch["image"])
            bce = F.binary_cross_entropy(again, batch["image"], reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            (bce + kld).backward()
            optimizer.step()
            losses.append((bce + kld).item() / 128)
    it.is_held(losses, 1e-6)
    pictures = [row["samples"] for row in it.run.rows("hook")]
    assert len(pictures) == 2 and all((it.run.folder / one).exists() for one in pictures)


def test_dcgan(attempt: Attempt) -> None:
    it = attempt("dcgan", "DCGAN", {"epochs": 2}, data=few(32, 16), nz=8, ngf=4, ndf=4, RECIPE=SMALL)
    generator, critic, losses = it.model.generator, it.model.critic, list[float]()
    adam: Any = {"lr": 0.0002, "betas": (0.5, 0.999)}
    of_critic, of_generator = (torch.optim.Adam(one.parameters(), **adam) for one in (critic, generator))
    for _ in range(2):
        for batch in it.batches(2, "image"):
            of_critic.zero_grad()
            of_generator.zero_grad()
            real, one, zero = batch["image"], torch.ones(16, 1), torch.zeros(16, 1)
            fake = generator(torch.randn(16, 8, 1, 1))
            told, denied = critic(real), critic(fake.detach())
            wrong = F.binary_cross_entropy(told, one) + F.binary_cross_entropy(denied, zero)
            wrong.backward()
            judged = F.binary_cross_entropy(critic(fake), one)
            judged.backward(inputs=[*generator.parameters()])
            of_critic.step()
            of_generator.step()
            losses.append((wrong + judged).item())
    it.is_held(losses, 1e-6)


SMALL = {"data": {"global_batch_size": 16, "micro_batch_size": 16}}


def test_word_language_model(attempt: Attempt) -> None:
    """With the script's own batches: state goes on through an epoch, and begins anew in the next."""
    text = np.random.default_rng(1).integers(0, 30, 505)

    def data(own: Any) -> Any:
        chunks = importlib.import_module("word_language_model").chunks
        return chunks(text[:400], own.columns, own.bptt), chunks(text[400:], own.columns, own.bptt)

    sizes = {f"data.{one}_batch_size": 4 for one in ("global", "micro", "eval")}
    small = {"words": 30, "size": 12, "columns": 4, "bptt": 35}
    it = attempt("word_language_model", "WordLanguageModel", {"epochs": 2, **sizes}, data=data, **small)
    model, losses = it.model, list[float]()

    def batches(source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = source[: len(source) // 4 * 4].view(4, -1).t()
        for at in range(0, len(rows) - 1, 35):
            yield rows[at : at + 35], rows[at + 1 : at + 36].reshape(-1)

    def run(word: torch.Tensor, hidden: Any) -> Any:
        """Beyond the last chunk's end, too, as dropout draws for all places."""
        padded = torch.zeros(35, 4, dtype=torch.long)
        padded[: len(word)] = word
        out, hidden = model.rnn(model.drop(model.encoder(padded.t())), hidden)
        return model.decoder(model.drop(out)).transpose(0, 1).reshape(-1, 30), hidden

    for _ in range(2):
        hidden: Any = torch.zeros(2, 2, 4, 12).unbind()
        for (word, wanted), _ in zip(batches(torch.from_numpy(text[:400])), it.batches(3), strict=True):
            hidden = tuple(one.detach() for one in hidden)
            model.zero_grad()
            told, hidden = run(word, hidden)
            loss = F.cross_entropy(told[: len(wanted)], wanted)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-20)
            losses.append(loss.item())
    model.state.copy_(torch.stack(hidden).detach())
    it.is_held(losses, 1e-6)
    model.eval()
    hidden, total = torch.zeros(2, 2, 4, 12).unbind(), 0.0
    for word, wanted in batches(torch.from_numpy(text[400:])):
        told, hidden = run(word, hidden)
        total += F.cross_entropy(told[: len(wanted)], wanted, reduction="sum").item()
    assert it.run.metrics["loss"] == pytest.approx(total / 100, rel=1e-6)


def test_siamese(attempt: Attempt) -> None:
    """In float64: in float32 Adadelta at this rate makes of rounding another run."""
    sizes = {"data.global_batch_size": 16, "data.micro_batch_size": 16}

    def data(own: Any) -> Any:
        pairs = importlib.import_module("siamese").Pairs
        return pairs(40, own.dtype), pairs(20, own.dtype)

    small = {"data": data, "width": 8, "dtype": np.float64}
    # Of the last 8 of 40 samples a second part would have none; of 40 by 39 the last step has one.
    for size, part in ((16, 8), (39, 39)):
        with refused("data.last_batch=weighted BatchNorm"):
            other = {"data.global_batch_size": size, "data.micro_batch_size": part}
            attempt("siamese", "Siamese", other, **small)
    it = attempt("siamese", "Siamese", {"epochs": 2, **sizes}, **small)
    model, losses = it.model, list[float]()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    pairs = list[bytes]()
    for _ in range(2):
        for batch in it.batches(3):
            optimizer.zero_grad()
            loss = nn.BCELoss()(model(batch["0"], batch["1"]).squeeze(), batch["2"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            pairs += map(bytes, batch["0"].numpy())
        scheduler.step()
    it.is_held(losses, 1e-12)
    assert sorted(pairs[:40]) != sorted(pairs[40:]), "drawn anew in each epoch"


def test_regression_ends_where_it_wants_to(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("regression").Reached, "wanted", 3.0)
    losses = attempt("regression", "Regression", {"max_steps": 3000}).losses
    reached = next(step for step, loss in enumerate(losses, 1) if loss < 3.0)
    assert reached <= len(losses) <= reached + 2 < 3000


def of_pairs(_: Any) -> Any:
    pairs = importlib.import_module("bert_pairs").Pairs
    return pairs(20), pairs(12)


@pytest.mark.parametrize(
    ("name", "kind", "changed"),
    [
        ("mnist", "MNIST", {"data": few(70, 20)}),
        ("time_sequence", "TimeSequence", {"size": 6, "length": 12}),
        ("super_resolution", "SuperResolution", {"data": few(70, 25), "width": 8, "pixels": 12}),
        pytest.param("bert_pairs", "BertPairs", {"data": of_pairs}, marks=[NEEDS, pytest.mark.slow]),
    ],
)
def test_the_others_train(name: str, kind: str, changed: dict[str, Any], attempt: Attempt) -> None:
    it = attempt(name, kind, {"max_steps": 2, "evaluation.every": "end"}, **changed)
    assert len(it.losses) == 2 and all(map(np.isfinite, it.losses)) and it.run.metrics


@NEEDS
def test_gpt2_of_code(attempt: Attempt) -> None:
    """In float64: AdamW makes steps of what rounding leaves of the gradient of a key's bias."""
    from transformers import get_scheduler

    sizes = {"epochs": 2, "data.global_batch_size": 8, "data.micro_batch_size": 2}
    it = attempt("code_gpt2", "CodeGPT2", sizes, parts=4, data=few(24, 6), dtype=torch.float64, warm_up=2)
    model, losses = it.model, list[float]()
    with_decay, without = list[nn.Parameter](), list[nn.Parameter]()
    for name, p in model.named_parameters():
        (without if any(one in name for one in ("bias", "LayerNorm.weight")) else with_decay).append(p)
    groups = [{"params": with_decay, "weight_decay": 0.1}, {"params": without, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=6)
    for _ in range(2):
        for step, batch in enumerate(it.batches(12, "input_ids"), 1):
            ids = batch["input_ids"]
            logits, labels = model(ids).logits[..., :-1, :], ids[..., 1:]
            each = nn.CrossEntropyLoss(reduction="none")(logits.reshape(-1, 500), labels.reshape(-1))
            weights = torch.stack([(ids == key).double() for key in (3, 5, 8, 13)]).sum((0, 2))
            loss = (each.view(labels.shape).mean(1) * (1 + weights)).mean() / 4
            loss.backward()
            losses.append(loss.item())
            if step % 4 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    it.is_held(np.reshape(losses, (6, 4)).sum(1).tolist(), 1e-12)
    ids = torch.from_numpy(it.own.data()[1]["input_ids"])
    loss = model.eval()(ids, labels=ids).loss
    assert it.run.metrics["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-6)
