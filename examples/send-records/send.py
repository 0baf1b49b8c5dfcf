"""Sends a run's records to a tracker: python send.py RUN wandb, or python send.py RUN mlflow."""

import json
import sys
from pathlib import Path

run, tracker = Path(sys.argv[1]), sys.argv[2]
manifest = json.loads((run / "manifest.json").read_text())
rows = [
    (row["step"], {f"{kind}/{name}": value for name, value in row.items() if isinstance(value, int | float)})
    for kind, file in {"train": "metrics.jsonl", "eval": "evaluations.jsonl"}.items()
    for row in map(json.loads, (run / file).read_text().splitlines())
]
if tracker == "wandb":
    import wandb

    with wandb.init(id=manifest["run_id"], resume="allow", name=run.name, config=manifest["config"]) as there:
        there.define_metric("*", step_metric="step")
        for step, figures in rows:
            there.log({**figures, "step": step})
else:
    import mlflow

    with mlflow.start_run(manifest["trackers"].get("mlflow"), run_name=run.name):
        for step, figures in rows:
            mlflow.log_metrics(figures, step=step)
