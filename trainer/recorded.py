"""What a run folder says of its run, for those who want to prove it: how it was trained, what came out."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from trainer.checkpoint import FOLDER, strict_json
from trainer.checkpoint.store import listing
from trainer.config import hash_of
from trainer.errors import BadInputError
from trainer.manifest import file_hash
from trainer.observe.trace import Traced, read_trace
from trainer.redact import redact_text
from trainer.resume import Attempt, Stored


class Manifest(Stored):
    """Of a run's manifest, what its replay needs; `differences_here` reads the rest as it is."""

    config_hash: str
    attempts: list[Attempt] = Field(min_length=1)
    windows: int = Field(ge=1)
    weights: dict[str, str]


@dataclass(frozen=True)
class Recorded:
    """What a run folder says of its run.

    Attributes:
        folder: The run folder.
        manifest: What is needed of it.
        facts: All of it.
        rows: What was recorded.
        unreadable: Lines of it that can't be read.
    """

    folder: Path
    manifest: Manifest
    facts: Mapping[str, Any]
    rows: list[Traced]
    unreadable: int


@dataclass(frozen=True)
class Part:
    """Windows that were trained in the same way: up to `until`, with a row of figures each `every`."""

    until: int
    ranks: int
    threads: int
    every: int


def read_run(folder: Path, rows_needed: bool = True) -> Recorded:
    """Reads what a run recorded; with rows of figures, if they are needed.

    Raises:
        BadInputError: If it is no run, or recorded nothing that could be compared.
    """
    path = folder / "manifest.json"
    try:
        facts = strict_json.parse(path.read_bytes())
        manifest = Manifest.model_validate(facts)
        rows, _, unreadable = read_trace(folder / "trace.jsonl")
    except OSError as error:
        raise BadInputError(f"{path}: can't be read ({error.strerror}); give a run folder") from error
    except ValueError as error:  # pydantic's, too
        raise BadInputError(
            f"{path}: lacks what verify needs; it isn't a manifest, or an older trainer wrote it"
        ) from error
    if rows and not any("epoch" in row.figures for row in rows):
        raise BadInputError(
            f"{folder}: an older trainer, with other fingerprints, wrote trace.jsonl; verify it with that"
        )
    if rows_needed and not rows:
        raise BadInputError(
            f"{folder}: nothing was recorded to compare with (trace.jsonl); its first row comes after "
            "log.every windows, with log.fingerprints=true"
        )
    return Recorded(folder, manifest, facts, rows, unreadable)


def last_window(run: Recorded, steps: int | None) -> int:
    """The last window to replay: that of the last row there should be, within the steps that were asked for.

    Raises:
        BadInputError: If there is no row within them, or fewer windows.
    """
    rows = sorted(row.window for row in run.rows)
    if steps is None:
        return max(rows[-1], _last_row_due(run))
    if not rows[0] <= steps <= rows[-1]:
        raise BadInputError(
            f"--steps {steps}: windows were recorded from {rows[0]} to {rows[-1]}; give a number between them"
        )
    return max(row for row in rows if row <= steps)


def _last_row_due(run: Recorded) -> int:
    """The window of the last row that must have been written, by how far the run is known to have come."""
    if run.manifest.weights or run.manifest.status == "finished":
        return run.manifest.windows
    if run.manifest.status == "diverged":
        return 0
    last = run.manifest.attempts[-1]
    reached = max((entry.step for entry in listing(run.folder / FOLDER)), default=0)
    due = reached // last.log_every * last.log_every
    return due if last.window < due < run.manifest.windows else 0


def contradictions(run: Recorded) -> list[str]:
    """What a run folder lacks of what it should hold, or says in two ways; as lines."""
    return [*_of_manifest(run), *_of_weights(run), *_of_rows(run)]


def _of_manifest(run: Recorded) -> Iterator[str]:
    manifest, facts = run.manifest, run.facts
    if (digest := hash_of(manifest.config)) != manifest.config_hash:
        yield (
            f"manifest.json: the hash of its config is {digest[:8]} and was {manifest.config_hash[:8]}: "
            "it was changed after the run"
        )
    try:
        config = yaml.safe_load((run.folder / "config.yaml").read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        config = None
    if config != manifest.config:
        problem = "can't be read" if config is None else "isn't the config in manifest.json"
        yield f"config.yaml {problem}"
    last = manifest.attempts[-1]
    for name, there, wanted in (
        ("seed", facts.get("seed"), manifest.config.get("seed")),
        ("world_size", manifest.world_size, last.ranks),
        ("threads", manifest.threads, last.threads),
    ):
        if there != wanted:
            yield f"manifest.json: {name} is {there}, and {wanted} by its config and attempts"


def _of_weights(run: Recorded) -> Iterator[str]:
    manifest = run.manifest
    wanted = dict(manifest.weights)
    if manifest.status == "finished":
        average = manifest.config.get("ema", {}).get("decay")
        wanted |= {
            name: ""
            for name in ("model.safetensors", *["ema.safetensors"] * bool(average))
            if name not in wanted
        }
    for name, digest in wanted.items():
        file = run.folder / name
        if not digest:
            yield f"manifest.json: the hash of {name} is missing"
        elif not file.is_file():
            yield f"{file} is missing"
        elif file_hash(file) != digest:
            yield f"{file} isn't the file that the run wrote"


def _of_rows(run: Recorded) -> Iterator[str]:
    """The rows of metrics.jsonl say what those of trace.jsonl do, which a replay proves."""
    if run.unreadable:
        yield f"{run.unreadable} lines of trace.jsonl can't be read"
    config = run.manifest.config
    if "jsonl" not in config.get("log", {}).get("sinks", []):
        return
    try:
        rows, bad = _metrics(run.folder / "metrics.jsonl")
    except OSError as error:
        yield f"metrics.jsonl can't be read ({error.strerror})"
        return
    if bad:
        yield f"{bad} lines of metrics.jsonl can't be read"
    traced = {(row.kind, row.window): row for row in run.rows}
    # A row is traced first: a run that was killed, or goes on now, may not have written its last one.
    unsure = max((row.window for row in run.rows), default=0) if run.manifest.status == "running" else None
    for (kind, window), row in traced.items():
        shown = rows.get((kind, window))
        if shown is None:
            if window != unsure:
                yield f"metrics.jsonl: the row of {kind} figures of window {window} is missing"
            continue
        for name, value in row.figures.items():
            wanted = "None" if value in ("nan", "inf", "-inf") else value
            if str(shown.get(name)) != wanted:
                yield f"metrics.jsonl, window {window}: {name} {shown.get(name)}, recorded {value}"
    for kind, window in rows.keys() - traced.keys():
        if kind in ("train", "evaluation"):
            yield f"metrics.jsonl: the row of {kind} figures of window {window} isn't in trace.jsonl"
    yield from _of_the_end(run, rows)


def _of_the_end(run: Recorded, rows: Mapping[tuple[str, int], Mapping[str, str | None]]) -> Iterator[str]:
    """The last evaluation stands in the last row and in the manifest, too."""
    windows = run.manifest.windows
    last = rows.get(("evaluation", windows))
    if run.manifest.status != "finished" or last is None:
        return
    summary = run.facts.get("summary") or {}
    for where, there in (
        ("metrics.jsonl, the last row", rows.get(("end", windows), {})),
        ("summary", summary),
    ):
        for name, value in last.items():
            if name not in ("kind", "window", "epoch") and str(there.get(name)) != str(value):
                yield f"{where}: {name} {there.get(name)}, and {value} in the last evaluation"


def _metrics(file: Path) -> tuple[dict[tuple[str, int], dict[str, str | None]], int]:
    """Rows of metrics.jsonl by kind and window, numbers as text; and how many lines can't be read."""
    *lines, _ = file.read_bytes().split(b"\n")
    rows, bad = dict[tuple[str, int], dict[str, str | None]](), 0
    for line in lines:
        try:
            row = json.loads(line, parse_float=str, parse_int=str)
            key = str(row["kind"]), int(row["window"])
        except (ValueError, KeyError, TypeError, RecursionError):
            bad += 1
            continue
        if key in rows and key[0] in ("train", "evaluation", "end"):
            bad += 1
        rows[key] = row
    return rows, bad


def parts_of(folder: Path, manifest: Manifest, until: int, ranks: int | None) -> list[Part]:
    """Who trained which windows: a run that was gone on with on other ranks is replayed on the same ones.

    Args:
        folder: The run folder, for the message.
        manifest: The run's.
        until: The last window to replay.
        ranks: How many to use instead, or None.

    Raises:
        BadInputError: If the configuration was changed on the way.
    """
    if ranks is not None:
        return [Part(until, ranks, manifest.threads, manifest.attempts[-1].log_every)]
    kept = list[Attempt]()
    for attempt in manifest.attempts:  # what was trained beyond its start is lost, but not what was changed
        lost = [change for earlier in kept if earlier.window >= attempt.window for change in earlier.changed]
        attempt = attempt.model_copy(update={"changed": [*lost, *attempt.changed]})  # noqa: PLW2901
        kept = [*(earlier for earlier in kept if earlier.window < attempt.window), attempt]
    for attempt in kept:
        if attempt.window and attempt.changed:
            raise BadInputError(
                f"{folder}: its configuration was changed after window {attempt.window} "
                f"({redact_text(attempt.changed[0])}), and the one before isn't kept: it can't be replayed"
            )
    starts = [attempt for attempt in kept if attempt.window < until]
    ends = [*(attempt.window for attempt in starts[1:]), until]
    parts = list[Part]()
    for attempt, end in zip(starts, ends, strict=True):
        part = Part(end, attempt.ranks, attempt.threads, attempt.log_every)
        if parts and replace(parts[-1], until=end) == part:
            parts.pop()
        parts.append(part)
    return parts
