"""Histories of sharded runs that are cut again and again; for `make chaos`.

On the same ranks each must end with the bits of the run that nobody disturbed, in every rank's part of the
last checkpoint as well. Where the number of ranks or the strategy changes sums have another order: then the
weights must be close.
"""

import hashlib
import itertools
import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch

from tests import chaos
from tests.helpers import topologies
from tests.helpers.late import import_late
from trainer.config.recipe import Recipe
from trainer.distributed import consensus

_MOST_CUTS = 12
_MOST_CHANGES = 4
TOLERANCE = 1e-5  # of the largest weight of a tensor
_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STRATEGIES: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"strategy": "fsdp"}),
    (4, {"strategy": "fsdp"}),
    (4, {"strategy": "hsdp", "shard": 2}),
)
_CHANGING: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (2, {}),
    (4, {}),
    (1, {"strategy": "fsdp"}),
    *_STRATEGIES,
)


def kinds() -> list[tuple[int, dict[str, Any]]]:
    """Numbers of ranks and recipes, as those of `chaos.kinds` with what goes with sharding."""
    found = []
    for number, kind in enumerate(chaos.kinds()):
        size, parallel = _STRATEGIES[number % len(_STRATEGIES)]
        changed = {"gradient_accumulation_steps": size << number % 2, "channels_last": False}
        optim = "adamw" if kind["optim"] == "muon" else kind["optim"]
        found.append((size, {**kind, **changed, "optim": optim, "parallel": parallel}))
    return found


def recipe_of(kind: dict[str, Any]) -> Recipe:
    """Returns the recipe of `chaos.recipe_of`, sharded."""
    return _on(chaos.recipe_of(kind), kind["parallel"])


def _on(recipe: Recipe, parallel: dict[str, Any]) -> Recipe:
    values = recipe.model_dump(mode="json")
    return Recipe.model_validate({**values, "parallel": {"threads": 1, "hang_s": 0, **parallel}})


def parts_of(folder: Path) -> str:
    """A hash of all ranks' parts of a run's last checkpoint; not of state.json, which has seconds."""
    newest = max((folder / "checkpoints").glob("step-*"))
    digest = hashlib.sha256(newest.name.encode())
    for file in sorted(newest.glob("*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def whole(recipe: Recipe, folder: Path, size: int) -> float:
    """A run that nobody disturbs, with checkpoints only at its end; the seconds it took."""
    folder.mkdir()
    began = time.monotonic()
    undisturbed = recipe.model_copy(update={"checkpoint": type(recipe.checkpoint)()})
    topologies.attempt(undisturbed, folder, size, 0.0, random.Random(0), None)
    return time.monotonic() - began


def sharded(cuts: int, seed: int, tally: chaos.Tally) -> str:
    """Cuts runs on the same ranks until there were enough cuts; returns a line about them."""
    random_, counts = random.Random(seed), Counter[str]()
    chosen, before = kinds(), tally.counts["identical"]
    _prepare()
    with tempfile.TemporaryDirectory(prefix="sharded-") as root:
        for number in itertools.count():
            if counts["cuts"] >= cuts:
                break
            which = number % len(chosen)
            size, kind = chosen[which]
            recipe, wanted = recipe_of(kind), Path(root, f"whole-{which}")
            if not wanted.exists():
                counts[f"seconds of {which}"] = round(1000 * whole(recipe, wanted, size))
            folder = Path(root, str(number))
            folder.mkdir()
            told = list[str]()
            while True:
                signaled = random_.choice(_SIGNALS) if len(told) < _MOST_CUTS else None
                left = topologies.attempt(
                    recipe, folder, size, counts[f"seconds of {which}"] / 1000, random_, signaled
                )
                if left.place:
                    assert signaled is not None
                    told.append(f"{signaled.name} in {left.place}")
                    counts.update(("cuts", left.place, "kills" if signaled == signal.SIGKILL else "signals"))
                if left.finished:
                    break
            name = f"{size} ranks, {', '.join(told)} ({kind})"
            tally.judge(name, folder, chaos.ending(wanted))
            if parts_of(folder) != parts_of(wanted):
                tally.failures.append(f"{name}: other bits in the ranks' parts of its checkpoint")
            shutil.rmtree(folder)
    places = ", ".join(f"{counts[place]} during {place}" for place in (*chaos.PHASES, "resume"))
    return (
        f"{counts['cuts']} cuts of sharded runs on 2 and 4 ranks, {counts['kills']} kills and "
        f"{counts['signals']} signals ({places}): {tally.counts['identical'] - before} runs identical"
    )


def resharded(count: int, seed: int, tally: chaos.Tally) -> str:
    """Judges so many histories in which ranks and strategy change; returns a line about them."""
    random_, largest, changes = random.Random(seed), 0.0, 0
    _prepare()
    # SGD, because Adam makes steps of any size of what is zero but for rounding.
    kind = {**chaos.kinds()[0], "gradient_accumulation_steps": 4, "channels_last": False, "mode": "fp32"}
    kind |= {"optim": "sgd", "every": 3, "ema": {"decay": 0.9}}
    recipe = chaos.recipe_of(kind)
    with tempfile.TemporaryDirectory(prefix="resharded-") as root:
        wanted = Path(root, "whole")
        seconds = whole(_on(recipe, {}), wanted, 1)
        for number in range(count):
            folder, told, last = Path(root, str(number)), list[str](), None
            folder.mkdir()
            while True:
                last = random_.choice([one for one in _CHANGING if one != last])
                size, parallel = last
                signaled = random_.choice(_SIGNALS) if len(told) < _MOST_CHANGES else None
                left = topologies.attempt(
                    _on(recipe, parallel), folder, size, seconds * size, random_, signaled
                )
                told.append(f"{size} {parallel.get('strategy', 'ddp')}")
                if left.finished:
                    break
            changes += len(told) - 1
            apart = distance(folder, wanted)
            largest = max(largest, apart)
            if not apart <= TOLERANCE:
                tally.failures.append(f"ranks {', '.join(told)}: weights are {apart:.1e} apart")
    return (
        f"{count} histories of ddp, fsdp and hsdp on 1, 2 and 4 ranks: {changes} changes; the same samples, "
        f"sums in another order: weights at most {largest:.1e} of a tensor's largest apart (tolerance "
        f"{TOLERANCE:g})"
    )


def distance(folder: Path, other: Path) -> float:
    """The largest difference of two runs' final weights, as a part of the largest number of its tensor."""
    assert json.loads((folder / "manifest.json").read_text())["status"] == "finished"
    found = [0.0]
    for file in ("model.safetensors", "ema.safetensors"):
        theirs = safetensors.torch.load_file(other / file)
        for name, tensor in safetensors.torch.load_file(folder / file).items():
            difference = (tensor.double() - theirs[name].double()).abs().max()
            found.append(float(difference / theirs[name].double().abs().max().clamp(min=1e-3)))
    return max(found)


def _prepare() -> None:
    consensus._SECONDS_BETWEEN = 0.02  # a run here is over in seconds
    import_late()
    from torch.distributed import fsdp  # noqa: F401
