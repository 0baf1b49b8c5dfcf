"""Promise: one type reads and writes manifest.json; a key less or more than ours does no harm."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import planted
from tests.helpers.manifests import least_manifest
from tests.helpers.refusals import refused
from trainer.runs.manifest import Manifest, read_facts, read_run, read_stored, update_manifest
from trainer.version import ARITHMETIC

# The keys of a finished run's manifest, in their order: what others read by (docs/run-folder.md).
KEYS = """
    format recipe run_id from config redacted config_hash seed command started ended restarts attempts commit
    dirty lock image versions arithmetic device data fingerprint pretrained host pid world_size threads
    waiting parameters metric lower_is_better planned_steps steps_done gradient_accumulation_steps notes
    trackers rows weights anomalies out_of_patience finished_by_hook status
"""


def write(folder: Path, facts: Any) -> Path:
    return planted.write(folder, {"manifest.json": json.dumps(facts)})


def test_what_is_written_is_read_again_with_the_same_keys(tmp_path: Path) -> None:
    manifest = Manifest.model_validate(least_manifest(recipe="digits"))
    update_manifest(tmp_path, manifest)
    facts = read_facts(tmp_path)
    assert list(facts) == KEYS.split()
    assert read_stored(tmp_path) == manifest
    (tmp_path / "anomalies.jsonl").write_text("{}\n{}\n")
    begun = {"folder": "runs/a", "run_id": "2", "step": 3, "hash": "0", "differs": []}
    update_manifest(tmp_path, manifest, status="finished", steps_done=7, summary={"loss": None})
    facts = read_facts(tmp_path)
    assert list(facts) == [*KEYS.split(), "summary"]
    assert (facts["status"], facts["steps_done"], facts["anomalies"]) == ("finished", 7, 2)
    assert facts["ended"] and facts["summary"] == {"loss": None}
    write(tmp_path, {**facts, "from": begun})
    assert read_run(tmp_path).manifest.as_facts()["from"] == begun


def test_the_least_that_any_version_wrote_is_enough_and_more_is_no_harm(tmp_path: Path) -> None:
    stored = read_stored(write(tmp_path, least_manifest(added_later={"by": "another version"})))
    assert stored is not None
    assert (stored.status, stored.recipe, stored.seed, stored.arithmetic) == ("stopped", "", None, ARITHMETIC)


@pytest.mark.parametrize(
    ("odd", "key"),
    [("over", "status"), ("4", "planned_steps"), ({"parallel": 5}, "config")],
)
def test_an_odd_value_is_one_line_and_a_report_still_has_the_rest(tmp_path: Path, odd: Any, key: str) -> None:
    """Who resumes or verifies needs each value as it should be; who looks at it takes what is there."""
    write(tmp_path, least_manifest(**{key: odd}))
    with refused(tmp_path / "manifest.json", key):
        read_run(tmp_path)
    assert read_facts(tmp_path)["run_id"] == "1"


def test_what_is_no_manifest_is_one_line(tmp_path: Path) -> None:
    for text in ("", "[]", '{"config": 1}', "[" * 100_000):
        (tmp_path / "manifest.json").write_text(text)
        with refused(tmp_path / "manifest.json"):
            read_stored(tmp_path)


@pytest.mark.parametrize("odd", [None, ["0"]])
def test_a_checkpoint_that_names_no_configuration_is_foreign(odd: Any) -> None:
    manifest = Manifest.model_validate(least_manifest())
    assert manifest.foreign({"run_id": "1", "config_hash": ""}) is None
    assert "its configuration" in str(manifest.foreign({"run_id": "1", "config_hash": odd}))
    assert "another run" in str(manifest.foreign({"run_id": odd}))
