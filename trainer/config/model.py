"""Configuration of the model, number formats, activation checkpointing and compilation."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from trainer.config.models import HF, MODELS, described_models
from trainer.config.optimizers import read_by
from trainer.config.section import Section

Allocator = Literal["native", "expandable", "async"]

# Names of weights on the hub and of torchvision; anything else is a path.
_PART = r"(?!\.)[\w.-]+"  # no way out of a folder
HUB = re.compile(rf"hub:(?P<repository>{_PART}/{_PART})@(?P<revision>{_PART}(/{_PART})*)")
TORCHVISION = re.compile(r"torchvision:(?P<name>\w+\.\w+)")


ALL_LINEAR = "all-linear"  # the word of the library peft


def _as_source(value: Any) -> Any:
    if not isinstance(value, str) or value.startswith(("hub:", "torchvision:")):
        return value
    return Path(value)


class LoraConfig(Section):
    """LoRA (Hu et al., 2021): trains a low-rank update of each weight; the weights are frozen."""

    rank: int = Field(0, ge=0, le=1 << 16, description="rank of the low-rank update; 0: no LoRA")
    alpha: float = Field(16.0, gt=0, description="the low-rank update is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of what the low-rank update is computed of")
    targets: tuple[str, ...] = Field(
        (),
        description='linear layers and torch\'s attention by the end of their names: ["q_proj", "v_proj"], '
        'or by pattern: ["*.mlp.*"]; by default, and with "all-linear", all within the model\'s blocks',
    )
    modules_to_save: tuple[str, ...] = Field(
        (), description='modules that are trained as a whole beside it: ["embed_tokens", "lm_head"]'
    )

    @model_validator(mode="after")
    def _all_belongs_to_a_rank(self) -> "LoraConfig":
        if not self.rank and (
            said := [key for key, value in self if value != type(self).model_fields[key].default]
        ):
            raise ValueError(f"model.lora.{said[0]} needs model.lora.rank, such as 8")
        return self


class ModelConfig(Section):
    """The model to train."""

    name: str = Field(
        "auto",
        description=f"{described_models()}, or by name torchvision's models of images and of detection, and "
        "timm's as timm/NAME; hf/FOLDER or hf/OWNER/REPO@REVISION: a language model that transformers knows, "
        "with its weights; auto: the task's own",
    )
    width: int = Field(32, ge=1, description=f"channels of the first stage ({read_by('width', MODELS)})")
    blocks: tuple[Annotated[int, Field(ge=1, le=100)], ...] = Field(
        (1, 1), min_length=1, description=f"residual blocks in each stage ({read_by('blocks', MODELS)})"
    )
    norm: Literal["batch", "group"] = Field("batch", description=f"normalization ({read_by('norm', MODELS)})")
    dropout: float = Field(
        0.0, ge=0, lt=1, description=f"dropout before the last layer ({read_by('dropout', MODELS)})"
    )
    channels_last: bool = Field(False, description="NHWC memory format for convolutions")
    pretrained: Annotated[Path | str | None, BeforeValidator(_as_source)] = Field(
        None,
        description="start from a safetensors file, hub:ORG/NAME@REVISION (its model.safetensors) "
        "or torchvision:WEIGHTS, such as torchvision:ResNet18_Weights.IMAGENET1K_V1",
        json_schema_extra={"words": "Path | hub:… | torchvision:… | null"},
    )
    reinit: tuple[str, ...] = Field(
        (),
        description='parameters that are initialized instead of taken from pretrained, by name: ["head.*"]',
    )

    freeze: tuple[str, ...] = Field(
        (), description='parameters that are not trained, by name: ["layer1*", "stem"]'
    )
    frozen_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="number format in which matrices of linear layers and embeddings are held that aren't "
        "trained; bf16 takes half the memory, and needs precision.mode=bf16",
    )
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="after")
    def _lora_freezes_by_itself(self) -> "ModelConfig":
        if self.freeze and self.lora.rank:
            raise ValueError(
                "model.lora freezes all weights that model.reinit and model.lora.modules_to_save don't name; "
                "leave model.freeze out"
            )
        if self.frozen_dtype != "fp32" and not (self.freeze or self.lora.rank):
            raise ValueError(
                "model.frozen_dtype: nothing is frozen; it needs model.lora.rank or model.freeze"
            )
        return self

    @field_validator("pretrained")
    @classmethod
    def _sources_are_whole(cls, value: Path | str | None) -> Path | str | None:
        if isinstance(value, str) and not (HUB.fullmatch(value) or TORCHVISION.fullmatch(value)):
            raise ValueError(
                "give hub:ORG/NAME@REVISION, such as hub:timm/vit_small_patch16_224.augreg_in1k@main"
                if value.startswith("hub:")
                else "give torchvision:WEIGHTS, such as torchvision:ResNet18_Weights.IMAGENET1K_V1"
            )
        return value

    @model_validator(mode="after")
    def _hf_brings_its_weights(self) -> "ModelConfig":
        if self.name.startswith(HF) and self.pretrained is not None:
            raise ValueError(
                f"model.name={self.name} brings its weights: leave model.pretrained out (--init-from takes "
                "those of another run)"
            )
        if self.name == HF:
            raise ValueError("model.name=hf/ names no model: give hf/FOLDER or hf/OWNER/REPO@REVISION")
        return self

    @model_validator(mode="after")
    def _fresh_belongs_to_a_file(self) -> "ModelConfig":
        if self.reinit and self.pretrained is None:
            raise ValueError(
                "model.reinit is set but there is no model.pretrained that it could leave out of"
            )
        return self


class PrecisionConfig(Section):
    """Number formats."""

    mode: Literal["fp32", "tf32", "fp16", "bf16"] = Field(
        "fp32",
        description="fp32, tf32 (Ampere or newer), fp16 (autocast and loss scaling) or bf16 (autocast)",
    )
    initial_scale: float = Field(65536.0, gt=0, description="first loss scale (fp16)")
    growth_interval: int = Field(
        2000, ge=1, description="updates without overflow before the scale doubles (fp16)"
    )
    keep_fp32: tuple[str, ...] = Field(
        (), description='modules that compute in float32, by name: ["head", "*.norm*"] (fp16, bf16)'
    )
    debug: bool = Field(
        False, description="name the first module whose output or gradient isn't finite; costs time"
    )


class MemoryConfig(Section):
    """Ways to save memory at the price of time."""

    checkpointing: Literal["none", "blocks", "names"] = Field(
        "none",
        description="activation checkpointing (Chen et al., 2016): none, blocks (every n-th, see every), "
        "names (modules by name)",
    )
    every: int = Field(1, ge=1, description="checkpoint every n-th block (blocks)")
    names: tuple[str, ...] = Field((), description='modules to checkpoint, such as ["blocks.0", "layer4.*"]')
    allocator: Allocator = Field(
        "native",
        description="allocator of GPU memory: native (PyTorch's), expandable (PyTorch's with segments that "
        "grow: less is lost in pieces where sizes vary), async (CUDA's own, driver 470 on)",
    )
    empty_cache: Literal["never", "after_eval"] = Field(
        "never",
        description="after_eval: release a GPU's cached memory after each evaluation, whose batches have "
        "other sizes; the log says how much was freed and how long it took",
    )

    @model_validator(mode="after")
    def _what_the_choice_needs(self) -> "MemoryConfig":
        if (self.checkpointing == "names") != bool(self.names):
            raise ValueError("memory.checkpointing=names and memory.names=[…] belong together")
        if self.every > 1 and self.checkpointing != "blocks":
            raise ValueError("memory.every needs memory.checkpointing=blocks")
        return self


class CompileConfig(Section):
    """Compilation."""

    mode: Literal["none", "default", "reduce-overhead", "max-autotune"] = Field(
        "none", description="torch.compile's mode; reduce-overhead and max-autotune use CUDA graphs on a GPU"
    )
    scope: Literal["model", "blocks"] = Field(
        "model",
        description="compile the model as one, or each block: compiled sooner, and DDP overlaps backward; "
        "where it isn't said, blocks with parallel.strategy fsdp and hsdp",
    )

    @model_validator(mode="after")
    def _graphs_are_of_the_whole_model(self) -> "CompileConfig":
        if self.mode == "reduce-overhead" and self.scope == "blocks":
            raise ValueError(
                "compile.mode=reduce-overhead records CUDA graphs of the whole model: use compile.scope=model"
            )
        return self

    @property
    def warm_up(self) -> int:
        """Steps before speed is measured: the first compiles, the next two record CUDA graphs."""
        return 3 if self.cuda_graphs else 1

    @property
    def cuda_graphs(self) -> bool:
        """True if torch replays CUDA graphs in this mode, on a GPU."""
        return self.mode in ("reduce-overhead", "max-autotune") and self.scope == "model"
