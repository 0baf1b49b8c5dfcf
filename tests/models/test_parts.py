"""Promise: a model is shown in few parts, and nothing of it is left out or shown twice."""

import torch
from torch import nn

from tests.helpers.toys import Block
from trainer.models.parts import parameters_of, parts


class Encoder(nn.Module):
    """Blocks, and a parameter of its own."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(7))
        self.layers = nn.ModuleList(Block(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) for _ in range(blocks))
        self.norm = nn.LayerNorm(2)


class Whole(nn.Module):
    """A stem, an encoder, and a head that shares the stem's weight."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.encoder = Encoder(blocks)
        self.head = nn.Linear(2, 2)
        self.head.weight = self.stem.weight
        self.scale = nn.Parameter(torch.ones(3))


def test_every_parameter_is_in_one_part() -> None:
    for blocks in (1, 3, 40):
        model = Whole(blocks)
        for most in (3, 6, 64):
            shown = parts(model, most)
            assert len(shown) <= most
            found = [p for own in parameters_of(model, shown).values() for p in own]
            assert len(found) == len({id(p) for p in found})
            assert {id(p) for p in found} == {id(p) for p in model.parameters()}
