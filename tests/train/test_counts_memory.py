"""Promise: a step leaves nothing of Python's behind; a sample is moved once, as bytes."""

import gc
import sys
import tracemalloc
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.counting import counting, of, skip_with_another_torch, tiny_steps
from tests.helpers.toys import build_alone
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.train.components.task import make_task
from trainer.train.state import Run
from trainer.train.step import train_step

# Bytes that operators copy in a step of the digits recipe, besides those of its batch: pixels to floats
# (16,384), the grid of the augmentation (32,768), and 2,644 of norms, the rate, BatchNorm's statistics and
# how often its layers ran.
COPIED_BY_DIGITS = 51_796


def test_nothing_of_pythons_grows_from_step_to_step(tmp_path: Path) -> None:
    """Bytes of Python's own memory after 350, 450, … steps, with no row of metrics between."""
    looks = range(350, 1000, 100)
    kept = array("q", [0] * len(looks))  # so that what is found takes no memory of its own

    def done(step: int) -> None:
        if step == 300:
            gc.collect()
            gc.freeze()  # what is there already needn't be looked through each time
            tracemalloc.start()
        if step in looks:
            gc.collect()
            forget_names()
            kept[looks.index(step)] = tracemalloc.get_traced_memory()[0]

    try:
        tiny_steps(tmp_path, looks[-1] + 1, done, log_every=1000)
    finally:
        tracemalloc.stop()
    assert all(kept), "not every look was taken"
    growth = np.diff(np.array(kept))
    # A list that gets None in each step would take 800 bytes more each time. The median, because another
    # thread may keep something, once.
    assert abs(np.median(growth)) < 200, growth


def forget_names() -> None:
    """Empties the interpreter's table of attributes: it holds names that C++ made anew for each look-up."""
    getattr(sys, "_clear_internal_caches" if sys.version_info >= (3, 13) else "_clear_type_cache")()


def digits(*settings: str) -> Run:
    words = ["model.width=8", "data.workers=0", "parallel.threads=1", *settings]
    recipe = validated(Recipe, override(read_recipe("digits"), words), "digits")
    return build_alone(recipe, make_task(recipe))


@pytest.mark.parametrize("resident", [True, False])
def test_the_bytes_that_a_step_of_the_digits_copies(resident: bool) -> None:
    run = digits(f"data.resident={resident}")
    run.replica.train()
    batches = run.loader(run.share.batches())
    steps = []
    for step in range(6):
        with counting(seen := Counter[str]()):
            train_step(run, batches, step)
        steps.append(seen)
    assert steps[1:] == steps[1:2] * 5
    assert not of(steps[1], "waits")
    copied = of(steps[1], "copied")
    batch = (64 * 8 * 8 + 64 * 8) if resident else 0  # images and labels, gathered; or they lie in the ring
    assert copied.get("copied aten.index_select.default", 0) == batch
    floats = sum(copied.get(f"copied aten.{name}.default", 0) for name in ("_to_copy", "copy_"))
    assert 4 * 64 * 8 * 8 <= floats < 2 * 4 * 64 * 8 * 8  # to float32, once
    skip_with_another_torch()
    assert sum(copied.values()) == COPIED_BY_DIGITS + batch, copied
