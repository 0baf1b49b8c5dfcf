"""Parts of a scoreboard made up by hand, and what is read off its page and its chart."""

from collections.abc import Sequence

from matplotlib.text import Text

from benchmarks.scoreboard.chart import chart
from benchmarks.scoreboard.figures import (
    Absent,
    Counted,
    Machine,
    Part,
    Timed,
)

MACHINE = Machine("2026-11-22, a processor", "quick 1.0, slow not installed")
WON = Timed("trainer 1", "slow 2.0", 100.0, 200.0, 0.5, 0.45, 0.55, 60)
LOST = Timed("trainer 1", "quick 1.0", 100.0, 80.0, 1.25, 1.21, 1.29, 60)
OPEN = Timed("trainer 1", "alike 3.0", 100.0, 101.0, 0.99, 0.97, 1.01, 60)
MISSING = Absent("nowhere", "not installed")
OVERHEAD = Part("overhead", [WON, LOST, OPEN, MISSING], "sixty rounds", {"trainer 1": [1.0, 2.0]}, seconds=9)
COUNTED = Part(
    "accumulation",
    [
        Counted("trainer 1", 8, 8),
        Counted("slow 2.0", 2, 8, 8),
        Counted("alike 3.0", 4, 4, 4, "not measured: the other four"),
        Absent("timm 1.0", "not measured: its train.py isn't in its wheel"),
    ],
    "seven micro-batches",
)
FAILED = Part("resume", failed="RuntimeError: it fell | over")
PARTS = (OVERHEAD, COUNTED, FAILED)


def words(parts: Sequence[Part]) -> list[str]:
    """Returns the texts of the chart."""
    texts = chart("title", parts).findobj(Text)
    return [one.get_text() for one in texts if isinstance(one, Text)]


def rows(page: str, title: str) -> list[list[str]]:
    """Cells of a section's table, without its head."""
    section = page[page.index(f"## {title}\n") + 3 :].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]
