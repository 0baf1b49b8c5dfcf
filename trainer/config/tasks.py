"""Configuration keys that belong to one task."""

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from trainer.config.section import Section

_Count = Annotated[int, Field(ge=0, le=10_000)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Factor = Annotated[float, Field(gt=0, le=10)]


class RegularizationConfig(Section):
    """Regularization against overfitting."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="fraction of the target that is spread over all classes"
    )
    mixup: float = Field(0.0, ge=0, le=8, description="Beta parameter of mixup; 0: none")
    cutmix: float = Field(
        0.0,
        ge=0,
        le=8,
        description="Beta parameter of CutMix; 0: none; with mixup, each of half the images",
    )
    stochastic_depth: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability of leaving out the last residual branch, linear in depth; 0: none, but what "
        "torchvision's swin, convnext, efficientnet and maxvit bring (0.1 to 0.6)",
    )


class GPTConfig(Section):
    """Size and parts of the trainer's own GPT."""

    layers: int = Field(4, ge=1, le=1000, description="transformer blocks")
    heads: int = Field(4, ge=1, le=1024, description="attention heads of a block; divides the width")
    width: int = Field(128, ge=1, le=1 << 17, description="channels")
    sequence_length: int = Field(
        256, ge=1, le=1 << 20, description="maximum number of tokens that a sample predicts"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on attention, residuals and embeddings")
    positions: Literal["rotary", "learned"] = Field(
        "rotary", description="position embedding: rotary or learned"
    )
    norm: Literal["rms", "layer"] = Field("rms", description="RMSNorm or LayerNorm")
    mlp: Literal["swiglu", "gelu"] = Field(
        "swiglu", description="swiglu (8/3 of the width) or gelu (4 times)"
    )
    bias: bool = Field(False, description="biases in linear layers and LayerNorm, as GPT-2 has them")

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "GPTConfig":
        if self.width % self.heads:
            raise ValueError(
                f"language.width={self.width} is not a multiple of language.heads={self.heads}: change one"
            )
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ValueError(
                f"language.positions=rotary turns pairs of channels, and a head has "
                f"{self.width // self.heads} of them: choose an even number, or positions=learned"
            )
        return self


class LanguageConfig(GPTConfig):
    """Keys of task=language: the model, and how text becomes samples."""

    text: Literal["stream", "packed", "padded"] = Field(
        "stream",
        description="stream (cut at equal lengths), packed (whole documents side by side in a sample, none "
        "seeing another) or padded (a document in a sample; batches of similar lengths, cut to the longest); "
        "conversations are packed by default",
    )
    learn: Literal["completions", "last", "all"] = Field(
        "completions",
        description="which tokens count in the loss: completions (and each turn of an assistant), last (of a "
        "conversation the assistant's last turn) or all (conversations)",
    )
    turns: Literal["together", "each"] = Field(
        "together",
        description="together (a conversation is one sample) or each (a sample for each turn that counts, of "
        "what comes before and the turn, rendered as for generation) (conversations)",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        json_schema_extra={"words": "{name: value}"},
        description="what the chat template is given beside messages and tools, such as {enable_thinking: "
        "false}; a row's own come first (conversations)",
    )
    tokenizer: Path | None = Field(
        None,
        description="folder of a model, for tokenizer.json and chat template; default: the model's own "
        "(conversations)",
    )
    prompts: tuple[str, ...] = Field(
        (),
        max_length=32,
        description="messages of a user, answered at each evaluation by the likeliest tokens, for the report "
        "(conversations)",
    )
    answer_tokens: int = Field(64, ge=1, le=4096, description="tokens of an answer at most (prompts)")
    buckets: int = Field(
        8, ge=1, le=64, description="lengths that a batch is cut to, equally far apart (padded)"
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="tokens from the start of a training sample to that of the next (stream; not tokens); "
        "default: the sequence length, so that each token is a target once an epoch",
    )
    vocabulary: int | None = Field(
        None, ge=2, le=1 << 24, description="size of the embedding; default: what the text needs"
    )
    dtype: Literal["uint16", "uint32"] | None = Field(
        None, description="dtype of token files without a JSON file beside them, such as nanoGPT's"
    )

    @model_validator(mode="after")
    def _turns_are_what_counts(self) -> "LanguageConfig":
        if self.turns == "each" and self.learn == "all":
            raise ValueError(
                "language.turns=each makes a sample of each turn that counts, and language.learn=all counts "
                "everything: leave one of them out"
            )
        return self


class AudioConfig(Section):
    """Recordings, their log-mel features, and how these are masked in training."""

    seconds: float = Field(
        1.0, gt=0, le=86400, description="length of a cut; a shorter recording is followed by zeros"
    )
    sample_rate: int = Field(16000, ge=100, le=10**7, description="in Hz; files must have it")
    mels: int = Field(40, ge=1, le=4096, description="mel bands")
    window: float = Field(0.025, gt=0, le=86400, description="Hann window of a frame, in seconds")
    hop: float = Field(0.01, gt=0, le=86400, description="from one frame to the next, in seconds")
    lowest: float = Field(20.0, ge=0, description="lower edge of the lowest band, in Hz")
    highest: float | None = Field(
        None, gt=0, description="upper edge of the highest band, in Hz (default: half the sample rate)"
    )
    time_masks: _Count = Field(0, description="SpecAugment: stretches of frames masked in each recording")
    time_mask: _Count = Field(20, description="SpecAugment: a stretch is shorter than so many frames")
    frequency_masks: _Count = Field(0, description="SpecAugment: groups of bands masked in each recording")
    frequency_mask: _Count = Field(8, description="SpecAugment: a group is smaller than so many bands")
    part: Literal["validation", "testing"] = Field(
        "validation",
        description="evaluation split of a folder with validation_list.txt and testing_list.txt",
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
        """Samples of the Fourier transform: the window's, rounded up to a power of two."""
        return 1 << (self.window_samples - 1).bit_length()


class DetectionConfig(Section):
    """Images with boxes, and how they are augmented together."""

    max_boxes: int = Field(100, ge=1, le=10_000, description="maximum number of boxes of an image")
    detections: int = Field(100, ge=1, le=100, description="detections per image that mAP counts")
    flip: _Share = Field(0.0, description="probability of mirroring an image left to right")
    scale: tuple[_Factor, _Factor] = Field(
        (1.0, 1.0), description="smallest and largest factor of an image's size; above 1 it is cropped"
    )
    mosaic: _Share = Field(0.0, description="probability of combining an image with three others")
    norm: Literal["batch", "frozen", "group"] = Field(
        "batch",
        description="in torchvision's models: batch, frozen (with model.pretrained) or group normalization",
    )

    @model_validator(mode="after")
    def _scales_rise(self) -> "DetectionConfig":
        if self.scale[0] > self.scale[1]:
            raise ValueError("detection.scale: the smallest factor, then the largest, such as [0.8, 1.25]")
        return self


_OF_IMAGES = tuple(
    f"data.{key}" for key in ("augment", "jitter", "policy", "crop_area", "eval_crop", "label_column")
)
_OF_CONVOLUTIONS = ("model.width", "model.blocks", "model.norm", "model.dropout")


class TaskKind(NamedTuple):
    """Kind of task.

    Attributes:
        section: Section of keys that only this task reads; empty if there is none.
        opens: "module:class" of the `Task`, called with the sections data, model and its own, and the seed.
        shows: "module:function" by which `trainer predict` shows predictions of a run.
        only: True if it trains only the models in `MODELS`.
        unread: Keys of other sections that it doesn't read; other values than the default are refused.
        ignores: Keys of other sections that it doesn't read; other values are accepted.
    """

    section: str = ""
    opens: str = ""
    shows: str = ""
    only: bool = False
    unread: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


TASKS = {
    "classification": TaskKind(
        "regularization",
        "trainer.tasks.classification:Classification",
        "trainer.commands.predict.images:show_images",
    ),
    "language": TaskKind(
        "language",
        "trainer.tasks.language:Language",
        "trainer.commands.predict.text:show_text",
        only=True,
        unread=_OF_IMAGES + _OF_CONVOLUTIONS,
        ignores=("data.image_size", "data.classes"),
    ),
    "audio": TaskKind(
        "audio",
        "trainer.tasks.audio:Audio",
        "trainer.commands.predict.sounds:show_sounds",
        only=True,
        unread=_OF_IMAGES,
        ignores=("data.image_size",),
    ),
    "detection": TaskKind(
        "detection",
        "trainer.tasks.detection:Detection",
        "trainer.commands.predict.boxes:show_boxes",
        unread=_OF_IMAGES,
    ),
}
# A class in a task's file, or one passed to `fit`.
CUSTOM = TaskKind(only=True, unread=_OF_IMAGES + _OF_CONVOLUTIONS, ignores=("data.image_size",))
