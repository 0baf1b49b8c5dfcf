"""`trainer checkpoints RUN`: lists the checkpoints of a run and verifies them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.sizes import MIB
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError, reading
from trainer.host.latest import run_path
from trainer.observe.text import age, without_controls

if TYPE_CHECKING:
    from trainer.checkpoint.store import Entry


def add_parser(commands: Any) -> None:
    """Adds `checkpoints` to the commands."""
    checkpoints = commands.add_parser(
        "checkpoints",
        help="List and verify checkpoints. Exit code 1: one is damaged or belongs to another run.",
        allow_abbrev=False,
    )
    checkpoints.add_argument("folder", type=run_path, metavar="RUN", help="run folder, or latest")
    checkpoints.add_argument("--json", action="store_true", help="print JSON")
    checkpoints.set_defaults(run=lambda options: show_checkpoints(options.folder, options.json))


def show_checkpoints(run: Path, as_json: bool) -> int:
    """Prints the checkpoints of a run, each verified.

    Args:
        run: A run folder.
        as_json: Whether to print for machines.

    Returns:
        Exit code: 1 if one is damaged.

    Raises:
        BadInputError: If it isn't a run folder, is one of another format, or can't be read.
    """
    from trainer.checkpoint.store import listing
    from trainer.runs.checkpoint_place import checkpoints_of
    from trainer.runs.folder import read_json
    from trainer.runs.manifest import check_format

    folder = checkpoints_of(run)
    # Without a readable manifest, the checkpoints are all that is left of the run: show them.
    with contextlib.suppress(OSError, ValueError):
        check_format(run, read_json(run / "manifest.json"))
    with reading(run):
        if not folder.is_dir() and not (run / "manifest.json").is_file():
            raise BadInputError(f"{run}: not a run folder (it holds no manifest.json and no checkpoints)")
        size = sum(entry.size for entry in listing(folder))
        started = time.monotonic()
        with _progress(size) as advance:
            entries = [_of_this_run(run, one) for one in listing(folder, verify=True, advance=advance)]
        seconds = time.monotonic() - started
    good = next((entry for entry in entries if entry.problem is None), None)
    speed = sum(entry.size for entry in entries) / seconds / 1e6
    lines = (without_controls(line.replace("\n", "\\n")) for line in _lines(run, entries, good, speed))
    print(_json(entries, good, speed) if as_json else "\n".join(lines))
    return EXIT_FAILED if any(entry.problem for entry in entries) else EXIT_DONE


def _of_this_run(run: Path, entry: Entry) -> Entry:
    """Gives an intact checkpoint of another run, which would not be resumed from, that as its problem."""
    from trainer.checkpoint.folder import read_state
    from trainer.runs.manifest import read_run

    if entry.problem is not None:
        return entry
    try:
        manifest = read_run(run).manifest
    except BadInputError:  # as above
        return entry
    return entry._replace(problem=manifest.foreign(read_state(entry.path)))


@contextlib.contextmanager
def _progress(size: int) -> Iterator[Callable[[int], object]]:
    """Shows a progress bar over bytes on a terminal, removed at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from trainer.checkpoint.folder import quietly

    if not sys.stderr.isatty():
        yield quietly
        return
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=size)
        yield lambda count: bar.advance(task, count)


def _json(entries: Sequence[Entry], good: Entry | None, speed: float) -> str:
    return json.dumps(
        {
            "checkpoints": [{**entry._asdict(), "path": str(entry.path)} for entry in entries],
            "newest_good": str(good.path) if good else None,
            "mb_per_second": round(speed, 1),
        },
        indent=2,
    )


def _lines(run: Path, entries: Sequence[Entry], good: Entry | None, speed: float) -> Iterator[str]:
    if not entries:
        yield f"{run}: no checkpoints"
        return
    yield f"{'step':>10}  {'age':>8}  {'size':>10}  verified"
    for entry in entries:
        old, size = age(time.time() - entry.time), f"{entry.size / MIB:,.1f} MiB"
        yield f"{entry.step:>10}  {old:>8}  {size:>10}  {entry.problem or 'good'}"
    if speed:
        yield f"verified at {f'{speed:,.0f}' if speed >= 10 else f'{speed:.2g}'} MB/s"
    yield (
        f"newest good: step {good.step} ({good.path})"
        if good
        else "newest good: none; all are damaged or of another run"
    )
