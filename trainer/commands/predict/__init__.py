"""`trainer predict RUN FILES…`: shows a run's predictions for files, or for its evaluation data.

- `predict`: chooses one of these by the run's task
- `images`, `sounds`: classes, printed by `classes`; `boxes`: detections in images; `text`: completions
"""

import argparse
from pathlib import Path
from typing import Any

from trainer.host.latest import run_path
from trainer.runs.flags import add_coco, add_settings, add_task


def add_parser(commands: Any) -> None:
    """Adds `predict` to the commands."""
    predict = commands.add_parser(
        "predict",
        help="Predict on files, or on the evaluation data.",
        allow_abbrev=False,
    )
    predict.add_argument(
        "folder", type=run_path, metavar="RUN", help="run folder (or latest), finished or with a checkpoint"
    )
    predict.add_argument("files", type=Path, nargs="*", metavar="FILE", help="images or recordings")
    predict.add_argument("--out", type=Path, metavar="DIR", help="folder for pictures with the boxes")
    predict.add_argument(
        "--top", type=int, default=3, metavar="N", help="classes or boxes named (default: 3)"
    )
    predict.add_argument(
        "--score",
        type=float,
        default=0.3,
        metavar="S",
        help="of the boxes to draw and write, at least (default: 0.3)",
    )
    add_coco(predict)
    _add_text(predict)
    predict.add_argument(
        "--samples", type=int, default=25, metavar="N", help="of the evaluation data to show (default: 25)"
    )
    add_settings(predict, "where the data lies now, such as data.path")
    add_task(predict)
    predict.set_defaults(run=_run)


def _add_text(predict: argparse.ArgumentParser) -> None:
    """Adds the options of language models."""
    predict.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to go on with (default: a new document); what a user says, again for each further turn",
    )
    predict.add_argument("--system", metavar="TEXT", help="system prompt of a conversation")
    predict.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="conversations to answer, one a line: text (.txt) or rows as in training; answered as JSON",
    )
    predict.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens of probability P together (default: 1)",
    )
    predict.add_argument("--tokens", type=int, default=200, metavar="N", help="to add (default: 200)")
    predict.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: always the likeliest (default: 0.8)",
    )
    predict.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    predict.add_argument("--tokenizer", metavar="bpe:FILE", help="the tokenizer.json of tokens that need one")


def _run(options: argparse.Namespace) -> int:
    from trainer.runs.manifest import read_run

    read_run(options.folder)  # what is no run is said before torch is imported
    from trainer.commands.predict.predict import predict

    return predict(options)
