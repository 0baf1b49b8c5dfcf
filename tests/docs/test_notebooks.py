"""Promise: every notebook runs from top to bottom on a CPU, and is kept without output."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_they_are_there() -> None:
    subjects = ["first-run", "input-pipeline", "memory", "your-own-task", "read-a-run"]
    assert [path.stem[3:] for path in NOTEBOOKS] == subjects


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any(cell.metadata for cell in notebook.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_draws(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    # Three times what a notebook may take: this machine does other things.
    NotebookClient(notebook, timeout=360, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures, "a notebook without a plot"
    assert not any(output.output_type == "error" for output in outputs)
    if "TRAINER_KEEP_NOTEBOOKS" in os.environ:  # to look at
        kept = Path(os.environ["TRAINER_KEEP_NOTEBOOKS"]) / path.name
        nbformat.write(notebook, kept)  # type: ignore[no-untyped-call]
