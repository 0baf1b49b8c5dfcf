"""Promise: what docs/from-other-trainers.md says to type can be typed: commands, keys, methods, names."""

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.test_readme import ROOT, _check
from trainer import PUBLIC
from trainer.cli import make_parser
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe, provisional, recipe_names
from trainer.config.section import describe
from trainer.tasks.own_methods import GIVEN, OPTIONAL_METHODS
from trainer.train.hooks import HOOK_METHODS

TEXT = (ROOT / "docs" / "from-other-trainers.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if re.match(r"\| \d+ \|", line)]
KEYS = {key.name for key in describe(Recipe)}
# Of torch, Python and the shell; and what others call it, where our column says that it is no more.
ELSEWHERE = {
    *("SummaryWriter", "collate_fn", "loader.dataset", "breakpoint()", "model."),
    *("should_stop", "loss/NAME", "runs/latest", "--init-from"),
}
SPANS = sorted({span for row in ROWS for span in re.findall(r"`([^`]+)`", row[3])})


def test_each_of_the_37_tasks_has_a_line() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 38))
    assert all(len(row) == 4 and all(row) for row in ROWS)


@pytest.mark.parametrize("span", SPANS)
def test_it_can_be_typed(span: str) -> None:
    public = {name for names in PUBLIC.values() for name in names} | {"losses"}
    if span in ELSEWHERE or span in public:
        return
    if method := re.fullmatch(r"(\w+)\([\w, ]*\)", span):
        assert method[1] in {*GIVEN, *OPTIONAL_METHODS, *HOOK_METHODS}
    elif span.startswith("trainer "):
        words = shlex.split(span.partition(" > ")[0])
        options = make_parser().parse_args(words[1:])
        if getattr(options, "recipe", None) in recipe_names() and words[1] == "train":
            _check(load_recipe(options.recipe, options.set or []), options.nproc_per_node or 1)
    else:
        settings = shlex.split(span)
        assert all("=" in one and one.partition("=")[0] in KEYS for one in settings), span
        if settings[0].startswith("data.class_weights"):
            provisional("digits", settings)
        else:
            provisional("recipe", settings, {"task": "classification", "epochs": 1})


def test_readme_and_site_lead_to_it() -> None:
    for page in ("README.md", "docs/index.md", "mkdocs.yml"):
        assert "from-other-trainers.md" in (ROOT / page).read_text()


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert not [
        page.name for page in Path(ROOT / "docs").glob("*.md") if f"({page.name}" not in index + "(index.md"
    ]


def test_the_glossary_is_linked_from_the_front_page() -> None:
    words = (ROOT / "docs" / "recipes.md").read_text().partition("## Twelve words")[2].partition("\n## ")[0]
    assert "docs/recipes.md#twelve-words" in (ROOT / "README.md").read_text()
    names = re.findall(r"^\| ([a-z, -]+) \| (?!meaning \|)", words, re.M)
    assert len(names) == 12
    wanted = "rank, micro-batch, step, sum, verdict, stack, pack, sink, box, tree reduction, parts, held out"
    assert set(wanted.split(", ")) <= {name for line in names for name in line.split(", ")}


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w-]+\.md)#([\w-]+)\)", TEXT))))
def test_its_links_lead_to_headings(link: tuple[str, str]) -> None:
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / link[0]).read_text(), re.M)
    assert link[1] in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
