"""Promise: what of the data isn't read, and how many samples others stood in for, is told by a run."""

import json
from pathlib import Path

import pytest

from tests.helpers.image_folders import encoded, picture
from tests.helpers.refusals import named
from tests.helpers.world import Ranks
from trainer import fit
from trainer.data.corrupt import Bad, Quarantine
from trainer.distributed.parallel import World
from trainer.train.summary import count_replaced

SETTINGS = {
    "data.name": "folder",
    "data.image_size": 32,
    "data.global_batch_size": 4,
    "data.micro_batch_size": 4,
    "data.workers": 0,
    "data.corrupt_budget": 0.5,
    "max_steps": 2,
    "model.width": 4,
    "parallel.threads": 1,
}


def test_a_run_tells_it_where_people_look(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg", "b/1.jpg", "b/2.heic"):
            file = tmp_path / "d" / part / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(picture(), "JPEG"))
        (tmp_path / "d" / part / "b" / "1.jpg").write_bytes(b"\xff\xd8 torn")
    fit("digits", {**SETTINGS, "data.path": str(tmp_path / "d"), "data.on_corrupt": "quarantine"}, out="run")
    assert named(capfd.readouterr().out, "1 .heic b/2.heic quarantine.jsonl")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    line = {"reason": ".heic", "count": 1, "first": "b/2.heic"}
    assert manifest["data"]["left_out"] == {"training data": [line], "evaluation data": [line]}
    assert manifest["summary"]["replaced/training"] == manifest["summary"]["replaced/evaluation"] == 1
    assert named((tmp_path / "run" / "report.html").read_text(), "1 .heic b/2.heic")


def found_by(world: World) -> dict[str, float]:
    quarantine = Quarantine("training", 9)
    quarantine.add([Bad(sample, f"{sample}.jpg", "torn") for sample in (world.rank, 7)])
    return count_replaced({"training": quarantine, "evaluation": Quarantine("evaluation", 9)}, world)


def test_samples_are_counted_once_over_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(2, found_by) == [{"replaced/training": 3.0}] * 2
