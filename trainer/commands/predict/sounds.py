"""Classes of recordings: of files, or of the evaluation data with the mistakes first."""

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from trainer.commands.predict.classes import show_files
from trainer.data.formats.audio import AUDIO, AudioFolder
from trainer.data.formats.files import Files
from trainer.data.formats.index import index_of
from trainer.train.model_of_run import OpenedRun, read_samples


def show_sounds(run: OpenedRun, options: argparse.Namespace) -> int:
    """Prints predictions for recordings; returns the exit code."""
    return show_files(run, options, AUDIO, _as_evaluated)


def _as_evaluated(path: Path, run: OpenedRun) -> torch.Tensor:
    """Reads the center of a recording as evaluation would: int16 (samples,).

    Raises:
        BadInputError: If it can't be read, isn't a recording, or has another sample rate.
    """
    facts = run.task.describe()
    alone = Files(path.parent, index_of([os.fsencode(path.name)], [0], ("",)))
    folder = AudioFolder(alone, facts["seconds"], facts["sample_rate"], False, "fail")
    return read_samples(folder, np.zeros(1, np.int64)).fields[AUDIO][0]
