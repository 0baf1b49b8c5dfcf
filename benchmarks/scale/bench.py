"""`python -m benchmarks scale`: what a job on many GPUs costs and loses, computed and simulated."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError

_MOST_GPUS = 1 << 20
_MOST_SIMULATED = 1 << 13
_SPREAD = 0.05


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.add_argument(
        "--gpus", default="8,64,512,4096", metavar="LIST", help="how many (default: 8,64,512,4096)"
    )
    bench.add_argument(
        "--figures",
        type=Path,
        metavar="FILE",
        help="figures with their sources, YAML or JSON",
    )
    bench.add_argument(
        "--comm", type=Path, metavar="FILE", help="what `python -m benchmarks comm --json` printed: the links"
    )
    bench.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="replace a figure; repeatable"
    )
    bench.add_argument(
        "--simulate", action="store_true", help="simulate it too; code 1 where they differ by over 10 %%"
    )
    bench.add_argument("--sources", action="store_true", help="only print the figures and their sources")
    bench.add_argument(
        "--strategies",
        action="store_true",
        help="only print what ddp, fsdp and hsdp (a group on each node) send a step and hold",
    )
    bench.add_argument("--seed", type=int, default=0, metavar="N", help="of the simulated failures")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw it, with the simulation (.svg)")
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
        simulated=options.simulate,
        sources_only=options.sources,
        strategies_only=options.strategies,
        seed=options.seed,
        as_json=options.json,
        plot=options.plot,
    )


def bench_scale(
    file: Path | None,
    gpus: str,
    settings: Sequence[str] = (),
    *,
    comm: Path | None = None,
    simulated: bool = False,
    sources_only: bool = False,
    strategies_only: bool = False,
    seed: int = 0,
    as_json: bool = False,
    plot: Path | None = None,
) -> int:
    """Computes, simulates, prints and draws.

    Args:
        file: Figures and their sources.
        gpus: How many, separated by commas.
        settings: NAME=VALUE of figures to replace.
        comm: What `python -m benchmarks comm --json` printed.
        simulated: Whether to simulate, too.
        sources_only: Whether to print what it would be computed from, and no more.
        strategies_only: Whether to print what the strategies send and hold, and no more.
        seed: Of the simulation.
        as_json: Whether to print for machines.
        plot: An SVG file to write, or None.

    Returns:
        0, 1 if formula and simulation lie too far apart.

    Raises:
        BadInputError: If a figure or a number of GPUs can't be.
    """
    from benchmarks.scale import formulas
    from benchmarks.scale.figures import as_mapping, read_job
    from benchmarks.scale.simulate import simulate, simulate_stragglers
    from benchmarks.scale.strategies import strategies_table
    from benchmarks.scale.table import TARGET, advice, differences, not_measured, sources, table

    if file is None:
        raise BadInputError(
            "--figures is missing: give docs/results/scale-measured.yaml or a file of your own, which "
            "`python -m benchmarks scale --measure RUN` begins"
        )
    if plot is not None and plot.suffix != ".svg":
        raise BadInputError(f"--plot {plot}: give a file that ends in .svg")
    if not 0 <= seed < 1 << 63:
        raise BadInputError(f"--seed {seed}: give a number from 0 on")
    job = read_job(file, settings, comm)
    if sources_only:
        print(sources(job))
        return EXIT_DONE
    figures = job.figures
    numbers = _numbers(gpus, figures.gpus_per_node, _MOST_SIMULATED if simulated or plot else _MOST_GPUS)
    if strategies_only:
        print(strategies_table(figures, numbers))
        return EXIT_DONE
    estimates = [formulas.estimate(figures, one) for one in numbers]
    seen = []
    if simulated:
        every = [formulas.steps_between(figures, one) for one in numbers]
        seen = [simulate(figures, one, steps, seed) for one, steps in zip(numbers, every, strict=True)]
    apart = differences(estimates, seen) if seen else {}
    told = advice(figures, numbers)
    if as_json:
        found: dict[str, Any] = {**as_mapping(job), "gpus": numbers, "advice": told}
        found["computed"] = [one._asdict() for one in estimates]
        if seen:
            found |= {"simulated": [one._asdict() for one in seen], "apart": apart}
        print(json.dumps(found))
    else:
        print("\n".join(line for line in (job.about, not_measured(job.sources)) if line))
        print(f"\n{table(numbers, estimates, seen)}\n\n{told}")
        if seen:
            print(f"formula / simulation: {100 * max(apart.values()):.1f} % apart at most, target 10 %")
            slow = simulate_stragglers(figures, numbers[-1], _SPREAD, seed) / estimates[-1].step_s - 1
            print(
                f"simulated alone: where ranks' times vary by {100 * _SPREAD:g} %, a step on "
                f"{numbers[-1]:,} GPUs takes {100 * slow:.0f} % longer"
            )
    if plot is not None:
        from benchmarks.scale.draw import draw

        draw(plot, job, numbers, seed)
    return EXIT_FAILED if apart and max(apart.values()) > TARGET else EXIT_DONE


def _numbers(gpus: str, per_node: int, most: int) -> list[int]:
    try:
        numbers = [int(word) for word in gpus.split(",")]
    except ValueError as error:
        raise BadInputError(f"--gpus {gpus}: give numbers such as 8,64,512") from error
    for one in numbers:
        if not 1 <= one <= most:
            raise BadInputError(f"--gpus {one}: give numbers from 1 to {most:,}")
        if one > per_node and one % per_node:
            raise BadInputError(
                f"--gpus {one}: no whole number of nodes of {per_node} GPUs; change it or gpus_per_node"
            )
    return sorted(set(numbers))
