"""Audio classification by log-mel features, computed and masked on the device."""

import math
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
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset
from trainer.data.formats.audio import AUDIO
from trainer.data.formats.records import LABEL
from trainer.data.sources import check_alike
from trainer.tasks.sums import classified, cross_entropy

_FLOOR = 1e-6  # added to a mel band's power, so that the logarithm of silence is finite


class Audio:
    """Audio classification by cross entropy."""

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
        self._hop = round(audio.hop * audio.sample_rate)
        # On the CPU and now: on a GPU the host would wait for the device while the filters are computed.
        filters = mel_filters(audio)
        if empty := int((filters == 0).all(0).sum()):
            self.notes = (
                *self.notes,
                f"{empty} of {audio.mels} mel bands lie between two bins: always silent",
            )
        self._by_device = {torch.device("cpu"): (torch.hann_window(audio.window_samples), filters)}

    def more_data(self, data: DataConfig, split: str | None) -> Dataset:
        """See `Extensible`."""
        config = self._config
        dataset, classes = more_audio(data, config.seconds, config.sample_rate, split, self._seed)
        check_alike(dataset, classes, self.evaluation_data, self.audio.classes)
        return dataset

    def describe(self) -> Mapping[str, Any]:
        """Returns classes, and the settings of `features`."""
        config = self._config
        return {
            "classes": self.audio.classes,
            "sample_rate": config.sample_rate,
            "seconds": config.seconds,
            "mels": config.mels,
            "window_samples": config.window_samples,
            "hop_samples": self._hop,
            "bins": config.bins,
            "band": (config.lowest, config.highest or config.sample_rate / 2),
        }

    def model(self) -> nn.Module:
        """Returns a new model for these features and classes."""
        model: nn.Module = self._make(self._model, self._config.mels, len(self.audio.classes))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the cross entropy summed over the micro-batch."""
        logits = model(self._masked(self.features(batch.fields[AUDIO])))
        return cross_entropy(logits, batch.fields[LABEL], batch)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Returns loss and metrics summed over the micro-batch."""
        return classified(model(*self.inputs(batch)), batch.fields[LABEL], batch)

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Returns log-mel features, float32 (n, 1, mels, frames)."""
        return (self.features(batch.fields[AUDIO]),)

    def features(self, audio: torch.Tensor) -> torch.Tensor:
        """Computes log-mel power, normalized to mean 0 and deviation 1 per recording, whatever its level.

        Args:
            audio: int16 (n, samples).

        Returns:
            float32 (n, 1, mels, frames), frames centered at multiples of the hop; the ends are reflected.
        """
        if audio.is_meta:  # torch has no Fourier transform on the meta device
            frames = audio.shape[1] // self._hop + 1
            return torch.empty(len(audio), 1, self._config.mels, frames, device="meta")
        # float32 under autocast, too: bf16 is too coarse for a quiet band beside a loud one.
        with torch.autocast(audio.device.type, enabled=False):
            log = (self._mel(audio.float() / 32768) + _FLOOR).log()
            deviation, mean = torch.std_mean(log, (1, 2), keepdim=True, correction=0)
            feature: torch.Tensor = (log - mean) / (deviation + 1e-5)
            return feature.unsqueeze(1)

    def _mel(self, audio: torch.Tensor) -> torch.Tensor:
        """Computes the power of each mel band in each frame: float32 (n, mels, frames)."""
        if audio.device not in self._by_device:
            window, filters = self._by_device[torch.device("cpu")]
            self._by_device[audio.device] = (window.to(audio.device), filters.to(audio.device))
        window, filters = self._by_device[audio.device]
        waves = torch.stft(
            audio, self._config.bins, self._hop, len(window), window, pad_mode="reflect", return_complex=True
        )
        return torch.matmul(waves.abs().pow(2.0).transpose(1, 2), filters).transpose(1, 2)

    def _masked(self, feature: torch.Tensor) -> torch.Tensor:
        """Applies SpecAugment (Park et al., 2019) without time warping; masked values are 0, the mean.

        It draws from the device's default generator, which is keyed by the micro-batch.
        """
        config = self._config
        for _ in range(config.time_masks):
            feature = mask_stretch(feature, config.time_mask, 3)
        for _ in range(config.frequency_masks):
            feature = mask_stretch(feature, config.frequency_mask, 2)
        return feature


def mel_filters(audio: AudioConfig) -> torch.Tensor:
    """Returns triangular filters of height 1 on HTK's mel scale, as torchaudio's: float32 (bins, mels)."""
    highest = audio.sample_rate // 2
    first, last = (
        2595.0 * math.log10(1.0 + edge / 700.0) for edge in (audio.lowest, audio.highest or float(highest))
    )
    edges = 700.0 * (10.0 ** (torch.linspace(first, last, audio.mels + 2) / 2595.0) - 1.0)
    distance = edges - torch.linspace(0, highest, audio.bins // 2 + 1).unsqueeze(1)
    width = edges.diff()
    return torch.minimum(-distance[:, :-2] / width[:-1], distance[:, 2:] / width[1:]).clamp_min(0.0)


def mask_stretch(feature: torch.Tensor, longest: int, axis: int) -> torch.Tensor:
    """Sets a random stretch of each recording, shorter than `longest`, to 0 along an axis."""
    if longest < 1:
        return feature
    # Transposed, since masked_fill's result is contiguous, and kernels are chosen by strides.
    feature = feature.transpose(axis, -1)
    size, device, dtype = feature.shape[-1], feature.device, feature.dtype
    length = torch.rand(feature.shape[:2], device=device, dtype=dtype) * longest
    first = (torch.rand(feature.shape[:2], device=device, dtype=dtype) * (size - length)).long()
    begin, end = first[..., None, None], (first + length.long())[..., None, None]
    at = torch.arange(size, device=device, dtype=dtype)
    return feature.masked_fill((at >= begin) & (at < end), 0.0).transpose(axis, -1)
