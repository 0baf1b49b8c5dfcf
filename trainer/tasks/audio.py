"""Audio: recordings to classes."""

from trainer.config import Section
from trainer.data.sources import DataConfig
from trainer.errors import BadInputError
from trainer.models import ModelConfig
from trainer.tasks import Task


class AudioConfig(Section):
    """Keys of task=audio."""


def Audio(data: DataConfig, model: ModelConfig, config: AudioConfig, seed: int) -> Task:  # noqa: N802, ARG001
    """Opens the data."""
    raise BadInputError("task=audio: not there yet")
