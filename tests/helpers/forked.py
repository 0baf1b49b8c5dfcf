"""Attempts at a small run in forked processes: what a rank does, its exit code and its line."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.late import import_late
from tests.helpers.toys import before_each_step_ends
from trainer.config.recipe import Recipe
from trainer.launch.worker import Worker
from trainer.train.options import Mode, parse_source
from trainer.train.request import Request
from trainer.train.start.rank import train_rank


class Attempt(NamedTuple):
    """Result of an attempt: exit code, line for the user, and all its output."""

    code: int
    line: str
    said: str


def small(**sections: Any) -> Recipe:
    """A recipe that takes a second: 16 steps, two evaluations."""
    sizes = {"image_size": 8, "samples": 64, "classes": 4, "global_batch_size": 8, "micro_batch_size": 8}
    values: dict[str, Any] = {"epochs": 2, "data": {"name": "synthetic", **sizes, "workers": 0}}
    values |= {"model": {"width": 4}, "ema": {"decay": 0.9}, "parallel": {"threads": 1}}
    values |= {"log": {"every": 2, "to": ["jsonl"]}, "checkpoint": {"every": 5, "minutes": 0, "best": False}}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return Recipe.model_validate(values)


def replace(thing: object, name: str, value: object) -> None:
    """Puts something else into a module or class, in a fork that ends soon."""
    setattr(thing, name, value)


def attempt(
    folder: Path,
    recipe: Recipe | None = None,
    mode: Mode = "auto",
    *,
    stop_at: int | None = None,
    stop_after: int | None = None,
    before: Callable[[], object] | None = None,
    source: str | None = None,
    code: int | None = None,
) -> Attempt:
    """Runs a rank in a fork, in a folder that is made if there is none.

    It trains `small()` if no recipe is given, with `mode` as --resume, `stop_after` as --stop-after, and
    `source` as --init-from; it gets SIGTERM after step `stop_at`. `before`, called in it, puts faults in.
    `code` is the exit code that it must have.
    """
    folder.mkdir(exist_ok=True)
    told = folder.with_name(f"{folder.name}.told")
    import_late()

    def rank() -> None:
        become_rank(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        before_each_step_ends(lambda done: os.kill(os.getpid(), signal.SIGTERM) if done == stop_at else None)
        # The line is told apart from what the rank says.
        replace(
            Worker, "_tell", lambda _, record: print(record.traceback, end="", file=sys.stderr, flush=True)
        )
        if before is not None:
            before()
        with Worker() as worker:
            begin = None if source is None else parse_source(source)
            request = Request(recipe or small(), "small", folder, mode, stop_after, source=begin)
            worker.code = train_rank(request).code
        assert worker.record is not None
        told.with_suffix(".line").write_text(json.dumps(worker.record.line))
        os._exit(worker.exit_code)

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    process.join(300)
    assert process.exitcode is not None, "it hangs"
    line = told.with_suffix(".line")
    outcome = json.loads(line.read_text()) if line.exists() else ""
    line.unlink(missing_ok=True)
    assert code in (None, process.exitcode), (process.exitcode, outcome, told.read_text())
    return Attempt(process.exitcode, outcome, told.read_text())


def become_rank(out: int, number: int = 0, size: int = 1, port: int = 0) -> None:
    """Makes this fork a rank, whose ranks meet at a port, and whose output goes to an open file."""
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest put its own there
    threading.excepthook = threading.__excepthook__
    rank, world = str(number), str(size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    if port:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
