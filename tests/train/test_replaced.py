"""Promise: what of the data isn't read, and how many samples others stood in for, is told by a run."""

from pathlib import Path

import pytest

from tests.helpers.image_folders import encoded, picture
from tests.helpers.refusals import named
from tests.helpers.run_folders import manifest
from tests.helpers.world import Ranks
from trainer import fit
from trainer.data.corrupt import Bad, Quarantine
from trainer.distributed.parallel import World
from trainer.train.summary import count_replaced


def test_a_run_tells_it_where_people_look(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "val"):
        for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg", "b/1.jpg", "b/2.heic"):
            file = here / "d" / part / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(picture(), "JPEG"))
        (here / "d" / part / "b" / "1.jpg").write_bytes(b"\xff\xd8 torn")
    data = {"name": "folder", "path": str(here / "d"), "image_size": 32, "workers": 0, "micro_batch_size": 4}
    data |= {"global_batch_size": 4, "corrupt_budget": 0.5, "on_corrupt": "quarantine"}
    settings = {"max_steps": 2, "model.width": 4, **{f"data.{key}": value for key, value in data.items()}}
    fit("digits", {**settings, "parallel.threads": 1}, out="run")
    assert named(capfd.readouterr().out, "1 .heic b/2.heic quarantine.jsonl")
    facts = manifest("run")
    line = {"reason": ".heic", "count": 1, "first": "b/2.heic"}
    assert facts["data"]["left_out"] == {"training data": [line], "evaluation data": [line]}
    assert facts["summary"]["replaced/training"] == facts["summary"]["replaced/evaluation"] == 1
    assert named((here / "run" / "report.html").read_text(), "1 .heic b/2.heic")


def found_by(world: World) -> dict[str, float]:
    quarantine = Quarantine("training", 9)
    quarantine.add([Bad(sample, f"{sample}.jpg", "torn") for sample in (world.rank, 7)])
    return count_replaced({"training": quarantine, "evaluation": Quarantine("evaluation", 9)}, world)


def test_samples_are_counted_once_over_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(2, found_by) == [{"replaced/training": 3.0}] * 2
