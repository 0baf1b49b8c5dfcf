"""What a run folder says of its run, for those who want to prove it: how it was trained, what came out."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from trainer.checkpoint import FOLDER
from trainer.checkpoint.store import listing
from trainer.config.redact import REDACTED, redact_text
from trainer.config.section import hash_of
from trainer.errors import BadInputError
from trainer.host import strict_json
from trainer.observe.checksums import ChecksumRow, read_checksums
from trainer.train.manifest import file_hash
from trainer.train.resume import Attempt, Stored, check_format, flat


class Manifest(Stored):
    """Of a run's manifest, what its replay needs; `differences_here` reads the rest as it is."""

    config_hash: str
    attempts: list[Attempt] = Field(min_length=1)
    steps: int = Field(ge=1)
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
    rows: list[ChecksumRow]
    unreadable: int


@dataclass(frozen=True)
class Part:
    """Steps that were trained in the same way: up to `until`, with a row of metrics each `every`.

    The settings are those of its configuration that were changed after it, as they were before.
    """

    until: int
    ranks: int
    threads: int
    every: int
    settings: tuple[str, ...] = ()


def read_run(folder: Path, rows_needed: bool = True) -> Recorded:
    """Reads what a run recorded; with rows of metrics, if they are needed.

    Raises:
        BadInputError: If it is no run, or recorded nothing that could be compared.
    """
    path = folder / "manifest.json"
    try:
        facts = strict_json.parse(path.read_bytes())
        check_format(folder, facts)
        manifest = Manifest.model_validate(facts)
        rows, _, unreadable = read_checksums(folder / "checksums.jsonl")
    except OSError as error:
        raise BadInputError(f"{path}: can't be read ({error.strerror}); give a run folder") from error
    except ValueError as error:  # pydantic's, too
        raise BadInputError(
            f"{path}: lacks what verify needs; it isn't a manifest, or an older trainer wrote it"
        ) from error
    if rows and not any("epoch" in row.metrics for row in rows):
        raise BadInputError(
            f"{folder}: an older trainer, with other fingerprints, wrote checksums.jsonl; verify it with that"
        )
    if rows_needed and not rows:
        raise BadInputError(
            f"{folder}: nothing was recorded to compare with (checksums.jsonl); its first row comes after "
            "log.every steps, with log.fingerprints=true"
        )
    return Recorded(folder, manifest, facts, rows, unreadable)


def last_step(run: Recorded, steps: int | None) -> int:
    """The last step to replay: that of the last row there should be, within the steps that were asked for.

    Raises:
        BadInputError: If there is no row within them, or fewer steps.
    """
    rows = sorted(row.step for row in run.rows)
    if steps is None:
        return min(max(rows[-1], _last_row_due(run)), run.manifest.steps)
    if not rows[0] <= steps <= rows[-1]:
        raise BadInputError(
            f"--steps {steps}: steps were recorded from {rows[0]} to {rows[-1]}; give a number between them"
        )
    return max(row for row in rows if row <= steps)


def _last_row_due(run: Recorded) -> int:
    """The step of the last row that must have been written, by how far the run is known to have come."""
    if run.manifest.weights or run.manifest.status == "finished":
        return run.manifest.steps
    if run.manifest.status == "diverged":
        return 0
    kept = _kept(run.manifest.attempts)
    reached = max((entry.step for entry in listing(run.folder / FOLDER)), default=0)
    ends = [*(attempt.step for attempt in kept[1:]), reached]
    due = [
        (attempt.step, end // attempt.log_every * attempt.log_every)
        for attempt, end in zip(kept, ends, strict=True)
        if attempt.checksums
    ]
    return max((end for start, end in due if start < end < run.manifest.steps), default=0)


def _kept(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Attempts without those of which nothing is left; what these changed counts as changed by the next."""
    kept = list[Attempt]()
    for attempt in attempts:
        lost = [change for earlier in kept if earlier.step >= attempt.step for change in earlier.changed]
        one = attempt.model_copy(update={"changed": [*lost, *attempt.changed]})
        kept = [*(earlier for earlier in kept if earlier.step < attempt.step), one]
    return kept


def was_traced(run: Recorded, step: int) -> bool:
    """Whether rows of that step should be in checksums.jsonl: log.fingerprints may change on the way."""
    return _trained(_kept(run.manifest.attempts), step).checksums


def _trained(kept: Sequence[Attempt], step: int) -> Attempt:
    """The attempt whose step that was, of those that are kept."""
    return next((one for one in reversed(kept) if one.step < step), kept[0])


def contradictions(run: Recorded) -> list[str]:
    """What a run folder lacks of what it should hold, or says in two ways; as lines."""
    return [*_of_manifest(run), *_of_weights(run), *_of_trace(run), *_of_metrics(run)]


def _of_manifest(run: Recorded) -> Iterator[str]:
    manifest, facts = run.manifest, run.facts
    if (digest := hash_of(manifest.config)) != manifest.config_hash:
        yield (
            f"manifest.json: the hash of its config is {digest[:8]} and was {manifest.config_hash[:8]}: "
            "it was changed after the run"
        )
    try:
        config = yaml.safe_load((run.folder / "config.yaml").read_bytes())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
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
    finite = not any(value in ("nan", "inf", "-inf") for value in _last_evaluation(run).values())
    if manifest.weights and (manifest.status == "stopped" or (manifest.status == "diverged" and finite)):
        yield f"manifest.json: status is {manifest.status}, though it names final weights"


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


def _of_trace(run: Recorded) -> Iterator[str]:
    """What a replay doesn't show of checksums.jsonl: it has each row once, and of the run's steps only."""
    if run.unreadable:
        yield f"{run.unreadable} lines of checksums.jsonl can't be read"
    for (kind, step), times in Counter((row.kind, row.step) for row in run.rows).items():
        if times > 1:
            yield f"checksums.jsonl: the row of {kind} metrics of step {step} is there {times} times"
        if step > run.manifest.steps:
            yield f"checksums.jsonl: a row of step {step}, and the run has {run.manifest.steps}"
    yield from _of_the_end(run, "summary", run.facts.get("summary"))


def _of_metrics(run: Recorded) -> Iterator[str]:
    """The rows of metrics.jsonl say what those of checksums.jsonl do, which a replay proves."""
    kept = _kept(run.manifest.attempts)
    if not any(attempt.jsonl for attempt in kept):
        return
    try:
        rows, bad = _metrics(run.folder / "metrics.jsonl")
    except OSError as error:
        yield f"metrics.jsonl can't be read ({error.strerror})"
        return
    if bad:
        yield f"{bad} lines of metrics.jsonl can't be read, or are there twice"
    yield from _rows_that_differ(run, kept, rows)
    end = rows.get(("end", run.manifest.steps))
    if kept[-1].jsonl:
        yield from _of_the_end(run, "metrics.jsonl, the last row", end)
    if end is not None and run.manifest.status == "stopped":
        yield "manifest.json: status is stopped, though metrics.jsonl has the row of the run's end"


def _rows_that_differ(
    run: Recorded, kept: Sequence[Attempt], rows: Mapping[tuple[str, int], Mapping[str, str | None]]
) -> Iterator[str]:
    checksums = {(row.kind, row.step): row for row in run.rows}
    # A row is checksums first: a run that was killed, or goes on now, may not have written its last one.
    unsure = max((row.step for row in run.rows), default=0) if run.manifest.status == "running" else None
    for (kind, step), row in checksums.items():
        shown = rows.get((kind, step))
        if shown is None:
            if step != unsure and _trained(kept, step).jsonl:
                yield f"metrics.jsonl: the row of {kind} metrics of step {step} is missing"
            continue
        for name, value in row.metrics.items():
            wanted = "None" if value in ("nan", "inf", "-inf") else value
            if str(shown.get(name)) != wanted:
                yield f"metrics.jsonl, step {step}: {name} {shown.get(name)}, recorded {value}"
    for kind, step in rows.keys() - checksums.keys():
        if kind in ("train", "evaluation") and _trained(kept, step).checksums:
            yield f"metrics.jsonl: the row of {kind} metrics of step {step} isn't in checksums.jsonl"


def _of_the_end(run: Recorded, where: str, said: object) -> Iterator[str]:
    """The last evaluation's metrics stand in the last row and in the manifest, too."""
    if run.manifest.status != "finished":
        return
    there = said if isinstance(said, Mapping) else {}
    for name, value in _last_evaluation(run).items():
        if name != "epoch" and str(there.get(name)) != value:
            yield f"{where}: {name} {there.get(name)}, and {value} in the last evaluation"


def _last_evaluation(run: Recorded) -> Mapping[str, str]:
    """Its metrics, as text; none if it wasn't checksums."""
    last = ("evaluation", run.manifest.steps)
    return next((row.metrics for row in run.rows if (row.kind, row.step) == last), {})


def _metrics(file: Path) -> tuple[dict[tuple[str, int], dict[str, str | None]], int]:
    """Rows of metrics.jsonl by kind and step, numbers as text; and how many lines can't be read."""
    *lines, _ = file.read_bytes().split(b"\n")
    rows, bad = dict[tuple[str, int], dict[str, str | None]](), 0
    for line in lines:
        try:
            row = json.loads(line, parse_float=str, parse_int=str)
            key = str(row["kind"]), int(row["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            bad += 1
            continue
        if key in rows and key[0] in ("train", "evaluation", "end"):
            bad += 1
        rows[key] = row
    return rows, bad


def parts_of(folder: Path, manifest: Manifest, until: int, ranks: int | None) -> list[Part]:
    """Who trained which steps: a run that was gone on with on other ranks is replayed on the same ones.

    Args:
        folder: The run folder, for the message.
        manifest: The run's.
        until: The last step to replay.
        ranks: How many to use instead, or None.

    Raises:
        BadInputError: If something was changed on the way that isn't known any more, such as its data.
    """
    kept = _kept(manifest.attempts)
    ends = [*(attempt.step for attempt in kept[1:]), until]
    before = dict[str, str]()  # what was changed after a part, from the last one back
    parts = list[Part]()
    for attempt, end in zip(reversed(kept), reversed(ends), strict=True):
        if attempt.step < until:
            parts.insert(
                0,
                Part(
                    min(end, until),
                    ranks or attempt.ranks,
                    attempt.threads,
                    attempt.log_every,
                    tuple(f"{name}={value}" for name, value in before.items()),
                ),
            )
        if attempt.step:
            for change in reversed(attempt.changed):
                before |= _before(folder, manifest.config, attempt.step, change)
    together = list[Part]()
    for part in parts:
        if together and replace(together[-1], until=part.until) == part:
            together.pop()
        together.append(part)
    return together


def _before(folder: Path, config: Mapping[str, Any], step: int, change: str) -> dict[str, str]:
    """The setting that undoes a change: "key: before, now after", see `trainer.train.resume.differences`."""
    name, _, values = change.partition(": ")
    try:
        value, _ = json.JSONDecoder().raw_decode(values)
    except ValueError:  # of a file or of data it is a hash
        value = REDACTED
    if name == "task" or name not in flat(config) or REDACTED in str(value):
        raise BadInputError(
            f"{folder}: it was changed after step {step} ({redact_text(change)}), and what was before "
            "isn't kept: it can't be replayed"
        )
    return {name: json.dumps(value)}
