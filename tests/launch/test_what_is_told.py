"""Promise: with --log-format json every line of launcher and ranks is an object, and says whose it is; with
--quiet there are only warnings and errors, with --verbose what a start does as well."""

import json
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import preloaded
from tests.helpers.forked import small
from tests.helpers.refusals import named
from tests.helpers.ways import OWN
from trainer.cli import main

JSON = ("--log-format", "json")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    values = small(max_steps=4).model_dump(mode="json", exclude_none=True)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def lines(text: str) -> list[dict[str, Any]]:
    """Each line as an object, with the keys that all have."""
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        assert one.keys() == {"time", "level", "rank", "message"}, one
        assert datetime.fromisoformat(one["time"]).tzinfo is not None
        assert one["message"] == one["message"].strip() != ""
    return found


def train(folder: Path, *words: str, task: str = "mine.yaml") -> Any:
    return preloaded.run([sys.executable, "-m", "trainer", "train", task, *words], cwd=folder)


TALKS = OWN.replace("x = np", "say('the data is made')\n        x = np")
TALKS = f"from trainer.observe.console import say\n{TALKS}"
RANKS = ("--nproc-per-node", "2", "data.micro_batch_size=4")


def test_a_run_on_two_ranks_is_told_in_objects_and_each_says_whose_its_lines_are(here: Path) -> None:
    """With what a start does, once for all ranks."""
    (here / "mine.py").write_text(TALKS)
    done = train(here, *JSON, *RANKS, "--out", "run", "-v", task="mine.py")
    assert done.returncode == 0, done.stderr
    lines(done.stderr)
    said = lines(done.stdout)
    assert {one["level"] for one in said} == {"info"}
    assert {one["rank"] for one in said if one["message"] == "the data is made"} >= {0, 1}
    assert {one["rank"] for one in said if one["message"] != "the data is made"} == {0, None}
    messages = [one["message"] for one in said]
    assert named(messages, "mine.py run epoch")
    for part in ("the launcher", "the loop"):
        assert len([one for one in messages if re.match(rf"\d+\.\d\d s  {part}", one)]) == 1


def test_a_rank_that_fails_is_an_object_too(here: Path) -> None:
    """With its traceback in one line."""
    fault = "raise RuntimeError('https://me:hunter2@host is gone')"
    (here / "watch.py").write_text(f"class Watch:\n    def after_step(self, run):\n        {fault}\n")
    failed = train(here, *JSON, "hooks.use=[watch.py:Watch]", "hooks.on_error=stop", "--out", "run")
    assert failed.returncode == 1, failed.stderr
    last, folder = lines(failed.stderr)[-2:]
    assert folder["message"].startswith("the run folder is ")
    assert (last["level"], last["rank"]) == ("error", None)
    assert "RuntimeError" in last["message"] and "\n" in last["message"] and "hunter2" not in failed.stderr


def test_quiet_leaves_warnings_and_errors(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train(here, "--quiet", *RANKS, "--out", "run")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (here / "run" / "report.html").exists()
    monkeypatch.chdir(here)
    assert main(["train", "mine.yaml", "-q", "optim.lrr=1"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and named(told.err, "mine.yaml optim.lrr")
    (only,) = lines(train(here, *JSON, "optim.lrr=1").stderr)
    assert (only["level"], only["rank"]) == ("error", None) and named(only["message"], "mine.yaml optim.lrr")
