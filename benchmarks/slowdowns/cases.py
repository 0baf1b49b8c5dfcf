"""The slowdowns: which cause must be named, in which recipe, and how it is put there.

These were written before the rules of `trainer.observe.diagnosis` were frozen; for the others see `held_out`.
"""

from typing import NamedTuple

from benchmarks.slowdowns.injections import (
    burners,
    inside,
    pulses,
    quota,
    served,
    slow_calls,
    slow_network,
)
from benchmarks.slowdowns.run import Injection


class Case(NamedTuple):
    """A run with something slow in it; a healthy one if the cause is "none".

    Attributes:
        name: Of the case, also of its file below tests/verdicts.
        cause: What the verdict must name.
        how: What is slow, for people.
        recipe: One of `bases.RECIPES`.
        steps: How many to train.
        settings: What else the command line sets.
        injections: What is put around the run.
        ranks: Processes.
        also: Other causes that name the same thing rightly.
    """

    name: str
    cause: str
    how: str
    recipe: str
    steps: int
    settings: tuple[str, ...] = ()
    injections: tuple[Injection, ...] = ()
    ranks: int = 1
    also: tuple[str, ...] = ()


_NARROW = "model.width=8"
_SMALL = ("model.width=8", "data.image_size=32")
_PAIR = "data.micro_batch_size=16"
_ADAM = ("optim.name=adamw", "optim.max_grad_norm=1.0", "ema.decay=0.99")

FIRST: tuple[Case, ...] = (
    Case(
        "camera-two-workers",
        "data-cpu",
        "JPEGs of 2.4 Mpixel, 2 workers on 2 CPUs",
        "camera",
        24,
        ("data.workers=2", "parallel.threads=1", "log.every=3", *_SMALL),
    ),
    Case(
        "pack-costly-transform",
        "data-cpu",
        "8 ms of Python for each sample, 2 workers",
        "pack",
        40,
        ("data.workers=2", "parallel.threads=1", *_SMALL),
        (inside("costly_samples", seconds=0.008),),
    ),
    Case(
        "photos-no-workers",
        "data-workers",
        "workers=0, one thread: the other CPU is idle",
        "photos",
        40,
        ("data.workers=0", "parallel.threads=1", *_SMALL),
    ),
    Case(
        "camera-one-worker",
        "data-workers",
        "one worker, one thread, a narrow model",
        "camera",
        16,
        ("data.workers=1", "parallel.threads=1", "log.every=2", *_SMALL),
    ),
    Case(
        "pack-slow-reads",
        "data-disk",
        "each read takes 8 ms longer (LD_PRELOAD)",
        "pack",
        30,
        (),
        (slow_calls("packed", read_us=8000),),
    ),
    Case(
        "photos-slow-open",
        "data-disk",
        "each file takes 20 ms to open (LD_PRELOAD)",
        "photos",
        20,
        ("data.workers=2", "log.every=2", *_SMALL),
        (slow_calls("photos", open_us=20_000),),
    ),
    Case(
        "shards-slow-disk",
        "data-disk",
        "a disk that gives 4 MB/s (LD_PRELOAD)",
        "shards",
        30,
        ("log.every=3", *_SMALL),
        (slow_calls("shards", mb_us=250_000),),
    ),
    Case(
        "many-shards-late-answers",
        "data-network",
        "many shards over HTTP, each answer 60 ms late",
        "many-shards",
        16,
        ("log.every=2",),
        (served("many-shards", 0.06),),
    ),
    Case(
        "shards-slow-server",
        "data-network",
        "shards over HTTP at 3 MB/s, through a cache of 16 MB",
        "shards",
        20,
        ("log.every=1", "data.cache_limit=16MB", *_SMALL),
        (served("shards", 0.0, mb_seconds=0.3),),
    ),
    Case(
        "digits-item",
        "sync",
        "`.item()` in a hook of the model",
        "digits",
        250,
        ("log.every=10",),
        (inside("item"),),
    ),
    Case("pack-to-list", "sync", "`.tolist()` of the answers", "pack", 60, (_NARROW,), (inside("to_list"),)),
    Case(
        "digits-pulses",
        "straggler",
        "rank 1 of 2 is stopped half of the time (SIGSTOP for 60 ms of 120)",
        "digits",
        200,
        ("data.micro_batch_size=32", "log.every=10"),
        (pulses(1, 0.06, 0.06),),
        ranks=2,
    ),
    Case(
        "synthetic-pulses",
        "straggler",
        "rank 1 of 2 is stopped two thirds of the time (SIGSTOP for 0.4 s of 0.6)",
        "synthetic",
        20,
        (_PAIR, "log.every=2"),
        (pulses(1, 0.4, 0.2),),
        ranks=2,
    ),
    Case(
        "pack-slow-rank",
        "straggler",
        "rank 0 of 2 sleeps 0.1 s in each forward pass",
        "pack",
        40,
        (_PAIR, _NARROW, "data.workers=1"),
        (inside("wait", seconds=0.1, rank=0),),
        ranks=2,
    ),
    Case(
        "synthetic-slow-network",
        "communication",
        "400 Mbit/s between 2 ranks (tc tbf in a namespace)",
        "synthetic",
        10,
        (_PAIR, "log.every=1"),
        (slow_network(400),),
        ranks=2,
    ),
    Case(
        "digits-slow-network",
        "communication",
        "20 Mbit/s between 2 ranks (tc tbf in a namespace)",
        "digits",
        60,
        ("data.micro_batch_size=32",),
        (slow_network(20),),
        ranks=2,
    ),
    Case(
        "digits-slow-fsync",
        "checkpoint",
        "a checkpoint each 2nd step, each sync takes 50 ms (LD_PRELOAD)",
        "digits",
        60,
        ("checkpoint.every=2",),
        (slow_calls("run", fsync_us=50_000),),
    ),
    Case(
        "pack-each-step-kept",
        "checkpoint",
        "a checkpoint after each step, each sync takes 30 ms (LD_PRELOAD)",
        "pack",
        30,
        ("checkpoint.every=1", _NARROW),
        (slow_calls("run", fsync_us=30_000),),
    ),
    Case(
        "evaluated-each-epoch",
        "evaluation",
        "4 times as many images to evaluate as to train, after each epoch",
        "evaluated",
        64,
        ("evaluation.every=1 epoch",),
    ),
    Case(
        "digits-evaluation-by-one",
        "evaluation",
        "eval_batch_size=1, after each epoch",
        "digits",
        180,
        ("evaluation.every=1 epoch", "data.eval_batch_size=1", "model.width=8"),
    ),
    Case(
        "digits-slow-log",
        "logging",
        "log.every=1, each line of metrics.jsonl takes 40 ms to write (LD_PRELOAD)",
        "digits",
        100,
        ("log.every=1",),
        (slow_calls("run", name="metrics.jsonl", write_us=40_000),),
    ),
    Case(
        "pack-slow-log",
        "logging",
        "log.every=1, each write below the run folder takes 40 ms (LD_PRELOAD)",
        "pack",
        60,
        ("log.every=1", _NARROW, "data.workers=1"),
        (slow_calls("run", write_us=40_000),),
    ),
    Case(
        "digits-two-samples",
        "update",
        "steps of 2 samples for a wide model",
        "digits",
        300,
        ("data.global_batch_size=2", "data.micro_batch_size=2", "model.width=96", "log.every=20"),
    ),
    Case(
        "synthetic-two-samples",
        "update",
        "steps of 2 samples for ResNet-18, with AdamW and an average",
        "synthetic",
        80,
        ("data.global_batch_size=2", "data.micro_batch_size=2", *_ADAM),
    ),
    Case(
        "digits-collect",
        "gc",
        "gc.collect() in each forward pass, 300,000 objects alive",
        "digits",
        150,
        (),
        (inside("collect", objects=300_000),),
    ),
    Case(
        "synthetic-collect",
        "gc",
        "gc.collect() in each forward pass, 3 million objects alive",
        "synthetic",
        20,
        ("log.every=2",),
        (inside("collect", objects=3_000_000),),
    ),
    Case(
        "pack-storm",
        "gc",
        "60,000 cycles of garbage a step, eager thresholds",
        "pack",
        40,
        (_NARROW,),
        (inside("storm", objects=60_000, live=400_000),),
    ),
    Case(
        "digits-burners",
        "cpu-others",
        "4 other processes that compute",
        "digits",
        200,
        ("log.every=10",),
        (burners(4),),
    ),
    Case(
        "synthetic-burners",
        "cpu-others",
        "3 other processes that compute",
        "synthetic",
        25,
        (),
        (burners(3),),
    ),
    Case("digits-half-a-cpu", "quota", "a quota of 0.5 CPUs (cgroup)", "digits", 120, (), (quota(0.5),)),
    Case(
        "photos-one-cpu",
        "quota",
        "a quota of 1 CPU for a rank and 3 workers (cgroup)",
        "photos",
        20,
        ("data.workers=3", "log.every=2", _NARROW),
        (quota(1.0),),
        also=("data-cpu",),
    ),
    Case("synthetic-half-a-cpu", "quota", "a quota of 0.6 CPUs (cgroup)", "synthetic", 15, (), (quota(0.6),)),
    Case(
        "digits-many-threads",
        "threads",
        "parallel.threads=16 on 2 CPUs",
        "digits",
        100,
        ("parallel.threads=16",),
    ),
    Case(
        "synthetic-many-threads",
        "threads",
        "parallel.threads=12 on 2 CPUs",
        "synthetic",
        15,
        ("parallel.threads=12", "log.every=2"),
    ),
)
