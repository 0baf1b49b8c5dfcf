"""Promise: behind S3 the batches are the same, and with a small cache a shard comes once an epoch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.batches import CPU, frozen
from tests.helpers.remote import S3, asked_for, files_below, wait_until_answered, write_pack
from trainer.config.data import DataConfig, LoaderConfig
from trainer.config.recipe import Recipe
from trainer.data.corrupt import Quarantine
from trainer.data.formats.sharded import About
from trainer.data.loader import RingLoader, Source
from trainer.data.sampling.plan import Plan, Share
from trainer.data.sources import load_images, order_of
from trainer.errors import BadInputError
from trainer.host import files as disk
from trainer.train.components.task import data_of, make_plan, make_task

SHARDS = [8] * 4
MORE = [8] * 8


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    write_pack(folder / "train", SHARDS)
    write_pack(folder / "val", [4, 2], seed=1)
    return folder


@pytest.fixture(scope="module")
def about(pack: Path) -> About:
    return About.model_validate_json((pack / "train" / "index.json").read_bytes())


@pytest.fixture(scope="module")
def started(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    more = tmp_path_factory.mktemp("more")
    write_pack(more / "train", MORE)
    write_pack(more / "val", [4], seed=1)
    folders = {"some/where": pack, "some/more": more}
    server = S3(
        {f"{at}/{name}": data for at, folder in folders.items() for name, data in files_below(folder).items()}
    )
    yield server
    server.close()


@pytest.fixture
def s3(started: S3) -> S3:
    started.app.asked.clear()
    return started


def config(**changes: Any) -> DataConfig:
    return DataConfig.model_validate({"name": "pack", "image_size": 8, "micro_batch_size": 4, **changes})


def remote(s3: S3, folder: Path, at: str = "where", **changes: Any) -> DataConfig:
    return config(path=f"{s3.url}/some/{at}/", cache=folder, **changes)


def batches(what: DataConfig, workers: int, method: Any = "fork", epochs: int = 3) -> Iterator[list[bytes]]:
    data = load_images(what, 0).train
    shards, shards_per_block = order_of(data)
    plan = Plan(len(data), 8, 4, epochs, "cross", seed=5, shards=shards, shards_per_block=shards_per_block)
    wait_until_answered()
    loading = LoaderConfig(start_method=method, prefetch=2)
    loader = RingLoader(Source(data, Share(plan), 4), CPU, workers, loading, Quarantine("training", 0))
    try:
        for batch in loader(Share(plan).batches()):
            yield frozen(batch)
    finally:
        loader.close()


@pytest.mark.parametrize(("workers", "method"), [(0, "fork"), (2, "fork")])
def test_batches_are_those_of_the_local_folder(
    s3: S3, pack: Path, about: About, tmp_path: Path, workers: int, method: str
) -> None:
    epochs = 1 if method == "spawn" else 2
    expected = list(batches(config(path=pack), 0, epochs=epochs))
    assert list(batches(remote(s3, tmp_path, cache_limit="1MB"), workers, method, epochs)) == expected
    assert asked_for(s3.app, about) == [1] * len(SHARDS)
    list(batches(remote(s3, tmp_path), 0, epochs=1))
    assert asked_for(s3.app, about) == [1] * len(SHARDS)


def limit_for(about: About, shards_per_block: int) -> int:
    return 2 * shards_per_block * max(shard.bytes for shard in about.shards)


def test_with_a_small_cache_each_shard_comes_once_an_epoch(s3: S3, tmp_path: Path) -> None:
    epochs, shards_per_block = 3, 2
    about = write_pack(tmp_path / "the same", MORE)
    limit = limit_for(about, shards_per_block)
    what = remote(s3, tmp_path, "more", cache_limit=f"{limit}B")
    assert order_of(load_images(what, 0).train) == (tuple(MORE), shards_per_block)
    largest = 0
    for _ in batches(what, 2, epochs=epochs):
        with disk.locked(tmp_path / "trainer-cache.lock"):  # nobody makes room while this counts
            largest = max(largest, sum(path.stat().st_size for path in tmp_path.glob("*.shard")))
    asked = asked_for(s3.app, about)
    assert max(asked) <= epochs
    # At each border between epochs some of the last two blocks' shards may still be there.
    assert epochs * len(MORE) - 2 * shards_per_block * (epochs - 1) <= sum(asked) <= epochs * len(MORE)
    assert limit / 2 < largest <= limit


def test_a_limit_below_two_shards_names_the_smallest(s3: S3, about: About, tmp_path: Path) -> None:
    smallest = limit_for(about, 1)
    with pytest.raises(BadInputError, match=f"={smallest - 1}B is too low: .* set {smallest}B"):
        load_images(remote(s3, tmp_path, cache_limit=f"{smallest - 1}B"), 0)
    load_images(remote(s3, tmp_path, cache_limit=f"{smallest}B"), 0)


def recipe(data: DataConfig) -> Recipe:
    return Recipe.model_validate({"epochs": 2, "data": data.model_dump()})


def test_a_run_tells_its_order_so_that_a_resume_with_another_is_refused(
    s3: S3, pack: Path, about: About, tmp_path: Path
) -> None:
    orders = []
    for data in (
        config(path=pack),
        remote(s3, tmp_path),
        remote(s3, tmp_path, cache_limit="1GB"),
        remote(s3, tmp_path, cache_limit=f"{limit_for(about, 2)}B"),
    ):
        task = make_task(recipe(data))
        orders.append(data_of(recipe(data), task))
        assert bool(make_plan(recipe(data), task).shards_per_block) == ("shards" in orders[-1]["order"])
    assert orders[0] == orders[1] == orders[2]
    assert orders[3] == {**orders[0], "order": "shuffled in blocks of 2 shards"}
