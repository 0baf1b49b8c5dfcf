"""`trainer bench`: the command line of what measures."""

import argparse
import os
from pathlib import Path
from typing import Any

from benchmarks.claims.command import add_parser as add_claims
from benchmarks.scale import command as scale
from benchmarks.scoreboard.command import add_parser as add_scoreboard
from trainer.host.threads import wait_passively


def _add_inference(benches: Any) -> None:
    inference = benches.add_parser(
        "inference",
        help="latency and throughput of a run's model: eager, compiled, TorchScript, exported, ONNX Runtime",
        allow_abbrev=False,
    )
    inference.add_argument("folder", type=Path, metavar="RUN", help="run folder")
    inference.add_argument(
        "--batches", default="1,8,64", metavar="LIST", help="batch sizes (default: 1,8,64)"
    )
    inference.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="for each way and batch size (default: 2)"
    )
    inference.add_argument("--ways", default="", metavar="LIST", help="which to measure (default: all)")
    inference.add_argument("--json", action="store_true", help="print JSON")
    inference.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.svg)")
    inference.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="where the data lies now; repeatable"
    )
    inference.set_defaults(run=_inference)


def add_parser(commands: Any, parser_class: type[argparse.ArgumentParser]) -> None:
    """Adds `bench` and what it can measure to the commands."""
    bench = commands.add_parser("bench", help="measure; exit code 1: target missed, 3: nothing measured")
    benches = bench.add_subparsers(required=True, metavar="BENCH", parser_class=parser_class)
    _add_inference(benches)
    overhead = benches.add_parser(
        "overhead", help="host time per step over a hand-written loop", allow_abbrev=False
    )
    overhead.add_argument(
        "--rounds", type=int, default=40, metavar="N", help="interleaved rounds (default: 40)"
    )
    overhead.add_argument(
        "--steps", type=int, default=500, metavar="N", help="steps per round (default: 500)"
    )
    overhead.add_argument(
        "--target", type=float, default=20.0, metavar="US", help="largest overhead, us per step"
    )
    overhead.add_argument(
        "--against", default="", metavar="LIST", help="lightning,fabric,accelerate,ignite: which to time too"
    )
    overhead.set_defaults(run=_overhead)
    accumulation = benches.add_parser(
        "accumulation", help="gradient of every window against its samples concatenated", allow_abbrev=False
    )
    accumulation.add_argument(
        "--against", default="", metavar="LIST", help="lightning,accelerate,timm: which to measure too"
    )
    accumulation.add_argument(
        "--timm-train", type=Path, metavar="FILE", help="timm's train.py, which its wheel doesn't hold"
    )
    accumulation.set_defaults(run=_accumulation)
    loader = benches.add_parser(
        "loader", help="CPU time, speed and memory of loading images", allow_abbrev=False
    )
    loader.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help="images by class (default: photographs made here)"
    )
    loader.add_argument(
        "--against", default="", metavar="LIST", help="torchvision,timm,webdataset: which to measure too"
    )
    loader.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")
    loader.add_argument("--workers", type=int, default=2, metavar="N", help="of each (default: 2)")
    loader.set_defaults(run=_loader)
    tokens = benches.add_parser(
        "tokens", help="token batches per CPU second against a nanoGPT-style get_batch", allow_abbrev=False
    )
    tokens.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="interleaved rounds (default: 20)"
    )
    tokens.add_argument("--target", type=float, default=8.0, metavar="X", help="smallest ratio (default: 8)")
    tokens.set_defaults(run=_tokens)
    reduction = benches.add_parser(
        "reduction", help="time, memory and bytes of parallel.reduction=tree", allow_abbrev=False
    )
    reduction.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="interleaved rounds (default: 15)"
    )
    reduction.add_argument(
        "--target", type=float, default=1.05, metavar="X", help="largest ratio on one rank (default: 1.05)"
    )
    reduction.set_defaults(run=_reduction)
    setting = benches.add_parser(
        "setting", help="time of a recipe's windows with a setting and without", allow_abbrev=False
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
    setting.add_argument("--windows", type=int, default=10, metavar="N", help="in a round (default: 10)")
    setting.add_argument(
        "--runs",
        action="store_true",
        help="whole runs in processes of their own: memory.allocator, parallel.*",
    )
    setting.set_defaults(run=_setting)
    workers = benches.add_parser(
        "workers",
        help="workers and prefetch: the whole grid against what the search at a run's start takes",
        allow_abbrev=False,
    )
    workers.add_argument("recipe", metavar="RECIPE", help="name of a recipe or path of a YAML file")
    workers.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable"
    )
    workers.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="interleaved turns of each setting (default: 5)"
    )
    workers.set_defaults(run=_workers)
    resume = benches.add_parser(
        "resume", help="a run gone on with against the one that wasn't cut", allow_abbrev=False
    )
    resume.add_argument(
        "--against", default="", metavar="LIST", help="lightning,accelerate: which to measure too"
    )
    resume.set_defaults(run=_resume)
    optimizers = benches.add_parser(
        "optimizers", help="what each optimiser learns in the same updates", allow_abbrev=False
    )
    optimizers.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    optimizers.set_defaults(run=_optimizers)
    _add_tasks(benches)
    _add_comm(benches)
    scale.add_parser(benches)


def _add_comm(benches: Any) -> None:
    comm = benches.add_parser(
        "comm",
        help="all-reduce bandwidth against the link's limit; --preflight: which link is slow or dead",
        allow_abbrev=False,
    )
    comm.add_argument("--ranks", type=int, metavar="N", help="on the CPUs of this host (default: 2)")
    comm.add_argument("--gpus", metavar="GPUS", help="a count, or indices (default: all)")
    comm.add_argument(
        "--sizes", default="", metavar="LIST", help="such as 4K,1M (default: 4K to 256M, on CPUs to 64M)"
    )
    comm.add_argument("--dtypes", default="fp32", metavar="LIST", help="fp32,bf16 (default: fp32)")
    comm.add_argument("--backend", choices=("gloo", "nccl", "auto"), default="auto", help="(default: auto)")
    comm.add_argument("--rounds", type=int, default=11, metavar="N", help="interleaved rounds (default: 11)")
    comm.add_argument("--limit", type=float, metavar="GBPS", help="the link's limit in Gbit/s, if you know")
    comm.add_argument("--json", action="store_true", help="print JSON")
    comm.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.svg)")
    comm.add_argument(
        "--preflight",
        action="store_true",
        help="try each link between hosts, or ranks of one host; exit code 1: one is slow or dead",
    )
    comm.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="after which no answer is none (default: 5)"
    )
    comm.add_argument("--nodes", metavar="N", help="as of trainer train: on each, with the next two")
    comm.add_argument("--node-rank", type=int, metavar="N", help="as of trainer train")
    comm.add_argument("--master", metavar="HOST:PORT", help="as of trainer train")
    comm.set_defaults(run=_comm)


def _add_tasks(benches: Any) -> None:
    add_claims(benches)
    add_scoreboard(benches)
    dtmf = benches.add_parser(
        "dtmf", help="Goertzel's filters on the test set of the recipe dtmf", allow_abbrev=False
    )
    dtmf.set_defaults(run=_dtmf)
    boxes = benches.add_parser(
        "boxes", help="what augmenting an image with its boxes costs a worker", allow_abbrev=False
    )
    boxes.add_argument("--rounds", type=int, default=7, metavar="N", help="interleaved rounds (default: 7)")
    boxes.set_defaults(run=_boxes)
    compression = benches.add_parser(
        "compression",
        help="gzip and xz on the text that gpt-stdlib is measured on, and a run beside them",
        allow_abbrev=False,
    )
    compression.add_argument(
        "run_folder", type=Path, nargs="?", metavar="RUN", help="folder of a finished run of gpt-stdlib"
    )
    compression.add_argument(
        "--target",
        type=float,
        default=2.3,
        metavar="BITS",
        help="most bits per byte (default: 2.3)",
    )
    compression.set_defaults(run=_compression)


# Commands import what they need when they run: torch alone takes two seconds.


def _overhead(options: argparse.Namespace) -> int:
    from trainer.commands.bench.overhead import bench_overhead

    return bench_overhead(options.rounds, options.steps, options.target, options.against)


def _inference(options: argparse.Namespace) -> int:
    from trainer.commands.bench.inference import bench_inference

    return bench_inference(
        options.folder,
        options.set,
        batches=options.batches,
        seconds=options.seconds,
        ways=options.ways,
        as_json=options.json,
        plot=options.plot,
    )


def _accumulation(options: argparse.Namespace) -> int:
    from benchmarks.accumulation import bench_accumulation

    return bench_accumulation(options.against, options.timm_train)


def _loader(options: argparse.Namespace) -> int:
    from benchmarks.loader import bench_loader

    return bench_loader(options.folder, options.against, options.rounds, options.workers)


def _tokens(options: argparse.Namespace) -> int:
    from benchmarks.tokens import bench_tokens

    return bench_tokens(rounds=options.rounds, target=options.target)


def _reduction(options: argparse.Namespace) -> int:
    from benchmarks.reduction import bench_reduction

    return bench_reduction(rounds=options.rounds, target=options.target)


def _setting(options: argparse.Namespace) -> int:
    from trainer.commands.bench.setting import bench_setting
    from trainer.commands.bench.whole_runs import bench_whole_runs

    bench = bench_whole_runs if options.runs else bench_setting
    return bench(
        options.recipe, options.settings, options.set, rounds=options.rounds, windows=options.windows
    )


def _workers(options: argparse.Namespace) -> int:
    wait_passively()
    from trainer.commands.bench.workers import bench_workers

    return bench_workers(options.recipe, options.set, options.repeats)


def _resume(options: argparse.Namespace) -> int:
    from benchmarks.resume import bench_resume

    return bench_resume(options.against)


def _optimizers(options: argparse.Namespace) -> int:
    from benchmarks.optimizers import bench_optimizers

    return bench_optimizers(options.quick)


def _dtmf(options: argparse.Namespace) -> int:  # noqa: ARG001
    from benchmarks.goertzel import bench_goertzel

    return bench_goertzel()


def _boxes(options: argparse.Namespace) -> int:
    from benchmarks.boxes import bench_boxes

    return bench_boxes(options.rounds)


def _compression(options: argparse.Namespace) -> int:
    from benchmarks.compression import bench_compression

    return bench_compression(options.run_folder, options.target)


def _comm(options: argparse.Namespace) -> int:
    from trainer.launch.rank import is_rank, register

    if is_rank(os.environ):
        register()  # before the slow imports, so that a signal finds a handler
    if options.preflight:  # what torch's store says of names that it can't look up helps nobody
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from trainer.commands.bench.comm import bench_comm

    return bench_comm(options)
