"""Promise: arrays of every kind that numpy has train as torch would by them, or are refused in one line."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.refusals import refused
from tests.helpers.small_task import Small
from tests.helpers.toys import build_alone, make_recipe
from trainer.tasks.custom import CustomTask
from trainer.train.components.task import check_request
from trainer.train.step import train_step


class Task(Small):
    """Points with a field more, `z`."""

    def __init__(self, z: Any, items: bool = False) -> None:
        self.z, self.items, self.seen = z, items, list[torch.Tensor]()

    def data(self) -> Any:
        x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
        fields: Any = {"x": x, "y": np.arange(12) % 2, "z": self.z}
        fields["length"] = np.full((12, 2), np.nan)  # a name that means nothing to the trainer
        return (part := Items(fields) if self.items else fields), part

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen.append(batch["z"].clone())
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


class Items(torch.utils.data.Dataset[Any]):
    """The same as a data set of torch's kind."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return 12

    def __getitem__(self, sample: int) -> Any:
        return {name: value[sample] for name, value in self.fields.items()}


def trained(own: Task, resident: bool | str = "auto") -> torch.Tensor:
    """What a step's micro-batches held of `z`, sorted."""
    data = {"global_batch_size": 12, "micro_batch_size": 6, "resident": resident, "workers": 0}
    with contextlib.closing(build_alone(make_recipe(data=data), CustomTask(own, "own"))) as run:
        own.seen.clear()
        train_step(run, run.loader(run.share.batches(0)[:2]), 0)
        return torch.cat(own.seen).sort(0).values


KINDS = (">f4", ">i8", "u2", "u8", "?", "f2", "f8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["resident", "ring", "items"])
def test_a_kind_of_number_reaches_the_loss(kind: str, how: str) -> None:
    values = np.arange(24).reshape(12, 2).astype(kind)
    seen = trained(Task(values, items=how == "items"), resident=how == "resident")
    wanted = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    assert seen.dtype == wanted.dtype and torch.equal(seen.long(), wanted.long().sort(0).values)


def test_the_bits_of_large_unsigned_numbers_stay() -> None:
    values = np.full(12, np.iinfo(np.uint64).max, np.uint64)
    for resident in (True, False):
        assert trained(Task(values), resident).view(torch.int64).eq(-1).all()


def test_strides_and_views_are_no_matter() -> None:
    base = np.arange(48, dtype=np.int32).reshape(24, 2)
    for view in (base[::2], base[12:][::-1], np.asfortranarray(base[:12]), base[:12].T.copy().T):
        assert torch.equal(trained(Task(view)), torch.from_numpy(np.sort(view, 0)))
    frozen = base[:12].copy()
    frozen.setflags(write=False)
    assert torch.equal(trained(Task(frozen)), torch.from_numpy(base[:12]))
    assert torch.equal(trained(Task(np.ma.masked_array(base[:12]))), torch.from_numpy(base[:12]))


REFUSED: dict[str, tuple[Any, str]] = {
    "long double": (np.arange(12).astype(np.longdouble), "z float128"),
    "masked": (np.ma.masked_greater(np.arange(12.0), 5), "z"),
    "objects": (np.array([None] * 12), "z"),
    "records": (np.zeros(12, [("a", "f4")]), "'z'"),
    "bfloat16": (torch.zeros(12, dtype=torch.bfloat16), "z"),
    "a graph": (torch.zeros(12, requires_grad=True), "z"),
}


ARRAYS = [*REFUSED][:4]  # of a data set torch reads tensors


@pytest.mark.parametrize(("kind", "items"), [*((k, False) for k in REFUSED), *((k, True) for k in ARRAYS)])
def test_what_torch_has_no_type_for_is_named(kind: str, items: bool) -> None:
    with refused(REFUSED[kind][1]):
        CustomTask(Task(REFUSED[kind][0], items), "own")


@pytest.mark.parametrize(
    ("kind", "mode", "message"),
    [
        (torch.float16, "fp16", "weight float16 precision.mode=fp16"),
        (torch.float16, "fp32", ""),
        (torch.float8_e4m3fn, "fp32", "weight float8_e4m3fn"),
    ],
)
def test_weights_of_a_type_that_can_not_be_trained(kind: torch.dtype, mode: str, message: str) -> None:
    class Odd(Task):
        def model(self) -> nn.Module:
            return nn.Linear(4, 2, bias=False).to(kind)

        def loss(self, model: Any, batch: Any) -> Any:
            return (batch.fields["x"].to(model.weight.dtype) @ model.weight.T).float().square().sum(1)

    with refused(message) if message else contextlib.nullcontext():
        check_request(make_recipe(precision={"mode": mode}), CustomTask(Odd(np.ones(12)), "own"), 1)
