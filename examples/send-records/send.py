"""Sends a run's records to a tracker: python send.py RUN wandb, or python send.py RUN mlflow."""

import json
import sys
from pathlib import Path

from trainer.runs.tracking.tracker import tracker_class

folder, name = Path(sys.argv[1]), sys.argv[2]
manifest = json.loads((folder / "manifest.json").read_text())
files = (folder / "metrics.jsonl", folder / "evaluations.jsonl")
rows = [
    {**json.loads(line), "time": file.stat().st_mtime}
    for file in files
    for line in file.read_text().splitlines()
]
about = {key: manifest[key] for key in ("run_id", "commit", "config")}
about |= {"id": manifest["trackers"].get(name), "rows": 0, "name": folder.name, "folder": str(folder)}
tracker = tracker_class(name)()
print(*tracker.open({**about, "recipe": Path(manifest["recipe"]).stem}))
tracker.log(sorted(rows, key=lambda row: row["step"]))
tracker.close(manifest["status"])
