"""Classes of recordings: of files, or of the evaluation data with the mistakes first."""

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from trainer.commands.predict.classes import (
    code_for,
    guesses,
    of_evaluation,
    probabilities,
    read_each,
    show_table,
)
from trainer.data.formats.audio import AUDIO, AudioFolder
from trainer.data.formats.files import Files
from trainer.data.formats.records import LABEL
from trainer.errors import EXIT_DONE
from trainer.train.model_of_run import OpenedRun, read_samples


def show_sounds(run: OpenedRun, options: argparse.Namespace) -> int:
    """Prints predictions for recordings; returns the exit code."""
    if not options.files:
        of_evaluation(run, options)
        return EXIT_DONE
    items = read_each(options.files, lambda path: _as_evaluated(path, run))
    if items:
        names, sounds = zip(*items, strict=True)
        fields = {AUDIO: torch.stack(sounds), LABEL: torch.zeros(len(sounds), dtype=torch.int64)}
        classes = run.task.describe()["classes"]
        show_table("file", guesses(names, probabilities(run, fields), classes, options.top))
    return code_for(items, options.files)


def _as_evaluated(path: Path, run: OpenedRun) -> torch.Tensor:
    """Reads the center of a recording as evaluation would: int16 (samples,).

    Raises:
        BadInputError: If it can't be read, isn't a recording, or has another sample rate.
    """
    facts = run.task.describe()
    alone = Files(path.parent, [os.fsencode(path.name)], [0], ("",))
    folder = AudioFolder(alone, facts["seconds"], facts["sample_rate"], False, "fail")
    return read_samples(folder, np.zeros(1, np.int64)).fields[AUDIO][0]
