"""What happens between two steps: evaluation, checkpoints, stops."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext

import torch

from trainer.checkpoint.background import BackgroundWriter, stage
from trainer.config.recipe import Recipe
from trainer.config.section import config_hash
from trainer.data.sampling.plan import Plan
from trainer.distributed.consensus import NOTHING, StopConsensus
from trainer.distributed.parallel import World, sum_over_ranks
from trainer.errors import BadInputError
from trainer.launch.signals import Stopped, requested
from trainer.observe.console import ProgressBar
from trainer.observe.log import MetricLogger
from trainer.observe.memory import after_evaluation, memory_row
from trainer.observe.phases import enter_phase
from trainer.observe.profile import Profile
from trainer.train.anomaly import AnomalyDetector, Finding
from trainer.train.evaluate import evaluate
from trainer.train.loop import train
from trainer.train.manifest import command
from trainer.train.progress import Progress, to_state
from trainer.train.run import Parts
from trainer.train.state import tensors_of


class Requeue(Exception):  # noqa: N818  (the outcome of a request, not an error)
    """A signal stopped this run, and it can be gone on with."""


class Anomaly(Exception):  # noqa: N818  (as above)
    """Anomaly detection found what ends this attempt."""

    def __init__(self, finding: Finding, done: int) -> None:
        """Found after so many steps."""
        super().__init__(str(finding))
        self.finding, self.done = finding, done


class BetweenSteps:
    """Trains, and does between two steps what is due there.

    Attributes:
        run_id: For the checkpoints; rank 0's, who writes them.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        parts: Parts,
        logger: MetricLogger,
        progress: Progress,
        writer: BackgroundWriter | None,
        progress_bar: ProgressBar | None,
        data: Mapping[str, str],
        stop_after: int | None = None,
        detector: AnomalyDetector | None = None,
        left_out: Collection[int] = (),
        profile: Profile | None = None,
    ) -> None:
        """Starts at the progress; rank 0 has the writer and the progress bar, `data` is from `data_of`."""
        self._stop_after, self._detector, self._left_out = stop_after, detector, left_out
        self._profile = profile
        self._recipe, self._data, self._world, self._parts = recipe, data, world, parts
        self._logger, self._progress, self._writer, self._progress_bar = (
            logger,
            progress,
            writer,
            progress_bar,
        )
        self._training, self._plan = parts.training, parts.training.share.plan
        self._consensus = StopConsensus(world.control or world.group, progress.step)
        self._every, self._keeps_best = recipe.checkpoint.every, recipe.checkpoint.best
        self._steps = self._plan.steps
        self._began = time.monotonic()
        self._set_due()
        self._start = progress.step
        self._is_best = False
        self.run_id = ""

    def train(self) -> None:
        """Trains from the progress to the end.

        Raises:
            Requeue: After a signal or where it was asked to stop, with a checkpoint to go on from.
            Stopped: After a signal, without one.
            Anomaly: After bad numbers, on every rank.
        """
        start = self._progress.step
        if start == 0:
            self._tell_memory(0, "start")
        steps = range(start, self._plan.steps)
        batches = self._training.share.batches(start)
        self._logger.left_out = self._left_out
        train(
            self._training,
            self._parts.loader(batches),
            steps,
            self._logger,
            self._recipe.log.every,
            _evaluation_due(self._recipe.evaluate_every, self._plan),
            self._evaluate,
            self.step_done,
            self._recipe.compile.warm_up,
            self._left_out,
        )
        enter_phase("end")

    def _evaluate(self, done: int) -> None:
        enter_phase("evaluation")
        t, parts = self._training, self._parts
        with nullcontext() if t.average is None else t.average.in_place():
            metrics = evaluate(
                t.task,
                t.model,
                parts.evaluation_loader,
                parts.evaluation_share,
                self._world,
                self._recipe.precision,
            )
        enter_phase("logging")
        self._logger.deliver()
        if freed := after_evaluation(self._recipe.memory, self._world.device):
            self._tell_memory(done, "evaluation", freed)
        epoch = round(self._plan.epoch_at(done), 4)
        self._logger.emit({"kind": "evaluation", "step": done, "epoch": epoch, **metrics})
        progress = self._progress
        progress.metrics = metrics
        metric = metrics[t.task.metric]
        score = -metric if t.task.lower_is_better else metric
        self._is_best = math.isfinite(score) and (progress.best is None or score > progress.best[0])
        if self._is_best:
            progress.best = (score, done)

    def step_done(self, done: int) -> None:
        """Shows how far it is, keeps what is due, and stops if all ranks agreed to."""
        if self._profile is not None:
            self._profile.step_done(done)
        if self._progress_bar is not None:
            self._progress_bar.step_done(done)
            if self._parts.compiled and done == self._start + self._recipe.compile.warm_up:
                self._progress_bar.say(f"  compiled in {time.monotonic() - self._began:.0f} s")
        if self._plan.epochs_done(done) > self._plan.epochs_done(done - 1):
            self._tell_memory(done, "end")
            if done < self._steps:
                self._tell_memory(done, "start")
        self._look(done, now=done == self._steps)
        overdue = time.monotonic() > self._due_at
        decision = self._consensus.after(done, requested() or 0, overdue)
        due = done == self._stop_after or (self._every > 0 and done % self._every == 0)
        if done == self._steps:
            # What the run can be extended from, or finished from if its weights can't be written.
            if self._every > 0 or self._recipe.checkpoint.minutes > 0:
                self._save(done)
            return
        if not (due or decision is not NOTHING or self._is_best):
            return
        if due or decision.signal or decision.save or (self._keeps_best and self._is_best):
            self._look(done, now=True)  # no checkpoint lies behind an anomaly that nobody knows of
            self._save(done)
        self._is_best = False
        if decision.signal or done == self._stop_after:
            self.stop(decision.signal, done)

    def _tell_memory(self, done: int, at: str, more: Mapping[str, float] | None = None) -> None:
        """After so many steps, where an epoch starts or ends, or after an evaluation."""
        if self._logger.sinks:
            row = memory_row(done, round(self._plan.epoch_at(done), 4), at, self._world.device)
            self._logger.emit({**row, **(more or {})})

    def _look(self, done: int, now: bool) -> None:
        """Raises what anomaly detection finds; on all ranks after the same step."""
        if self._detector is not None and (finding := self._detector.look(done, now)):
            self._logger.stage(done)
            self._logger.deliver()
            raise Anomaly(finding, done)

    def _set_due(self) -> None:
        seconds = self._recipe.checkpoint.minutes * 60
        # By rank 0's clock alone, which tells the others.
        timed = seconds > 0 and self._world.rank == 0
        self._due_at = time.monotonic() + seconds if timed else math.inf

    def _save(self, done: int) -> None:
        """Every rank has a part in it: the losses since the last row are each rank's own."""
        enter_phase("checkpoint")
        t, logger = self._training, self._logger
        self._set_due()
        losses = t.loss.clone().view(1)  # with a tree it is everyone's
        if t.tree is None:
            losses = torch.zeros(self._world.size, dtype=torch.float64, device=self._world.device)
            losses[self._world.rank] = t.loss
            losses = sum_over_ranks(losses, self._world.group)
        if self._writer is None:
            return
        logger.deliver()
        now = Progress(
            done,
            logger.step,
            losses.tolist(),
            logger.busy_seconds,
            logger.timed_samples,
            self._progress.metrics,
            self._progress.best,
            self._detector.history if self._detector is not None else [],
        )
        state = {
            **to_state(now),
            "run_id": self.run_id,
            "config_hash": config_hash(self._recipe),
            "world_size": self._world.size,
            "threads": torch.get_num_threads(),
            "fingerprint": dict(self._data),
        }
        best = self._progress.best[1] if self._progress.best and self._recipe.checkpoint.best else None
        self._writer.submit(done, stage(tensors_of(t)), state, best)

    def stop(self, number: int, done: int) -> None:
        """Ends this attempt by what is on the disk, whenever it was written; collective.

        Args:
            number: The signal that asked for it; 0: `stop_after`.
            done: Steps done.

        Raises:
            Requeue: There is a checkpoint to go on from.
            Stopped: There is none.
        """
        enter_phase("checkpoint")
        newest = self._writer.newest() if self._writer is not None else None
        kept = torch.tensor([0 if newest is None else newest + 1])
        sum_over_ranks(kept, self._world.control or self._world.group)
        step = int(kept) - 1
        where = "from there" if step == done else f"after step {step}, its newest checkpoint"
        if not number:
            if step < 0:
                raise BadInputError(
                    f"--stop-after {done}: no checkpoint could be written; make room on the disk"
                )
            raise Requeue(f"stopped after step {done} as asked; without --stop-after it goes on {where}")
        name, how = signal.Signals(number), _with(command(os.environ, sys.argv))
        if step < 0:
            raise Stopped(name, "no checkpoint could be written to go on from")
        raise Requeue(f"stopped by {name.name} after step {done}; the same command goes on {where}{how}")


def _with(typed: str) -> str:
    """What a command needs besides to go on with the run that it began."""
    words = typed.replace("=", " ").split()
    return "" if "--out" in words or "newest" in words else " (with --resume newest)"


def _evaluation_due(every: int, plan: Plan) -> Callable[[int], bool]:
    def due(steps: int) -> bool:
        if steps == plan.steps:
            return True
        return every > 0 and plan.epochs_done(steps) // every > plan.epochs_done(steps - 1) // every

    return due
