"""Promise: what README.md and docs/ show can be typed, leads somewhere, and was measured."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch

from benchmarks.__main__ import make_parser as make_bench_parser
from tests.helpers.rows import read_rows
from trainer.checkpoint import CHECKPOINTS
from trainer.cli import make_parser
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, recipe_names
from trainer.config.training import HooksConfig, LogConfig
from trainer.errors import BadInputError
from trainer.observe.rows import FILES
from trainer.runs.folder import _ADDED_TO, _FOLDERS, _LEFTOVERS, MANIFEST
from trainer.train.components.task import check_request, make_task

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "docs/results/index.md"
_FIGURE = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w,]*\w)")
_LINK = re.compile(r"\]\(([^)#:\s]+\.(?:md|json))")


def measured() -> list[tuple[Path, str, str, str]]:
    """The rows of the tables of what was measured: page, claim, figure, command."""
    found = []
    for page, head in ((ROOT / "README.md", "result"), (RESULTS, "figure | conditions")):
        for table in page.read_text().split(f"| claim | {head} | command |\n")[1:]:
            for line in table.splitlines()[1:]:
                if not line.startswith("|"):
                    break
                claim, result, *_, where = line.strip("| ").split(" | ")
                found.append((page, claim, result, where))
    return found


ROWS = [row for row in measured() if _LINK.search(row[3]) and _FIGURE.search(row[2])]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].stem}-{row[1][:50]}")
def test_its_figures_stand_in_the_results(row: tuple[Path, str, str, str]) -> None:
    page, _, result, where = row
    files = _LINK.findall(where)
    there = "\n".join((page.parent / name).read_text() for name in files)
    numbers = [float(figure.replace(",", "")) for figure in _FIGURE.findall(there)]
    missing = [figure for figure in _FIGURE.findall(result) if not _stands(figure.replace(",", ""), numbers)]
    assert not missing, f"not in {', '.join(files)}: {missing}"


def _stands(figure: str, numbers: list[float]) -> bool:
    """Whether one of the numbers is it, or is rounded to it."""
    places = len(figure.partition(".")[2])
    wanted, mesh = float(figure), 0.5001 * 10**-places if places else 0.0
    return any(abs(number - wanted) <= mesh for number in numbers)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def commands() -> Iterator[tuple[Path, str]]:
    """The lines of code blocks that call trainer, make or a bench: page and command, comments cut off."""
    for page in PAGES:
        for block in re.findall(r"```(?:|bash|sh)\n(.*?)```", page.read_text(), re.S):
            for line in re.split(r"\n| && ", block.replace("\\\n", " ")):
                command = line.removeprefix("$ ").partition("  # ")[0].strip()
                left = "…" in command or f"{line}\ntrainer: error:" in block
                if re.match(r"(trainer|make|python -m benchmarks) [a-z]", command) and not left:
                    yield page, command


COMMANDS = sorted(set(commands()))
PARSER, CHECKED = make_parser(), set[tuple[str, int]]()
MAKEFILES = (ROOT / "Makefile").read_text() + (ROOT / "scripts/maintain.mk").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILES, re.M))


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=[f"{page.stem}: {line[:70]}" for page, line in COMMANDS]
)
def test_a_command_can_be_typed(page: Path, command: str) -> None:
    """Its words are parsed, and its keys are set in the recipe, but nothing is run."""
    words = shlex.split(re.split(r" [>|] ", command)[0])
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= TARGETS, page
        return
    if words[0] == "python":
        make_bench_parser(words[3:]).parse_args(words[3:])
        return
    options = PARSER.parse_args(words[1:])
    settings = [value for value in getattr(options, "set", None) or [] if not value.startswith("KEY")]
    if getattr(options, "recipe", None) in recipe_names():
        recipe = load_recipe(options.recipe, settings)
        if words[1] == "train":
            _check(recipe, options.nproc_per_node or 1)


def _check(recipe: Recipe, ranks: int) -> None:
    """What is looked at before ranks start, without what lies elsewhere: only that may be missing."""
    if (one := (recipe.model_dump_json(), ranks)) in CHECKED:
        return
    CHECKED.add(one)
    kept: dict[str, object] = {"model": recipe.model.model_copy(update={"pretrained": None, "reinit": ()})}
    kept |= {"hooks": HooksConfig(), "log": LogConfig()}
    try:
        check_request(recipe.model_copy(update=kept), make_task(recipe), ranks)
    except BadInputError as error:
        assert recipe.data.name not in ("digits", "stdlib", "dtmf", "digits-canvas", "synthetic"), error
        elsewhere = r"data\.path is missing|/data|[Nn]o such|there is no folder|can't be reached from here"
        assert re.search(elsewhere, str(error)), error


def test_a_command_whose_data_is_not_there_is_checked_as_well() -> None:
    recipe = load_recipe("gpt2-124m", ["parallel.strategy=fsdp"])
    assert recipe.compile.scope == "blocks"
    with pytest.raises(BadInputError, match=r"use compile\.scope=blocks"):
        load_recipe("gpt2-124m", ["parallel.strategy=fsdp", "compile.scope=model"])
    assert load_recipe("gpt2-124m", []).compile.scope == "model"


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_page_made_of_the_code_is_current(page: str) -> None:
    assert (ROOT / "docs" / page).read_text() == reference.PAGES[page](), "python scripts/reference.py"


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
    state, weights = names["model"].state_dict(), names["weights"]
    assert state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in state)


def test_the_document_names_the_files_that_are_in_the_code_and_no_others(digits_run: Path) -> None:
    """A name whose rank or kind is put in, as memory_summary.rank-1.txt, is in the code with braces."""
    first = [line.split(" | ")[0] for line in RUN_FOLDER.splitlines() if line.startswith("| `")]
    names = {name.rstrip("/") for cell in first for name in re.findall(r"`([\w-]+/|[\w-]*\.[a-z-]+)`", cell)}
    written = {*_ADDED_TO, *_FOLDERS, *_LEFTOVERS, MANIFEST, CHECKPOINTS}
    assert written | {path.name for path in digits_run.iterdir()} <= names
    code = "".join(file.read_text() for file in (ROOT / "trainer").rglob("*.py"))
    for name in names - written:
        stem, dot, end = name.partition(".")
        assert re.search(rf'"{re.escape(stem)}(\{{\w+\}})?{re.escape(dot + end)}"', code), name


def test_every_key_of_a_row_in_the_document_is_in_the_code() -> None:
    """As a text of its own, or as the family before a slash."""
    rows = RUN_FOLDER.partition("\n| key |")[2].partition("\n\n")[0].splitlines()[2:]
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    code = "".join(file.read_text() for file in (ROOT / "trainer").rglob("*.py"))
    texts = set(re.findall(r"[\"']([a-z_0-9]+/?)[^\"'\n]*[\"']", code))
    assert len(names) > 30
    families = {name: re.sub(r"/(\*|…|NAME/…)$", "/", name) for name in names}
    assert not [name for name, one in families.items() if texts.isdisjoint((one, one.rstrip("/")))]


def test_every_key_of_a_row_is_in_the_document(digits_run: Path) -> None:
    told = set[tuple[str, str]]()
    for line in RUN_FOLDER.splitlines():
        if line.startswith("| `"):
            names, kinds, *_ = line.split(" | ")
            told |= {(name, kind) for name in re.findall(r"`([^`]+)`", names) for kind in kinds.split(", ")}
    rows = read_rows(digits_run, ())
    assert {"train", "eval", "end"} <= {row["kind"] for row in rows}
    records = RUN_FOLDER.partition("\n## Metrics records")[2]
    assert set(re.findall(r"(?m)^\| `(\w+\.jsonl)` ", records)) == set(FILES.values())
    for row in rows:
        for key in row:
            names_of = (key, f"{key.partition('/')[0]}/*")
            assert told & {(name, kind) for name in names_of for kind in ("all", row["kind"])}, (key, row)
