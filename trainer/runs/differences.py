"""Differences of two configurations, data sets or arithmetic, and which of them matter. Imports no torch."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any

from trainer.config.models import HF
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override
from trainer.config.redact import REDACTED, is_masked, is_same, redact, salted
from trainer.config.task_file import is_own
from trainer.errors import BadInputError
from trainer.runs.manifest import Manifest, RunFolder, TaskIdentity
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
_ENVIRONMENT = "environment"  # of a trial's results
_SAME = 1e-4  # relative: kernels round by where a batch lies in memory
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
        return is_own(before)
    if key == "model.name":
        return all(str(one).startswith(HF) for one in (before, value))
    return any(fnmatchcase(key, free) for free in FREE if free.startswith(_PLACES))


def differences(
    stored: Mapping[str, Any], now: Mapping[str, Any], redacted: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Returns the keys that affect results and differ from a manifest's, each as "key: before, now after".

    A key that the manifest lacks is newer than its run, and counts with its default. A value that was
    redacted is compared by its salted hash (`redacted`, by key).
    """
    before, after, itself = flat(stored), flat(redact(now)), flat(now)
    before = {key: value for key, value in _defaults().items() if key in after} | before
    return [
        f"{key}: {json.dumps(before.get(key))}, now {json.dumps(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if not is_same(before.get(key), itself.get(key), redacted.get(key))
        and not any(fnmatchcase(key, free) for free in FREE)
        # The place of a custom task is free: its content is compared.
        if key != "task" or not all(is_own(one.get(key)) for one in (before, after))
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
    """Returns the changes in a run's data (`components.task.data_of`), in the format of `differences`.

    The hash of a task's file is left out where the task's identity was recorded (`other_task`), and where
    there is no file.
    """
    return [
        f"{name}: {before}, now {data.get(name)}"
        for name, before in stored.fingerprint.items()
        if before != data.get(name) and (name != "task" or (stored.identity is None and name in data))
    ]


def other_task(before: TaskIdentity, now: TaskIdentity) -> dict[str, str]:
    """Returns the changes in a custom task by name, each in the format of `differences`.

    Code is compared under the same compiler only, and results of the trial in the same environment.
    """
    changes = dict[str, str]()
    if before.compiler == now.compiler:
        for name in _differing(before.code, now.code):
            changes[name] = f"{name}: {_change(before.code.get(name), now.code.get(name))}"
    for name in _differing(before.values, now.values, is_masked):
        one, other = before.values.get(name), now.values.get(name)
        shown = one and other and "#" not in (one[0], other[0])
        changes[name] = f"{name}: {f'{one}, now {other}' if shown else _change(one, other)}"
    if before.tried.get(_ENVIRONMENT) == now.tried.get(_ENVIRONMENT):
        for name in sorted(before.tried.keys() & now.tried.keys() - {_ENVIRONMENT}):
            one, other = before.tried[name], now.tried[name]
            if one != other and not math.isclose(float(one), float(other), rel_tol=_SAME, abs_tol=_SAME):
                changes[name] = f"{name}: {one}, now {other}"
    return changes


def _differing(
    before: Mapping[str, str], now: Mapping[str, str], same: Callable[[str, str], bool] = str.__eq__
) -> list[str]:
    both = before.keys() & now.keys()
    return sorted({*(before.keys() ^ now.keys()), *(one for one in both if not same(before[one], now[one]))})


def _change(before: str | None, after: str | None) -> str:
    return "new" if before is None else "gone" if after is None else "edited"


def other_arithmetic(before: int) -> list[str]:
    """Returns a line in the format of `differences` if a run's arithmetic isn't today's, with the changes."""
    if before == ARITHMETIC:
        return []
    since = [f"{number}: {what}" for number, what in ARITHMETIC_CHANGES.items() if number > before]
    what = "; ".join(since) or "this version of trainer is older than the run"
    return [f"arithmetic: {before}, now {ARITHMETIC} ({what})"]


def extends(stored: Manifest, config: Mapping[str, Any]) -> bool:
    """True if a configuration extends a run that has reached its end, or continues such an extension."""
    later = any(map(of_end, differences(stored.config, config, stored.redacted)))
    return stored.status == "finished" or (stored.extended and later)


def hidden(
    config: Mapping[str, Any], stored: Manifest | None, prefix: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a configuration without secrets, and by key a salted hash of each value that was redacted.

    A value that `stored` has redacted stays so, also where the variable that told is gone.
    """
    kept, hashes = dict[str, Any](), dict[str, str]()
    before = flat(stored.config) if stored else {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        known = stored.redacted.get(key) if stored else None
        if isinstance(value, Mapping):
            kept[name], inner = hidden(value, stored, f"{key}.")
            hashes |= inner
        elif (masked := redact(value)) != value:
            kept[name], hashes[key] = masked, salted(value)
        elif known is not None and is_same(before.get(key), value, known):
            kept[name], hashes[key] = before[key], known
        else:
            kept[name] = value
    return kept, hashes


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a configuration's values by dotted key."""
    keys: dict[str, Any] = {}
    for name, value in config.items():
        keys |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return keys
