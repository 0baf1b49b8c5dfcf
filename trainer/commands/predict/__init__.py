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
        "predict", help="Predict on files, or on the evaluation data.", allow_abbrev=False
    )
    add = predict.add_argument
    add("folder", type=run_path, metavar="RUN", help="run folder (or latest), finished or with a checkpoint")
    add("files", type=Path, nargs="*", metavar="FILE", help="images or recordings")
    add("--out", type=Path, metavar="DIR", help="folder for pictures with the boxes")
    add("--top", type=int, default=3, metavar="N", help="classes or boxes to print (default: 3)")
    add(
        "--score",
        type=float,
        default=0.3,
        metavar="S",
        help="lowest score of a box to draw or write (default: 0.3)",
    )
    add_coco(predict)
    _add_text(predict)
    add("--samples", type=int, default=25, metavar="N", help="evaluation samples to print (default: 25)")
    add_settings(predict, "place of the data now, such as data.path")
    add_task(predict)
    predict.set_defaults(run=_run)


def _add_text(predict: argparse.ArgumentParser) -> None:
    """Adds the options of language models."""
    add = predict.add_argument
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue (default: a new document), or a user's turn; repeat it for further turns",
    )
    add("--system", metavar="TEXT", help="system prompt of a conversation")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="conversations to answer, one a line: text (.txt) or rows as in training; answered as JSON",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens of probability P together (default: 1)",
    )
    add("--tokens", type=int, default=200, metavar="N", help="tokens to add (default: 200)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="randomness of the tokens; 0: always the likeliest (default: 0.8)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the drawn tokens (default: 0)")
    add("--tokenizer", metavar="bpe:FILE", help="tokenizer.json of the training data")


def _run(options: argparse.Namespace) -> int:
    from trainer.runs.manifest import read_run

    read_run(options.folder)  # what is no run is said before torch is imported
    from trainer.commands.predict.predict import predict

    return predict(options)
