"""Effect of a setting of the whole process, such as memory.allocator: whole runs, in turn."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.conditions import conditions
from benchmarks.paired import median_interval
from trainer.config.sizes import GIB
from trainer.errors import EXIT_DONE, BadInputError
from trainer.runs.folder import read_rows

_VARIABLE = "env:"
# Heading, and the key of a row whose largest value it is.
_MEMORY = {
    "allocated": "memory/peak_bytes",
    "reserved": "memory/reserved_bytes",
    "used on the GPU": "gpu/memory_bytes",
    "resident": "memory/rss_bytes",
}


class Figures(NamedTuple):
    """Results of a run.

    Attributes:
        samples_per_s: Of its training.
        memory: The most GiB, by heading; without what its rows didn't tell.
    """

    samples_per_s: float
    memory: dict[str, float]


def bench_whole_runs(
    name: str, settings: Sequence[str], common: Sequence[str], rounds: int, steps: int
) -> int:
    """Measures and prints: each round has a run of each side, each in processes of its own.

    Args:
        name: Of a recipe.
        settings: As for `run`; each is compared with the recipe as it is.
        common: KEY=VALUE for all sides.
        rounds: Interleaved rounds.
        steps: Of each run.

    Returns:
        0.

    Raises:
        BadInputError: If a run fails; its own words are on stderr.
    """
    length = [
        "epochs=1000000000",
        f"max_steps={steps}",
        "evaluation={every: end, patience: 0}",
        "checkpoint.minutes=0",
    ]
    sides = {"as it is": [], **{setting: [setting] for setting in settings}}
    found: dict[str, list[Figures]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, own in sides.items():
            found[side].append(run(name, [*common, *length, *own]))
    print(f"{conditions()}\n{' '.join([name, *common])}: {rounds} interleaved runs of {steps} steps each")
    print(_table(found))
    return EXIT_DONE


def _table(found: Mapping[str, Sequence[Figures]]) -> str:
    first = next(iter(found.values()))
    told = [heading for heading in _MEMORY if any(heading in one.memory for one in first)]
    head = ["setting", "samples/s", "ratio", "95 % interval", *(f"{heading}, GiB" for heading in told)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for side, runs in found.items():
        speed = median_interval([one.samples_per_s for one in runs])[0]
        pairs = zip(runs, first, strict=True)
        ratio, low, high = median_interval([one.samples_per_s / base.samples_per_s for one, base in pairs])
        against = ["", ""] if runs is first else [f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"]
        most = [max((one.memory.get(heading, 0.0) for one in runs), default=0.0) for heading in told]
        cells = [side, f"{speed:,.0f}", *against, *(f"{size:.2f}" if size else "" for size in most)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(name: str, settings: Sequence[str]) -> Figures:
    """Trains a recipe as `rows_of` does; returns what it reached."""
    return figures(rows_of(name, settings))


def rows_of(name: str, settings: Sequence[str]) -> list[dict[str, Any]]:
    """Trains a recipe in processes of its own and returns its rows; nothing else of it stays.

    Args:
        name: Of the recipe.
        settings: KEY=VALUE, or env:NAME=VALUE for a variable of the environment.

    Raises:
        BadInputError: If it fails.
    """
    variables = [one.removeprefix(_VARIABLE).partition("=") for one in settings if one.startswith(_VARIABLE)]
    environment = {**os.environ, **{variable: value for variable, _, value in variables}}
    keys = [setting for setting in settings if not setting.startswith(_VARIABLE)]
    words = [word for setting in keys for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "trainer", "train", name, "--out", str(out), *words]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise BadInputError(f"{' '.join([name, *settings])} ended with code {done.returncode}: see above")
        return list(read_rows(out))


def figures(rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Reads from a run's rows what it reached."""
    memory = {}
    for heading, key in _MEMORY.items():
        if sizes := [row[key] for row in rows if key in row]:
            memory[heading] = max(sizes) / GIB
    return Figures(next(row["samples_per_s"] for row in rows if row["kind"] == "end"), memory)
