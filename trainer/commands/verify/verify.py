"""`trainer verify RUN`: trains a run again from its manifest, elsewhere, and compares the bits."""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint import CHECKPOINTS
from trainer.checkpoint.folder import Damaged, Unreadable, read
from trainer.checkpoint.store import listing
from trainer.commands.verify.contradictions import contradictions
from trainer.commands.verify.recorded import Recorded, had_checksums, last_step, parts_of, read_recorded
from trainer.commands.verify.replay import begin, ranks_wanted, replay, replay_config
from trainer.commands.verify.verdict import differences_here, different, differing_weights, identical
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host.files import copy_folder
from trainer.observe.checksums import first_difference, read_checksums
from trainer.observe.console import say, warn
from trainer.runs.altered import unhashed_rows
from trainer.runs.folder import checkpoints_of
from trainer.runs.manifest import Manifest, read_run
from trainer.train.anomaly import ending_at, first_stop, read_anomalies


def verify(options: argparse.Namespace) -> int:
    """Runs `trainer verify`; returns the exit code: 0 if identical, 1 if not."""
    run = read_recorded(options.folder)
    anomalies = read_anomalies(run.path)
    odd = contradictions(run)
    if line := unhashed_rows(run.path, run.manifest.as_facts()):
        warn(line)
    run = before_its_stop(run, anomalies)
    until = last_step(run, options.steps)
    config = replay_config(run, options.set)
    parts = parts_of(run, until, ranks_wanted(options, run.manifest.device.kind))
    with tempfile.TemporaryDirectory(prefix="trainer-verify-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "run"
        begin(run, folder)
        say(f"{run.path}: training steps 1 to {until} of {run.manifest.last_step} again, in {temporary}")
        code = replay(config, parts, run.manifest.last_step, folder, options.gpus)
        if code != EXIT_DONE:
            return code
        again = read_run(folder).manifest
        rows, _, _ = read_checksums(folder / "checksums.jsonl")
        compared = [row for row in run.rows if row.step <= until]
        again_due = [row for row in rows if row.step <= until and had_checksums(run, row.step)]
        found = first_difference(compared, again_due)
        weights = differing_weights(run, folder) if until == run.manifest.last_step else []
    here = differences_here(run.manifest.model_dump(exclude_unset=True), again.model_dump())
    if not parts[-1].settings:
        odd += _other_steps(run.manifest, again)
    if found is None and not weights and not odd:
        say(identical(run, compared, until, parts, here))
        return EXIT_DONE
    say(different(run, found, weights, here, odd))
    return EXIT_FAILED


def _other_steps(recorded: Manifest, again: Manifest) -> Iterator[str]:
    """Compares the steps of the manifest with those of the replay, which its configuration gives."""
    if recorded.last_step != again.last_step and not recorded.finished_by_hook:
        yield f"manifest.json: steps is {recorded.last_step}, and {again.last_step} by its config"
    elif recorded.steps_done is not None and recorded.planned_steps != again.planned_steps:
        by_config = again.planned_steps
        yield f"manifest.json: planned_steps is {recorded.planned_steps}, and {by_config} by its config"


def before_its_stop(run: Recorded, anomalies: list[dict[str, Any]]) -> Recorded:
    """Returns a run without the records after the step for which it was stopped, as a replay stops there.

    Raises:
        BadInputError: If no records are left.
    """
    stop = first_stop(anomalies)
    if run.manifest.finished_by_hook:
        step = run.manifest.last_step
        if rows := [row for row in run.rows if row.step < step]:
            say(f"{run.path}: a hook finished it after step {step}: what is before that is compared")
            return replace(run, rows=rows)
        raise BadInputError(
            f"{run.path}: a hook finished it before a second row: there is nothing to compare"
        )
    if stop is None:
        return run
    step = anomalies[stop]["step"]
    if rows := [row for row in run.rows if row.step < step]:
        return replace(run, rows=rows)
    raise BadInputError(
        f"{run.path}: nothing was recorded before the step {step} that stopped it; look at that with "
        f"--anomaly {stop + 1}"
    )


_COMPARED = ("kind", "loss", "grad_norm", "median", "deviation", "epochs", "samples")


def verify_anomaly(options: argparse.Namespace) -> int:
    """Runs `trainer verify --anomaly`; returns the exit code: 0 if it recurred with the same bits, else 1."""
    run = read_recorded(options.folder, rows_needed=False)
    anomalies = read_anomalies(run.path)
    if not 1 <= options.anomaly <= len(anomalies):
        known = f"anomalies 1 to {len(anomalies)} were recorded" if anomalies else "no anomaly was recorded"
        raise BadInputError(f"--anomaly {options.anomaly}: {known} in {run.path}")
    wanted = anomalies[options.anomaly - 1]
    step = int(wanted["step"])
    config = ending_at(replay_config(run, options.set), wanted)
    with tempfile.TemporaryDirectory(prefix="trainer-verify-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "run"
        begin(run, folder)
        start = _checkpoint_before(run, folder, step)
        steps = f"step {step}" if step == start + 1 else f"steps {start + 1} to {step}"
        say(f"{run.path}: training {steps} again, in {temporary}")
        parts = parts_of(run, step, ranks_wanted(options, run.manifest.device.kind))
        parts = [part for part in parts if part.until > start]
        code = replay(config, parts, run.manifest.last_step, folder, options.gpus)
        if code not in (EXIT_DONE, EXIT_FAILED):  # it fails where the anomaly comes again
            return code
        again = [one for one in read_anomalies(folder) if one["step"] == step]
    number = f"anomaly {options.anomaly}, step {step}"
    if not again:
        say(f"{number}: did not come again")
        return EXIT_FAILED
    differing = [key for key in _COMPARED if again[0].get(key) != wanted.get(key)]
    if differing:
        key = differing[0]
        say(f"{number}: came again, but {key} was {wanted.get(key)} and is {again[0].get(key)}")
        return EXIT_FAILED
    numbers = f"loss ({wanted['loss']}) and gradient norm ({wanted['grad_norm']})"
    say(f"{number}: came again, with the same samples, {numbers}")
    return EXIT_DONE


def _checkpoint_before(run: Recorded, folder: Path, step: int) -> int:
    """Copies the run's newest checkpoint before a step, if there is one; returns its step, or 0."""
    for entry in listing(checkpoints_of(run.path)):
        if entry.step >= step:
            continue
        try:
            read(entry.path)
        except (Damaged, Unreadable):
            continue
        copy_folder(entry.path, folder / CHECKPOINTS / entry.path.name)
        return entry.step
    return 0
