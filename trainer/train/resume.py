"""Whether a run goes on where one stopped: what of its configuration, device and data may differ."""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override
from trainer.config.redact import REDACTED, redact
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host.latest import LATEST
from trainer.train.manifest import Manifest, RunFolder, read_run
from trainer.train.run_folder import MANIFEST
from trainer.version import ARITHMETIC, ARITHMETIC_CHANGES

# What changes nothing that is computed: where data lies and how it comes, and what is written of a run.
# (The order that data.cache_limit leads to is compared with the data.)
FREE = (
    "about",
    "data.path",
    "data.cache",
    "data.cache_limit",
    "data.check",
    "data.workers",
    "data.prefetch",
    "data.resident",
    "data.start_method",
    *(f"evaluation.sets.*.{key}" for key in ("path", "cache", "cache_limit", "check")),
    "model.mirror",
    "parallel.strategy",
    "parallel.shard",
    "parallel.timeout_s",
    "memory.allocator",
    "memory.empty_cache",
    "memory.history",
    "anomaly.spike*",
    "anomaly.most",
    "parallel.hang_s",
    "parallel.cpu_binding",
    "log.*",
    "hooks.*",
    "checkpoint.*",
)
# What says where a run ends: a finished one is extended by more of them.
_ENDS = ("epochs", "max_steps", "evaluation.patience")
_SHOWN = 4

Mode = Literal["auto", "newest", "force", "never"]


class StartingPoint(NamedTuple):
    """What `--from` names.

    Attributes:
        run: A run folder.
        which: "last", "best" or a step.
        word: As it was given.
    """

    run: Path
    which: str
    word: str


def parse_source(word: str) -> StartingPoint:
    """Reads RUN, RUN@STEP or RUN@best.

    Raises:
        BadInputError: If it is none of these.
    """
    if not (Path(word) / MANIFEST).is_file() and "@" in word:
        name, _, which = word.rpartition("@")
        if which not in ("best", "last") and not (which.isascii() and which.isdigit()):
            raise BadInputError(f"--from {word}: after the @ stands a step, best or last")
        return StartingPoint(Path(name), which, word)
    return StartingPoint(Path(word), "last", word)


def own_config(run: RunFolder, settings: Sequence[str]) -> dict[str, Any]:
    """A run's resolved configuration, with settings.

    Raises:
        BadInputError: If something in it was redacted, and isn't among the settings.
    """
    config = override(dict(run.manifest.config), settings)
    for name, value in flat(config).items():
        if REDACTED in str(value):
            raise BadInputError(f"{run.path}: {name} was redacted; give it with --set {name}=…")
    return config


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ from those of a manifest, and matter, each as "key: before, now after".

    A key that the manifest lacks is newer than its run, which did what the key's default says.
    """
    before, after = flat(stored), flat(redact(now))
    before = {key: value for key, value in _defaults().items() if key in after} | before
    return [
        f"{key}: {json.dumps(before.get(key))}, now {json.dumps(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not any(fnmatchcase(key, free) for free in FREE)
        # Where somebody's file lies is free: what is in it is compared with the data.
        if key != "task" or not all(str(one.get(key)).endswith(".py") for one in (before, after))
        # Only skipping is a part of the arithmetic.
        if key != "anomaly.nonfinite" or "skip" in (before.get(key), after.get(key))
    ]


@cache
def _defaults() -> dict[str, Any]:
    return flat(Recipe(epochs=1).model_dump(mode="json", exclude={"epochs"}))


def _of_end(difference: str) -> bool:
    return difference.partition(": ")[0] in _ENDS


def other_data(stored: Manifest, data: Mapping[str, str]) -> list[str]:
    """What of a run's data is another now, from `trainer.train.run.data_of`; each as in `differences`."""
    return [
        f"{name}: {before}, now {data.get(name)}"
        for name, before in stored.fingerprint.items()
        if before != data.get(name)
    ]


def other_arithmetic(before: int) -> list[str]:
    """Number of a run's arithmetic and of today's, if they differ, and what changed; as in `differences`."""
    if before == ARITHMETIC:
        return []
    since = [f"{number}: {what}" for number, what in ARITHMETIC_CHANGES.items() if number > before]
    what = "; ".join(since) or "this version of trainer is older than the run"
    return [f"arithmetic: {before}, now {ARITHMETIC} ({what})"]


def check_resumable(
    folder: Path,
    stored: Manifest,
    config: Mapping[str, Any],
    device: str,
    data: Mapping[str, str],
    mode: Mode,
    steps: int,
) -> None:
    """Makes sure that a folder's run may be gone on with by this configuration, on this device and data.

    Args:
        steps: At which it is to end now: a finished run may be extended.

    Raises:
        BadInputError: If the user forbade it, or something differs and that wasn't forced.
    """
    if mode == "never":
        raise BadInputError(f"--out {folder}: holds a run already; give another folder or remove it")
    differing = differences(stored.config, config)
    if (stored.status == "finished" or stored.extended) and steps > stored.steps:
        differing = [line for line in differing if not _of_end(line)]
    if stored.device.kind != device:
        differing.append(f"trained on {stored.device.kind}, now {device}")
    differing += other_data(stored, data)
    if stored.status != "finished" or steps > stored.steps:
        differing += other_arithmetic(stored.arithmetic)
    if differing and mode != "force":
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise BadInputError(
            f"--out {folder}: holds a run with another configuration ({'; '.join(differing[:_SHOWN])}{more});"
            " give another --out, or go on with the changed one by --resume force"
        )


def extends(stored: Manifest, config: Mapping[str, Any]) -> bool:
    """Whether a configuration moves the end of a run that had reached one, also where that is under way."""
    later = any(map(_of_end, differences(stored.config, config)))
    return stored.status == "finished" or (stored.extended and later)


def check_beginning(folder: Path, stored: Manifest, source: StartingPoint) -> None:
    """Makes sure that a folder's run began from what `--from` names; where that is gone now, it isn't needed.

    Raises:
        BadInputError: If it began otherwise.
    """
    begun, remedy = stored.begun_from, "leave --from out to go on with it, or give another --out"
    if begun is None:
        raise BadInputError(f"--from {source.word}: {folder} holds a run that began anew; {remedy}")
    if source.word.partition("@")[0] == LATEST:  # which was another run then: since then it is this one
        return
    try:
        same = read_run(source.run).manifest.run_id == begun.run_id
    except BadInputError:
        same = True
    if not same or (source.which.isdigit() and int(source.which) != begun.step):
        raise BadInputError(
            f"--from {source.word}: {folder} holds a run that began from {begun.folder}, step {begun.step}; "
            f"{remedy}"
        )


def ended(
    folder: Path, stored: Manifest, config: Mapping[str, Any], mode: Mode, steps: int
) -> tuple[str, int] | None:
    """What to say of a run that is through, and the exit code; None if it can be gone on with.

    Args:
        steps: At which it is to end now: a later end extends it. (One that ran out of patience ended before.)

    Raises:
        BadInputError: If a later end doesn't help, as it ran out of patience.
    """
    later = any(map(_of_end, differences(stored.config, config)))
    extended = (mode == "force" or later) and steps > stored.steps
    if stored.status == "finished" and extended:
        spent = stored.out_of_patience
        if 0 < config["evaluation"]["patience"] <= spent:
            if later:
                raise BadInputError(
                    f"{folder}: ended at step {stored.steps} out of patience ({spent} evaluations in a row "
                    f"were no better), which more steps don't change: raise evaluation.patience above "
                    f"{spent}, too, or set it to 0"
                )
            extended = False
    if stored.status == "finished" and not extended:
        return f"{folder} is finished already; nothing to do", EXIT_DONE
    if stored.status == "diverged" and mode != "force":
        remedy = "go on from its newest checkpoint, with what you changed, by --resume force"
        return f"{folder} is diverged already; {remedy}", EXIT_FAILED
    return None


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's values by dotted key."""
    keys: dict[str, Any] = {}
    for name, value in config.items():
        keys |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return keys
