"""Detection: boxes and classes in images."""

from trainer.config import Section
from trainer.data.sources import DataConfig
from trainer.errors import BadInputError
from trainer.models import ModelConfig
from trainer.tasks import Task


class DetectionConfig(Section):
    """Keys of task=detection."""


def Detection(data: DataConfig, model: ModelConfig, config: DetectionConfig, seed: int) -> Task:  # noqa: N802, ARG001
    """Opens the data."""
    raise BadInputError("task=detection: not there yet")
