"""Conversations for the task language: their tokenizer, and sets of them together."""

from collections.abc import Sequence

import numpy as np

from trainer.config.data import DataConfig, at_home
from trainer.config.model import ModelConfig
from trainer.config.tasks import LanguageConfig
from trainer.data.dataset import ArrayDataset
from trainer.data.formats.chat import Chat, open_tokenizer
from trainer.data.left_out import tally
from trainer.errors import BadInputError


def joined(parts: Sequence[ArrayDataset], labeled: bool = False) -> ArrayDataset:
    """Samples of one set after another, with the number of the set as their label."""
    if len(parts) == 1 and not labeled:
        return parts[0]
    arrays = [one.arrays or {} for one in parts]
    made = {name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]}
    if labeled:
        made["label"] = np.repeat(np.arange(len(parts)), [len(one) for one in parts])
    joined = ArrayDataset(made)
    joined.left_out = tally(found for one in parts for found in one.left_out)
    return joined


def open_chat(data: DataConfig, model: ModelConfig, config: LanguageConfig) -> Chat | None:
    """The tokenizer and chat template of conversations; None for other data."""
    if data.name != "conversations":
        return None
    if config.text == "stream":
        raise BadInputError(
            "language.text=stream cuts anywhere, also within a conversation; use packed or padded for "
            "data.name=conversations"
        )
    if config.text == "padded" and data.mix is not None:
        raise BadInputError(
            "data.mix: padded samples are read in buckets of like length; use language.text=packed"
        )
    if config.tokenizer is not None:
        return open_tokenizer(at_home(config.tokenizer, "language.tokenizer"))
    if not model.name.startswith("hf/"):
        raise BadInputError(
            "data.name=conversations needs a tokenizer: --set language.tokenizer=FOLDER, with the "
            "tokenizer.json and chat template of a model"
        )
    from trainer.models.hf_files import model_folder

    return open_tokenizer(model_folder(model.name))
