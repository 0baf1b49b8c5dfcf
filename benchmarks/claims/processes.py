"""Ablations of whole processes: allocators, CPU binding, a GPU's utilization; and a fact of the recipes."""

from collections.abc import Sequence
from functools import partial

from benchmarks import whole_runs
from benchmarks.claims.claim import Series
from benchmarks.claims.loading import photographs
from benchmarks.claims.measuring import Ablation, Measurement, Size
from benchmarks.claims.needs import library
from benchmarks.claims.training import IMAGES
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import read_recipe, recipe_names
from trainer.config.section import validated
from trainer.errors import BadInputError

_STEPS = 60
_ROUNDS = 6  # of whole processes, each of which imports torch
_UTILIZED = (
    "data.global_batch_size=64 data.micro_batch_size=64 data.eval_batch_size=8 compile.mode=default "
    "log.every=20 max_steps=200 epochs=1000000 evaluation.every=end optim.schedule=constant"
)


def _runs(sides: dict[str, tuple[str, ...]], wanted: Sequence[str], size: Size) -> Measurement:  # noqa: ARG001
    """Runs in processes of their own, in turn: their training's time, and what they reserved on a GPU."""
    length = ("epochs=1000000000", f"max_steps={_STEPS}", "evaluation.every=end", "checkpoint.minutes=0")
    names = [name for name in sides if name in wanted]
    found: dict[str, list[whole_runs.Figures]] = {name: [] for name in names}
    for number in range(_ROUNDS):
        for offset in range(len(names)):
            name = names[(number + offset) % len(names)]
            settings = [*IMAGES.settings, *length, *sides[name]]
            found[name].append(whole_runs.run(IMAGES.recipe, settings))
    times = {name: [1e6 / one.samples_per_s for one in runs] for name, runs in found.items()}
    series = {"time": Series(times, "us an image")}
    if all("reserved" in one.memory for runs in found.values() for one in runs):
        most = {name: [max(one.memory["reserved"] for one in runs)] for name, runs in found.items()}
        series["reserved"] = Series(most, "GiB", counted=True)
    return Measurement(f"whole runs of {_STEPS} steps: {IMAGES}", series)


def _preloaded(name: str, wanted: Sequence[str], size: Size) -> Measurement:
    found = library(name) or library(f"{name}_minimal")
    return _runs({"malloc": (), name: (f"env:LD_PRELOAD={found}",)}, wanted, size)


def _utilization(wanted: Sequence[str], size: Size) -> Measurement:  # noqa: ARG001
    """Measures the fraction of a run's time on photographs in which the GPU was idle."""
    settings = ["data.name=folder", f"data.path={photographs(size)}", *_UTILIZED.split()]
    rows = [row for row in whole_runs.rows_of("resnet50-imagenet", settings) if row["kind"] == "train"]
    busy = [row["gpu/utilization"] for row in rows if "gpu/utilization" in row][1:]
    if not busy:
        raise BadInputError("no row says how busy the GPU was: its driver doesn't tell")
    series = Series({"all of it": [1.0] * len(busy), "idle": [1 - share for share in busy]}, "of the time")
    return Measurement(f"resnet50-imagenet on {size.images} photographs, bf16, compiled", {"time": series})


def _managed(wanted: Sequence[str], size: Size) -> Measurement:  # noqa: ARG001
    """Counts the recipes that use another GPU allocator than PyTorch's by default."""
    recipes = [validated(Recipe, read_recipe(name), name) for name in recipe_names()]
    managed = sum(recipe.memory.allocator != "native" for recipe in recipes)
    series = Series({"recipes": [len(recipes)], "managed": [managed]}, "recipes", counted=True)
    return Measurement("memory.allocator of every recipe as it is", {"count": series})


_ALLOCATORS: dict[str, tuple[str, ...]] = {
    "native": (),
    "expandable": ("memory.allocator=expandable",),
    "async": ("memory.allocator=async",),
}
_BINDINGS: dict[str, tuple[str, ...]] = {
    "none": ("parallel.cpu_binding=none",),
    "node": ("parallel.cpu_binding=node",),
}
PROCESSES = {
    "managed": Ablation(_managed, seconds=1.0),
    "allocators": Ablation(partial(_runs, _ALLOCATORS), ("cuda",), 270.0, quick=False),
    "jemalloc": Ablation(partial(_preloaded, "jemalloc"), ("jemalloc",), 100.0, quick=False),
    "tcmalloc": Ablation(partial(_preloaded, "tcmalloc"), ("tcmalloc",), 100.0, quick=False),
    "numa": Ablation(partial(_runs, _BINDINGS), ("NUMA",), 100.0, quick=False),
    "utilization": Ablation(_utilization, ("cuda", "16 CPUs", "photographs"), 60.0, quick=False),
}
