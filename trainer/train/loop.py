"""The training loop."""

from collections.abc import Callable, Collection, Iterator

from trainer.data.loader import Batch
from trainer.observe.log import MetricLogger
from trainer.observe.phases import enter_phase
from trainer.train.step import Training, leave_out_step, train_step


def train(
    training: Training,
    batches: Iterator[Batch],
    steps: range,
    logger: MetricLogger,
    log_every: int,
    evaluation_due: Callable[[int], bool],
    evaluate: Callable[[int], None],
    step_done: Callable[[int], None],
    warm_up: int = 1,
    left_out: Collection[int] = (),
) -> None:
    """Trains steps in their order.

    Args:
        training: What is updated.
        batches: This rank's batches, from the first step on.
        steps: Numbers of the steps to do.
        logger: Takes the metrics.
        log_every: Steps between two rows of metrics.
        evaluation_due: Whether to evaluate after so many steps.
        evaluate: Evaluates, given the number of steps done.
        step_done: Told how many steps are done: shows it, keeps it, may raise to stop.
        warm_up: Steps of this call that are not timed: those that compile.
        left_out: Steps that are not trained.
    """
    training.replica.train()
    for step in steps:
        if step in left_out:
            leave_out_step(training, batches, step)
        else:
            train_step(training, batches, step)
        enter_phase("logging")
        done = step + 1
        if done <= steps.start + warm_up:
            logger.start_clock(done)
        if done % log_every == 0 or done == steps.stop:
            logger.stage(done)
        if evaluation_due(done):
            logger.stage(done)
            evaluate(done)
            logger.start_clock(done)
        step_done(done)
    logger.deliver()
