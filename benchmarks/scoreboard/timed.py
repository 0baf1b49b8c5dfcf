"""The benches that are timed, as rows of the scoreboard."""

import tempfile
from pathlib import Path

from benchmarks import loader, overhead, tokens
from benchmarks.against import LibraryFailed, titled
from benchmarks.photographs import write_photographs
from benchmarks.scoreboard.common import Extent, failed_rows, libraries_for
from benchmarks.scoreboard.figures import Part, timed, without_the_failing

_WORKERS = 2
_US = 1e6
_HAND = "by hand"
_SHRUNK = "images shrunk beforehand: not compared"


def by_overhead(extent: Extent) -> Part:
    """Host time per step, over two loops by hand too."""
    there, rows = libraries_for("train_tiny")
    times, failed = without_the_failing(
        lambda names: overhead.measure_overhead(extent.rounds, extent.steps, {n: there[n] for n in names}),
        there,
        LibraryFailed,
    )
    others = {_HAND: times.hand, f"{_HAND}, lean": times.lean}
    others |= {titled(name): series for name, series in times.theirs.items()}
    own = titled("trainer")
    compared = [
        timed(own, name, times.ours, series, _HAND if name.startswith(_HAND) else "")
        for name, series in others.items()
    ]
    return Part(
        "overhead",
        [*compared, *rows, *failed_rows(failed)],
        f"{extent.rounds} interleaved rounds of {extent.steps} steps on one thread; nothing is logged but by "
        f"the trainer, a row of metrics every {times.log_every} steps",
        {name: list(series) for name, series in {own: times.ours, **others}.items()},
    )


def by_loader(extent: Extent) -> Part:
    """CPU time of an image: three ways of ours."""
    loader.check_proc()
    there, rows = libraries_for("load")
    with tempfile.TemporaryDirectory() as name:
        images = Path(name) / "images"
        write_photographs(images, extent.images)
        about = loader.about(None, images, extent.epochs, _WORKERS)

        def measure(names: list[str]) -> loader.LoadTimes:
            with tempfile.TemporaryDirectory(dir=name) as work:
                return loader.measure_loading(images, Path(work), names, extent.epochs, _WORKERS)

        times, failed = without_the_failing(measure, there, LibraryFailed)
    costs = {name: pipeline.all_us for name, pipeline in times.pipelines.items()}
    compared = [
        timed(ours, titled(name), costs[ours], costs[name], apart="" if ours == loader.ORIGINALS else _SHRUNK)
        for name in there
        if name in costs
        for ours in loader.TARGETS
    ]
    raw = {
        name: {"epochs": [epoch._asdict() for epoch in pipeline.epochs], "pss_mib": pipeline.pss}
        for name, pipeline in times.pipelines.items()
    }
    return Part(
        "loader",
        [*compared, *rows, *failed_rows(failed)],
        f"{about}; the trainer's CPU time with flip and normalization, which its device does "
        f"(measured in each round: {times.device_us:,.0f} us of each image), as the others do them",
        {"pipelines": raw, "device_us": times.device_us},
    )


def by_tokens(extent: Extent) -> Part:
    """CPU time of a batch of tokens."""
    times = tokens.measure_tokens(extent.token_rounds, extent.batches, extent.megabytes)
    row = timed("trainer, no workers", tokens.NANOGPT, times.ours * _US, times.theirs * _US)
    return Part(
        "tokens",
        [row],
        f"{extent.token_rounds} interleaved rounds, batches of 32 x 1024 tokens as x and y, one thread, "
        f"a file of {extent.megabytes} MB in the page cache",
        {row.ours: list(times.ours * _US), row.against: list(times.theirs * _US)},
    )
