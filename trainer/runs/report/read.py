"""Reads a run folder as plain data. Torn, malformed and missing parts are left out; nothing is trusted."""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.redact import redact
from trainer.errors import BadInputError
from trainer.host import strict_json
from trainer.host.files import lines_inside, oddity
from trainer.observe.console import warn
from trainer.observe.rows import FILES, PICTURES, length_of, span_of
from trainer.runs.folder import checkpoints_of, is_abandoned, read_json
from trainer.runs.manifest import read_facts
from trainer.runs.report.thin import Point, ThinnedRows

_POINTS = 400
_LINE = 1 << 20  # most bytes of a record; longer lines are malformed
_LATEST = 10**15  # steps
_TEXTS = 200  # verdicts and anomalies that are kept, the newest
_OF_SETS = 96  # most figures of further evaluation sets
_FIGURES = 12  # most figures that this module doesn't know, such as a task's own metrics

_PICTURES = 24
_PICTURE = re.compile(rf"{PICTURES}/[\w.%~-]{{1,250}}\.png", re.ASCII)
_CHECKPOINT = re.compile(r"step-([0-9]{8,18})")
KNOWN = {
    *("loss", "lr", "grad_norm", "loss_scale", "memory_bytes", "slow_excess"),
    *("samples_per_s", "tokens_per_s", "flops_per_s", "mfu"),
}
_SECTIONS = ("time/", "cpu/", "disk/", "network/", "gpu/", "energy/", "memory/", "loader/")
OF_LOSSES = ("loss/", "watched/")  # of a task's own
REPLACED = "replaced/"  # in a summary, before the name of a data set
# Of a record, and of no interest as a curve.
_NO_FIGURE = {"kind", "step", "epoch", "updates", "seconds", "tokens_seen", "slow_rank", "slow_phase"}


class SavedCheckpoint(NamedTuple):
    """Checkpoint in the folder: its name, step, bytes, time of writing, and whether it is the best."""

    name: str
    step: int
    size: int
    written: float
    best: bool


@dataclass
class Newest:
    """Newest entries of a list that may be long.

    Attributes:
        items: The entries.
        left_out: Number of those before them.
    """

    items: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_TEXTS))
    left_out: int = 0

    def add(self, item: dict[str, Any]) -> None:
        """Appends an entry."""
        self.left_out += len(self.items) == _TEXTS
        self.items.append(item)


@dataclass
class RecordedRun:
    """Content of a run folder.

    Attributes:
        folder: The folder.
        name: Name of the folder.
        manifest: The manifest, without secrets.
        train: Records of kind "train", thinned.
        evaluation: Records of kind "eval", thinned.
        hook: Records of kind "hook", thinned.
        answers: Answers to prompts at the first evaluation and at the last one.
        pictures: Pictures of hooks, by name: step of the last one, and its path in the run folder.
        end: The last record of kind "end", or {}.
        verdicts: Records of kind "verdict" except the final one.
        verdict: The final verdict, or None.
        throttled: Number of records by reason of the GPU's throttling.
        anomalies: Lines of anomalies.jsonl.
        checkpoints: Checkpoints, newest first.
        rows: Number of valid lines of metrics.jsonl and the files beside it.
        unreadable: Number of malformed lines.
    """

    folder: Path
    name: str
    manifest: dict[str, Any]
    train: list[Point] = field(default_factory=list)
    evaluation: list[Point] = field(default_factory=list)
    hook: list[Point] = field(default_factory=list)
    pictures: dict[str, tuple[int, str]] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    verdicts: Newest = field(default_factory=Newest)
    verdict: dict[str, Any] | None = None
    throttled: Counter[str] = field(default_factory=Counter)
    anomalies: Newest = field(default_factory=Newest)
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)
    rows: int = 0
    unreadable: int = 0


def read_recorded_run(folder: Path) -> RecordedRun:
    """Reads a run folder, in one pass and in bounded memory.

    Raises:
        BadInputError: If it has no readable manifest.
    """
    manifest = redact(read_facts(folder))
    if is_abandoned(folder, manifest):
        manifest["status"] = "ended without saying so"
    run = RecordedRun(folder, folder.resolve().name or str(folder), manifest)
    _read_rows(run)
    for line in _lines(folder / "anomalies.jsonl"):
        anomaly = _parsed(line)
        if anomaly is None:
            run.unreadable += 1
        else:
            run.anomalies.add(anomaly)
    run.checkpoints = saved_checkpoints(folder)
    return run


def _read_rows(run: RecordedRun) -> None:
    rows = {
        "train": ThinnedRows(_POINTS, _known(KNOWN), span_of, length_of),
        "eval": ThinnedRows(_POINTS, _known(set(), "eval/")),
        "hook": ThinnedRows(_POINTS, _known(set(), "")),
    }
    for line in chain.from_iterable(_lines(run.folder / name) for name in FILES.values()):
        row = _parsed(line)
        step = row.get("step") if row else None
        if row is None or type(step) is not int or not 0 <= step <= _LATEST:
            run.unreadable += 1
            continue
        run.rows += 1
        kind = str(row.get("kind"))
        reason = row.get("gpu/throttle_reason")
        if isinstance(reason, str) and reason and len(run.throttled) < 100:
            run.throttled[reason[:200]] += 1
        if kind == "hook":
            run.pictures |= {
                n: (step, v)
                for n, v in row.items()
                if _is_picture(v) and (n in run.pictures or len(run.pictures) < _PICTURES)
            }
        if kind in rows:
            rows[kind].add(step, row)
        elif kind == "verdict":
            run.verdicts.add(row)
            if row.get("final"):
                run.verdict = row
        elif kind == "answers":
            run.answers = [*run.answers[:1], row]
        elif kind == "end":
            run.end = row
    run.train, run.evaluation = rows["train"].points(), rows["eval"].points()
    run.hook = rows["hook"].points()


def _is_picture(value: object) -> bool:
    return isinstance(value, str) and _PICTURE.fullmatch(value) is not None


def _known(names: set[str], more: str = "\0") -> Callable[[str], bool]:
    """Returns a filter of figures: the known ones, and the first few of a task or with this prefix."""
    others, further = 0, set[str]()

    def wanted(name: str) -> bool:
        nonlocal others
        if name in _NO_FIGURE:
            return False
        if name in names or name.startswith(_SECTIONS):
            return True
        if name.startswith(more) and len(further) < _OF_SETS:
            further.add(name)
        if name in further:
            return True
        if ("/" in name and not name.startswith(OF_LOSSES)) or others >= _FIGURES:
            return False
        others += 1
        return True

    return wanted


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Parses a line as a JSON object; None for anything else. Faster than strict_json, for many records."""
    try:
        value = strict_json.parse_quickly(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, except a torn last one; a malformed line if the file can't be read."""
    try:
        for line in lines_inside(path):
            if line.endswith(b"\n"):
                yield line if len(line) <= _LINE else b""
    except FileNotFoundError:
        return
    except OSError:
        yield b""


def saved_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Lists folders named as checkpoints. They aren't verified, see `trainer runs RUN`."""
    found = list[tuple[int, int, float, Path]]()
    try:
        for path in checkpoints_of(folder).iterdir():
            if (match := _CHECKPOINT.fullmatch(path.name)) and not oddity(path, folder=True):
                stats = [file.stat() for file in path.iterdir() if file.is_file()]
                found.append((int(match[1]), sum(one.st_size for one in stats), path.stat().st_mtime, path))
    except BadInputError as error:
        warn(str(error))
    except OSError:
        pass
    found.sort(reverse=True)
    best = _best_step(found[0][3]) if found else None
    return [
        SavedCheckpoint(path.name, step, size, written, step == best) for step, size, written, path in found
    ]


def _best_step(newest: Path) -> int | None:
    """Returns the step of the best evaluation so far, as the newest checkpoint has it."""
    try:
        best = read_json(newest / "state.json")["state"]["best"][1]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return best if type(best) is int else None
