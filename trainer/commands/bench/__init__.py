"""`trainer bench`: measures the user's machine. Exit code 1: a target was missed; 3: nothing was measured.

`inference` measures latency and throughput of a trained model, for each way in which torch can run it.
"""

import argparse
from typing import Any

from trainer.host.latest import run_path
from trainer.runs.flags import add_settings, add_trust


def add_parser(commands: Any) -> None:
    """Adds `bench` and its subcommands to the commands."""
    bench = commands.add_parser("bench", help="measure; exit code 1: target missed, 3: nothing measured")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    _add_inference(benches)


def _add_inference(benches: Any) -> None:
    inference = benches.add_parser(
        "inference",
        help="latency and throughput of a run's model: eager, compiled, TorchScript, exported, ONNX Runtime",
        allow_abbrev=False,
    )
    inference.add_argument("folder", type=run_path, metavar="RUN", help="run folder, or latest")
    inference.add_argument(
        "--batches", default="1,8,64", metavar="LIST", help="batch sizes (default: 1,8,64)"
    )
    inference.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="for each way and batch size (default: 2)"
    )
    inference.add_argument("--ways", default="", metavar="LIST", help="which to measure (default: all)")
    inference.add_argument("--json", action="store_true", help="print JSON")
    add_settings(inference, "where the data lies now")
    add_trust(inference)
    inference.set_defaults(run=_inference)


# Benches import what they need when they run: torch alone takes two seconds.


def _inference(options: argparse.Namespace) -> int:
    from trainer.commands.bench.inference import bench_inference

    return bench_inference(
        options.folder,
        options.set,
        batches=options.batches,
        seconds=options.seconds,
        ways=options.ways,
        as_json=options.json,
        trust=options.trust,
    )
