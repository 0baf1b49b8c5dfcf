"""`trainer bench links`: all connections between the hosts of a job. Exit code 1: one is slow or dead."""

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds `bench` and its subcommands to the commands."""
    bench = commands.add_parser("bench", help="Measure the network links between hosts.")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    _add_links(benches)


def _add_links(benches: Any) -> None:
    links = benches.add_parser(
        "links",
        help="try each link between the hosts of a job; exit code 1: one is slow or dead",
        allow_abbrev=False,
    )
    links.add_argument("--json", action="store_true", help="print JSON")
    links.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="after which no answer is none (default: 5)"
    )
    links.add_argument("--nnodes", metavar="N", help="as of trainer train: on each, with the next three")
    links.add_argument("--node-rank", type=int, metavar="N", help="as of trainer train")
    links.add_argument("--master-addr", metavar="HOST", help="as of trainer train")
    links.add_argument("--master-port", type=int, metavar="PORT", help="as of trainer train")
    links.set_defaults(run=_links)


def _links(options: argparse.Namespace) -> int:
    from trainer.commands.bench.preflight import bench_links

    return bench_links(options)
