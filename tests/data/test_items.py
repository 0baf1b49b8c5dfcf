"""Promise: any data set of torch's kind is read in the plan's order, to the same bits however it is read."""

import random
import re
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from tests.helpers.batches import frozen
from tests.helpers.refusals import refused
from tests.helpers.toys import build_alone, make_recipe
from trainer.config.recipe import Recipe
from trainer.config.user_file import run_file
from trainer.data.items import ItemDataset
from trainer.data.workers import check_importable
from trainer.errors import OwnCodeError
from trainer.host.limits import Limits
from trainer.tasks.custom import CustomTask
from trainer.train.components.loading import choose_loading


class Bad:
    def __init__(self, item: Callable[[int], Any], length: Any = 5) -> None:
        self.item, self.length = item, length

    def __getitem__(self, sample: int) -> Any:
        return self.item(sample)

    def __len__(self) -> int:
        return int(self.length)


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def points(count: int = 21) -> Bad:
    return Bad(lambda n: {"x": torch.full((3,), n) + torch.tensor(drawn()), "y": n % 2, "number": n}, count)


class Task:
    def data(self) -> Any:
        return points(), points(10)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch.fields["x"]), batch.fields["y"], reduction="none")

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": F.cross_entropy(model(batch.fields["x"]), batch.fields["y"], reduction="none")}


def task_of(**methods: Any) -> CustomTask:
    return CustomTask(type("Mine", (Task,), methods)(), "mine")


def recipe_of(**data: Any) -> Recipe:
    sizes: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2, "eval_batch_size": 4}
    sizes |= {"start_method": "fork"}  # other tests may have left threads, and these classes can't be sent
    parallel = {"threads": 1, "reduction": "tree"}
    return make_recipe(epochs=3, task="own", data={**sizes, **data}, parallel=parallel)


def batches_of(workers: int, first: int = 0, **methods: Any) -> list[list[bytes]]:
    with closing(build_alone(recipe_of(workers=workers), task_of(**methods))) as run:
        held = run.evaluation_loader(run.evaluation_share.batches())
        return [*map(frozen, run.loader(run.share.batches()[first:])), *map(frozen, held)]


def flip(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"] * (1 if random.random() < 0.5 else -1)}


def widened(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "wide": np.tile(sample["x"], 2) + np.random.normal()}


ARRAYS = {"x": np.arange(63, dtype=np.float32).reshape(21, 3), "y": np.arange(21) % 2}
KINDS: dict[str, dict[str, Any]] = {
    "items": {"transforms": lambda _: flip, "collate": lambda _, items: default_collate(items)},
    "arrays": {"data": lambda _: (ARRAYS, ARRAYS), "transforms": lambda _: [flip, widened]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_the_place_to_begin_change_no_bit(kind: str) -> None:
    whole = batches_of(0, **KINDS[kind])
    torch.manual_seed(5)  # whatever was drawn before
    random.seed(1)
    np.random.seed(2)
    assert batches_of(2, **KINDS[kind]) == whole
    assert batches_of(0, 5, **KINDS[kind]) == whole[5:]


def test_reading_without_workers_leaves_the_generators_as_they_are() -> None:
    run = build_alone(recipe_of(workers=0), task_of())
    found = []
    for numbers in (run.share.batches(), range(0)):
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        list(run.loader(numbers))
        found.append(drawn())
    assert found[0] == found[1]


def test_each_sample_and_each_epoch_draws_otherwise_and_the_evaluation_alike() -> None:
    run = build_alone(recipe_of(workers=0), task_of())
    drawn: dict[int, set[tuple[float, ...]]] = {}
    for batch in run.loader(run.share.batches()):
        for x, number in zip(batch.fields["x"], batch.fields["number"], strict=True):
            drawn.setdefault(int(number), set()).add(tuple((x - number).tolist()))
    assert sorted(drawn) == list(range(21))
    assert all(len(noises) >= 2 for noises in drawn.values())
    assert all(len({round(v, 4) for v in noise}) == 3 for noises in drawn.values() for noise in noises)
    assert len({noise for noises in drawn.values() for noise in noises}) == sum(map(len, drawn.values()))
    held = run.evaluation_share.batches()
    once, again = ([b.fields["x"].clone() for b in run.evaluation_loader(held)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_tuples_are_fields_by_number_and_a_fingerprint_tells_data_apart() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    one = ItemDataset(TensorDataset(x, torch.arange(4)), "training")
    fields = {name: (field.shape, str(field.dtype)) for name, field in one.fields.items()}
    assert fields == {"0": ((2,), "float32"), "1": ((), "int64")}
    part = Subset(TensorDataset(x, torch.arange(4)), range(4))
    assert ItemDataset(part, "training").fingerprint() == one.fingerprint()
    assert ItemDataset(TensorDataset(x + 1, torch.arange(4)), "training").fingerprint() != one.fingerprint()


class NoLength(torch.utils.data.Dataset[Any]):
    def __getitem__(self, sample: int) -> Any:
        return {"x": np.zeros(3)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ()


def broken(sample: int) -> Any:
    raise OSError(f"no file {sample}.png")


PLACE = f"tests/data/test_items.py:{broken.__code__.co_firstlineno + 1}"
FRESH = np.random.default_rng(0)


def data_of(item: Callable[[int], Any], length: Any = 5) -> dict[str, Any]:
    return {"data": lambda _: (Bad(item, length), points())}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data": lambda _: (NoLength(), points())}, "training NoLength __len__"),
    ({"data": lambda _: (points(), Stream())}, "evaluation Stream IterableDataset"),
    (data_of(lambda i: {"x": i}, 0), "training Bad samples"),
    (data_of(broken), f"training Bad[0]: {PLACE} __getitem__ OSError: 0.png"),
    (data_of(lambda i: {"x": np.float32(i) if i else i}), "'x' float32 4 int64"),
    (data_of(lambda i: {"x": np.zeros(3 + i)}), "'x' (1, 7) (n, 3)"),
    (data_of(lambda i: {"x": i, **({"z": 1} if i else {})}), "Bad x, z"),
    (data_of(lambda _: {"x": "a"}), "'x' <U1 0"),
    (data_of(lambda _: {"y": 0, "x": torch.zeros(2, dtype=torch.bfloat16)}), "'x' Tensor BFloat16 0"),
    (data_of(lambda _: {"y": 0, "x": [[1], [1, 2]]}), "'x' list 0"),
    (data_of(lambda _: "a"), "str dict 0"),
    (data_of(lambda _: {"x": FRESH.random()}), "'x' second"),
    ({"collate": lambda *_: {"x": torch.zeros(3)}}, "collate 'x' (3,) 1"),
    ({"collate": lambda *_: {}}, "collate"),
    ({"transforms": lambda _: 3}, "transforms int"),
    ({"transforms": lambda _: [lambda _: 1 / 0]}, "transforms ZeroDivisionError"),
]


@pytest.mark.parametrize(("methods", "names"), WRONG)
def test_what_is_wrong_is_said(methods: dict[str, Any], names: str) -> None:
    with refused(names):
        task_of(**methods)


def test_what_is_raised_in_the_middle_has_its_place_and_traceback_without_workers_too() -> None:
    items = Bad(lambda i: broken(i) if i == 3 else {"x": np.zeros(3, np.float32), "y": 0}, 8)
    run = build_alone(recipe_of(workers=0), task_of(data=lambda _: (items, items)))
    line = f"training data: Bad[3]: in {PLACE} (__getitem__): OSError: no file 3.png"
    with pytest.raises(OwnCodeError, match=re.escape(line)) as raised:
        list(run.loader(run.share.batches()))
    frames = [frame for frame in raised.value.trace.splitlines() if frame.startswith("  File ")]
    assert [frame.rpartition(" in ")[2] for frame in frames] == ["__getitem__", "<lambda>", "broken"]


def test_a_file_that_would_shadow_a_module_in_a_worker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(sample):\n    return sample")
    dataset: Any = task_of(transforms=lambda _: run_file(tmp_path / "mine.py").mine).train_data
    check_importable(dataset, "spawn")
    (tmp_path / "antigravity.py").touch()  # nobody imports that
    check_importable(dataset, "spawn")
    (tmp_path / "queue.py").touch()
    check_importable(dataset, "fork")
    with refused("data.start_method=spawn", tmp_path / "queue.py"):
        check_importable(dataset, "spawn")


def test_by_default_there_are_no_workers_that_could_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "mine.v2.py").write_text("def mine(sample):\n    return sample")
    mine, limits = run_file(tmp_path / "mine.v2.py").mine, Limits(8, 1 << 36, 1 << 30, None)
    for keys in ({}, {"start_method": "fork"}, {"workers": 2}):
        task = task_of(transforms=lambda _: mine)
        chosen = choose_loading(recipe_of(**{"start_method": "spawn", **keys}), task, limits, 1)
        assert (chosen.setting.workers > 0, "mine" in chosen.line) == (bool(keys), not keys), keys
    with refused("data.start_method=spawn mine"):
        build_alone(recipe_of(start_method="spawn"), task_of(transforms=lambda _: mine), workers=1)


@pytest.mark.parametrize(("guard", "line"), [("", 2), ("if __name__ == '__main__':", None)])
def test_a_script_that_a_worker_would_run_again_is_refused(
    guard: str, line: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, main = tmp_path / "script.py", ModuleType("__main__")
    script.write_text(f"{guard}\n{'    ' * bool(guard)}check()")
    vars(main).update(__file__=str(script), check=lambda: check_importable(task_of().train_data, "spawn"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    with nullcontext() if line is None else refused(f"data.start_method=spawn {line}"):
        exec(compile(script.read_text(), script, "exec"), vars(main))
