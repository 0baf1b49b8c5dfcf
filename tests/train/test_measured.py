"""Promise: what somebody's `measure` gives is the same on any number of ranks, or refused on all of them."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.small_task import Small
from tests.helpers.world import Ranks
from trainer.config.data import LoaderConfig
from trainer.config.model import PrecisionConfig
from trainer.data.loader import Source, make_loader
from trainer.data.sampling.plan import evaluation_share
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.tasks.custom import CustomTask
from trainer.train.evaluate import evaluate

SAMPLES = 13  # batches of 2: seven, the last of one sample


class Numbered(Small):
    """The number of each sample is a field; `given` is what a batch is measured as."""

    given: str
    rank = 0

    def data(self) -> Any:
        x = np.arange(2 * SAMPLES, dtype=np.float32).reshape(SAMPLES, 2)
        part = {"x": x, "y": x[:, :1], "n": np.arange(SAMPLES)}
        return part, part

    def measure(self, _: nn.Module, batch: Any) -> Any:
        return MEASURED[self.given][0](self, batch.fields["n"])


class Rows(Numbered):
    """With `summarize`, which gets all values."""

    def summarize(self, rows: Any) -> Any:
        if self.given == "breaks on one":
            return {"m": 1 // self.rank}
        if self.given == "draws":
            return {"m": random.SystemRandom().random()}
        if self.given == "a name":
            return {"m": 1.0, "a\nb": 2.0, 3: 4.0}
        told = {
            name: [[str(part.dtype), part.tolist()] for part in (one if isinstance(one, tuple) else (one,))]
            for name, one in rows.items()
        }
        return {json.dumps(told, sort_keys=True, default=str)[:100]: float(len(told))}


def values(n: torch.Tensor) -> dict[str, Any]:
    return {name: n + number for number, name in enumerate("abcd")}


def shuffled(n: torch.Tensor) -> dict[str, Any]:
    """In another order for each batch, as a set's is in each process."""
    pairs = [*values(n).items()]
    random.Random(int(n[0])).shuffle(pairs)
    return dict(pairs)


EYE = torch.eye(13, 3)
WHOLE = {"a": 6.0, "b": 7.0, "c": 8.0, "d": 9.0}
Cases = dict[str, tuple[Callable[[Any, torch.Tensor], Any], dict[str, float] | str | None]]
# What a batch is measured as, and the metrics; or what is said. None: the same on any number of ranks.
MEANS: Cases = {
    "another order": (lambda _, n: shuffled(n), WHOLE),
    "some batches": (lambda _, n: values(n) if n[0] % 4 else {"a": n}, None),
    "one rank": (lambda _, n: {"a": n} if n[0] in (4, 12) else {}, {"a": 7.0}),
    "pairs": (
        lambda _, n: {"a": (n, n > 5), "b": (n.double(), n), "c": (n[:, None].expand(-1, 3), EYE[n])},
        {"a": 9.0, "b": 650 / 78, "c": 1.0},
    ),
    "a pair once": (lambda _, n: {"a": (n, n > 3) if n[0] == 4 else n}, {"a": 6.0}),
    "what doesn't count": (lambda _, n: {"a": ((n - 3).double().log(), n > 3)}, None),
    "kinds": (lambda _, n: {"a": n > 5, "b": n.half(), "c": n.double()}, {"a": 7 / 13, "b": 6.0, "c": 6.0}),
    "one more dimension": (lambda _, n: {"a": n[:, None]}, {"a": 6.0}),
    "types that differ": (
        lambda _, n: {"a": n if n[0] % 4 else n.double() + 0.25},
        {"a": (78 + 0.25 * 7) / SAMPLES},
    ),
    "nothing counts": (lambda _, n: {"a": (n, n > 20)}, "'a'"),
    "a sum": (lambda _, n: {"a": n.sum() if n[0] == 4 else n}, "'a'"),
    "nothing": (lambda *_: {}, "measure"),
    "a word": (lambda _, n: {"a": "high" if n[0] == 4 else n}, "'a'"),
    "a row's name": (lambda _, n: {"step" if n[0] == 4 else "a": n}, "'step'"),
}
OF_ROWS: Cases = {
    **{
        f"rows of {kind}": (lambda _, n, to=kind: {"row": n.to(getattr(torch, to))}, None)  # type: ignore[misc]
        for kind in ("bool", "int16", "complex64")
    },
    "minus zero": (lambda _, n: {"row": torch.full((len(n),), -0.0)}, None),
    "rows in another order": (
        lambda _, n: dict([*{"p": n, "q": -n, "r": n > 3}.items()][:: 1 if n[0] % 4 else -1]),
        None,
    ),
    "draws": (lambda _, n: {"row": n}, None),
    "a name": (lambda _, n: {"row": n}, {"m": 1.0}),
    "breaks on one": (lambda _, n: {"row": n}, "ZeroDivisionError"),
    "no rows once": (lambda _, n: {"a": n, **({} if n[0] == 4 else {"row": n})}, "'row'"),
    "counts once": (lambda _, n: {"row": (n, n > 3) if n[0] == 4 else n}, "'row'"),
    "wider rows": (lambda _, n: {"row": torch.zeros(len(n), 3 if n[0] == 4 else 2)}, "'row'"),
    "cut rows": (lambda _, n: {"row": n / 2 if n[0] == 4 else n}, "'row'"),
    "too many rows": (lambda _, n: {"row": torch.cat([n, n]) if n[0] == 4 else n}, "'row'"),
}
MEASURED = {**MEANS, **OF_ROWS}


def measured(world: World, cases: list[str]) -> dict[str, Any]:
    """Metrics of each case, or what is said."""
    found = dict[str, Any]()
    for given in cases:
        own = Rows() if given in OF_ROWS else Numbered()
        own.given, own.rank = given, world.rank
        task: Any = CustomTask(own, "mine")
        data = task.evaluation_data
        share = evaluation_share(len(data), 2, world.rank, world.size)
        loader = make_loader(Source(data, share), world.device, LoaderConfig(), 0)
        torch.manual_seed(0)
        try:
            found[given] = evaluate(task, task.model(), loader, share, world, PrecisionConfig())
        except BadInputError as error:
            found[given] = str(error)
    return found


@pytest.fixture(scope="module")
def answers(ranks: Ranks) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, what each of them found."""
    every = [*MEASURED]
    return {
        size: ranks.run(size, measured, cases) for size, cases in ((1, every), (2, every), (4, every[::5]))
    }


@pytest.mark.parametrize("given", MEASURED)
def test_on_any_number_of_ranks(answers: dict[int, list[dict[str, Any]]], given: str) -> None:
    wanted, alone = MEASURED[given][1], answers[1][0][given]
    for first, *others in answers.values():
        if given not in first:
            continue
        assert all(answer[given] == first[given] for answer in others), others
        if isinstance(wanted, str):
            assert wanted in first[given] and "\n" not in first[given]
        elif given != "draws":
            assert first[given] == alone
    if isinstance(wanted, dict):
        assert alone == wanted
    if given.startswith("rows of "):
        assert f'"torch.{given[8:]}"' in next(iter(alone)), "of their own type, to the last bit"
