"""Runs in which nothing is slow: recipes, sizes, workers, ranks. None of them must get a verdict."""

from benchmarks.slowdowns.cases import Case

_PAIR = "data.micro_batch_size=16"


def _case(name: str, how: str, recipe: str, steps: int, *settings: str, ranks: int = 1) -> Case:
    return Case(f"healthy-{name}", "none", how, recipe, steps, settings, ranks=ranks)


HEALTHY: tuple[Case, ...] = (
    _case("digits", "as it is", "digits", 250, "log.every=10"),
    _case(
        "digits-batch-16",
        "steps of 16",
        "digits",
        400,
        "data.global_batch_size=16",
        "data.micro_batch_size=16",
    ),
    _case(
        "digits-accumulation", "4 shards a step", "digits", 150, "data.micro_batch_size=16", "log.every=10"
    ),
    _case(
        "digits-evaluated", "evaluated each epoch", "digits", 200, "evaluation.every=1 epoch", "log.every=10"
    ),
    _case("digits-checkpoints", "a checkpoint each 50", "digits", 250, "checkpoint.every=50", "log.every=25"),
    _case(
        "digits-workers", "not resident, one worker", "digits", 150, "data.resident=false", "data.workers=1"
    ),
    _case("digits-bf16", "bfloat16", "digits", 60, "precision.mode=bf16"),
    _case("digits-pair", "two ranks", "digits", 250, "data.micro_batch_size=32", "log.every=10", ranks=2),
    _case(
        "digits-tree",
        "two ranks, reduction by a tree",
        "digits",
        250,
        "data.micro_batch_size=32",
        "parallel.reduction=tree",
        "log.every=10",
        ranks=2,
    ),
    _case("photos", "as it is", "photos", 12, "log.every=2"),
    _case("photos-two-workers", "2 workers", "photos", 12, "data.workers=2", "log.every=2"),
    _case("pack", "as it is", "pack", 60),
    _case("pack-pair", "two ranks, a worker each", "pack", 30, _PAIR, "data.workers=1", ranks=2),
    _case("shards", "as it is", "shards", 20, "log.every=2"),
    _case("synthetic", "as it is", "synthetic", 40),
    _case("synthetic-adamw", "AdamW and an average", "synthetic", 40, "optim.name=adamw", "ema.decay=0.99"),
    _case("synthetic-accumulation", "2 shards", "synthetic", 30, "data.micro_batch_size=16", "log.every=3"),
    _case(
        "synthetic-pair",
        "two ranks",
        "synthetic",
        20,
        _PAIR,
        "data.global_batch_size=64",
        "log.every=2",
        ranks=2,
    ),
    _case("evaluated-seldom", "evaluated each 8th epoch", "evaluated", 100, "evaluation.every=8 epochs"),
    _case("many-shards", "little images, a wider model", "many-shards", 100, "model.width=32"),
)
