"""Contradictions within a run folder, and records that it lacks."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint import CHECKPOINTS
from trainer.checkpoint.folder import odd_weights
from trainer.checkpoint.store import listing
from trainer.commands.verify.recorded import Recorded, kept_attempts, trained_by
from trainer.config.yaml_text import parse_dumped
from trainer.errors import BadInputError
from trainer.host.files import read_inside
from trainer.observe.checksums import rows_as_text
from trainer.observe.rows import FILES
from trainer.runs.altered import altered_config, altered_rows
from trainer.runs.folder import checkpoints_of
from trainer.runs.manifest import Attempt
from trainer.train.provenance import file_hash


def contradictions(run: Recorded) -> list[str]:
    """Returns contradictions and missing records of a run folder, as lines."""
    lines = [*_of_manifest(run), *_of_weights(run), *_of_trace(run), *_of_metrics(run), *_of_checkpoints(run)]
    # What the above does not see: memory, layers, verdicts.
    more = altered_rows(run.path, run.manifest.as_facts())
    known = [*lines, "checksums.jsonl"]  # which the replay proves
    return [*lines, *(line for line in more if not any(line.split()[0] in one for one in known))]


def _of_manifest(run: Recorded) -> Iterator[str]:
    manifest = run.manifest
    yield from altered_config(manifest.as_facts())
    try:
        config = parse_dumped(read_inside(run.path / "config.yaml", 16 << 20).decode(), "config.yaml")
    except (OSError, ValueError, BadInputError):
        config = None
    if config != manifest.config:
        problem = "can't be read" if config is None else "isn't the config in manifest.json"
        yield f"config.yaml {problem}"
    last = manifest.attempts[-1]
    for name, value, wanted in (
        ("seed", manifest.seed, manifest.config.get("seed")),
        ("world_size", manifest.world_size, last.ranks),
        ("threads", manifest.threads, last.threads),
    ):
        if value != wanted:
            yield f"manifest.json: {name} is {value}, and {wanted} by its config and attempts"
    finite = not any(value in ("nan", "inf", "-inf") for value in _last_evaluation(run).values())
    if manifest.weights and (manifest.status == "stopped" or (manifest.status == "diverged" and finite)):
        yield f"manifest.json: status is {manifest.status}, though it names final weights"


def _of_weights(run: Recorded) -> Iterator[str]:
    manifest = run.manifest
    wanted = dict.fromkeys(manifest.weights)
    if manifest.status == "finished":
        average = manifest.config.get("ema", {}).get("decay")
        wanted |= dict.fromkeys(["model.safetensors", *["ema.safetensors"] * bool(average)])
    for name in wanted:
        file, digest = run.path / name, manifest.weights.get(name)
        if not digest:
            yield f"manifest.json: the hash of {name} is missing"
        elif not os.path.lexists(file):
            yield f"{file} is missing"
        elif (problem := odd_weights(file)) is not None:
            yield f"{file} can't be read ({problem})"
        elif file_hash(file) != digest:
            yield f"{file} isn't the file that the run wrote"


def _of_checkpoints(run: Recorded) -> Iterator[str]:
    try:
        for entry in listing(checkpoints_of(run.path), verify=True):
            if entry.problem is not None:
                yield f"{CHECKPOINTS}/{entry.path.name}: {entry.problem}"
    except OSError as error:
        yield f"{CHECKPOINTS} can't be read ({error.strerror})"
    except BadInputError as error:
        yield str(error)


def _of_trace(run: Recorded) -> Iterator[str]:
    """Checks what a replay can't: that checksums.jsonl has each record once, and only steps of the run."""
    if run.unreadable:
        yield f"{run.unreadable} lines of checksums.jsonl can't be read"
    for (kind, step), times in Counter((row.kind, row.step) for row in run.rows).items():
        if times > 1:
            yield f"checksums.jsonl: the row of {kind} metrics of step {step} is there {times} times"
        if step > run.manifest.last_step:
            yield f"checksums.jsonl: a row of step {step}, and the run has {run.manifest.last_step}"
    yield from _of_the_end(run, "summary", run.manifest.summary)


def _of_metrics(run: Recorded) -> Iterator[str]:
    """Compares metrics with checksums.jsonl, which a replay proves."""
    kept = kept_attempts(run.manifest)
    if not any(attempt.jsonl for attempt in kept):
        return
    rows = dict[tuple[str, int], dict[str, Any]]()
    for kind, name in FILES.items():
        try:
            bad = _add_metrics(rows, kind, run.path / name)
        except OSError as error:
            yield f"{name} can't be read ({error.strerror})"
            return
        if bad:
            yield f"{bad} lines of {name} can't be read, or are there twice"
    yield from _rows_that_differ(run, kept, rows)
    end = rows.get(("end", run.manifest.last_step))
    if kept[-1].jsonl:
        yield from _of_the_end(run, FILES["end"], end)
    if end is not None and run.manifest.status == "stopped":
        yield f"manifest.json: status is stopped, though {FILES['end']} has the row of the run's end"


def _rows_that_differ(
    run: Recorded, kept: Sequence[Attempt], rows: Mapping[tuple[str, int], Mapping[str, Any]]
) -> Iterator[str]:
    checksums = {(row.kind, row.step): row for row in run.rows}
    # A row is checksums first: a run that was killed, or goes on now, may not have written its last one.
    unsure = max((row.step for row in run.rows), default=0) if run.manifest.status == "running" else None
    for (kind, step), row in checksums.items():
        shown = rows.get((kind, step))
        if shown is None:
            if step != unsure and trained_by(kept, step).jsonl:
                yield f"{FILES[kind]}: the row of {kind} metrics of step {step} is missing"
            continue
        for name, value in row.metrics.items():
            wanted = "None" if value in ("nan", "inf", "-inf") else value
            if str(shown.get(name)) != wanted:
                yield f"{FILES[kind]}, step {step}: {name} {shown.get(name)}, recorded {value}"
    for kind, step in rows.keys() - checksums.keys():
        if kind in ("train", "eval") and trained_by(kept, step).checksums:
            yield f"{FILES[kind]}: the row of {kind} metrics of step {step} isn't in checksums.jsonl"


def _of_the_end(run: Recorded, where: str, recorded: object) -> Iterator[str]:
    """Compares the last evaluation's metrics with the last record and the manifest."""
    if run.manifest.status != "finished":
        return
    metrics = recorded if isinstance(recorded, Mapping) else {}
    for name, value in _last_evaluation(run).items():
        if name != "epoch" and str(metrics.get(name)) != value:
            yield f"{where}: {name} {metrics.get(name)}, and {value} in the last evaluation"


def _last_evaluation(run: Recorded) -> Mapping[str, str]:
    """Returns the metrics of the last evaluation, as text; none if it is missing from checksums.jsonl."""
    last = ("eval", run.manifest.last_step)
    return next((row.metrics for row in run.rows if (row.kind, row.step) == last), {})


def _add_metrics(rows: dict[tuple[str, int], dict[str, Any]], kind: str, file: Path) -> int:
    """Adds a file's records by kind and step, numbers as text; returns the number of malformed lines."""
    bad = 0
    for row in rows_as_text(file):
        try:
            key = str(row["kind"]), int(row["step"])
        except (ValueError, KeyError, TypeError):
            bad += 1
            continue
        if key[0] != kind or (key in rows and kind in ("train", "eval", "end")):
            bad += 1
        rows[key] = row
    return bad
