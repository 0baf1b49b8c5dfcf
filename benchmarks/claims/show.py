"""Claims as a table, as JSON, and in words."""

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.claims.claim import Claim, Measured, Row, Source
from trainer.observe.text import DASH, number

_HEAD = "| claim | from | what was measured | with / without | 95 % interval | at most | verdict |"
VERDICTS = ("holds", "doesn't hold", "undecided", "not measured")


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown, the sources and the conditions by number below it."""
    sources = list(dict.fromkeys(row.claim.source for row in rows))
    conditions = list(dict.fromkeys(row.conditions for row in rows if row.conditions))
    lines = [_HEAD, "|---" * _HEAD.count("|", 1) + "|"]
    for row in rows:
        where = sources.index(row.claim.source) + 1
        under = f" ({_letter(conditions.index(row.conditions))})" if row.measured else ""
        cells = [row.claim.text, f"[{where}]", _figures(row) + under, *_ratio(row), verdict(row)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- [{number}] {_named(source)}" for number, source in enumerate(sources, 1))]
    lines += ["", *(f"- ({_letter(number)}) {text}" for number, text in enumerate(conditions))]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Counts the claims by verdict."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    return f"{len(rows)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def verdict(row: Row) -> str:
    """Formats a verdict, with the reason if it wasn't measured."""
    return f"{row.verdict}: {row.reason}" if row.reason else row.verdict


def as_json(rows: Sequence[Row], conditions: str, about: str) -> str:
    """Formats the whole result as JSON."""
    found = {
        "conditions": conditions,
        "about": about,
        "summary": summary(rows),
        "claims": [_as_dict(row) for row in rows],
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _as_dict(row: Row) -> dict[str, Any]:
    claim, measured = row.claim, row.measured
    return {
        **{"name": claim.name, "claim": claim.text, "source": claim.source._asdict()},
        "ablation": {"name": claim.ablation, "base": claim.base, "tried": claim.tried},
        **{"quantity": claim.quantity, "most": claim.most, "verdict": row.verdict, "reason": row.reason},
        **{"conditions": row.conditions, "measured": measured._asdict() if measured else None},
    }


def _figures(row: Row) -> str:
    claim: Claim = row.claim
    if row.measured is None:
        return f"{claim.base} → {claim.tried}"
    base, tried = (number(value, 3) for value in (row.measured.base, row.measured.tried))
    return f"{claim.base} {base} → {claim.tried} {tried} {row.measured.unit}"


def _ratio(row: Row) -> list[str]:
    most = f"{row.claim.most:.2f}"
    measured: Measured | None = row.measured
    if measured is None:
        return [DASH, DASH, most]
    between = "counted" if measured.counted else f"{measured.low:.3f} to {measured.high:.3f}"
    return [f"{measured.ratio:.3f}", between, most]


def _named(source: Source) -> str:
    return f"{source.title}: {source.address}" if source.address else source.title


def _letter(index: int) -> str:
    return chr(ord("a") + index % 26) * (1 + index // 26)
