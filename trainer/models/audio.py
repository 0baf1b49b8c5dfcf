"""A small convolutional classifier of spectrograms."""

import torch
from torch import nn

from trainer.config.model import ModelConfig
from trainer.models.images import ResidualBlock, make_norm


class AudioCnn(nn.Module):
    """A residual network that averages over time but keeps apart what lies at different frequencies."""

    def __init__(self, config: ModelConfig, mels: int, classes: int) -> None:
        """Each stage halves both axes and, but for the first, doubles the width."""
        super().__init__()
        width, bands = config.width, mels
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        stages = []
        for number, blocks in enumerate(config.blocks):
            target = config.width << number
            for index in range(blocks):
                stages.append(ResidualBlock(width, target, 1 if index else 2, config.norm))
                width = target
            bands = (bands + 1) // 2
        self.blocks = nn.Sequential(*stages)
        self.norm = make_norm(config.norm, width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(width * bands, classes)

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """Classifies: float (n, 1, mels, frames) to logits (n, classes)."""
        hidden = torch.relu(self.norm(self.blocks(self.stem(feature))))
        logits: torch.Tensor = self.head(self.dropout(hidden.mean(3).flatten(1)))
        return logits
