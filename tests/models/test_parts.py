"""Promise: a model is shown in few parts, and nothing of it is left out or shown twice."""

import torch
from torch import nn

from tests.helpers.toys import Block
from trainer.models.parts import parameters_of, parts


def whole(blocks: int) -> nn.Module:
    """A stem, an encoder with a parameter of its own, and a head that shares the stem's weight."""
    layers = nn.ModuleList(Block(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) for _ in range(blocks))
    encoder = nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(2)})
    encoder.register_parameter("position", nn.Parameter(torch.zeros(7)))
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "encoder": encoder, "head": nn.Linear(2, 2)})
    model["head"].weight = model["stem"].weight
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    return model


def test_every_parameter_is_in_one_part() -> None:
    for blocks in (1, 3, 40):
        model = whole(blocks)
        for most in (3, 6, 64):
            shown = parts(model, most)
            assert len(shown) <= most
            found = [p for own in parameters_of(model, shown).values() for p in own]
            assert len(found) == len({id(p) for p in found})
            assert {id(p) for p in found} == {id(p) for p in model.parameters()}
