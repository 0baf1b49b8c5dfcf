"""Checkpoints during training: when they are due, and who writes them: rank 0, or each rank its rows."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.checkpoint.background import BackgroundWriter, RankPart, make_room, stage
from trainer.checkpoint.folder import folder_name
from trainer.config.section import config_hash
from trainer.distributed.exchange import StoreExchange
from trainer.distributed.parallel import sum_over_ranks
from trainer.observe.console import warn
from trainer.train.hooks import HookError
from trainer.train.state import Run, numbers_of, shapes_of, tensors_of


class Checkpoints:
    """Checkpoints of an attempt: decides when one is due, and saves it."""

    def __init__(
        self,
        run: Run,
        writer: BackgroundWriter | None = None,
        run_id: str = "",
        data: Mapping[str, str] | None = None,
        written: Callable[[int, Path], None] | None = None,
    ) -> None:
        """Saves nothing yet.

        Args:
            run: The run that is trained.
            writer: Writes checkpoints in the background, on rank 0; in a sharded run also on the other ranks
                that write rows. None: this rank writes nothing.
            run_id: The run's id, written into each checkpoint; rank 0's.
            data: Fingerprints of the data, from `data_of`, written into each checkpoint.
            written: Called with step and folder of each checkpoint that has been written, or None.
        """
        self._reported, self._on_written = None if writer is None else writer.written, written
        self._run, self._writer, self._run_id, self._data = run, writer, run_id, dict(data or {})
        self._config, rows = run.recipe.checkpoint, run.state.rows
        self._room = make_room(tensors_of(run.state)) if writer is not None and self.wanted else None
        self._exchange: StoreExchange | None = None
        if rows is not None and writer is not None:
            self._exchange = StoreExchange(rows.rank, rows.ranks, run.recipe.parallel.timeout_s)
        self._set_clock()

    @property
    def wanted(self) -> bool:
        """True if the run saves checkpoints."""
        return self._config.every > 0 or self._config.minutes > 0

    def due(self, done: int) -> bool:
        """True if a checkpoint is due after so many steps (checkpoint.every)."""
        return self._config.every > 0 and done % self._config.every == 0

    def overdue(self) -> bool:
        """True if a checkpoint is due by the clock (checkpoint.minutes); only rank 0's clock counts."""
        return time.monotonic() > self._due_at

    def _set_clock(self) -> None:
        seconds = self._config.minutes * 60
        timed = seconds > 0 and self._run.world.rank == 0
        self._due_at = time.monotonic() + seconds if timed else math.inf

    def save(self) -> None:
        """Copies the run's state, and starts to write it in the background; collective."""
        run, state = self._run, self._run.state
        self._set_clock()
        losses = run.reduction.gather_losses(state.loss)
        token = self._token()
        if self._writer is None:
            return
        numbers = {
            **numbers_of(state, losses.tolist()),
            "run_id": self._run_id,
            "config_hash": config_hash(run.recipe),
            "world_size": run.world.size,
            "threads": torch.get_num_threads(),
            "fingerprint": self._data,
        }
        best = state.best[1] if state.best and self._config.best else None
        self.finish()  # before another takes its place, on the disk and in memory
        tensors, part = tensors_of(state), None
        if self._exchange is not None:
            shapes = {kind: shapes_of(state, kind, group) for kind, group in tensors.items()}
            part = RankPart(self._exchange, token, shapes, run.recipe.parallel.timeout_s / 2)
        self._writer.submit(state.step, stage(tensors, self._room), numbers, best, part)

    def _token(self) -> int:
        """Returns a number that identifies a write by several ranks; 0 without sharding, else collective."""
        world = self._run.world
        if self._run.state.rows is None:
            return 0
        token = torch.tensor([0 if world.rank else time.time_ns()])
        return int(sum_over_ranks(token, world.control or world.group))

    def look(self, _done: int = 0) -> None:
        """Calls `written` for a checkpoint that has been written since the last call."""
        if self._writer is None or self._on_written is None or self._writer.written == self._reported:
            return
        self._reported = step = self._writer.written
        assert step is not None
        self._on_written(step, self._writer.folder / folder_name(step))

    def newest(self) -> int:
        """Returns the step of the newest checkpoint on the disk, of any attempt, or -1; collective."""
        newest = None
        if self._run.world.rank:
            self.close()  # in a sharded run it waits for this rank's rows
        elif self._writer is not None:
            newest = self._writer.newest()
        with _hook_errors_as_warnings():
            self.look()
        step = torch.tensor([0 if newest is None else newest + 1])
        sum_over_ranks(step, self._run.world.control or self._run.world.group)
        return int(step) - 1

    def finish(self) -> None:
        """Waits for the checkpoint that is being written."""
        if self._writer is not None:
            self._writer.finish()
            self.look()

    def close(self) -> None:
        """Waits as `finish`, at the end of the run: an error in a hook is only a warning."""
        with _hook_errors_as_warnings():
            self.finish()


@contextmanager
def _hook_errors_as_warnings() -> Iterator[None]:
    try:
        yield
    except HookError as error:
        warn(str(error))
