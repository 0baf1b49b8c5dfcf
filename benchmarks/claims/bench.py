"""`python -m benchmarks claims`: the command line. Imports torch only when it runs."""

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path

from trainer.host.startup import choose_waiting


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument("--quick", action="store_true", help="a minute at most; wider intervals")
    bench.add_argument("--only", default="", metavar="LIST", help="claims or ablations by name")
    bench.add_argument("--out", type=Path, metavar="DIR", help="write claims.json and claims.svg there")
    bench.set_defaults(run=_claims)


def _claims(options: argparse.Namespace) -> int:
    choose_waiting()
    # Or asking whether there is a GPU would start CUDA here, and no process could be forked from this one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return bench_claims(options.quick, options.only, options.out)


def bench_claims(quick: bool = False, only: str = "", out: Path | None = None) -> int:
    """Measures, prints and writes.

    Args:
        quick: A minute at most, instead of ten.
        only: Claims or ablations by name, separated by commas; empty: all.
        out: A folder for the rows as JSON, and a plot.

    Returns:
        0, or 3 if none of the claims could be measured here.

    Raises:
        BadInputError: For a name that is no claim's.
    """
    from benchmarks.charts import as_svg
    from benchmarks.claims.chart import chart
    from benchmarks.claims.run import FULL, QUICK, run_claims, select
    from benchmarks.claims.show import as_json, summary, table
    from benchmarks.conditions import conditions
    from trainer.errors import EXIT_DONE, EXIT_NOT_MEASURED

    claims, extent = select(only), QUICK if quick else FULL
    # Every optimizer wants it, and it takes three seconds: once here, not in each process that is forked.
    importlib.import_module("torch._dynamo")
    with tempfile.TemporaryDirectory(prefix="trainer-claims-") as scratch:
        rows = run_claims(claims, quick, Path(scratch), _say)
    here = conditions()
    words = ["python -m benchmarks claims", "--quick" * quick, f"--only {only}" * bool(only)]
    about = (
        f"{' '.join(filter(None, words))}: medians of {extent.rounds} interleaved rounds, all else equal; "
        "a claim holds if the whole interval lies at or below what was claimed"
    )
    print(f"{here}\n{about}\n\n{table(rows)}\n\n{summary(rows)}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        drawn = as_svg(chart(f"{here}; {summary(rows)}", rows))
        files = {"json": as_json(rows, here, about), "svg": drawn}
        for suffix, content in files.items():
            (out / f"claims.{suffix}").write_text(content, encoding="utf-8")
    return EXIT_DONE if any(row.measured for row in rows) else EXIT_NOT_MEASURED


def _say(text: str) -> None:
    print(f"measuring {text}", file=sys.stderr, flush=True)
