"""Promise: what docs/from-other-trainers.md says to type can be typed: commands, keys, methods, names."""

import re
import shlex

import pytest

from tests.docs.test_readme import PARSER, ROOT, _check
from trainer import PUBLIC
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


@pytest.mark.parametrize("span", SPANS)
def test_it_can_be_typed(span: str) -> None:
    public = {name for names in PUBLIC.values() for name in names} | {"losses"}
    if span in ELSEWHERE or span in public:
        return
    if method := re.fullmatch(r"(\w+)\([\w, ]*\)", span):
        assert method[1] in {*GIVEN, *OPTIONAL_METHODS, *HOOK_METHODS}
    elif span.startswith("trainer "):
        words = shlex.split(span.partition(" > ")[0])
        options = PARSER.parse_args(words[1:])
        if getattr(options, "recipe", None) in recipe_names() and words[1] == "train":
            _check(load_recipe(options.recipe, options.set or []), options.nproc_per_node or 1)
    else:
        settings = shlex.split(span)
        assert all("=" in one and one.partition("=")[0] in KEYS for one in settings), span
        if settings[0].startswith("data.class_weights"):
            provisional("digits", settings)
        else:
            provisional("recipe", settings, {"task": "classification", "epochs": 1})
