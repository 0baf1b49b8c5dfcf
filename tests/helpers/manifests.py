"""The least that a run's manifest says."""

from typing import Any

from trainer.runs.manifest import FORMAT
from trainer.version import ARITHMETIC


def least_manifest(**changes: Any) -> dict[str, Any]:
    """Returns the manifest of a stopped run, on one rank of one thread."""
    attempt = {"started": "", "step": 0, "ranks": 1, "threads": 1, "log_every": 1, "changed": []}
    more = {"jsonl": True, "checksums": True, "arithmetic": ARITHMETIC}
    about: dict[str, Any] = {"format": FORMAT, "config": {}, "config_hash": "", "threads": 1, "weights": {}}
    about |= {"world_size": 1, "status": "stopped", "fingerprint": {}, "run_id": "1", "planned_steps": 1}
    about |= {"attempts": [{**attempt, **more, "config_hash": "", "job": {}}], "device": {"kind": "cpu"}}
    return {**about, **changes}
