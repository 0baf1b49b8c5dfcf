"""`trainer verify RUN`: trains a run again from its manifest, elsewhere, and compares the bits."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.commands.verify.contradictions import contradictions
from trainer.commands.verify.recorded import Recorded, had_checksums, last_step, parts_of, read_recorded
from trainer.commands.verify.replay import begin, ranks_wanted, replay, replay_config
from trainer.commands.verify.verdict import differences_here, different, differing_weights, identical
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.observe.checksums import first_difference, read_checksums
from trainer.observe.console import say, warn
from trainer.runs.altered import unhashed_rows
from trainer.runs.manifest import read_run
from trainer.train.anomaly import first_stop, read_anomalies, rolled_back


def verify(options: argparse.Namespace) -> int:
    """Runs `trainer verify`; returns the exit code: 0 if identical, 1 if not."""
    run = read_recorded(options.folder)
    anomalies = read_anomalies(run.path)
    odd = contradictions(run)
    if line := unhashed_rows(run.path, run.manifest.as_facts()):
        warn(line)
    run = before_its_stop(run, anomalies)
    until = last_step(run, options.steps)
    config = replay_config(run, options.set, options.trust)
    parts = parts_of(run, until, ranks_wanted(options))
    with tempfile.TemporaryDirectory(prefix="trainer-verify-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "run"
        begin(run, folder, rolled_back(anomalies))
        say(f"{run.path}: training steps 1 to {until} of {run.manifest.steps} again, in {temporary}")
        code = replay(config, parts, run.manifest.steps, folder, options.gpus)
        if code != EXIT_DONE:
            return code
        again = read_run(folder).manifest
        rows, _, _ = read_checksums(folder / "checksums.jsonl")
        compared = [row for row in run.rows if row.step <= until]
        again_due = [row for row in rows if row.step <= until and had_checksums(run, row.step)]
        found = first_difference(compared, again_due)
        weights = differing_weights(run, folder) if until == run.manifest.steps else []
    here = differences_here(run.manifest.model_dump(exclude_unset=True), again.model_dump())
    if run.manifest.steps != again.steps and not parts[-1].settings:
        odd.append(f"manifest.json: steps is {run.manifest.steps}, and {again.steps} by its config")
    if found is None and not weights and not odd:
        say(identical(run, compared, until, parts, here))
        return EXIT_DONE
    say(different(run, found, weights, here, odd))
    return EXIT_FAILED


def before_its_stop(run: Recorded, anomalies: list[dict[str, Any]]) -> Recorded:
    """Returns a run without the records after the step for which it was stopped, as a replay stops there.

    Raises:
        BadInputError: If no records are left.
    """
    stop = first_stop(anomalies)
    if stop is None:
        return run
    step = anomalies[stop]["step"]
    if rows := [row for row in run.rows if row.step < step]:
        return replace(run, rows=rows)
    raise BadInputError(
        f"{run.path}: nothing was recorded before the step {step} that stopped it; look at that with "
        f"--anomaly {stop + 1}"
    )
