"""A small GPT, of which every part has a say."""

from typing import Any

import torch

from trainer.config.tasks import GPTConfig
from trainer.models.gpt import GPT

SMALL: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "sequence_length": 12}


def make_model(vocabulary: int = 20, **keys: Any) -> GPT:
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL | keys), vocabulary).double()
    for parameter in model.parameters():  # so that every part has a say
        torch.nn.init.normal_(parameter, std=0.3)
    return model
