"""A recipe: everything that decides what a run trains, put together from its parts."""

from typing import Literal

from pydantic import Field

from trainer.config import Section
from trainer.data.sources import DataConfig
from trainer.memory import MemoryConfig
from trainer.models import ModelConfig
from trainer.observe.log import LogConfig
from trainer.optim import OptimConfig
from trainer.parallel import ParallelConfig
from trainer.plan import WindowConfig
from trainer.precision import PrecisionConfig


class Recipe(Section):
    """The configuration of a run. Unknown keys are errors."""

    about: str = Field("", description="one line that `trainer recipes` shows")
    task: Literal["classification"] = Field("classification", description="what is learned")
    seed: int = Field(0, ge=0, lt=1 << 63, description="keys the weights, the order and all other randomness")
    epochs: int = Field(..., ge=1, le=10**9, description="how often the data is seen")
    max_windows: int | None = Field(None, ge=1, description="stop after this many windows (optimiser steps)")
    evaluate_every: int = Field(1, ge=0, description="epochs between evaluations; 0: only at the end")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPUs if there are any")
    compile: bool = Field(False, description="torch.compile the model")
    cudnn_benchmark: bool = Field(
        True, description="let cuDNN time its algorithms once; shapes are fixed here"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread over all classes")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    window: WindowConfig = WindowConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    log: LogConfig = LogConfig()
