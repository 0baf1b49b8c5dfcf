"""`trainer runs [DIR]`: lists the runs in a folder, newest first; of a run its checkpoints, too."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.redact import redact
from trainer.config.sizes import MIB
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError, reading
from trainer.host.latest import MANIFEST, RUNS, run_path
from trainer.observe.console import progress_bar, warn
from trainer.observe.text import age, number, rough_size, table, without_controls

if TYPE_CHECKING:
    from trainer.checkpoint.store import Entry

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
    runs = commands.add_parser(
        "runs",
        help="List runs, the newest first; verify a RUN's checkpoints. Exit code 1: one is damaged, or "
        "another run's.",
        allow_abbrev=False,
    )
    runs.add_argument(
        "folder",
        type=run_path,
        nargs="?",
        default=RUNS,
        metavar="DIR|RUN",
        help=f"where they lie (default: {RUNS}), or a run (latest: the newest)",
    )
    runs.add_argument("--json", action="store_true", help="print JSON")
    runs.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.runs.folder import checkpoints_of

    folder: Path = options.folder
    # Without its manifest, the checkpoints are all that is left of a run.
    left = checkpoints_of(folder)
    if (folder / MANIFEST).is_file() or (left.is_dir() and not (left / MANIFEST).is_file()):
        return _show_run(folder, left, options.json)
    found, odd = _read_all(_folders(folder), quiet=options.json)
    if options.json:
        print(json.dumps(_for_programs(found, odd), indent=1))
    elif found:
        print("\n".join(_table(found)))
    else:
        print(f"{folder}: no run lies there")
    return EXIT_DONE


def _show_run(run: Path, folder: Path, as_json: bool) -> int:
    from trainer.checkpoint.folder import quietly
    from trainer.checkpoint.store import listing
    from trainer.runs.folder import read_json
    from trainer.runs.manifest import check_format

    with contextlib.suppress(OSError, ValueError):
        check_format(run, read_json(run / MANIFEST))
    found, odd = _read_all([run] if (run / MANIFEST).is_file() else [], quiet=as_json)
    with reading(run):
        size = sum(entry.size for entry in listing(folder))
        shown = progress_bar("verifying", size) if sys.stderr.isatty() else contextlib.nullcontext(quietly)
        with shown as advance:
            entries = [_of_this_run(run, one) for one in listing(folder, verify=True, advance=advance)]
    good = next((entry for entry in entries if entry.problem is None), None)
    if as_json:
        told = {
            **_for_programs(found, odd),
            "checkpoints": [{**entry._asdict(), "path": str(entry.path)} for entry in entries],
            "newest_good": str(good.path) if good else None,
        }
        print(json.dumps(told, indent=1))
    else:
        lines = [*_table(found), *checkpoint_lines(run, entries, good)]
        print("\n".join(without_controls(line.replace("\n", "\\n")) for line in lines))
    return EXIT_FAILED if any(entry.problem for entry in entries) else EXIT_DONE


def _of_this_run(run: Path, entry: Entry) -> Entry:
    """Gives an intact checkpoint of another run, which would not be resumed from, that as its problem."""
    from trainer.checkpoint.folder import read_state
    from trainer.runs.manifest import read_run

    if entry.problem is not None:
        return entry
    try:
        manifest = read_run(run).manifest
    except BadInputError:  # the manifest can't be read: the checkpoints are all that is left
        return entry
    return entry._replace(problem=manifest.foreign(read_state(entry.path)))


def checkpoint_lines(run: Path, entries: Sequence[Entry], good: Entry | None) -> Iterator[str]:
    """Yields the lines of a run's checkpoints.

    Args:
        run: The run folder.
        entries: Its checkpoints, verified.
        good: The newest good one.
    """
    if not entries:
        yield f"{run}: no checkpoints"
        return
    yield f"{'step':>10}  {'age':>8}  {'size':>10}  verified"
    for entry in entries:
        old, size = age(time.time() - entry.time), f"{entry.size / MIB:,.1f} MiB"
        yield f"{entry.step:>10}  {old:>8}  {size:>10}  {entry.problem or 'good'}"
    yield (
        f"newest good: step {good.step} ({good.path})"
        if good
        else "newest good: none; all are damaged or of another run"
    )


def _read_all(folders: Iterable[Path], quiet: bool = False) -> tuple[list[FoundRun], dict[str, str]]:
    """Returns the runs, newest first, and why others can't be read, by name."""
    found, odd = list[FoundRun](), dict[str, str]()
    for path in folders:
        try:
            found.append(_read(path))
        except BadInputError as error:
            odd[path.name] = str(error)
        except OSError as error:
            odd[path.name] = f"{path}: can't be read ({error.strerror})"
    found.sort(key=lambda one: (one.age_s, one.name))
    for reason in [] if quiet else odd.values():
        warn(" ".join(reason.split()))
    return found, odd


def _for_programs(found: Sequence[FoundRun], odd: Mapping[str, str]) -> dict[str, Any]:
    unreadable = [{"name": name, "reason": reason} for name, reason in odd.items()]
    return {"runs": [one._asdict() for one in found], "unreadable": unreadable}


def _table(found: Sequence[FoundRun]) -> list[str]:
    names = ("run", "recipe", "status", "step", "of", "best", "", "size", "age")
    return table(names, [_cells(one) for one in found], left=(0, 1, 2, 6)).splitlines() if found else []


def _cells(one: FoundRun) -> tuple[str, ...]:
    best = "" if one.best is None else number(one.best)
    planned = "" if one.planned_steps is None else f"{one.planned_steps:,}"
    return (
        *(one.name, one.recipe, one.status, f"{one.step:,}", planned, best, one.metric),
        *(rough_size(one.bytes), age(one.age_s)),
    )


def _folders(root: Path) -> Iterator[Path]:
    """Yields the run folders in a folder; links aren't followed.

    Raises:
        BadInputError: If there is no such folder.
    """
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
    metric, best, measured = _measured(folder, facts)
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


def _measured(folder: Path, facts: Mapping[str, Any]) -> tuple[str, float | None, int]:
    """Returns the deciding metric, else the first of the evaluations, its best value, and the last step."""
    from trainer.observe.rows import OWN
    from trainer.runs.folder import read_rows
    from trainer.runs.report.figures import NO_METRICS, more_is_better
    from trainer.runs.report.thin import is_number

    metric, best, step = "", None, 0
    for row in read_rows(folder, "eval"):
        step = row["step"] if type(row.get("step")) is int else step
        names = [name for name in row if name not in OWN and "/" not in name]
        told = facts.get("metric")
        first = told if told in names else next((name for name in names if name not in NO_METRICS), "")
        metric = metric or first or ("loss" if "loss" in names else "")
        value = row.get(metric)
        if is_number(value):
            better = max if more_is_better(metric, facts) else min
            best = float(value) if best is None else better(best, float(value))
    return metric, best, step


def _newest_checkpoint(folder: Path, run_id: object) -> int:
    """Returns the step of the run's newest checkpoint; 0 without one. Those of other runs don't count."""
    from trainer.runs.folder import checkpoints_of, read_json
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
