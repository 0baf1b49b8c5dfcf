"""Language: text as tokens, the next one predicted."""

from trainer.config import Section
from trainer.data.sources import DataConfig
from trainer.errors import BadInputError
from trainer.models import ModelConfig
from trainer.tasks import Task


class LanguageConfig(Section):
    """Keys of task=language."""


def Language(data: DataConfig, model: ModelConfig, config: LanguageConfig, seed: int) -> Task:  # noqa: N802, ARG001
    """Opens the data."""
    raise BadInputError("task=language: not there yet")
