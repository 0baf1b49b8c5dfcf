"""Promise: data.class_weights draws as torch's WeightedRandomSampler does, and each draw can be looked up."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, WeightedRandomSampler

from tests.helpers.refusals import named, refused
from tests.helpers.small_task import Small
from tests.helpers.toys import make_recipe
from trainer.commands.check.order import odd_order
from trainer.config.recipe_file import load_recipe
from trainer.data.dataset import ArrayDataset, limited
from trainer.data.items import ArrayItems, ItemDataset
from trainer.data.loader import Source
from trainer.data.sampling.class_order import ClassDraws, weigh
from trainer.data.sampling.plan import Plan, Share, evaluation_share
from trainer.rng import Ints
from trainer.tasks.custom import CustomTask
from trainer.train.components.task import check_request, data_of, draws_of, make_plan, make_task

LABELS = np.repeat([2, 0, 1], [30, 60, 10])  # not in the order of their numbers
WEIGHTS = {"a": 1.0, "b": 4.5, "c": 0.5}


def draws(weights: Any = WEIGHTS) -> ClassDraws:
    return weigh(LABELS, ("a", "b", "c"), weights, len(LABELS))


def drawn(weights: Any = WEIGHTS) -> Ints:
    order = Plan(len(LABELS), 12, 3, 400, "cross", 3, draws=draws(weights))
    return order.read(np.arange(order.steps * order.micro_batches)).sample.reshape(-1)


@pytest.mark.parametrize("weights", [WEIGHTS, "balanced", {"b": 0}, {"a": 0, "c": 2}])
def test_the_chances_are_those_of_a_weight_for_each_sample(weights: Any) -> None:
    counts = {"a": 60, "b": 10, "c": 30}
    balanced = {name: Fraction(1, count) for name, count in counts.items()}
    given = balanced if weights == "balanced" else weights
    each = [Fraction(given.get(name, 1)) * count for name, count in counts.items()]
    found = draws(weights)
    assert found.chances.tolist() == pytest.approx([float(one / sum(each)) for one in each], abs=1e-15)
    assert found.counts.tolist() == [60, 10, 30]
    assert LABELS[found.by_class].tolist() == sorted(LABELS.tolist())


@pytest.mark.xdist_group("scipy")
@pytest.mark.parametrize("weights", ["balanced", {"b": 0, "c": 4.5}])
def test_samples_come_as_often_as_from_torchs_sampler(weights: Any) -> None:
    """Pearson's chi-squared: against the law, and against as many draws of torch's; each sample by itself."""
    from scipy import stats

    found = draws(weights)
    chance = (found.chances / found.counts)[LABELS]
    counts = np.bincount(drawn(weights)[:40_000], minlength=100)
    torchs = WeightedRandomSampler(chance.tolist(), 40_000, generator=torch.Generator().manual_seed(1))
    theirs, there = np.bincount(list(torchs), minlength=100), chance > 0
    assert counts.sum() == theirs.sum() == 40_000 and not counts[~there].any()
    for one in (counts, theirs):
        assert stats.chisquare(one[there], 40_000 * chance[there]).pvalue > 0.001
    assert stats.chi2_contingency([counts[there], theirs[there]]).pvalue > 0.001


@pytest.mark.compat
def test_the_draws_never_change_between_versions() -> None:
    assert drawn()[:12].tolist() == [61, 65, 68, 80, 93, 65, 11, 93, 53, 37, 87, 99]


def test_a_sample_that_comes_twice_in_an_epoch_is_augmented_anew() -> None:
    dataset = ArrayDataset({"label": np.zeros(2, np.int64)})
    order = Plan(2, 8, 8, 4, "cross", 0, draws=weigh(np.array([0, 1]), (), {"1": 0}, 2))
    sample, extras = Source(dataset, Share(order), uniforms=2).extras(np.arange(1))
    assert not sample.any() and len({tuple(one) for one in extras["\0uniform"][0].tolist()}) == 8


def test_data_sets_of_torch_have_them_by_the_names_of_torchvision() -> None:
    def labels(data: Any) -> Any:
        found = ItemDataset(data, "training").labels
        return found if found is None else np.asarray(found).tolist()

    pairs: Any = TensorDataset(torch.zeros(4, 2), torch.tensor([3, 1, 1, 0]))
    assert labels(pairs) is None
    pairs.targets = [3, 1, 1, 0]
    assert labels(pairs) == [3, 1, 1, 0]
    assert labels(ConcatDataset([Subset(pairs, [0, 3]), Subset(Subset(pairs, [1, 2]), [0])])) == [3, 0, 1]
    pairs.targets, pairs.labels = None, torch.tensor([1, 0, 2, 2])
    assert labels(pairs) == [1, 0, 2, 2]
    assert labels(ArrayItems({"label": np.array([1, 2])})) == [1, 2]
    for pairs.labels in (["cat", "dog"], [np.ones(1), np.ones(2), 1, 1], 4):
        with refused("data.class_weights", "TensorDataset", "4"):
            labels(Subset(pairs, [3]))


@pytest.mark.parametrize(
    ("name", "weights", "names"),
    [
        ("gpt-stdlib", "balanced", "data.class_weights"),
        ("digits", "{x: 2}", "'x' 0, 1, 2, 3"),
        ("digits", str(dict.fromkeys(range(10), 0)), "data.class_weights"),
        ("digits", "{3: -1}", "balanced 3: -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(name: str, weights: str, names: str) -> None:
    with refused(names):
        recipe = load_recipe(name, [f"data.class_weights={weights}"])
        check_request(recipe, make_task(recipe), 1)


def test_odd_labels_are_refused() -> None:
    for labels, names in (([0.0, 1.0], "float64"), ([0, -1], "-1"), ([[0, 1]], "(1, 2) 2"), ([0, 3], "3 2")):
        with refused(names):
            weigh(np.array(labels), ("a", "b"), "balanced", 2)
    few: Any = limited(type("Few", (ArrayDataset,), {"labels": [0, 1]})({"x": np.zeros(4)}), 3)
    with refused("(2,) 3"):
        weigh(few.labels, (), "balanced", 3)


def test_a_number_of_classes_is_no_list_of_their_names() -> None:
    part = {**Small().data()[0], "label": np.arange(10) % 2}
    own = type("Mine", (Small,), {"data": lambda _: (part, part), "describe": lambda _: {"classes": 2}})()
    found = draws_of(make_recipe(data={"class_weights": {"1": 3}}), CustomTask(own, "mine"))
    assert isinstance(found, ClassDraws) and found.chances.tolist() == [0.25, 0.75]


def test_it_is_told_and_evaluation_and_fingerprints_know_it() -> None:
    weights = "data.class_weights={3: 5}", "data.class_weights={3: 6}", "data.class_weights={}"
    recipe, *others = (load_recipe("digits", ["data.limit=200", one]) for one in weights)
    task = make_task(recipe)
    plan = make_plan(recipe, task)
    assert plan.draws and named(plan.draws.told(), "data.class_weights: 200 3") and not odd_order(plan)
    assert len({data_of(one, task)["order"] for one in (recipe, *others)}) == 3
    assert evaluation_share(len(task.evaluation_data), 64, 0, 1).plan.draws is None
