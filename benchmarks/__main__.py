"""`python -m benchmarks BENCH …`: runs one of the benchmarks.

Each prints what it measured; code 1 means that a target was missed, 3 that nothing was measured. Run it from
the root of the repository: benches are not part of the package. `make bench BENCH=…` makes their environment.
"""

import importlib
import sys
from collections.abc import Sequence

from trainer.cli import Parser, run

# A bench's module has add_arguments(parser), which says what it takes and what runs it. Only the one that is
# asked for is imported.
BENCHES = {
    "overhead": ("overhead", "host time per step over a hand-written loop"),
    "faults": ("check_faults.bench", "known faults, put in one at a time: which does trainer check see?"),
    "slowdowns": ("slowdowns.bench", "runs slowed in known ways (half an hour, root): do they say so?"),
    "accumulation": ("accumulation", "gradient of every step against its samples concatenated"),
    "loader": ("loader", "CPU time, speed and memory of loading images"),
    "tokens": ("tokens", "token batches per CPU second against a nanoGPT-style get_batch"),
    "start": ("start", "CPU seconds from the command to the first step, beside a plain script's"),
    "reduction": ("reduction", "time, memory and bytes of parallel.reduction=tree"),
    "sharding": ("sharding", "memory, bytes sent and time of a model spread over four ranks, beside DDP"),
    "setting": ("setting", "what settings cost: steps, or whole runs, with each and without, in turn"),
    "waits": ("waits", "time of a step by how threads wait, on a quiet machine and beside busy processes"),
    "peers": ("peers", "whole runs of other projects' training scripts, given by path, beside ours"),
    "comm": ("comm", "all-reduce bandwidth of this host's ranks, or torchrun's"),
    "inference": (
        "inference",
        "a trained model: latency and throughput of each way in which torch can run it",
    ),
    "resume": ("resume", "a run gone on with against the one that wasn't cut"),
    "optimizers": ("optimizers", "what each optimizer learns in the same updates"),
    "claims": (
        "claims.bench",
        "what guides say that settings bring, each measured on this machine (10 minutes at most)",
    ),
    "scoreboard": ("scoreboard.bench", "the trainer against every library that is installed, on one page"),
    "stages": ("stages", "what each stage of preparing a sample costs, by kind of data"),
    "scale": (
        "scale.bench",
        "a job on many GPUs, computed from figures measured here: communication, failures, loading",
    ),
    "growth": ("growth", "how time and memory grow with samples, shards and steps"),
    "pictures": ("pictures", "the documentation's pictures: the rooms of the package, the losses of runs"),
    "gpu": ("gpu", "what one GPU is asked for, row after row, in calls of four minutes"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a bench; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run(make_parser(words), words)


def make_parser(words: Sequence[str]) -> Parser:
    """Returns the parser of all benches, with the options of the one that these words name."""
    parser = Parser(prog="python -m benchmarks", description="Proves what is claimed.", allow_abbrev=False)
    benches = parser.add_subparsers(required=True, metavar="BENCH", dest="command")
    for name, (module, about) in BENCHES.items():
        bench = benches.add_parser(name, help=about, description=about, allow_abbrev=False)
        if words[:1] == [name]:
            importlib.import_module(f"benchmarks.{module}").add_arguments(bench)
    return parser


if __name__ == "__main__":
    sys.exit(main())
