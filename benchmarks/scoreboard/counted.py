"""The benches that are counted, as rows of the scoreboard."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import accumulation, cut_run, resume
from benchmarks.against import Judged, LibraryFailed, titled
from benchmarks.scoreboard.common import Extent, failed_rows, libraries_for
from benchmarks.scoreboard.figures import Absent, Counted, Part, Row, without_the_failing


def by_accumulation(timm_train: Path | None) -> Part:
    """Steps with the gradient of their samples."""
    there, rows = libraries_for("accumulate")
    there = accumulation.with_script(there, timm_train if "timm" in there else None)

    def measure(names: list[str]) -> list[Judged]:
        theirs = (accumulation.measure_library(name, there[name]) for name in names)
        return list(chain(accumulation.measure_ours(), *theirs))

    judged, failed = without_the_failing(measure, there, LibraryFailed)
    return Part(
        "accumulation",
        [*count_steps(judged), *rows, *failed_rows(failed)],
        "5 and 7 micro-batches at accumulation 4, with all tokens valid and with valid tokens that vary; "
        "float64, one process, one epoch",
        {"cases": [{**one._asdict(), **_nested(one)} for one in judged]},
    )


def _nested(judged: Judged) -> dict[str, Any]:
    return {"case": judged.case._asdict(), "score": judged.score and judged.score._asdict()}


def count_steps(judged: Sequence[Judged]) -> list[Row]:
    """Counts the steps with their samples' gradient, for each way and for the trainer on the same cases."""
    own = [one for one in judged if one.name == "trainer"]
    rows: list[Row] = []
    for (name, _), group in _grouped(judged).items():
        scores = {one.case: one.score for one in group if one.score}
        notes = ", ".join(dict.fromkeys(one.note for one in group if not one.score))
        title = group[0].label
        if not scores:
            rows.append(Absent(title, notes))
            continue
        right, of = (sum(n) for n in zip(*((s.right, len(s.due)) for s in scores.values()), strict=True))
        ours = None
        if name != "trainer":  # the worse one of the trainer's ways
            ways = {one.variant for one in own}
            ours = min(
                sum(one.score.right for one in own if one.score and one.variant == way and one.case in scores)
                for way in ways
            )
        rows.append(Counted(title, right, of, ours, notes, titled(name)))
    return rows


def by_resume(extent: Extent) -> Part:
    """Cuts that end with the same bits."""
    there, rows = libraries_for("resume")
    ways: dict[str, Any] = {"trainer": resume.resume, **there}

    def measure(names: list[str]) -> list[Judged]:
        return [
            one for name in ("trainer", *names) for one in resume.measure_cuts(name, ways[name], extent.cuts)
        ]

    judged, failed = without_the_failing(measure, there, LibraryFailed)
    return Part(
        "resume",
        [*count_cuts(judged), *rows, *failed_rows(failed)],
        f"a run of {cut_run.EPOCHS} epochs of {cut_run.BATCHES} updates, cut after update "
        f"{', '.join(map(str, extent.cuts))}; float32, one process without loader workers",
        {"cuts": [{**one._asdict(), "score": one.score._asdict()} for one in judged]},
    )


def count_cuts(judged: Sequence[Judged]) -> list[Row]:
    """Counts the cuts that end with the same bits, for each way."""
    ours = sum(one.score.same for one in judged if one.name == "trainer")
    return [
        Counted(
            group[0].label,
            sum(one.score.same for one in group),
            len(group),
            None if name == "trainer" else ours,
            rival=titled(name),
        )
        for (name, _), group in _grouped(judged).items()
    ]


def _grouped(judged: Iterable[Any]) -> Mapping[tuple[str, str], list[Any]]:
    groups: dict[tuple[str, str], list[Any]] = {}
    for one in judged:
        groups.setdefault((one.name, one.variant), []).append(one)
    return groups
