"""`python -m benchmarks pictures`: for the documentation, the rooms of the package and losses of runs."""

import argparse
import ast
import json
from pathlib import Path

import grimp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from benchmarks.charts import FAINT, INK, as_svg
from trainer.errors import BadInputError
from trainer.runs.folder import read_rows

# From the ground up, as import-linter's contract in pyproject.toml has them (a test compares).
ROOMS = (
    *("config", "host", "observe", "launch", "distributed", "checkpoint", "data", "models", "optim", "tasks"),
    *("runs", "train", "commands"),
)
_PACKAGE = Path(__file__).parent.parent / "trainer"
_LINE = "#3f51b5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run folders whose losses are drawn (default: none)"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), metavar="DIR")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if missing := [run for run in options.runs if not (run / "metrics.jsonl").is_file()]:
        raise BadInputError(f"{missing[0]}: no run folder: it has no metrics.jsonl")
    options.out.mkdir(parents=True, exist_ok=True)
    pictures = {"rooms": rooms()} | ({"learning": learning(options.runs)} if options.runs else {})
    for name, figure in pictures.items():
        path = options.out / f"{name}.svg"
        path.write_text(as_svg(figure))
        print(path)
    return 0


def rooms() -> Figure:
    """A box for each room, each above those that it imports, with a curve for each import between rooms."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0.5, 11.5)
    axes.set_ylim(-0.6, len(ROOMS) - 0.4)
    for height, room in enumerate(ROOMS):
        axes.add_patch(Rectangle((2.6, height - 0.38), 8.8, 0.76, facecolor="#f3f4fb", edgecolor="#d5d8ee"))
        axes.text(2.75, height, room, fontsize=11, weight="bold", va="center", color=INK)
        axes.text(4.2, height, _role(room), fontsize=8, va="center", color=FAINT)
    for importer, imported in arrows():
        _curve(axes, ROOMS.index(importer), ROOMS.index(imported))
    axes.text(2.6, -0.55, "a curve leads from a room down to one that it imports", fontsize=7, color=FAINT)
    return figure


def arrows() -> list[tuple[str, str]]:
    """The pairs of rooms of which the first imports the second, lazy imports included."""
    graph = grimp.build_graph("trainer")
    return [
        (a, b)
        for a in ROOMS
        for b in ROOMS
        if a != b
        and graph.direct_import_exists(importer=f"trainer.{a}", imported=f"trainer.{b}", as_packages=True)
    ]


def _role(room: str) -> str:
    """The first sentence of the room's docstring."""
    text = ast.get_docstring(ast.parse((_PACKAGE / room / "__init__.py").read_text())) or ""
    return text.partition("\n")[0].partition(". ")[0].rstrip(".")


def _curve(axes: Axes, top: int, bottom: int) -> None:
    far = top - bottom
    axes.add_patch(
        FancyArrowPatch(
            (2.55, top),
            (2.55, bottom),
            connectionstyle=f"arc3,rad={0.35 + 0.9 / far:.2f}",
            arrowstyle="-|>,head_length=3,head_width=1.5",
            color=_LINE,
            alpha=0.25 + 0.5 / far,
            linewidth=0.8,
        )
    )


def learning(runs: list[Path]) -> Figure:
    """The loss of each run over its steps: in training, and on the evaluation data."""
    columns = 2 if len(runs) > 1 else 1
    lines = -(-len(runs) // columns)
    figure = Figure(figsize=(4.5 * columns, 2.6 * lines), layout="constrained")
    for place, run in enumerate(runs):
        axes = figure.add_subplot(lines, columns, place + 1)
        for kind, label, color in (("train", "training", FAINT), ("eval", "evaluation", _LINE)):
            points = [(row["step"], row["loss"]) for row in read_rows(run, kind) if "loss" in row]
            if points:
                marker = "o" if kind == "eval" else ""
                axes.plot(*zip(*points, strict=True), color=color, label=label, lw=1.2, marker=marker, ms=3)
        manifest = json.loads((run / "manifest.json").read_text())
        axes.set_title(manifest["recipe"], fontsize=9, loc="left")
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("loss", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7)
        axes.grid(color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    return figure
