"""Differences of two configurations, data sets or arithmetic, and which of them matter. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from trainer.config.dropped import without_dropped
from trainer.config.models import HF
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override
from trainer.config.redact import REDACTED, redact
from trainer.errors import BadInputError
from trainer.runs.manifest import Manifest, RunFolder
from trainer.version import ARITHMETIC, ARITHMETIC_CHANGES

# Keys that don't affect results: location and loading of data, logging. They may differ on resume.
# (The order of samples, which data.cache_limit affects, is compared with the data.)
FREE = (
    "about",
    "data.path",
    "data.cache",
    "data.cache_limit",
    "data.check",
    "data.mix*",  # sizes and fractions are compared with the data, as its order
    "language.prompts",
    "language.answer_tokens",
    "language.tokenizer",  # so are the tokens of the text
    "data.workers",
    "data.prefetch",
    "data.resident",
    "data.start_method",
    *(f"evaluation.sets.*.{key}" for key in ("path", "cache", "cache_limit", "check")),
    "parallel.strategy",
    "parallel.shard",
    "parallel.timeout_s",
    "memory.allocator",
    "memory.empty_cache",
    "anomaly.spike*",
    "anomaly.most",
    "parallel.hang_s",
    "parallel.cpu_binding",
    "log.*",
    "hooks.*",
    "checkpoint.*",
)
_PLACES = ("data.", "evaluation.sets.", "language.tokenizer")
# Keys that decide where a run ends: a finished run is extended by raising them.
_ENDS = ("epochs", "max_steps", "evaluation.patience")


def own_config(run: RunFolder, settings: Sequence[str]) -> dict[str, Any]:
    """Returns a run's resolved configuration, overridden by settings.

    Raises:
        BadInputError: If a value in it was redacted and isn't among the settings.
    """
    config = override(dict(run.manifest.config), settings)
    for name, value in flat(config).items():
        if REDACTED in str(value):
            raise BadInputError(f"{run.path}: {name} was redacted; give it with --set {name}=…")
    return config


def names_a_place(setting: str, config: Mapping[str, Any]) -> bool:
    """True if a KEY=VALUE changes in a run's configuration only where something lies, or how it is read."""
    key, _, value = (word.strip() for word in setting.partition("="))
    before = flat(config).get(key)
    if key == "task":
        return str(before).endswith(".py")
    if key == "model.name":
        return all(str(one).startswith(HF) for one in (before, value))
    return any(fnmatchcase(key, free) for free in FREE if free.startswith(_PLACES))


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the keys that affect results and differ from a manifest's, each as "key: before, now after".

    A key that the manifest lacks is newer than its run, and counts with its default.
    """
    before, after = flat(without_dropped(stored)), flat(redact(now))
    before = {key: value for key, value in _defaults().items() if key in after} | before
    return [
        f"{key}: {json.dumps(before.get(key))}, now {json.dumps(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not any(fnmatchcase(key, free) for free in FREE)
        # The path of a task's file is free: its content is compared with the data.
        if key != "task" or not all(str(one.get(key)).endswith(".py") for one in (before, after))
        # The configuration of a model from files is compared with its weights.
        if key != "model.name" or not all(str(one.get(key)).startswith(HF) for one in (before, after))
        # Only skipping is a part of the arithmetic.
        if key != "anomaly.nonfinite" or "skip" in (before.get(key), after.get(key))
    ]


@cache
def _defaults() -> dict[str, Any]:
    return flat(Recipe(epochs=1).model_dump(mode="json", exclude={"epochs"}))


def of_end(difference: str) -> bool:
    """True if a difference is of a key that decides where a run ends."""
    return difference.partition(": ")[0] in _ENDS


def other_data(stored: Manifest, data: Mapping[str, str]) -> list[str]:
    """Returns the changes in a run's data (`components.task.data_of`), in the format of `differences`."""
    return [
        f"{name}: {before}, now {data.get(name)}"
        for name, before in stored.fingerprint.items()
        if before != data.get(name)
    ]


def other_arithmetic(before: int) -> list[str]:
    """Returns a line in the format of `differences` if a run's arithmetic isn't today's, with the changes."""
    if before == ARITHMETIC:
        return []
    since = [f"{number}: {what}" for number, what in ARITHMETIC_CHANGES.items() if number > before]
    what = "; ".join(since) or "this version of trainer is older than the run"
    return [f"arithmetic: {before}, now {ARITHMETIC} ({what})"]


def extends(stored: Manifest, config: Mapping[str, Any]) -> bool:
    """True if a configuration extends a run that has reached its end, or continues such an extension."""
    later = any(map(of_end, differences(stored.config, config)))
    return stored.status == "finished" or (stored.extended and later)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a configuration's values by dotted key."""
    keys: dict[str, Any] = {}
    for name, value in config.items():
        keys |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return keys
