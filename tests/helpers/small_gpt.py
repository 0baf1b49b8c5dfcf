"""A small GPT, of which every part has a say."""

from typing import Any

import torch

from trainer.config.tasks import GPTConfig
from trainer.models.gpt import GPT
from trainer.train.state import Run
from trainer.train.step import train_step

SMALL: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "sequence_length": 12}
# Plain descent with a rate of 1 takes the gradient away from the weights.
SGD = {"name": "sgd", "momentum": 0, "lr": 1.0, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0}


def first_step(run: Run) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step of a run with `SGD`."""
    before = {name: p.detach().clone() for name, p in run.state.model.named_parameters()}
    train_step(run, run.loader(run.share.batches()), 0)
    after = dict(run.state.model.named_parameters())
    return float(run.state.loss), {name: p - after[name].detach() for name, p in before.items()}


def make_model(vocabulary: int = 20, **keys: Any) -> GPT:
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SMALL | keys), vocabulary).double()
    for parameter in model.parameters():  # so that every part has a say
        torch.nn.init.normal_(parameter, std=0.3)
    return model
