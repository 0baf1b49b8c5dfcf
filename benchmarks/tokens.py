"""Token batches per second of processor time: the trainer's loader against a nanoGPT-style `get_batch`.

Both deliver x and y, int64 (32, 1024), on the CPU, from the same file of random tokens in the page cache. The
other one is written here after the manner of nanoGPT: the file is mapped anew for each batch, offsets are
drawn, and each sample is cut out, cast and stacked, for x and then for y. Ours is the loader that trains,
without workers: the order of the epoch is computed, not drawn with repetition, and what comes back is cast
once on its way into x and y. Rounds are interleaved.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.conditions import conditions
from benchmarks.options import add_rounds
from benchmarks.overhead import Series
from benchmarks.paired import interleaved, judged, median_interval, one_thread
from trainer.config.data import LoaderConfig
from trainer.data.formats.tokens import TOKENS, TokenDataset, inputs_and_targets
from trainer.data.loader import RingLoader, Source
from trainer.data.sampling.plan import Plan, Share

_LENGTH, _BATCH = 1024, 32
_VOCABULARY = 50257

NANOGPT = "get_batch as in nanoGPT"

Pair = tuple[torch.Tensor, torch.Tensor]


def get_batch(file: Path) -> Pair:
    """Returns a batch in the manner of nanoGPT: x and y, int64 (32, 1024)."""
    data = np.memmap(file, np.uint16, "r")
    starts = torch.randint(len(data) - _LENGTH, (_BATCH,))

    def part(shift: int) -> torch.Tensor:
        # Gone through as a tensor, not as a list: so it is there, and half of what it costs.
        cuts = (data[start + shift : start + shift + _LENGTH] for start in starts)
        return torch.stack([torch.from_numpy(cut.astype(np.int64)) for cut in cuts])

    return part(0), part(1)


def by_get_batch(file: Path, batches: int) -> float:
    """Seconds of processor time for so many batches."""
    start = time.process_time()
    for _ in range(batches):
        get_batch(file)
    return time.process_time() - start


def by_trainer(loader: RingLoader, batches: int) -> float:
    """Seconds of processor time for so many batches."""
    start = time.process_time()
    for batch in loader(range(batches)):
        inputs_and_targets(batch.fields[TOKENS])
    return time.process_time() - start


def token_loader(file: Path, batches: int) -> RingLoader:
    """The trainer's loader over a token file, for at least so many batches."""
    data = TokenDataset(file, _LENGTH, "uint16")
    epochs = -(-batches * _BATCH // len(data))
    plan = Plan(len(data), _BATCH, _BATCH, epochs=epochs, last="cross", seed=0)
    return RingLoader(Source(data, Share(plan)), torch.device("cpu"), 0, LoaderConfig(workers=0))


@dataclass(frozen=True)
class TokenTimes:
    """Seconds of processor time for a batch of 32 x 1024 tokens, float64 (rounds,).

    Attributes:
        theirs: nanoGPT's manner.
        ours: The trainer's loader, without workers.
    """

    theirs: Series
    ours: Series


def measure_tokens(rounds: int, batches: int, megabytes: int) -> TokenTimes:
    """Times both in turn, on one thread; see `bench_tokens`."""
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "random.bin")
        random = np.random.Generator(np.random.Philox(0))
        random.integers(0, _VOCABULARY, megabytes * 500_000, np.uint16).tofile(file)
        loader = token_loader(file, batches)
        loops = [partial(by_get_batch, file, batches // 10), partial(by_trainer, loader, batches)]
        theirs, ours = (np.array(series) for series in interleaved(loops, rounds))
    return TokenTimes(theirs / (batches // 10), ours / batches)


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    add_rounds(bench, 20)
    bench.add_argument("--target", type=float, default=8.0, metavar="X", help="smallest ratio (default: 8)")
    bench.set_defaults(run=lambda options: bench_tokens(rounds=options.rounds, target=options.target))


def bench_tokens(rounds: int = 20, batches: int = 1000, megabytes: int = 100, target: float = 8.0) -> int:
    """Measures, prints and judges.

    Args:
        rounds: Pairs of runs.
        batches: Batches of a run of ours; the other one does a tenth.
        megabytes: Size of the file.
        target: Smallest ratio of tokens per second of processor time.

    Returns:
        0 if the target is met, 1 if not, 3 if it lies within the interval.
    """
    times = measure_tokens(rounds, batches, megabytes)
    ratio, low, high = median_interval((times.theirs / times.ours).tolist())
    verdict, code = judged(-high, -low, -target)
    per_batch = _BATCH * _LENGTH / 1e6
    rows = [
        f"| {name} | {np.median(speed):,.0f} | {speed.min():,.0f} to {speed.max():,.0f} | {more} |"
        for name, speed, more in (
            (NANOGPT, per_batch / times.theirs, "1"),
            ("trainer, no workers", per_batch / times.ours, f"{ratio:.1f} ({low:.1f} to {high:.1f})"),
        )
    ]
    print(
        f"{conditions()}\n"
        f"median of {rounds} interleaved rounds, T = {_LENGTH}, B = {_BATCH}, x and y as int64 on the CPU, "
        f"1 thread, uint16 file of {megabytes} MB in the page cache\n\n"
        "| loader | million tokens per CPU second | smallest to largest | ratio (95 % interval) |\n"
        "|---|---|---|---|\n" + "\n".join(rows) + f"\n\ntarget {target:g}x: {verdict}"
    )
    return code
