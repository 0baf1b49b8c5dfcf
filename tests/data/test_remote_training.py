"""Promise: from a server the batches are the same, and with a small cache a shard comes once an epoch."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.batches import CPU, FORK, frozen
from tests.helpers.refusals import refused
from tests.helpers.remote import Web, asked_for, files_below, wait_until_answered, write_pack
from trainer.config.data import DataConfig
from trainer.config.recipe import Recipe
from trainer.data.corrupt import Quarantine
from trainer.data.formats.sharded import About
from trainer.data.loader import RingLoader, Source
from trainer.data.sampling.plan import Plan, Share
from trainer.data.sources import load_images, order_of
from trainer.host import files as disk
from trainer.train.components.task import data_of, make_plan, make_task

SHARDS = [8] * 8


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    write_pack(folder / "train", SHARDS)
    write_pack(folder / "val", [4, 2], seed=1)
    return folder


@pytest.fixture(scope="module")
def about(pack: Path) -> About:
    return About.model_validate_json((pack / "train" / "index.json").read_bytes())


@pytest.fixture
def web(pack: Path) -> Iterator[Web]:
    with closing(Web({f"some/where/{name}": data for name, data in files_below(pack).items()})) as server:
        yield server


def config(path: object, **changes: Any) -> DataConfig:
    sizes = {"image_size": 8, "global_batch_size": 8, "micro_batch_size": 4}
    return DataConfig.model_validate({"name": "pack", "path": path, **sizes, **changes})


def remote(web: Web, folder: Path, **changes: Any) -> DataConfig:
    return config(f"{web.url}/some/where/", cache=folder, **changes)


def batches(what: DataConfig, workers: int, epochs: int = 2) -> Iterator[list[bytes]]:
    data = load_images(what, 0).train
    shards, shards_per_block = order_of(data)
    plan = Plan(len(data), 8, 4, epochs, "cross", seed=5, shards=shards, shards_per_block=shards_per_block)
    wait_until_answered()
    source = Source(data, Share(plan), 4)
    near = FORK.model_copy(update={"prefetch": 1})  # no worker is a block ahead of another, however slow
    with closing(RingLoader(source, CPU, workers, near, Quarantine("training", 0))) as loader:
        yield from map(frozen, loader(Share(plan).batches()))


def test_batches_are_those_of_the_local_folder(web: Web, pack: Path, about: About, tmp_path: Path) -> None:
    expected = list(batches(config(pack), 0))
    for workers in (2, 0):
        assert list(batches(remote(web, tmp_path, cache_limit="1MB"), workers)) == expected
        assert asked_for(web.app, about) == [1] * len(SHARDS)


def limit_for(about: About, shards_per_block: int) -> int:
    return 2 * shards_per_block * max(shard.bytes for shard in about.shards)


def test_with_a_small_cache_each_shard_comes_once_an_epoch(web: Web, about: About, tmp_path: Path) -> None:
    epochs, shards_per_block, largest = 3, 2, 0
    limit = limit_for(about, shards_per_block)
    for _ in batches(remote(web, tmp_path, cache_limit=f"{limit}B"), 2, epochs):
        with disk.locked(tmp_path / "trainer-cache.lock"):  # nobody makes room while this counts
            largest = max(largest, sum(path.stat().st_size for path in tmp_path.glob("*.shard")))
    asked = asked_for(web.app, about)
    assert max(asked) <= epochs
    # At each border between epochs some of the last two blocks' shards may still be there.
    whole = epochs * len(SHARDS)
    assert whole - 2 * shards_per_block * (epochs - 1) <= sum(asked) <= whole
    assert limit / 2 < largest <= limit


def test_a_limit_below_two_shards_names_the_smallest(web: Web, about: About, tmp_path: Path) -> None:
    smallest = limit_for(about, 1)
    with refused(f"data.cache_limit={smallest - 1}B {smallest}B"):
        load_images(remote(web, tmp_path, cache_limit=f"{smallest - 1}B"), 0)
    load_images(remote(web, tmp_path, cache_limit=f"{smallest}B"), 0)


def test_a_resume_with_another_order_is_refused(web: Web, pack: Path, about: About, tmp_path: Path) -> None:
    orders = []
    limits = "1GB", f"{limit_for(about, 2)}B"
    for data in (config(pack), *(remote(web, tmp_path, cache_limit=limit) for limit in limits)):
        recipe = Recipe.model_validate({"epochs": 2, "data": data.model_dump()})
        task = make_task(recipe)
        orders.append(data_of(recipe, task))
        assert bool(make_plan(recipe, task).shards_per_block) == ("shards" in orders[-1]["order"])
    assert orders[0] == orders[1]
    assert orders[2].keys() == orders[0].keys() and orders[2]["order"] != orders[0]["order"]
    assert "2" in orders[2]["order"]
