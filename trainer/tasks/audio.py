"""Classification of recordings by log-mel features, made and masked on the device."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.config.data import DataConfig
from trainer.config.model import ModelConfig
from trainer.config.models import opens
from trainer.config.registry import named
from trainer.config.tasks import AudioConfig
from trainer.data.audio_sets import AudioData, load_audio, more_audio
from trainer.data.dataset import Dataset
from trainer.data.formats.audio import AUDIO, LABEL
from trainer.data.loader import Batch
from trainer.data.sources import check_alike
from trainer.tasks.sums import classified, cross_entropy

_FLOOR = 1e-6  # of a mel band's power, for the logarithm: silence is no infinity


class Audio:
    """Recordings to classes, by cross entropy."""

    metric = "accuracy"
    lower_is_better = False
    uniforms = 0

    def __init__(self, data: DataConfig, model: ModelConfig, audio: AudioConfig, seed: int) -> None:
        """Opens the data."""
        self.audio: AudioData = load_audio(data, audio.seconds, audio.sample_rate, audio.part, seed)
        self.train_data = self.audio.train
        self.evaluation_data = self.audio.evaluation
        self.notes = self.audio.notes
        self._model, self._config, self._seed = model, audio, seed
        self._make = named(opens(model.name, "audio") or "")
        # Here and not at the first batch: torch waits for the device while it makes the filters.
        from torchaudio.transforms import MelSpectrogram

        self._transform: nn.Module = MelSpectrogram(
            audio.sample_rate,
            n_fft=audio.bins,
            win_length=audio.window_samples,
            hop_length=round(audio.hop * audio.sample_rate),
            f_min=audio.lowest,
            f_max=audio.highest,
            n_mels=audio.mels,
        )
        self._there: dict[torch.device, nn.Module] = {}

    def more_data(self, data: DataConfig, split: str | None) -> Dataset:
        """See `Extensible`."""
        config = self._config
        dataset, classes = more_audio(data, config.seconds, config.sample_rate, split, self._seed)
        check_alike(dataset, classes, self.evaluation_data, self.audio.classes)
        return dataset

    def describe(self) -> Mapping[str, Any]:
        """Classes, and what the features are made of (see `features`)."""
        config = self._config
        return {
            "classes": self.audio.classes,
            "sample_rate": config.sample_rate,
            "seconds": config.seconds,
            "mels": config.mels,
            "window_samples": config.window_samples,
            "hop_samples": round(config.hop * config.sample_rate),
            "bins": config.bins,
            "band": (config.lowest, config.highest or config.sample_rate / 2),
        }

    def model(self) -> nn.Module:
        """A new model for these features."""
        model: nn.Module = self._make(self._model, self._config.mels, len(self.audio.classes))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy, summed over the micro-batch."""
        logits = model(self._masked(self.features(batch.fields[AUDIO])))
        return cross_entropy(logits, batch.fields[LABEL], batch)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Loss and correct answers, summed over the micro-batch."""
        return classified(model(*self.inputs(batch)), batch.fields[LABEL], batch)

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Log-mel features, float32 (n, 1, mels, frames): the model itself is convolutional."""
        return (self.features(batch.fields[AUDIO]),)

    def features(self, audio: torch.Tensor) -> torch.Tensor:
        """Log-mel power, each recording with mean 0 and deviation 1: so its level doesn't matter.

        Args:
            audio: int16 (n, samples).

        Returns:
            float32 (n, 1, mels, frames), a frame centered at each multiple of the hop; the ends are mirrored.
        """
        if audio.is_meta:  # shapes alone: torch has no Fourier transform of them
            frames = audio.shape[1] // round(self._config.hop * self._config.sample_rate) + 1
            return torch.empty(len(audio), 1, self._config.mels, frames, device="meta")
        # float32 whatever autocast says: bf16 has less precision than a quiet band beside a loud one needs.
        with torch.autocast(audio.device.type, enabled=False):
            mel: torch.Tensor = self._mel(audio.device)(audio.float() / 32768)
            log = (mel + _FLOOR).log()
            deviation, mean = torch.std_mean(log, (1, 2), keepdim=True, correction=0)
            feature: torch.Tensor = (log - mean) / (deviation + 1e-5)
            return feature.unsqueeze(1)

    def _mel(self, device: torch.device) -> nn.Module:
        if device not in self._there:
            self._there[device] = copy.deepcopy(self._transform).to(device)
        return self._there[device]

    def _masked(self, feature: torch.Tensor) -> torch.Tensor:
        """SpecAugment (Park et al., 2019) without its warping of time; masked is 0, each recording's mean.

        It draws from torch's generator of the device, which is seeded anew for each micro-batch.
        """
        config = self._config
        if not config.time_masks and not config.frequency_masks:
            return feature
        from torchaudio.transforms import SpecAugment

        augment = SpecAugment(
            config.time_masks,
            config.time_mask,
            config.frequency_masks,
            config.frequency_mask,
            zero_masking=True,
        )
        masked: torch.Tensor = augment(feature)
        return masked
