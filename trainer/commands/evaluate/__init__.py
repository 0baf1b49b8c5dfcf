"""`trainer evaluate RUN`: a run's model, measured on its own or on other evaluation data.

- `evaluate`: what is asked for, and the ranks that do it
- `rank`: a rank's part: model, data, metrics
- `details`: what goes beyond the metrics of training: classes, the confusion matrix, COCO's twelve figures
- `show`: tables, JSON and the matrix as a picture
"""

import argparse
from pathlib import Path
from typing import Any

from trainer.host.latest import run_path
from trainer.train.trust_flag import add_trust


def add_parser(commands: Any) -> None:
    """Adds `evaluate` to the commands."""
    evaluate = commands.add_parser(
        "evaluate",
        help="measure a run's model again, on its own or other data",
        allow_abbrev=False,
    )
    evaluate.add_argument(
        "run_or_weights",
        type=run_path,
        metavar="RUN|WEIGHTS",
        help="run folder, or latest; or model.safetensors or ema.safetensors in one",
    )
    evaluate.add_argument(
        "--checkpoint",
        metavar="best|last|STEP",
        help="weights of this checkpoint (default: the final ones, or of the newest checkpoint)",
    )
    evaluate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="other data, such as data.path; repeatable",
    )
    evaluate.add_argument(
        "--on",
        default="data",
        metavar="SET",
        help="one of the run's evaluation.sets (default: data, the main one)",
    )
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.add_argument(
        "--plot", type=Path, metavar="FILE", help="write the confusion matrix (.svg; classification, audio)"
    )
    evaluate.add_argument("--gpus", metavar="N|LIST", help="which GPUs (default: all)")
    evaluate.add_argument("--nproc-per-node", type=int, metavar="N", help="processes on CPUs (default: 1)")
    add_trust(evaluate)
    evaluate.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.train.manifest import read_run

    if options.run_or_weights.suffix != ".safetensors":
        read_run(options.run_or_weights)  # what is no run is said before torch is imported
    from trainer.commands.evaluate.evaluate import evaluate_run

    return evaluate_run(options)
