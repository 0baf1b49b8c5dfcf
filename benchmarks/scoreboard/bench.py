"""`python -m benchmarks scoreboard`: the command line. Imports torch only when it runs."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED, BadInputError

if TYPE_CHECKING:
    from benchmarks.scoreboard.common import Extent
    from benchmarks.scoreboard.figures import Part

    Measure = Callable[[str, Extent, Path | None], Part]


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("--quick", action="store_true", help="two minutes at most; wider intervals")
    bench.add_argument(
        "--only", default="", metavar="LIST", help="overhead,loader,tokens,accumulation,resume: which"
    )
    bench.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write the figures there, and a plot beside it"
    )
    bench.add_argument(
        "--timm-train", type=Path, metavar="FILE", help="timm's train.py, which its wheel doesn't hold"
    )
    bench.set_defaults(run=_scoreboard)


def _scoreboard(options: argparse.Namespace) -> int:
    return bench_scoreboard(options.quick, options.only, options.out, options.timm_train)


def bench_scoreboard(
    quick: bool = False,
    only: str = "",
    out: Path | None = None,
    timm_train: Path | None = None,
    measure: "Measure | None" = None,
) -> int:
    """Measures, prints and writes.

    Args:
        quick: Two minutes at most.
        only: Benches, separated by commas; empty: all.
        out: A file for the figures; FILE.svg is written beside it.
        timm_train: timm's train.py.
        measure: Measures one bench; by default in a process of its own.

    Returns:
        0 whoever wins; 1 if a bench or a library in it failed, or if the trainer isn't right wherever that is
        counted; 3 if nothing was measured.

    Raises:
        BadInputError: For a name that is no bench's, or files that can't be read or written.
    """
    check_files(out, timm_train)
    from benchmarks.against import LIBRARIES, installed
    from benchmarks.charts import as_svg
    from benchmarks.conditions import conditions
    from benchmarks.scoreboard.benches import BENCHES, FULL, QUICK, measured_apart, select
    from benchmarks.scoreboard.chart import chart
    from benchmarks.scoreboard.figures import Machine, between
    from benchmarks.scoreboard.quiet import share_of_cpus
    from benchmarks.scoreboard.show import as_json, command_line, libraries, text

    names, extent = select(only), QUICK if quick else FULL
    if timm_train is not None and "accumulation" not in names:
        raise BadInputError("--timm-train is only read by accumulation, which --only leaves out")
    began, parts = time.monotonic(), []
    for number, name in enumerate(names, 1):
        about = "" if quick else f", about {BENCHES[name].seconds:.0f} s"
        print(
            f"measuring {name}, {number} of {len(names)}{about} ({time.monotonic() - began:.0f} s so far)",
            file=sys.stderr,
            flush=True,
        )
        before = share_of_cpus() if BENCHES[name].timed else 1.0
        part = (measure or measured_apart)(name, extent, timm_train)
        parts.append(between(part, before, share_of_cpus()) if BENCHES[name].timed else part)
    machine = Machine(conditions(), libraries({name: installed(name) for name in LIBRARIES}))
    given = {"quick": quick, "only": only, "timm-train": timm_train, "out": out}
    command = command_line(given)
    print(text(parts, machine))
    if out is not None:
        drawn = as_svg(chart(machine.conditions, parts))
        write_all({out.with_suffix(".svg"): drawn, out: as_json(parts, machine, command)})
    if any(part.failures for part in parts):
        return EXIT_FAILED
    return EXIT_DONE if any(part.measured for part in parts) else EXIT_NOT_MEASURED


def check_files(out: Path | None, timm_train: Path | None) -> None:
    """Looks at what is to be written and read before anything is measured.

    Raises:
        BadInputError: If that can't be.
    """
    if out is not None and out.suffix != ".json":
        raise BadInputError(f"--out {out}: give a file that ends in .json; the plot goes beside it")
    for file in [out.with_suffix(suffix) for suffix in (".svg", ".json")] if out else []:
        if not file.parent.is_dir():
            raise BadInputError(f"--out {file}: there is no folder {file.parent}; make it first")
        if file.is_dir():
            raise BadInputError(f"--out {file}: that is a folder; give a file")
        if not os.access(file.parent, os.W_OK):
            raise BadInputError(f"--out {file}: nothing can be written into {file.parent}; give another")
    if timm_train is not None and not timm_train.is_file():
        raise BadInputError(f"--timm-train: there is no file {timm_train}")


def write_all(contents: Mapping[Path, str]) -> None:
    """Writes all files beside their places, then moves them there one by one.

    Each is the old or the new one, whole. While they are written nothing is replaced; if a move fails, those
    before it have been made.

    Raises:
        BadInputError: If one can't be written.
    """
    beside = {file: file.with_name(f".{file.name}.part") for file in contents}
    file = Path()
    try:
        for file, content in contents.items():
            beside[file].write_text(content, encoding="utf-8")
        for file in contents:
            beside[file].replace(file)
    except OSError as error:
        raise BadInputError(f"{file}: can't be written ({error.strerror}); give another") from error
    finally:
        for part in beside.values():
            with suppress(OSError):
                part.unlink(missing_ok=True)
