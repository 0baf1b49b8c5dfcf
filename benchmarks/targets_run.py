"""Measures the targets in pieces, and keeps what was found: `scripts/bench_gpu.sh`.

Each piece is a call that ends within 8 minutes. What a call found is written after each row, by GPU, and
isn't measured again; compiled code is kept, so that a later piece needn't compile it.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import picked
from benchmarks.targets import TARGETS, Step, Target, Verdict
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_NOT_MEASURED, BadInputError
from trainer.host.files import write_whole
from trainer.runs.folder import read_rows

LIMIT_S = 470.0
FOLDER = Path("build/targets")
PIECES = max(target.piece for target in TARGETS)
_RESULTS, _TABLE = "results.json", "table.md"


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Says what it takes on the command line."""
    bench.add_argument("--dry-run", action="store_true", help="show the commands")
    keys = ", ".join(target.key for target in TARGETS)
    bench.add_argument("--only", default="", metavar="KEY,…", help=f"rows: {keys}")
    bench.add_argument("--piece", type=int, default=0, metavar="N", help=f"1 to {PIECES}; a call for each")
    bench.add_argument("--out", type=Path, default=FOLDER, help=f"folder for what was found ({FOLDER})")
    bench.set_defaults(run=lambda o: bench_targets(o.dry_run, chosen(o.only, o.piece), o.out))


def chosen(only: str, piece: int) -> list[Target]:
    """Chooses rows: by key, of a piece, or all.

    Raises:
        BadInputError: If there is no such row or piece.
    """
    keys = picked(only, [target.key for target in TARGETS], "--only", "target")
    if not 0 <= piece <= PIECES:
        raise BadInputError(f"--piece {piece}: there are 1 to {PIECES}")
    return [t for t in TARGETS if (not keys or t.key in keys) and piece in (0, t.piece)]


def bench_targets(dry_run: bool, rows: Sequence[Target], out: Path) -> int:
    """Measures what there is time for, and prints the table of all targets.

    Args:
        dry_run: Whether only to show the commands.
        rows: What is measured, but what was found before.
        out: Folder of what was found.

    Returns:
        0 if each of these rows was met, 1 if one was missed, 3 if one could not be judged or there is no GPU.
    """
    if dry_run:
        for target in rows:
            print(f"# {target.key} (piece {target.piece}): {target.what}: {target.target}")
            for step in target.steps:
                print(shlex.join(command(step, Path("WORK"))))
        return EXIT_DONE
    if not torch.cuda.is_available():
        print("not measured: no GPU")
        return EXIT_NOT_MEASURED
    from benchmarks.conditions import conditions

    # By card: figures of two are never compared.
    folder = (out / torch.cuda.get_device_name().replace(" ", "-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(name, str(folder / name.partition("_")[0].lower()))
    began, found = time.monotonic(), _read(folder)
    verdicts = list[bool | None]()
    for target in rows:

        def left() -> float:
            return LIMIT_S - (time.monotonic() - began)

        verdicts.append(measured(target, folder, found, left)[1])
        table = f"{conditions()}\n\n{table_of(found)}"
        write_whole(folder / _TABLE, table)
    print(table if rows else table_of(found))
    if False in verdicts:
        return EXIT_FAILED
    return EXIT_DONE if all(verdicts) else EXIT_NOT_MEASURED


def table_of(found: dict[str, Any]) -> str:
    """Puts all targets into a table; what is still missing has the call that measures it."""
    lines = ["| what | target | measured | |", "|---|---|---|---|"]
    for target in TARGETS:
        said, met = judged(target, found)
        if met is None and any(step.key not in found for step in target.steps):
            said = f"{said}: scripts/bench_gpu.sh --piece {target.piece}"
        verdict = {True: "met", False: "MISSED", None: ""}[met]
        lines.append(f"| {target.what} | {target.target} | {said} | {verdict} |")
    return "\n".join(lines)


def command(step: Step, work: Path) -> list[str]:
    """The words of a step's command."""
    return [sys.executable, *(word.replace("{work}", str(work)) for word in step.words)]


def measured(target: Target, folder: Path, found: dict[str, Any], left: Callable[[], float]) -> Verdict:
    """Does what of a row's steps wasn't done yet, keeps what they found, and judges."""
    for step in target.steps:
        if step.key in found:
            continue
        if left() <= 0:
            return f"not measured: {LIMIT_S:.0f} s were over", None
        try:
            found[step.key] = _done(step, folder, left())
        except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
            said = str(error).splitlines()[0][:120]
            print(f"not measured: {step.key}: {said}", file=sys.stderr)
            return f"not measured: {step.key}: {said}", None
        write_whole(folder / _RESULTS, json.dumps(found))
    return judged(target, found)


def judged(target: Target, found: dict[str, Any]) -> Verdict:
    """Judges a row by what was found; says why where that can't be."""
    if missing := [step.key for step in target.steps if step.key not in found]:
        return f"not measured ({', '.join(missing)})", None
    try:
        return target.judge(found)
    except (KeyError, StopIteration, ZeroDivisionError, TypeError) as error:
        return f"not measured: no figure ({type(error).__name__} {error})", None


def _read(folder: Path) -> dict[str, Any]:
    """Reads the results of earlier calls on this card."""
    try:
        found: dict[str, Any] = json.loads((folder / _RESULTS).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BadInputError(f"{folder / _RESULTS} can't be read ({error}): remove it") from error
    return found


def _done(step: Step, work: Path, within: float) -> Any:
    words = command(step, work)
    print(f"+ {shlex.join(words)}", file=sys.stderr, flush=True)
    piped = subprocess.PIPE if step.keeps == "json" else None
    told = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if step.deterministic else {}
    done = subprocess.run(
        words, stdout=piped, text=True, timeout=within, check=step.keeps != "code", env={**os.environ, **told}
    )
    if step.keeps == "code":
        return done.returncode
    if step.keeps == "json":
        return json.loads(done.stdout.splitlines()[-1])
    return list(read_rows(work / step.key))
