"""The training loop."""

from collections.abc import Callable, Collection, Iterator

from trainer.data.loader import Batch
from trainer.observe.log import Meter
from trainer.observe.phases import mark
from trainer.train.step import Training, leave_out_window, train_window


def train(
    training: Training,
    batches: Iterator[Batch],
    windows: range,
    meter: Meter,
    log_every: int,
    evaluation_due: Callable[[int], bool],
    evaluate: Callable[[int], None],
    window_done: Callable[[int], None],
    warm_up: int = 1,
    left_out: Collection[int] = (),
) -> None:
    """Trains windows in their order.

    Args:
        training: What is updated.
        batches: This rank's batches, from the first window on.
        windows: Numbers of the windows to do.
        meter: Takes the figures.
        log_every: Windows between two rows of figures.
        evaluation_due: Whether to evaluate after so many windows.
        evaluate: Evaluates, given the number of windows done.
        window_done: Told how many windows are done: shows it, keeps it, may raise to stop.
        warm_up: Windows of this call that are not timed: those that compile.
        left_out: Windows that are not trained.
    """
    training.replica.train()
    for window in windows:
        if window in left_out:
            leave_out_window(training, batches, window)
        else:
            train_window(training, batches, window)
        mark("logging")
        done = window + 1
        if done <= windows.start + warm_up:
            meter.start_clock(done)
        if done % log_every == 0 or done == windows.stop:
            meter.stage(done)
        if evaluation_due(done):
            meter.stage(done)
            evaluate(done)
            meter.start_clock(done)
        window_done(done)
    meter.deliver()
