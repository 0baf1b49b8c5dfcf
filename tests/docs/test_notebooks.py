"""Promise: every notebook runs from top to bottom on a CPU, and is kept without output."""

import ast
import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers import preloaded
from trainer.config.recipe import Recipe
from trainer.config.section import describe

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_of(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.fixture(autouse=True)
def from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook imports the package that lies here."""
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@each_notebook
def test_it_is_clean(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell["metadata"] and not cell.get("outputs") and not cell.get("execution_count")


@each_notebook
def test_what_it_imports_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(code_of(path))):
        if isinstance(node, ast.Import):
            for one in node.names:
                importlib.import_module(one.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            module = importlib.import_module(node.module)
            assert [one.name for one in node.names if not hasattr(module, one.name)] == []


@each_notebook
def test_the_keys_that_it_sets_are_a_recipes(path: Path) -> None:
    keys = {key.name for key in describe(Recipe)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    texts = [node.value for node in ast.walk(ast.parse(code_of(path))) if isinstance(node, ast.Constant)]
    named = [re.match(r"(\w+)\.(?!safetensors)\w+(?==|$)", text) for text in texts if isinstance(text, str)]
    assert {key[0] for key in named if key and key[1] in sections} <= keys


def test_the_first_runs_and_draws(tmp_path: Path) -> None:
    """As a script, of fewer epochs and threads: Jupyter's kernel takes longer to start than this to run."""
    code = code_of(NOTEBOOKS[0])
    assert '{"epochs": 8,' in code
    code = code.replace('{"epochs": 8,', '{"epochs": 2, "parallel.threads": 1,')
    draws = "assert len(plt.get_fignums()) == 3, plt.get_fignums()"
    env, words = {**os.environ, "MPLBACKEND": "agg"}, [sys.executable, "-c", f"{code}\n{draws}"]
    done = preloaded.run(words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "manifest.json\n" in done.stdout


@pytest.mark.slow
@each_notebook
def test_it_runs_and_draws(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    # Three times what a notebook may take: this machine does other things.
    NotebookClient(notebook, timeout=360, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures, "a notebook without a plot"
    assert not any(output.output_type == "error" for output in outputs)
