"""Recordings to classes: of files, or of the evaluation data with the mistakes first."""

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from trainer.commands.predict.classes import guesses, of_evaluation, probabilities, say_unread, show_table
from trainer.data.formats.audio import AUDIO, LABEL, AudioFolder
from trainer.data.formats.files import Files
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.train.model_of_run import OpenedRun, read_samples


def show_sounds(run: OpenedRun, options: argparse.Namespace) -> int:
    """Prints what the model takes recordings for; returns the exit code."""
    if options.out is not None:
        raise BadInputError("--out: there is nothing to draw of recordings; leave it out")
    if not options.files:
        of_evaluation(run, options)
        return EXIT_DONE
    sounds, names = list[torch.Tensor](), list[str]()
    for path in options.files:
        try:
            sounds.append(as_evaluated(path, run))
            names.append(str(path))
        except BadInputError as error:
            say_unread(path, error)
    if not sounds:
        return EXIT_BAD_INPUT
    fields = {AUDIO: torch.stack(sounds), LABEL: torch.zeros(len(sounds), dtype=torch.int64)}
    classes = run.task.describe()["classes"]
    show_table("file", guesses(names, probabilities(run, fields), classes, options.top))
    return EXIT_FAILED if len(sounds) < len(options.files) else EXIT_DONE


def as_evaluated(path: Path, run: OpenedRun) -> torch.Tensor:
    """The centre of a recording, as evaluation would hear it: int16 (samples,).

    Raises:
        BadInputError: If it can't be read, isn't a recording, or has another sample rate.
    """
    said = run.task.describe()
    alone = Files(path.parent, [os.fsencode(path.name)], [0], ("",))
    folder = AudioFolder(path.parent, said["seconds"], said["sample_rate"], False, "fail", alone)
    return read_samples(folder, np.zeros(1, np.int64)).fields[AUDIO][0]
