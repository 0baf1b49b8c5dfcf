"""Promise: a figure that the README publishes stands in the results that it links to."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
_FIGURE = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w,]*\w)")
_LINK = re.compile(r"\]\((docs/results/[\w.-]+\.md)")


def measured() -> list[tuple[str, str, str]]:
    """The rows of the README's table of what was measured: claim, result, where."""
    text = (ROOT / "README.md").read_text()
    table = text[text.index("## Measured") :].partition("\n\nThe libraries")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if "|" in line
    ]
    return [(row[0].strip("| "), row[1], row[2]) for row in rows[2:] if len(row) == 3]


ROWS = [row for row in measured() if _LINK.search(row[2]) and _FIGURE.search(_LINK.sub("", row[1]))]


def test_there_are_some() -> None:
    assert len(measured()) > 15
    assert len(ROWS) > 8


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_its_figures_stand_in_the_results(row: tuple[str, str, str]) -> None:
    _, result, where = row
    files = _LINK.findall(where)
    there = "\n".join((ROOT / name).read_text() for name in files)
    numbers = [float(figure.replace(",", "")) for figure in _FIGURE.findall(there)]
    missing = [figure for figure in _FIGURE.findall(result) if not _stands(figure.replace(",", ""), numbers)]
    assert not missing, f"not in {', '.join(files)}: {missing}"


def _stands(figure: str, numbers: list[float]) -> bool:
    """Whether one of the numbers is it, or is rounded to it."""
    places = len(figure.partition(".")[2])
    wanted, mesh = float(figure), 0.5001 * 10**-places if places else 0.0
    return any(abs(number - wanted) <= mesh for number in numbers)


def test_a_figure_that_nobody_measured_is_found() -> None:
    assert _stands("0.38", [0.379])
    assert not _stands("0.38", [0.37, 3.8])
    assert not _stands("70", [71.0])


def test_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / target).exists(), target


# docs/run-folder.md

RUN_FOLDER = (ROOT / "docs" / "run-folder.md").read_text()


def test_the_weights_are_loaded_as_the_document_says(
    digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", RUN_FOLDER, re.S)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(digits_run)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(snippet, names)
    state = names["model"].state_dict()
    assert state.keys() == names["weights"].keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in names["weights"].items())


def test_every_key_of_a_row_is_in_the_document(digits_run: Path) -> None:
    table = [line.split(" | ") for line in RUN_FOLDER.splitlines() if line.startswith("| `")]
    told = {
        (name, kind)
        for cells in table
        for name in re.findall(r"`([^`]+)`", cells[0])
        for kind in cells[1].split(", ")
    }
    rows = [json.loads(line) for line in (digits_run / "metrics.jsonl").read_text().splitlines()]
    assert {"train", "evaluation", "end"} <= {row["kind"] for row in rows}
    for row in rows:
        for key in row:
            names = (key, f"{key.partition('/')[0]}/*")
            assert any((name, kind) in told for name in names for kind in ("all", row["kind"])), (key, row)
