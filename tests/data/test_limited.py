"""Promise: data.limit trains and measures on a few evenly spaced samples of any data, always the same."""

import numpy as np
import pytest

from trainer.config.recipe_file import load_recipe
from trainer.data.corrupt import Bad
from trainer.data.dataset import ArrayDataset
from trainer.data.limited import LimitedDataset, limited
from trainer.train.run import check_request, data_of, make_plan, make_task


class Corrupt(ArrayDataset):
    """Of which a sample can't be decoded."""

    def read(self, samples, random, out):  # type: ignore[no-untyped-def]
        """As that, and says so."""
        super().read(samples, random, out)
        return [Bad(9, "there", "why")]


def test_it_reads_evenly_spaced_samples_and_numbers_them_anew() -> None:
    few = LimitedDataset(Corrupt({"x": np.arange(10)}), 4)
    out = {"x": np.zeros(2, np.int64)}
    assert [bad.sample for bad in few.read(np.array([0, 3]), None, out)] == [3]
    assert out["x"].tolist() == [0, 9]
    assert few.arrays is not None and few.arrays["x"].tolist() == [0, 3, 6, 9]


def test_no_more_than_there_is() -> None:
    whole = ArrayDataset({"x": np.arange(10)})
    assert limited(whole, 10) is whole
    assert limited(whole, None) is whole
    assert len(limited(whole, 9)) == 9
    assert limited(whole, 9).fingerprint() != whole.fingerprint()


@pytest.mark.parametrize("recipe", ["digits", "dtmf", "gpt-stdlib language.text=padded"])
def test_of_every_task(recipe: str) -> None:
    name, *more = recipe.split()
    few = [*more, "data.limit=10", "data.global_batch_size=4", "data.micro_batch_size=4"]
    one = load_recipe(name, few)
    task = make_task(one)
    assert (len(task.train_data), len(task.evaluation_data)) == (10, 10)
    assert sum(make_plan(one, task).buckets) in (0, 10)
    check_request(one, task, 1)
    other = make_task(load_recipe(name, [*few, "data.limit=9"]))
    assert data_of(task)["training data"] != data_of(other)["training data"]
