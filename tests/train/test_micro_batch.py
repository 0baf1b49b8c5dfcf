"""Promise: data.micro_batch_size=auto is the first of the halved sizes that fits; the global batch stays."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, strategies as st

from tests.helpers import preloaded
from tests.helpers.forked import small
from tests.helpers.refusals import named, refusal, refused
from tests.helpers.run_folders import manifest
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe
from trainer.data.sampling.plan import Plan
from trainer.launch.launcher import LocalRanks
from trainer.launch.signals import SignalReceiver
from trainer.train.start import job, micro_batch
from trainer.train.start.micro_batch import Interrupted, Trial, first_that_fits, micro_batch_sizes, run_trial

GIB = 1 << 30
SMALL = ("model.width=4", "data.limit=64", "parallel.threads=1", "max_steps=2", "device=cpu")
AUTO = "data.micro_batch_size=auto"


def test_sizes_keep_the_global_batch() -> None:
    def sizes(ranks: int = 1, **sections: Any) -> list[int]:
        return micro_batch_sizes(small(**sections), ranks)

    assert sizes(data={"global_batch_size": 60}) == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]
    assert sizes(3, data={"global_batch_size": 60}) == [1, 2, 4, 5, 10, 20]
    assert sizes(data={"global_batch_size": 60}, regularization={"mixup": 0.2})[0] == 2
    assert sizes(2, data={"global_batch_size": 48}, parallel={"reduction": "tree"}) == [3, 6, 12, 24]
    with refused("data.global_batch_size=60 7"):
        sizes(7, data={"global_batch_size": 60})


@given(st.integers(1, 96), st.sampled_from([1, 2, 3]), st.integers(1, 200))
def test_every_size_trains_the_same_samples_in_the_same_steps(each: int, ranks: int, samples: int) -> None:
    recipe = small(data={"global_batch_size": each * ranks})

    def steps(size: int) -> list[list[int]]:
        plan = Plan(samples, each * ranks, size, 2, "cross", seed=3)
        order = plan.read(np.arange(plan.steps * plan.micro_batches))
        return order.sample.reshape(plan.steps, -1).tolist()

    first, *others = (steps(size) for size in micro_batch_sizes(recipe, ranks))
    assert all(other == first for other in others)


def test_a_trial_has_the_steps_that_show_the_peak() -> None:
    def shape(size: int, **sections: Any) -> tuple[int, int, int]:
        recipe = Recipe.model_validate(micro_batch.trial_recipe(small(**sections), size, 2))
        assert recipe.max_steps is not None
        return recipe.data.micro_batch_size, recipe.data.global_batch_size, recipe.max_steps

    whole = {"global_batch_size": 64}
    assert shape(4, data=whole) == (4, 16, 2)  # two micro-batches on each of two ranks, with optimizer state
    assert shape(32, data=whole) == (32, 64, 2)  # which accumulates nothing
    assert shape(4, data=whole, parallel={"reduction": "tree"})[:2] == (4, 64)  # whose sums need the step
    assert shape(4, data=whole, compile={"mode": "max-autotune"})[2] >= 4
    values = micro_batch.trial_recipe(small(data={"last_batch": "drop"}), 8, 1)
    assert values["data"]["last_batch"] == "cross"  # the step of a trial may be larger than the data


def test_the_first_that_fits_is_taken_and_no_smaller_one_is_tried() -> None:
    tried = list[int]()

    def attempt(size: int) -> Trial:
        tried.append(size)
        return Trial(size <= 8, "planted")

    assert first_that_fits([64, 32, 16, 8, 4], attempt) == 8
    assert tried == [64, 32, 16, 8]
    with refused("data.micro_batch_size=16 planted"):
        first_that_fits([64, 32, 16], attempt)


@pytest.mark.parametrize(
    ("used", "fits"), [((15, 10), True), ((10, 15), True), ((15.2, 1), True), ((1, 15.3), False)]
)
def test_the_fullest_gpu_decides_with_five_percent_left(used: tuple[float, ...], fits: bool) -> None:
    assert micro_batch.judged([{"used": one * GIB, "total": 16 * GIB} for one in used]).fits is fits


ALONE = LocalRanks(1, 1, {"CUDA_VISIBLE_DEVICES": ""})


def attempted(folder: str, values: str) -> None:
    """A trial on CPUs; what it returns or raises is written to the folder."""
    recipe = Recipe.model_validate_json(values)
    with SignalReceiver() as receiver:
        try:
            told = run_trial(recipe, ALONE, recipe.data.micro_batch_size, receiver)._asdict()
        except Exception as error:
            told = {"error": str(error)}
    Path(folder, "told").write_text(json.dumps(told))


TASK = """
import torch
class Mine:
    def data(self): return ({"x": torch.ones(16, 2).numpy()},) * 2
    def model(self): return torch.nn.Linear(2, 1)
    def loss(self, model, batch):
        %s
    def measure(self, model, batch): return {"loss": model(batch.fields["x"]).sum(1)}
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")', "fits"),
        ('raise ZeroDivisionError("oh")', "error"),
    ],
)
def test_only_memory_makes_a_size_too_large(line: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TASK % line)
    recipe = load_recipe(str(file), ["device=cpu", "parallel.threads=1"])
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    preloaded.call(attempted, str(tmp_path), recipe.model_dump_json(), timeout=300, env=environment)
    assert not list((tmp_path / "tmp").glob("trainer-trial-*"))
    found = json.loads((tmp_path / "told").read_text())
    assert next(iter(found)) == told and not found.get("fits")
    assert named(str(found), "memory" if told == "fits" else "data.micro_batch_size=64 ZeroDivisionError")


def test_a_signal_ends_the_trial() -> None:
    with SignalReceiver() as receiver:
        receiver.received.append(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            run_trial(small(), ALONE, 8, receiver)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, here: Path) -> list[int]:  # noqa: ARG001
    """Sizes of which a trial was asked, of which 16 and less fit; the CPU passes for a GPU."""
    sizes = list[int]()

    def planted(_recipe: Recipe, _local: LocalRanks, size: int, _receiver: SignalReceiver) -> Trial:
        sizes.append(size)
        return Trial(size <= 16, "planted")

    on_gpus = lambda recipe, local: micro_batch.fitting_size(recipe, local._replace(gpus=local.ranks))  # noqa: E731
    monkeypatch.setattr(job, "fitting_size", on_gpus)
    monkeypatch.setattr(micro_batch, "run_trial", planted)
    return sizes


def size_of(run: Path | str) -> tuple[int, int]:
    """The micro-batch in the configuration and in the manifest of a run."""
    config = yaml.safe_load(Path(run, "config.yaml").read_text())
    return config["data"]["micro_batch_size"], manifest(run)["config"]["data"]["micro_batch_size"]


def test_what_was_found_stands_in_the_run_and_is_kept_on_resume(tried: list[int]) -> None:
    assert main(["train", "digits", *SMALL, AUTO, "--out", "run"]) == 0
    assert tried == [64, 32, 16] and size_of("run") == (16, 16)
    assert main(["train", "digits", *SMALL, AUTO, "max_steps=3", "--out", "run"]) == 0
    assert tried == [64, 32, 16] and size_of("run") == (16, 16)


def test_where_nothing_fits_no_folder_is_left(tried: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.global_batch_size=65536", "data.last_batch=weighted", "model.norm=group"]
    code = main(["train", "digits", *SMALL, *words, AUTO, "--out", "run"])
    refusal(code, capsys.readouterr().err, "data.micro_batch_size=512", folder=Path("run"))
    assert len(tried) == 8


def test_on_a_cpu_it_is_the_recipes_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("epochs: 1\ndata: {name: digits, global_batch_size: 96, micro_batch_size: 24}\n")
    assert main(["train", str(file), *SMALL, AUTO, "--out", str(tmp_path / "run")]) == 0
    assert size_of(tmp_path / "run") == (24, 24)
