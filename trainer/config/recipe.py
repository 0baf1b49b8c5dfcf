"""Recipe: the whole configuration of a run, put together from its sections."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from trainer.config.data import DataConfig, EvaluationSetConfig
from trainer.config.formats import formats_of
from trainer.config.model import CompileConfig, MemoryConfig, ModelConfig, PrecisionConfig
from trainer.config.models import HF, models_of
from trainer.config.optimizers import OPTIMIZERS
from trainer.config.section import Section, refuse
from trainer.config.suggest import nearest
from trainer.config.task_file import is_own
from trainer.config.tasks import (
    CUSTOM,
    TASKS,
    AudioConfig,
    DetectionConfig,
    GPTConfig,
    LanguageConfig,
    RegularizationConfig,
)
from trainer.config.training import (
    AnomalyConfig,
    AverageConfig,
    CheckpointConfig,
    EvaluationConfig,
    HooksConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
)

WHY_NO_MPS = (
    "a Mac's GPU isn't used: MPS has no float64 and no process groups, and its reproducibility was never "
    "tested"
)


def of_set(name: str, text: str) -> str:
    """Returns a message about a key of the section data with the key's name in an evaluation set."""
    keys = "|".join(EvaluationSetConfig.model_fields)
    text = re.sub(rf"\bdata\.({keys})\b", rf"evaluation.sets.{name}.\1", text)
    text = re.sub(r"\bdata\.eval_split\b", f"evaluation.sets.{name}.split", text)
    return text if f"evaluation.sets.{name}" in text else f"evaluation.sets.{name}: {text}"


class Recipe(Section):
    """Configuration of a run. Unknown keys are errors."""

    about: str = Field("", description="summary that `trainer recipes` shows")
    task: str = Field(
        "classification",
        description="classification, language, audio, detection, or a custom task: FILE.py, or FILE.py:CLASS",
    )
    seed: int = Field(
        0, ge=0, lt=1 << 63, description="seed of the weights, the sample order and all other randomness"
    )
    epochs: int = Field(..., ge=1, le=10**9, description="passes over the training data")
    max_steps: int | None = Field(None, ge=1, description="stop after this many steps")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: the GPUs if there are any (a Mac's GPU isn't used)"
    )
    cudnn_benchmark: bool = Field(True, description="let cuDNN choose its algorithms by timing them once")
    deterministic: bool = Field(
        False, description="only algorithms that give the same bits each time, on GPUs too; slower"
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    language: LanguageConfig = LanguageConfig()
    audio: AudioConfig = AudioConfig()
    detection: DetectionConfig = DetectionConfig()
    memory: MemoryConfig = MemoryConfig()
    compile: CompileConfig = CompileConfig()
    optim: OptimConfig = OptimConfig()
    ema: AverageConfig = AverageConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    regularization: RegularizationConfig = RegularizationConfig()
    parallel: ParallelConfig = ParallelConfig()
    anomaly: AnomalyConfig = AnomalyConfig()
    log: LogConfig = LogConfig()
    hooks: HooksConfig = HooksConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @field_validator("device", mode="before")
    @classmethod
    def _no_mac(cls, value: object) -> object:
        if value in ("mps", "metal"):
            raise ValueError(f"{WHY_NO_MPS}; use device=cpu, or leave it out")
        return value

    @model_validator(mode="after")
    def _task_with_its_data_and_model(self) -> "Recipe":
        own = is_own(self.task)
        if not own and self.task not in TASKS:
            raise ValueError(
                f"task={self.task}: no such task{nearest(self.task, list(TASKS))} (there are: "
                f"{', '.join(TASKS)}, or a .py file, which `trainer new FILE.py` begins)"
            )
        task, formats = (CUSTOM, ("own",)) if own else (TASKS[self.task], formats_of(self.task))
        if "name" not in self.data.model_fields_set:
            self.data.name = formats[0]
        if self.data.name not in formats:
            raise ValueError(
                f"data.name={self.data.name} isn't read by task={self.task}, which reads {', '.join(formats)}"
            )
        if self.data.name == "conversations" and "text" not in self.language.model_fields_set:
            self.language.text = "packed"
        if self.model.name == "auto":
            self.model.name = models_of(self.task)[0]
        for section in (one.section for one in TASKS.values() if one is not task):
            if getattr(self, section) != type(getattr(self, section))():
                raise ValueError(f"{section}: not read by task={self.task}; leave its keys out")
        for dotted in task.unread:
            section, _, key = dotted.partition(".")
            part = getattr(self, section)
            if getattr(part, key) != type(part).model_fields[key].default:
                raise ValueError(f"{dotted}: not read by task={self.task}; leave it out")
        if self.model.name.startswith(HF):
            self._only_what_hf_reads()
        elif task.only and self.model.name not in (names := models_of(self.task)):
            raise ValueError(
                f"model.name={self.model.name}: task={self.task} has a model of its own; leave the name out"
                + f" (there are: {', '.join(names)})" * (len(names) > 1)
            )
        return self

    def _only_what_hf_reads(self) -> None:
        """Refuses other tasks, and the keys of the trainer's own GPT: the model has its own configuration."""
        if self.task != "language":
            raise ValueError(f"model.name={self.model.name} is a language model: use task=language")
        for key, field in LanguageConfig.model_fields.items():
            of_gpt = key in ("attention", "vocabulary") or key in GPTConfig.model_fields
            if of_gpt and key != "sequence_length" and getattr(self.language, key) != field.default:
                raise ValueError(
                    f"language.{key} is a key of our own GPT, and {self.model.name} has a configuration of "
                    "its own: leave it out"
                )

    @model_validator(mode="after")
    def _sets_that_the_task_reads(self) -> "Recipe":
        for name, one in self.evaluation.sets.items():
            if self.task not in TASKS:
                raise ValueError(
                    "evaluation.sets: a custom task brings its own data, with one evaluation set; leave them "
                    "out"
                )
            try:
                data, names = one.on(self.data), formats_of(self.task)
            except ValueError as error:
                raise ValueError(of_set(name, str(error))) from None
            if data.name not in names:
                raise ValueError(
                    f"evaluation.sets.{name}.name={data.name} isn't read by task={self.task}, which reads "
                    f"{', '.join(names)}"
                )
        return self

    def data_of_set(self, name: str) -> DataConfig:
        """Returns an evaluation set's configuration as a section data."""
        return self.evaluation.sets[name].on(self.data)

    @model_validator(mode="after")
    def _parts_that_exclude_each_other(self) -> "Recipe":
        mixing = self.regularization.mixup or self.regularization.cutmix
        if mixing and self.data.micro_batch_size == 1:
            raise ValueError(
                "regularization.mixup and cutmix mix the samples of a micro-batch: data.micro_batch_size=1 "
                "has nothing to mix; use a larger one or 0"
            )
        if mixing and self.data.last_batch == "weighted":
            raise ValueError(
                "regularization.mixup and cutmix would mix the padding of data.last_batch=weighted into "
                "samples; use data.last_batch=cross"
            )
        if self.memory.allocator == "async" and self.compile.mode != "none" and self.compile.cuda_graphs:
            raise ValueError(
                "memory.allocator=async can't serve CUDA graphs (pytorch#158641): use "
                "compile.mode=default, or another allocator"
            )
        if self.precision.debug and self.compile.mode != "none":
            raise ValueError(
                "precision.debug checks every module's output, uncompiled: set compile.mode=none"
            )
        if self.parallel.strategy != "ddp":
            self._compile_what_is_gathered()
            self._refuse_what_cannot_be_sharded()
        if self.precision.keep_fp32 and self.precision.mode in ("fp32", "tf32"):
            raise ValueError(
                f"precision.keep_fp32 has no effect with precision.mode={self.precision.mode}; "
                "leave it out, or use fp16 or bf16"
            )
        if self.model.frozen_dtype == "bf16" and (self.precision.mode != "bf16" or self.precision.keep_fp32):
            raise ValueError(
                "model.frozen_dtype=bf16 needs precision.mode=bf16 in all modules, which rounds these "
                "matrices in any case: set that, and leave precision.keep_fp32 out"
            )
        return self

    def _compile_what_is_gathered(self) -> None:
        """Compiles by blocks unless compile.scope is given, because FSDP gathers them one by one."""
        if "scope" not in self.compile.model_fields_set and self.compile.mode in ("default", "max-autotune"):
            self.compile.scope = "blocks"

    def _refuse_what_cannot_be_sharded(self) -> None:
        able = sorted(name for name, one in OPTIMIZERS.items() if one.elementwise)
        reasons = {
            f"optim.name={self.optim.name}": self.optim.name not in able
            and f" needs whole matrices, and each rank has rows of them: use {' or '.join(able)}",
            "model.channels_last": self.model.channels_last
            and " uses a memory layout of parameters that can't be split by rows: leave it out",
            "model.frozen_dtype=bf16": self.model.frozen_dtype == "bf16"
            and " gives the model two types of number, and FSDP gathers those of one: leave it out",
            "compile.scope=model": self.compile.mode != "none"
            and self.compile.scope == "model"
            and " compiles a model whose blocks are gathered one by one: use compile.scope=blocks",
            "precision.debug": self.precision.debug
            and " reads the weights of modules before FSDP has gathered them: leave it out",
        }
        refuse(reasons, ", or use parallel.strategy=ddp")
