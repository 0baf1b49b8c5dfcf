"""Classification of recordings by log-mel features, made and masked on the device."""

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from trainer.config.recipe_file import Section
from trainer.data.audio_sets import AudioData, load_audio
from trainer.data.formats.audio import AUDIO, LABEL
from trainer.data.loader import Batch
from trainer.data.sources import DataConfig
from trainer.models.audio import AudioCnn
from trainer.models.images import ModelConfig

_FLOOR = 1e-6  # of a mel band's power, for the logarithm: silence is no infinity
Count = Annotated[int, Field(ge=0)]


class AudioConfig(Section):
    """Recordings, their log-mel features, and how these are masked in training."""

    seconds: float = Field(1.0, gt=0, description="length of a cut; a shorter recording is followed by zeros")
    sample_rate: int = Field(16000, ge=100, description="in Hz; files must have it")
    mels: int = Field(40, ge=1, description="mel bands")
    window: float = Field(0.025, gt=0, description="Hann window of a frame, in seconds")
    hop: float = Field(0.01, gt=0, description="from one frame to the next, in seconds")
    lowest: float = Field(20.0, ge=0, description="lower edge of the lowest band, in Hz")
    highest: float | None = Field(
        None, gt=0, description="upper edge of the highest band, in Hz (default: half the sample rate)"
    )
    time_masks: Count = Field(0, description="SpecAugment: stretches of frames masked in each recording")
    time_mask: Count = Field(20, description="SpecAugment: a stretch is shorter than so many frames")
    frequency_masks: Count = Field(0, description="SpecAugment: groups of bands masked in each recording")
    frequency_mask: Count = Field(8, description="SpecAugment: a group is smaller than so many bands")
    part: Literal["validation", "testing"] = Field(
        "validation",
        description="what is measured on, of a folder with validation_list.txt, testing_list.txt",
    )

    @model_validator(mode="after")
    def _bands_and_frames_exist(self) -> "AudioConfig":
        highest = self.highest if self.highest is not None else self.sample_rate / 2
        if not self.lowest < highest <= self.sample_rate / 2:
            raise ValueError(
                "audio.lowest must be below audio.highest, and that at most half of audio.sample_rate"
            )
        if self.hop * self.sample_rate < 1 or self.window * self.sample_rate < 2:
            raise ValueError("audio.hop and audio.window are too short: a sample and two are the least")
        if self.bins // 2 >= round(self.seconds * self.sample_rate):
            raise ValueError("audio.window is longer than twice audio.seconds; lower it")
        return self

    @property
    def window_samples(self) -> int:
        """Samples of a window."""
        return round(self.window * self.sample_rate)

    @property
    def bins(self) -> int:
        """Samples of the Fourier transform: the next power of two."""
        return 1 << (self.window_samples - 1).bit_length()


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
        self._model, self._config = model, audio
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
        return AudioCnn(self._model, self._config.mels, len(self.audio.classes))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy, summed over the shard."""
        return _cross_entropy(model(self._masked(self.features(batch.fields[AUDIO]))), batch)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Loss and correct answers, summed over the shard."""
        logits = model(*self.inputs(batch))
        correct = logits.argmax(1) == batch.fields[LABEL]
        if batch.weight is not None:
            correct = correct & (batch.weight > 0)
        return {"loss": _cross_entropy(logits, batch), "accuracy": correct.sum()}

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Log-mel features, float32 (n, 1, mels, frames): the model itself is convolutional."""
        return (self.features(batch.fields[AUDIO]),)

    def features(self, audio: torch.Tensor) -> torch.Tensor:
        """Log-mel power, each recording with mean 0 and deviation 1: so its level doesn't matter.

        Args:
            audio: int16 (n, samples).

        Returns:
            float32 (n, 1, mels, frames), a frame centred at each multiple of the hop; the ends are mirrored.
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

        It draws from torch's generator of the device, which is seeded anew for each shard.
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


def _cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Summed over the shard; whatever the padding gives counts for nothing."""
    if batch.weight is None:
        return F.cross_entropy(logits, batch.fields[LABEL], reduction="sum")
    each = F.cross_entropy(logits, batch.fields[LABEL], reduction="none")
    return torch.where(batch.weight > 0, each * batch.weight, 0.0).sum()
