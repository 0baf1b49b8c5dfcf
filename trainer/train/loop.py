"""The training loop."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from trainer.distributed.consensus import StopConsensus
from trainer.launch.worker import requested
from trainer.observe.log import MetricLogger, Row
from trainer.observe.memory import after_evaluation, memory_row
from trainer.observe.phases import enter_phase
from trainer.tasks import Deriving
from trainer.train.anomaly import AnomalyDetector, Finding
from trainer.train.answers import answers
from trainer.train.evaluate import evaluate_run, next_evaluation, out_of_patience
from trainer.train.outputs import Outputs
from trainer.train.state import Run
from trainer.train.step import leave_out_step, train_step


@dataclass(frozen=True)
class Ending:
    """End of the loop, the same on every rank.

    Attributes:
        how: finished: after the last step, or out of patience; stopped: by a signal or as asked for;
            anomaly: by bad numbers.
        signal: The signal that stopped it, as a number; 0: none.
        finding: The anomaly.
    """

    how: Literal["finished", "stopped", "anomaly"]
    signal: int = 0
    finding: Finding | None = None


def train(  # noqa: PLR0912, PLR0915  (one loop, to be read from top to bottom)
    run: Run,
    out: Outputs,
    detector: AnomalyDetector | None = None,
    left_out: Collection[int] = (),
    until: int | None = None,
    stop_after: int | None = None,
) -> Ending:
    """Trains from the state's step to the last one, or to a step after which all ranks stop.

    Whatever is decided here must be decided alike on every rank (by the step, by metrics of all ranks, or by
    `StopConsensus`), as evaluations, rows and checkpoints are collective.

    Args:
        run: What is trained; its state is updated in place.
        left_out: Steps whose samples are not learned from.
        until: The step after which to return as at the end, but without a checkpoint; None: the run's last.
        stop_after: The step after which to stop with a checkpoint, to be resumed, or None.
    """
    recipe, plan, state, logger, checkpoints = run.recipe, run.plan, run.state, out.logger, out.checkpoints
    until = run.steps if until is None else until
    until = state.step if out_of_patience(run) else until  # an earlier attempt ended so
    log_every, timed_from = recipe.log.every, state.step + recipe.compile.warm_up
    epoch_ends = plan.next_epoch_end(state.step)
    evaluate_at = next_evaluation(recipe.evaluation, plan, state.step)
    consensus = StopConsensus(run.world.control or run.world.group, state.step)
    batches = run.loader(
        run.share.batches(state.step)[: (until - state.step) * run.gradient_accumulation_steps]
    )
    if state.step == 0:
        _tell_memory(run, logger, "start")
    for step in range(state.step, until):
        if step in left_out:
            leave_out_step(run, batches, step)
        else:
            train_step(run, batches, step)
        done = state.step = step + 1

        enter_phase("logging")
        if done <= timed_from:  # steps that compile and warm up don't count
            logger.start_clock(done)
        if done % log_every == 0 or done == until:
            logger.stage(done)

        best = over = False
        if done == evaluate_at:
            logger.stage(done)
            best = _evaluate(run, logger)
            over = out_of_patience(run)
            logger.start_clock(done)
            evaluate_at = next_evaluation(recipe.evaluation, plan, done)

        for watch in out.each_step:
            watch(done)
        if done == epoch_ends:
            _tell_memory(run, logger, "end")
            if done < run.steps and not over:
                _tell_memory(run, logger, "start")
            epoch_ends = plan.next_epoch_end(done)

        asked = consensus.after(done, requested() or 0, checkpoints.overdue())
        last = over or done == run.steps
        stop = not last and (asked.signal > 0 or done == stop_after)
        if last:  # what the run can be extended from, or finished from if its weights can't be written
            save = checkpoints.wanted
        else:
            save = stop or asked.save or checkpoints.due(done) or (best and recipe.checkpoint.best)

        # At the end, and before each checkpoint: none lies behind an anomaly that nobody knows of.
        found = [] if detector is None else detector.look(done, now=last or save)
        if found and (finding := out.anomalies.ending(found)):
            logger.stage(done)
            logger.deliver()
            return Ending("anomaly", finding=finding)
        if save:
            enter_phase("checkpoint")
            logger.deliver()
            checkpoints.save()
        if stop:
            return Ending("stopped", signal=asked.signal)
        if last:
            break
    logger.deliver()
    enter_phase("end")
    return Ending("finished")


def _evaluate(run: Run, logger: MetricLogger) -> bool:
    """Evaluates, tells the metrics, and returns whether they are the best so far."""
    enter_phase("evaluation")
    metrics, best = evaluate_run(run)
    enter_phase("logging")
    logger.deliver()
    if freed := after_evaluation(run.recipe.memory, run.world.device):
        _tell_memory(run, logger, "evaluation", freed)
    step = run.state.step
    row: Row = {"kind": "eval", "step": step, "epoch": round(run.plan.epoch_at(step), 4), **metrics}
    logger.emit(row, run.task.derived(metrics) if isinstance(run.task, Deriving) else {})
    enter_phase("evaluation")
    if answered := answers(run):
        logger.emit(answered)
    enter_phase("logging")
    return best


def _tell_memory(run: Run, logger: MetricLogger, at: str, more: dict[str, float] | None = None) -> None:
    """A row on memory where an epoch starts or ends, or after an evaluation; `more` belongs to it."""
    if logger.sinks:
        step = run.state.step
        row = memory_row(step, round(run.plan.epoch_at(step), 4), at, run.world.device)
        logger.emit({**row, **(more or {})})
