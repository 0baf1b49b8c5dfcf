"""`trainer bench`: what users measure on their own box. Code 1: a target was missed, 3: nothing was measured.

- `setting`: a recipe's steps with a setting and without; `whole_runs`: the same with whole runs
- `comm`: all-reduces over the ranks; `preflight`: every link between hosts, over plain TCP
- `inference`: a trained model, in every way that torch can run it
- `paired`: things that are timed in turn, and the interval that holds a median
"""

import argparse
import os
from typing import Any

from trainer.host.latest import run_path
from trainer.train.trust_flag import add_trust


def add_parser(commands: Any) -> None:
    """Adds `bench` and what it can measure to the commands."""
    bench = commands.add_parser("bench", help="measure; exit code 1: target missed, 3: nothing measured")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    _add_inference(benches)
    _add_setting(benches)
    _add_comm(benches)


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
    inference.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="where the data lies now; repeatable"
    )
    add_trust(inference)
    inference.set_defaults(run=_inference)


def _add_setting(benches: Any) -> None:
    setting = benches.add_parser(
        "setting", help="time of a recipe's steps with a setting and without", allow_abbrev=False
    )
    setting.add_argument("recipe", metavar="RECIPE", help="name of a recipe or path of a YAML file")
    setting.add_argument(
        "settings",
        nargs="+",
        metavar="KEY=VALUE",
        help="each compared with the recipe as it is; with --runs also env:NAME=VALUE",
    )
    setting.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for all sides; repeatable"
    )
    setting.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="interleaved rounds (default: 15)"
    )
    setting.add_argument("--steps", type=int, default=10, metavar="N", help="in a round (default: 10)")
    setting.add_argument(
        "--runs",
        action="store_true",
        help="whole runs in processes of their own: memory.allocator, parallel.*",
    )
    setting.set_defaults(run=_setting)


def _add_comm(benches: Any) -> None:
    comm = benches.add_parser(
        "comm",
        help="all-reduce bandwidth against the link's limit; --preflight: which link is slow or dead",
        allow_abbrev=False,
    )
    comm.add_argument("--nproc-per-node", type=int, metavar="N", help="on the CPUs of this host (default: 2)")
    comm.add_argument("--gpus", metavar="GPUS", help="a count, or indices (default: all)")
    comm.add_argument(
        "--sizes", default="", metavar="LIST", help="such as 4K,1M (default: 4K to 256M, on CPUs to 64M)"
    )
    comm.add_argument("--dtypes", default="fp32", metavar="LIST", help="fp32,bf16 (default: fp32)")
    comm.add_argument("--backend", choices=("gloo", "nccl", "auto"), default="auto", help="(default: auto)")
    comm.add_argument("--rounds", type=int, default=11, metavar="N", help="interleaved rounds (default: 11)")
    comm.add_argument("--limit", type=float, metavar="GBPS", help="the link's limit in Gbit/s, if you know")
    comm.add_argument("--json", action="store_true", help="print JSON")
    comm.add_argument(
        "--preflight",
        action="store_true",
        help="try each link between hosts, or ranks of one host; exit code 1: one is slow or dead",
    )
    comm.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="after which no answer is none (default: 5)"
    )
    comm.add_argument("--nnodes", metavar="N", help="as of trainer train: on each, with the next three")
    comm.add_argument("--node-rank", type=int, metavar="N", help="as of trainer train")
    comm.add_argument("--master-addr", metavar="HOST", help="as of trainer train")
    comm.add_argument("--master-port", type=int, metavar="PORT", help="as of trainer train")
    comm.set_defaults(run=_comm)


# Benches import what they need when they run: torch alone takes two seconds.


def _setting(options: argparse.Namespace) -> int:
    from trainer.commands.bench.setting import bench_setting
    from trainer.commands.bench.whole_runs import bench_whole_runs

    bench = bench_whole_runs if options.runs else bench_setting
    return bench(options.recipe, options.settings, options.set, rounds=options.rounds, steps=options.steps)


def _comm(options: argparse.Namespace) -> int:
    from trainer.launch.nodes.discover import is_rank, rank_variables

    os.environ.update(rank_variables(os.environ))
    if options.preflight:  # what torch's store says of names that it can't look up helps nobody
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if is_rank(os.environ):
        from trainer.launch.worker import Worker

        with Worker() as worker:  # before the slow imports, so that a signal finds a handler
            from trainer.commands.bench.comm import comm_without_launcher

            worker.code = comm_without_launcher(options)
        return worker.exit_code
    from trainer.commands.bench.comm import bench_comm

    return bench_comm(options)


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
