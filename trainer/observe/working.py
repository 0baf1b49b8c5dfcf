"""That a long command works: a bar on a terminal, plain lines elsewhere, both on standard error."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_SECONDS = 30.0  # at most between two lines, while something moves


@contextlib.contextmanager
def counted(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yields what is told of work done: a bar, or a line for the first, every tenth and every half minute."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), redirect_stdout=False) as bar:
            task = bar.add_task(label, total=total)
            yield lambda by: bar.advance(task, by)
        return
    done, tenths, said = 0, 0, float("-inf")

    def advance(by: int) -> None:
        nonlocal done, tenths, said
        done += by
        if not by or not total or (done * 10 // total == tenths and time.monotonic() - said < _SECONDS):
            return
        tenths, said = done * 10 // total, time.monotonic()
        print(f"{label}: {done * 100 // total} %", file=sys.stderr, flush=True)

    yield advance


@contextlib.contextmanager
def staged() -> Iterator[Callable[[str], object]]:
    """Yields what is told of each stage as it begins: a clock beside the stage, or a line for each."""
    if not sys.stderr.isatty():
        yield lambda stage: print(stage, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage: bar.update(task, description=stage)
