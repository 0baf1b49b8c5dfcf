"""`trainer runs [DIR]`: lists the runs in a folder, newest first."""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.redact import redact
from trainer.errors import EXIT_DONE, BadInputError
from trainer.host.latest import MANIFEST, RUNS
from trainer.observe.console import warn
from trainer.observe.text import age, number, rough_size, table

_TAIL = 1 << 16  # bytes of a file of rows in which its last one is


class FoundRun(NamedTuple):
    """Summary of a run.

    Attributes:
        name: Name of its folder.
        recipe: Name of the recipe.
        status: finished, running, stopped, failed, diverged; killed: marked as running, without a process.
        step: Steps done: those of the last metrics record or checkpoint, whichever is later.
        planned_steps: Steps of the whole run; None if its manifest doesn't say.
        metric: First metric of its evaluations; "" without one.
        best: Best value of that metric.
        bytes: Total size of its files.
        age_s: Seconds since the last write to one of them.
    """

    name: str
    recipe: str
    status: str
    step: int
    planned_steps: int | None
    metric: str
    best: float | None
    bytes: int
    age_s: float


def add_parser(commands: Any) -> None:
    """Adds `runs` to the commands."""
    runs = commands.add_parser("runs", help="List runs, the newest first.", allow_abbrev=False)
    runs.add_argument(
        "folder", type=Path, nargs="?", default=RUNS, metavar="DIR", help=f"where they lie (default: {RUNS})"
    )
    runs.add_argument("--json", action="store_true", help="print JSON")
    runs.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found, odd = list[FoundRun](), dict[str, str]()
    for path in _folders(options.folder):
        try:
            found.append(_read(path))
        except BadInputError as error:
            odd[path.name] = str(error)
        except OSError as error:
            odd[path.name] = f"{path}: can't be read ({error.strerror})"
    found.sort(key=lambda one: (one.age_s, one.name))
    if options.json:
        unreadable = [{"name": name, "reason": reason} for name, reason in odd.items()]
        print(json.dumps({"runs": [one._asdict() for one in found], "unreadable": unreadable}, indent=1))
        return EXIT_DONE
    for reason in odd.values():
        warn(" ".join(reason.split()))
    if not found:
        print(f"{options.folder}: no run lies there")
        return EXIT_DONE
    names = ("run", "recipe", "status", "step", "of", "best", "", "size", "age")
    print(table(names, [_cells(one) for one in found], left=(0, 1, 2, 6)))
    return EXIT_DONE


def _cells(one: FoundRun) -> tuple[str, ...]:
    best = "" if one.best is None else number(one.best)
    planned = "" if one.planned_steps is None else f"{one.planned_steps:,}"
    return (
        *(one.name, one.recipe, one.status, f"{one.step:,}", planned, best, one.metric),
        *(rough_size(one.bytes), age(one.age_s)),
    )


def _folders(root: Path) -> Iterator[Path]:
    """Yields the run folders in a folder, or the folder itself if it is a run; links aren't followed.

    Raises:
        BadInputError: If there is no such folder.
    """
    if (root / MANIFEST).is_file():
        yield root
        return
    try:
        with os.scandir(root) as entries:
            inside = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError as error:
        if root == RUNS:
            return
        raise BadInputError(f"{root}: no such folder; give the one that runs lie in") from error
    except OSError as error:
        raise BadInputError(f"{root}: can't be listed ({error.strerror}); give the folder of runs") from error
    yield from (root / name for name in inside if os.path.lexists(root / name / MANIFEST))


def _read(folder: Path) -> FoundRun:
    from trainer.observe.rows import FILES
    from trainer.runs.folder import is_abandoned
    from trainer.runs.manifest import planned_steps, read_facts

    facts = redact(read_facts(folder))
    status = "killed" if is_abandoned(folder, facts) else str(facts.get("status", "unknown"))
    metric, best, measured = _measured(folder)
    rows = [_last_row(folder / FILES[kind]).get("step") for kind in ("train", "end")]
    size, newest = _size(folder)
    return FoundRun(
        folder.name,
        str(facts.get("recipe", "")),
        status,
        max(
            [
                0,
                measured,
                _newest_checkpoint(folder, facts.get("run_id")),
                *(step for step in rows if type(step) is int),
            ]
        ),
        planned_steps(facts),
        metric,
        best,
        size,
        max(0.0, time.time() - newest),
    )


def _measured(folder: Path) -> tuple[str, float | None, int]:
    """Returns the first metric of the evaluations other than the loss, its best value, and the last step."""
    from trainer.observe.rows import OWN
    from trainer.runs.folder import read_rows
    from trainer.runs.report.figures import is_number, more_is_better

    metric, best, step = "", None, 0
    for row in read_rows(folder, "eval"):
        step = row["step"] if type(row.get("step")) is int else step
        names = [name for name in row if name not in OWN and "/" not in name]
        metric = metric or next((name for name in names if name != "loss"), "loss" if "loss" in names else "")
        value = row.get(metric)
        if is_number(value):
            better = max if more_is_better(metric) else min
            best = float(value) if best is None else better(best, float(value))
    return metric, best, step


def _newest_checkpoint(folder: Path, run_id: object) -> int:
    """Returns the step of the run's newest checkpoint; 0 without one. Those of other runs don't count."""
    from trainer.runs.checkpoint_place import checkpoints_of
    from trainer.runs.folder import read_json
    from trainer.runs.report.read import saved_checkpoints

    for saved in saved_checkpoints(folder):
        with contextlib.suppress(BadInputError, OSError, ValueError, KeyError, TypeError):
            if read_json(checkpoints_of(folder) / saved.name / "state.json")["state"]["run_id"] == run_id:
                return saved.step
    return 0


def _last_row(path: Path) -> dict[str, Any]:
    from trainer.host import strict_json
    from trainer.host.files import open_inside

    try:
        with os.fdopen(open_inside(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            row = strict_json.parse(file.read(_TAIL).rpartition(b"\n")[0].rpartition(b"\n")[2])
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def _size(folder: Path) -> tuple[int, float]:
    """Returns the bytes of all files and the time of the last write; links aren't followed."""
    total, newest = 0, 0.0
    for inside, _, names in os.walk(folder):
        for name in names:
            try:
                facts = os.lstat(os.path.join(inside, name))  # noqa: PTH118
            except OSError:  # it was removed meanwhile
                continue
            total, newest = total + facts.st_size, max(newest, facts.st_mtime)
    return total, newest
