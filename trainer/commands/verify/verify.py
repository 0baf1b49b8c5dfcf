"""`trainer verify RUN`: trains a run again from its manifest, elsewhere, and compares the bits."""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.commands.verify.recorded import Recorded, had_checksums, last_step, parts_of, read_recorded
from trainer.commands.verify.replay import begin, ranks_wanted, replay, replay_config
from trainer.commands.verify.verdict import differences_here, different, differing_weights, identical
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host.files import hash_inside
from trainer.observe.checksums import first_difference, read_checksums
from trainer.observe.console import say, warn
from trainer.runs.altered import altered_config, altered_rows
from trainer.runs.manifest import read_run
from trainer.train.anomaly import first_stop, read_anomalies


def verify(options: argparse.Namespace) -> int:
    """Runs `trainer verify`; returns the exit code: 0 if identical, 1 if not."""
    run = read_recorded(options.folder)
    anomalies = read_anomalies(run.path)
    odd = list(altered_files(run))
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
    if found is None and not weights and not odd:
        say(identical(run, compared, until, parts, here))
        return EXIT_DONE
    say(different(run, found, weights, here, odd))
    return EXIT_FAILED


def altered_files(run: Recorded) -> Iterator[str]:
    """Yields what was changed, or is missing, of the files that the run wrote."""
    manifest, facts = run.manifest, run.manifest.as_facts()
    yield from altered_config(facts)
    yield from altered_rows(run.path, facts)
    if run.unreadable:
        yield f"{run.unreadable} lines of checksums.jsonl can't be read"
    if manifest.status == "finished" and "model.safetensors" not in manifest.weights:
        yield "manifest.json: the hash of model.safetensors is missing"
    for name, digest in manifest.weights.items():
        try:
            if hash_inside(run.path / name) != digest:
                yield f"{run.path / name} isn't the file that the run wrote"
        except OSError as error:
            yield f"{run.path / name} can't be read ({error.strerror})"
    if not manifest.rows:
        warn(f"{run.path}: the run wrote no hashes of its records: whether they were changed isn't known")


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
    raise BadInputError(f"{run.path}: nothing was recorded before the step {step} that stopped it")
