"""Promise: folders and files that a run can't use are one line before a rank starts, and stay as they are."""

import getpass
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.few_pictures import write_pictures
from tests.helpers.manifests import least_manifest
from tests.helpers.refusals import named, refusal
from trainer.cli import main
from trainer.launch.launcher import Launched
from trainer.models.compiling import CACHE_VARIABLE, prepare_cache
from trainer.runs.manifest import FORMAT
from trainer.train.start import job as start

pytestmark = pytest.mark.usefixtures("nothing_starts")


def test_files_are_looked_up_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = write_pictures(tmp_path / "pictures")
    (pictures / "val" / "0" / "dead.png").symlink_to("gone.png")
    settings = {"data.path": pictures, "data.name": "folder", "data.image_size": 16, "data.workers": 0}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert main(["train", "digits", *sets]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named(line, f"1 5 {pictures}/val {pictures}/val/0/dead")
    assert not (tmp_path / "runs").exists()
    with pytest.raises(AssertionError):  # ranks were started
        main(["train", "digits", *sets, "--set", "data.check=none"])


def test_more_ranks_than_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.yaml").write_text(
        "epochs: 1\ndata: "
        "{name: synthetic, samples: 2, image_size: 8, global_batch_size: 4, micro_batch_size: 1}\n"
    )
    assert main(["train", "few.yaml", "--nproc-per-node", "4"]) == 2
    refusal(2, capsys.readouterr().err, "4 2")


def test_a_folder_with_something_in_it_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "notes.txt").write_text("mine")
    refusal(main(["train", "digits", "--out", "."]), capsys.readouterr().err)
    assert (tmp_path / "tensorboard" / "notes.txt").read_text() == "mine"


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "digits", "--out", str(tmp_path)]
    older = [["verify", str(tmp_path)], ["runs", str(tmp_path)], ["export", "--to", "onnx", str(tmp_path)]]
    for manifest, commands, names in (
        ({}, [train], tmp_path / "manifest.json"),
        (least_manifest(format=1), [train, *older], f"1 {FORMAT}"),
        (least_manifest(format=FORMAT), [train, [*train, "--resume", "never"]], tmp_path),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        for words in commands:
            refusal(main(words), capsys.readouterr().err, names)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_a_name_a_home_or_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Any UID of a container, with nothing set: compiled code has a folder, and a refused one is named."""
    tmp_path.chmod(0o755)
    if not (child := os.fork()):
        code: Any = 1
        try:
            for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", CACHE_VARIABLE):
                os.environ.pop(name, None)
            os.setgroups([])
            os.setgid(0)
            os.setuid(987_654)
            prepare_cache()
            code = main(["train", "digits"]) if getpass.getuser() == "uid-987654" else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert named(capfd.readouterr().err, "runs")
    assert list(tmp_path.iterdir()) == []


def test_what_ranks_find_bad_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(_: str, request: dict[str, Any], *__: Any, **___: Any) -> Launched:
        folder = Path(request["folder"] or "runs/digits-1").absolute()
        folder.mkdir(parents=True)
        (folder / ".lock").touch()
        return Launched(2, {**request, "folder": str(folder), "again": True, "made": True})

    monkeypatch.setattr(start, "launch", launch)
    assert main(["train", "digits"]) == 2
    assert main(["train", "digits", "--out", "mine"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert list((tmp_path / "runs").iterdir()) == []
