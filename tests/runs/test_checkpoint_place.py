"""Promise: checkpoint.folder has a run's checkpoints elsewhere, and no other link leads there."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.forked import attempt, small
from trainer import cli
from trainer.commands.verify.contradictions import contradictions
from trainer.commands.verify.recorded import read_recorded
from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.runs.checkpoint_place import checkpoints_of, has_checkpoint, place_checkpoints
from trainer.runs.folder import OWNER, claim_folder, remove_unused
from trainer.runs.trust import check_run


def there(place: Path) -> Recipe:
    return small(checkpoint={"folder": place})


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped run `a` with its checkpoints in `scratch/a` beside it, and the same one `inside`, without."""
    root = tmp_path_factory.mktemp("placed")
    assert attempt(root / "a", there(root / "scratch" / "a"), stop_at=8).code == 75
    assert attempt(root / "inside", small()).code == 0
    return root


@pytest.fixture
def placed(begun: Path, tmp_path: Path) -> Path:
    """A copy of all, as if it had been begun here."""
    root = tmp_path / "root"
    shutil.copytree(begun, root, symlinks=True)
    (root / "a" / "checkpoints").unlink()
    (root / "a" / "checkpoints").symlink_to(root / "scratch" / "a")
    owner = json.loads((root / "scratch" / "a" / OWNER).read_text())
    (root / "scratch" / "a" / OWNER).write_text(json.dumps({**owner, "folder": str(root / "a")}))
    return root


def test_a_run_goes_through_with_its_checkpoints_elsewhere(
    placed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, place = placed / "a", placed / "scratch" / "a"
    assert [path.name for path in sorted(place.glob("step-*"))] == ["step-00000005", "step-00000008"]
    assert has_checkpoint(run, newest=False, recipe="x")
    ended = attempt(run, there(place))
    assert ended.code == 0 and "begins again" not in ended.said, ended
    assert [path.name for path in sorted(place.iterdir())] == [OWNER, "step-00000015", "step-00000016"]
    assert (run / "checkpoints").resolve() == place
    same = [json.loads((placed / one / "manifest.json").read_text()) for one in ("a", "inside")]
    assert same[0]["weights"] == same[1]["weights"]
    assert same[0]["config"]["checkpoint"]["folder"].endswith("scratch/a")
    export = ["export", str(run), "--to", "safetensors", "--out", str(placed / "x")]
    evaluate = ["evaluate", str(run), "--checkpoint", "last", "--json"]
    for words in (evaluate, ["runs", str(run)], export, ["report", str(run)]):
        assert cli.main(words) == 0, capsys.readouterr()
    assert "step 16" in capsys.readouterr().out
    assert "16" in (run / "report.html").read_text()
    assert contradictions(read_recorded(run)) == []
    began = attempt(placed / "b", small(), source=str(run))
    assert began.code == 0, began
    (place / "step-00000016" / "model.safetensors").write_bytes(b"x")
    assert cli.main(["runs", str(run)]) == 1
    assert any("step-00000016" in line for line in contradictions(read_recorded(run)))


def test_a_moved_folder_is_one_line_and_goes_on_where_it_is_now(
    placed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, place = placed / "a", placed / "scratch" / "a"
    shutil.move(place, placed / "big")
    for words in (["runs", str(run)], ["evaluate", str(run)]):
        assert cli.main(words) == 2
        assert f"leads to {place}, which isn't there: bring" in capsys.readouterr().err
    assert cli.main(["report", str(run)]) == 0
    assert "isn't there" in capsys.readouterr().err
    assert any("isn't there" in line for line in contradictions(read_recorded(run)))
    ended = attempt(run, there(place))
    assert (ended.code, ended.line.count("\n")) == (2, 0) and "isn't there" in ended.line
    assert not place.exists()
    ended = attempt(run, there(placed / "new"))  # where nothing is
    assert ended.code == 2 and "move that folder to the new place first" in ended.line, ended
    ended = attempt(run, there(placed / "big"))
    assert ended.code == 0 and "begins again" not in ended.said, ended
    assert checkpoints_of(run) == placed / "big"


def test_a_moved_run_folder_finds_its_checkpoints(placed: Path) -> None:
    shutil.move(placed / "a", placed / "c")
    assert checkpoints_of(placed / "c") == placed / "scratch" / "a"
    assert attempt(placed / "c", there(placed / "scratch" / "a")).code == 0
    assert json.loads((placed / "scratch" / "a" / OWNER).read_text())["folder"] == str(placed / "c")


def test_a_copy_of_a_run_does_not_write_to_the_checkpoints_of_the_first(placed: Path) -> None:
    shutil.copytree(placed / "a", placed / "copy", symlinks=True)
    before = sorted((placed / "scratch" / "a").rglob("*"))
    ended = attempt(placed / "copy", there(placed / "scratch" / "a"))
    assert ended.code == 2 and "of which this is a copy" in ended.line, ended
    (placed / "copy" / "checkpoints").unlink()  # a copy without links
    assert "of which this is a copy" in attempt(placed / "copy", there(placed / "scratch" / "a")).line
    assert sorted((placed / "scratch" / "a").rglob("*")) == before
    (placed / "copy" / "checkpoints").symlink_to(placed / "scratch" / "a")
    shutil.copytree(placed / "scratch" / "a", placed / "second")
    assert attempt(placed / "copy", there(placed / "second")).code == 0
    assert checkpoints_of(placed / "copy") == placed / "second"


def of_another_run(root: Path) -> Path:
    return root / "inside" / "checkpoints"


def holding_something(root: Path) -> Path:
    (root / "home").mkdir()
    (root / "home" / "thesis.tex").write_text("")
    return root / "home"


def in_the_run(root: Path) -> Path:
    return root / "new" / "profile"


def a_file(root: Path) -> Path:
    (root / "file").write_text("")
    return root / "file"


def of_a_run_that_was_removed(root: Path) -> Path:
    shutil.rmtree(root / "a")
    shutil.move(root / "new", root / "a")  # the same place again
    (root / "new").symlink_to("a")
    return root / "scratch" / "a"


@pytest.mark.parametrize(
    "place", [of_another_run, holding_something, in_the_run, a_file, of_a_run_that_was_removed]
)
def test_a_new_run_takes_no_folder_of_others(placed: Path, place: Callable[[Path], Path]) -> None:
    (placed / "new").mkdir()
    wanted = place(placed)
    before = {path: path.lstat().st_mtime_ns for path in placed.rglob("*")}
    with pytest.raises(BadInputError, match=r"checkpoint\.folder=.*"):
        place_checkpoints(placed / "new", wanted)
    assert {path: path.lstat().st_mtime_ns for path in placed.rglob("*")} == before


def test_a_start_that_was_killed_before_its_manifest_is_begun_again(placed: Path) -> None:
    run, place = placed / "new", placed / "scratch" / "new"
    for _ in range(2):
        claim_folder(run)
        place_checkpoints(run, place)
    shutil.rmtree(run)  # as the launcher does where nothing has begun
    claim_folder(placed / "other")
    place_checkpoints(placed / "other", place)
    assert checkpoints_of(placed / "other") == place


def another_runs(run: Path, root: Path) -> None:
    (run / "checkpoints").symlink_to(root / "inside" / "checkpoints")


def another_placed_runs(run: Path, root: Path) -> None:
    shutil.copytree(root / "scratch" / "a", root / "theirs")
    owner = {"folder": str(root / "inside"), "run_id": "another"}
    (root / "theirs" / OWNER).write_text(json.dumps(owner))
    (run / "checkpoints").symlink_to(root / "theirs")


def a_mark_by_a_link(run: Path, root: Path) -> None:
    shutil.copytree(root / "inside" / "checkpoints", root / "theirs")
    (root / "theirs" / OWNER).symlink_to(root / "scratch" / "a" / OWNER)
    (run / "checkpoints").symlink_to(root / "theirs")


def a_fifo_for_a_mark(run: Path, root: Path) -> None:
    shutil.copytree(root / "inside" / "checkpoints", root / "theirs")
    os.mkfifo(root / "theirs" / OWNER)
    (run / "checkpoints").symlink_to(root / "theirs")


def a_circle(run: Path, _: Path) -> None:
    (run / "checkpoints").symlink_to(run / "checkpoints")


def no_id_and_somebody_elses_folder(run: Path, root: Path) -> None:
    shutil.copytree(root / "scratch" / "a", root / "theirs")
    (root / "theirs" / OWNER).write_text(json.dumps({"folder": str(root / "inside"), "run_id": ""}))
    (run / "checkpoints").symlink_to(root / "theirs")


def _outside(root: Path, run: Path) -> dict[Path, int]:
    paths = [path for path in root.rglob("*") if run not in (path, *path.parents) and path.suffix != ".told"]
    return {path: path.lstat().st_mtime_ns for path in paths}


@pytest.mark.parametrize(
    "planted",
    [
        another_runs,
        another_placed_runs,
        a_mark_by_a_link,
        a_fifo_for_a_mark,
        a_circle,
        no_id_and_somebody_elses_folder,
    ],
)
def test_a_link_that_was_planted_is_refused_with_the_key(
    placed: Path, planted: Callable[[Path, Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = placed / "a"
    (run / "checkpoints").unlink()
    planted(run, placed)
    before = _outside(placed, run)
    ended = attempt(run, small())
    assert ended.code == 2 and "\n" not in ended.line, ended
    assert planted is a_circle or "checkpoint.folder=DIR" in ended.line
    for command in ("runs", "evaluate"):
        assert cli.main([command, str(run)]) == 2
    assert "checkpoints" in capsys.readouterr().err
    assert _outside(placed, run) == before


def test_a_run_that_was_sent_names_no_folder_to_write_to(
    placed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    recipe = there(placed / "scratch" / "a")
    with pytest.raises(BadInputError, match=r"a folder that it would write to: checkpoint\.folder="):
        check_run(placed / "a", recipe, [], trusted=False)
    check_run(placed / "a", recipe, [], trusted=True)
    check_run(placed / "a", recipe, ["checkpoint.folder=/scratch/mine"], trusted=False)


def test_a_run_that_did_not_begin_leaves_no_mark(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "scratch"
    assert claim_folder(run)
    place_checkpoints(run, place)
    assert (place / OWNER).is_file()
    remove_unused(run)
    assert not run.exists() and list(place.iterdir()) == []
