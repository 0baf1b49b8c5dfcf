"""Small convolutional classifier of spectrograms."""

import torch
from torch import nn

from trainer.config.model import ModelConfig
from trainer.models.images import make_norm, residual_stages


class AudioCnn(nn.Module):
    """Residual network whose pooling averages over time but keeps the frequency axis."""

    def __init__(self, config: ModelConfig, mels: int, classes: int) -> None:
        """Builds the stages: each halves both axes and, except for the first, doubles the width."""
        super().__init__()
        self.stem = nn.Conv2d(1, config.width, 3, padding=1, bias=False)
        self.blocks, width = residual_stages(config, first_stride=2)
        bands = -(-mels // 2 ** len(config.blocks))
        self.norm = make_norm(config.norm, width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(width * bands, classes)

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """Classifies: float (n, 1, mels, frames) to logits (n, classes)."""
        hidden = torch.relu(self.norm(self.blocks(self.stem(feature))))
        logits: torch.Tensor = self.head(self.dropout(hidden.mean(3).flatten(1)))
        return logits
