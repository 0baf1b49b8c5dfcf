"""Promise: `latest` links to the newest run, atomically, and never hinders a run."""

import os
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from tests.helpers.planted import put
from trainer.cli import make_parser
from trainer.commands.train import find_run
from trainer.host.latest import LATEST, RUNS, link_latest, nor_below_runs, run_path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(name: str, at: int = 0) -> Path:
    folder = put(RUNS / name, "manifest.json", content=b"{}")
    if at:
        os.utime(folder / "manifest.json", (at, at))
    return folder


def test_the_link_goes_to_the_newest_run() -> None:
    with pytest.raises(ArgumentTypeError, match="latest: there is no run below runs"):
        run_path("latest")
    first, second = made("a", 2), made("b", 1)
    link_latest(first.absolute())
    link_latest(second.absolute())
    assert os.readlink(RUNS / LATEST) == "b", "relative: the folder may be mounted elsewhere"  # noqa: PTH115
    assert run_path("latest") == second, "by its own name, and not by its time"
    assert run_path("a/latest") == Path("a/latest")
    assert sorted(path.name for path in RUNS.iterdir()) == ["a", "b", LATEST], "nothing is left beside it"
    (second / "manifest.json").unlink()
    assert run_path("latest") == first, "a link to what is no run any more"


def test_a_run_is_found_by_its_name_below_runs() -> None:
    """As --name made it; a path that is there comes first."""
    run = made("base")
    assert run_path("base") == run
    assert run_path("other") == Path("other") and run_path("x/base") == Path("x/base")
    assert nor_below_runs(Path("other")) == ", and there is no runs/other"
    assert nor_below_runs(Path("x/base")) == nor_below_runs(Path("runs")) == ""
    options = make_parser().parse_args(["train", "--resume", "base"])
    assert find_run(options) == run == options.out
    Path("base").mkdir()
    assert run_path("base") == Path("base")


def test_where_no_link_can_be_made_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without links; or where a folder of somebody's has that name."""
    older, newer = made("a", 1), made("b", 2)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refuse)
        link_latest(older.absolute())
    assert not (RUNS / LATEST).exists() and run_path("latest") == newer
    made(LATEST)
    link_latest(older.absolute())
    assert not (RUNS / LATEST).is_symlink() and run_path("latest").samefile(RUNS / LATEST)


def test_a_file_of_somebodys_that_is_named_latest_stays() -> None:
    run = made("a")
    (RUNS / LATEST).write_text("mine")
    link_latest(run.absolute())
    assert (RUNS / LATEST).read_text() == "mine" and not (RUNS / LATEST).is_symlink()


def test_a_run_links_itself(tmp_path: Path) -> None:
    """When it begins; one that is resumed isn't the newest by that."""
    from tests.helpers.forked import attempt, small

    RUNS.mkdir()
    runs = tmp_path / RUNS
    attempt(runs / "a", small(max_steps=4), stop_after=2, code=75)
    attempt(runs / "b", small(max_steps=2), code=0)
    attempt(runs / "a", small(max_steps=4), code=0)
    assert run_path("latest") == RUNS / "b"
