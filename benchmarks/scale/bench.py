"""`python -m benchmarks scale`: what a job on many GPUs costs and loses, computed."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_DONE, BadInputError

_MOST_GPUS = 1 << 20


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument(
        "--gpus", default="8,64,512,4096", metavar="LIST", help="how many (default: 8,64,512,4096)"
    )
    bench.add_argument(
        "--figures", type=Path, metavar="FILE", help="figures with their sources, YAML or JSON"
    )
    bench.add_argument(
        "--comm", type=Path, metavar="FILE", help="what `python -m benchmarks comm --json` printed: the links"
    )
    bench.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="replace a figure; repeatable"
    )
    bench.add_argument("--sources", action="store_true", help="only print the figures and their sources")
    bench.add_argument(
        "--strategies",
        action="store_true",
        help="only print what ddp, fsdp and hsdp (a group on each node) send a step and hold",
    )
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument(
        "--measure", type=Path, metavar="RUN", help="print a file of figures from a run and from this machine"
    )
    bench.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.measure is not None:
        from benchmarks.scale.measure import print_figures

        return print_figures(options.measure, options.comm)
    return bench_scale(
        options.figures,
        options.gpus,
        options.set,
        comm=options.comm,
        sources_only=options.sources,
        strategies_only=options.strategies,
        as_json=options.json,
    )


def bench_scale(
    file: Path | None,
    gpus: str,
    settings: Sequence[str] = (),
    *,
    comm: Path | None = None,
    sources_only: bool = False,
    strategies_only: bool = False,
    as_json: bool = False,
) -> int:
    """Computes and prints.

    Args:
        file: Figures and their sources.
        gpus: Numbers of GPUs, separated by commas.
        settings: NAME=VALUE of figures to replace.
        comm: Output of `python -m benchmarks comm --json`.
        sources_only: Whether to print the figures and their sources, and no more.
        strategies_only: Whether to print what the strategies send and hold, and no more.
        as_json: Whether to print for machines.

    Returns:
        0.

    Raises:
        BadInputError: If a figure or a number of GPUs can't be.
    """
    from benchmarks.scale import formulas
    from benchmarks.scale.figures import as_mapping, read_job
    from benchmarks.scale.strategies import strategies_table
    from benchmarks.scale.table import advice, not_measured, sources, table

    if file is None:
        raise BadInputError(
            "--figures is missing: give docs/results/scale-measured.yaml or a file of your own, which "
            "`python -m benchmarks scale --measure RUN` begins"
        )
    job = read_job(file, settings, comm)
    if sources_only:
        print(sources(job))
        return EXIT_DONE
    figures = job.figures
    numbers = _numbers(gpus, figures.gpus_per_node)
    if strategies_only:
        print(strategies_table(figures, numbers))
        return EXIT_DONE
    estimates = [formulas.estimate(figures, one) for one in numbers]
    told = advice(figures, numbers)
    if as_json:
        found: dict[str, Any] = {**as_mapping(job), "gpus": numbers, "advice": told}
        print(json.dumps({**found, "computed": estimates}))
        return EXIT_DONE
    print("\n".join(line for line in (job.about, not_measured(job.sources)) if line))
    print(f"\n{table(numbers, estimates)}\n\n{told}")
    return EXIT_DONE


def _numbers(gpus: str, per_node: int) -> list[int]:
    try:
        numbers = [int(word) for word in gpus.split(",")]
    except ValueError as error:
        raise BadInputError(f"--gpus {gpus}: give numbers such as 8,64,512") from error
    for one in numbers:
        if not 1 <= one <= _MOST_GPUS:
            raise BadInputError(f"--gpus {one}: give numbers from 1 to {_MOST_GPUS:,}")
        if one > per_node and one % per_node:
            raise BadInputError(
                f"--gpus {one}: no whole number of nodes of {per_node} GPUs; change it or gpus_per_node"
            )
    return sorted(set(numbers))
