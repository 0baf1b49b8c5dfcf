"""Training loop."""

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
from trainer.train.step import train_step


@dataclass(frozen=True)
class Ending:
    """End of the loop, equal on every rank.

    Attributes:
        how: finished: after the last step, by early stopping, or as a hook asked; stopped: by a signal, or
            after the step of `stop_after`; anomaly: by a loss or gradient that isn't finite, or a loss spike.
        signal: Number of the signal that stopped the loop; 0 if none did.
        finding: The anomaly that ended the loop, or None.
    """

    how: Literal["finished", "stopped", "anomaly"]
    signal: int = 0
    finding: Finding | None = None


def train(  # noqa: PLR0912, PLR0915  (one loop, to be read from top to bottom)
    run: Run,
    out: Outputs,
    detector: AnomalyDetector | None = None,
    until: int | None = None,
    stop_after: int | None = None,
) -> Ending:
    """Trains from the state's step to the last one, or until all ranks stop after the same step.

    Evaluations, metrics records and checkpoints are collective. So every decision here must be equal on all
    ranks: it follows from the step, from metrics of all ranks, or from `StopConsensus`.

    Args:
        run: Model, optimizer, data and plan; its state is updated in place.
        out: Receivers of metrics records, checkpoints and anomalies.
        detector: Looks for anomalies, some steps late, but always before a checkpoint; None: it is off.
        until: Number of steps after which to return as finished, but without a checkpoint; None: all steps.
        stop_after: Number of steps after which to save a checkpoint and stop, or None.

    Returns:
        How the loop ended.
    """
    recipe, plan, state = run.recipe, run.plan, run.state
    logger, checkpoints, asked = out.logger, out.checkpoints, out.asked
    until = run.steps if until is None else until
    until = state.step if out_of_patience(run) else until  # an earlier attempt stopped early
    log_every, timed_from = recipe.log.every, state.step + recipe.compile.warm_up
    epoch_ends = plan.next_epoch_end(state.step)
    evaluated, evaluate_at = -1, next_evaluation(recipe.evaluation, plan, state.step)
    consensus = StopConsensus(run.world.control or run.world.group, state.step)
    batches = run.loader(
        run.share.batches(state.step)[: (until - state.step) * run.gradient_accumulation_steps]
    )
    if state.step == 0:
        _log_memory(run, logger, "start")
    for step in range(state.step, until):
        train_step(run, batches, step)
        done = state.step = step + 1

        enter_phase("logging")
        if done <= timed_from:  # steps that compile or warm up are not timed
            logger.start_clock(done)
        if done % log_every == 0 or done == until:
            logger.stage(done)

        best = over = False
        if done == evaluate_at:
            evaluated = done
            logger.stage(done)
            best = _evaluate(run, out)
            over = out_of_patience(run)
            logger.start_clock(done)
            evaluate_at = next_evaluation(recipe.evaluation, plan, done)

        for observer in out.each_step:
            observer(done)
        if done == epoch_ends:
            _log_memory(run, logger, "end")
            if done < run.steps and not over:
                _log_memory(run, logger, "start")
            epoch_ends = plan.next_epoch_end(done)

        agreed = consensus.after(done, requested() or 0, checkpoints.overdue(), asked)
        if agreed.finish and not over and done < run.steps:
            over = True
            if evaluated != done:
                logger.stage(done)
                _evaluate(run, out)
        last = over or done == run.steps
        stop = not last and (agreed.signal > 0 or done == stop_after)
        if last:  # to extend the run, or to finish it if its final weights can't be written
            save = checkpoints.wanted
        else:
            save = stop or agreed.save or checkpoints.due(done) or (best and recipe.checkpoint.best)

        # At the end, and before each checkpoint: none is saved after an anomaly that isn't found yet.
        findings = [] if detector is None else detector.look(done, now=last or save)
        if findings and (finding := out.anomalies.ending(findings)):
            logger.stage(done)
            logger.deliver()
            return Ending("anomaly", finding=finding)
        if save:
            enter_phase("checkpoint")
            logger.deliver()
            checkpoints.save()
        if stop:
            return Ending("stopped", signal=agreed.signal)
        if last:
            break
    logger.deliver()
    enter_phase("end")
    return Ending("finished")


def _evaluate(run: Run, out: Outputs) -> bool:
    """Evaluates, logs the metrics, and returns True if they are the best so far."""
    logger = out.logger
    enter_phase("evaluation")
    metrics, best = evaluate_run(run)
    enter_phase("logging")
    logger.deliver()
    if freed := after_evaluation(run.recipe.memory, run.world.device):
        _log_memory(run, logger, "evaluation", freed)
    step = run.state.step
    beside = dict[str, float]()
    if isinstance(run.task, Deriving):
        names = run.task.beside
        beside = {name: value for name, value in metrics.items() if name.rpartition("/")[2] in names}
        beside |= run.task.derived(metrics)
    proven = {name: value for name, value in metrics.items() if name not in beside}
    row: Row = {"kind": "eval", "step": step, "epoch": round(run.plan.epoch_at(step), 4), **proven}
    with out.for_hooks():
        logger.emit(row, beside)
    enter_phase("evaluation")
    if answered := answers(run):
        logger.emit(answered)
    enter_phase("logging")
    return best


def _log_memory(run: Run, logger: MetricLogger, at: str, extra: dict[str, float] | None = None) -> None:
    """Logs a memory record at the start or end of an epoch, or after an evaluation, with `extra` fields."""
    if logger.sinks:
        step = run.state.step
        row = memory_row(step, round(run.plan.epoch_at(step), 4), at, run.world.device)
        logger.emit({**row, **(extra or {})})
