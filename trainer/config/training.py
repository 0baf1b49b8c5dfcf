"""Configuration of optimization, evaluation, anomalies, logging and checkpoints."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer.config import sinks
from trainer.config.data import EvaluationSetConfig
from trainer.config.optimizers import OPTIMIZERS, SCHEDULES, described, read_by
from trainer.config.redact import is_secret
from trainer.config.section import Section, refuse, validated
from trainer.config.suggest import nearest
from trainer.errors import BadInputError

if TYPE_CHECKING:
    OptimizerName = str
    ScheduleName = str
else:
    OptimizerName, ScheduleName = Literal[tuple(OPTIMIZERS)], Literal[tuple(SCHEDULES)]

Binding = Literal["auto", "none", "node", "cores"]
_Beta = Annotated[float, Field(ge=0, lt=1)]
_Share = Annotated[float, Field(ge=0, le=1)]
_INTERVAL = re.compile(r"([1-9]\d{0,8}) ?(epoch|step)s?")
_SET_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
MAIN_SET = "data"  # name of the evaluation set of the section data


class OptimConfig(Section):
    """Optimizer, learning rate and clipping."""

    name: OptimizerName = Field("adamw", description=f"optimizer: {described(OPTIMIZERS)}")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    schedule: ScheduleName = Field("cosine", description=f"after the warm-up: {described(SCHEDULES)}")
    warmup_steps: int | float = Field(
        0.05,
        ge=0,
        description="updates of the linear warm-up; a number >= 1 counts updates, one below 1 is a fraction "
        "of the run's updates; if they exceed the run, the peak is not reached",
    )
    final_lr: _Share = Field(
        0.0,
        description="final learning rate as a fraction of the peak; one-cycle: at least 4e-6 "
        f"({read_by('final_lr', SCHEDULES)})",
    )
    milestones: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (),
        description="epochs after which the learning rate falls, such as [30, 60]; 2.5 is in the middle of "
        f"the third; those after the run's end have no effect ({read_by('milestones', SCHEDULES)})",
    )
    gamma: float = Field(
        0.1, gt=0, le=1, description=f"factor at each milestone ({read_by('gamma', SCHEDULES)})"
    )
    decay: float = Field(
        0.2,
        gt=0,
        le=1,
        description=f"fraction of the updates that the final decay takes ({read_by('decay', SCHEDULES)})",
    )
    weight_decay: float = Field(
        0.01, ge=0, description="weight decay; not on norms and biases, see decay_1d and no_decay"
    )
    decay_1d: bool = Field(
        False,
        description="weight decay also on parameters with less than two dimensions (norms, biases), as with "
        "torch.optim.SGD(model.parameters())",
    )
    no_decay: tuple[str, ...] = Field(
        (),
        description='parameters without weight decay, by name: ["class_token", "*pos_embedding"]',
    )
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="factor of the learning rate from a block to the one before; 1: none"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description=f"momentum ({read_by('momentum', OPTIMIZERS)})")
    nesterov: bool = Field(True, description=f"Nesterov's momentum ({read_by('nesterov', OPTIMIZERS)})")
    betas: tuple[_Beta, _Beta] = Field(
        (0.9, 0.999), description=f"decay of the moments ({read_by('betas', OPTIMIZERS)})"
    )
    eps: float = Field(1e-8, gt=0, description=f"added to the denominator ({read_by('eps', OPTIMIZERS)})")
    max_grad_norm: float = Field(0.0, ge=0, description="largest global gradient norm; 0: no clipping")

    @field_validator("warmup_steps")
    @classmethod
    def _steps_are_whole(cls, value: float) -> int | float:
        if value < 1 and value:
            return value
        if value != int(value):
            raise ValueError("from 1 on it is a whole number of updates; below 1 a fraction of the run")
        return int(value)

    @model_validator(mode="after")
    def _parts_come_one_after_the_other(self) -> "OptimConfig":
        if self.schedule == "wsd" and self.warmup_steps < 1 and self.warmup_steps + self.decay > 1:
            raise ValueError("optim.warmup_steps and optim.decay are together more than the run")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("optim.milestones must rise, such as [30, 60, 80]")
        if self.schedule == "step" and not self.milestones:
            raise ValueError("optim.schedule=step needs optim.milestones, epochs such as [30, 60]")
        return self


class EvaluationConfig(Section):
    """When a run is evaluated, on what, and whether the results end it early."""

    every: str = Field(
        "1 epoch",
        description='interval: "2 epochs", "500 steps", or "end" (a run is always evaluated at its end)',
    )
    patience: int = Field(
        0,
        ge=0,
        description="the run ends after this many evaluations in a row without improvement; 0: never",
    )
    sets: dict[str, EvaluationSetConfig] = Field(
        {},
        description="more evaluation sets, by any name, each with some of path, name, split "
        "(such as test; default: val), cache, cache_limit, check, input_column and label_column; what it "
        "doesn't say is as in data. Metrics records have eval/NAME/loss and so on",
        json_schema_extra={"words": "{NAME: {path: …, name: …, split: …}}"},
    )
    decides: str = Field(
        MAIN_SET,
        description="the set by which the best checkpoint is chosen and patience counts: a name of sets, or "
        "data: the main one",
    )

    @field_validator("sets", mode="before")
    @classmethod
    def _sets_have_names_and_known_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("give sets by name, such as {far: {path: /data/far}}")
        sets = {}
        for name, keys in value.items():
            if not isinstance(name, str) or not _SET_NAME.fullmatch(name) or is_secret(name):
                raise ValueError(f"'{name}' is no name for a set: use letters, digits, - and _")
            if name == MAIN_SET:
                raise ValueError("the set of the section data is called data already; take another name")
            if not isinstance(keys, dict | EvaluationSetConfig):
                raise ValueError(f"{name}: give its keys, such as {name}={{path: /data/{name}}}")
            try:
                sets[name] = validated(EvaluationSetConfig, dict(keys), name)
            except BadInputError as error:
                raise ValueError(str(error)) from None
        return sets

    @model_validator(mode="after")
    def _a_set_decides(self) -> "EvaluationConfig":
        names = [MAIN_SET, *self.sets]
        if self.decides not in names:
            raise ValueError(
                f"evaluation.decides={self.decides}: no such set{nearest(self.decides, names)} (there are: "
                f"{', '.join(names)})"
            )
        return self

    @field_validator("every", mode="before")
    @classmethod
    def _is_an_interval(cls, value: Any) -> Any:
        if not isinstance(value, str) or (value != "end" and not _INTERVAL.fullmatch(value)):
            raise ValueError('give a number and its unit, such as "2 epochs" or "500 steps", or "end"')
        return value

    @model_validator(mode="after")
    def _patience_is_of_several(self) -> "EvaluationConfig":
        if self.patience and self.every == "end":
            raise ValueError("evaluation.patience has no effect with evaluation.every=end")
        return self

    @property
    def interval(self) -> tuple[int, Literal["epoch", "step"]] | None:
        """Returns the interval as number and unit; None: only at the end."""
        found = _INTERVAL.fullmatch(self.every)
        return None if found is None else (int(found[1]), "epoch" if found[2] == "epoch" else "step")


class AverageConfig(Section):
    """Exponential moving average of the weights (EMA); evaluation uses it if it is on."""

    decay: float = Field(0.0, ge=0, lt=1, description="decay of the average at each update; 0: no average")
    every: int = Field(1, ge=1, description="steps between two updates of the average, scaled accordingly")

    @model_validator(mode="after")
    def _without_a_decay_there_is_none(self) -> "AverageConfig":
        if not self.decay and self.every > 1:
            raise ValueError("ema.every has no effect without ema.decay, such as 0.999")
        return self


class ParallelConfig(Section):
    """Processes and threads."""

    threads: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = Field(
        "auto",
        description="intra-op CPU threads per rank, part of the arithmetic on a CPU; auto: the rank's CPUs, "
        "or 1 on a CPU with reduction=tree",
    )
    cpu_binding: Binding = Field(
        "auto",
        description="CPUs that a rank keeps to: node (those of its GPU's NUMA node), cores (whole cores of "
        "its own, OpenMP's threads pinned to them), none; auto: node where there are several, else none",
    )
    timeout_s: float = Field(600.0, gt=0, le=86400, description="seconds that a rank waits for the others")
    hang_s: float = Field(
        300.0,
        ge=0,
        le=86400,
        description="seconds without progress of any rank after which the ranks name the one that hangs and "
        "end with code 76; never more than half of timeout_s; 0: off",
    )
    strategy: Literal["ddp", "fsdp", "hsdp"] = Field(
        "ddp",
        description="ddp: each rank has the whole model; fsdp: each has a part of every parameter, gradient "
        "and moment; hsdp: the same within groups of parallel.shard ranks",
    )
    shard: int = Field(0, ge=0, description="ranks that share a model (hsdp); 0: all of them (fsdp)")
    bucket_mb: int = Field(25, ge=1, le=1 << 20, description="DDP's bucket size in MiB")
    reduction: Literal["all_reduce", "tree"] = Field(
        "all_reduce",
        description="how a step's gradients are added; tree: the same bits on any number of ranks that "
        "splits global_batch_size / micro_batch_size into powers of two",
    )
    compress: Literal["none", "bf16"] = Field(
        "none", description="bf16: gradients cross the network in bfloat16, half the bytes, less exact"
    )
    sync_batchnorm: bool = Field(
        False,
        description="BatchNorm over a micro-batch of all ranks; results then depend on their number",
    )
    find_unused_parameters: bool = Field(
        False,
        description="let DDP look for parameters that a step doesn't use; costs time each step",
    )

    @model_validator(mode="after")
    def _a_tree_is_exact(self) -> "ParallelConfig":
        if self.reduction == "tree":
            reasons = {
                "parallel.compress": self.compress != "none" and " rounds what crosses the network",
                "parallel.find_unused_parameters": self.find_unused_parameters
                and " is DDP's; a tree takes unused parameters as they are",
                "parallel.sync_batchnorm": self.sync_batchnorm
                and " makes statistics depend on the number of ranks",
            }
            refuse(reasons, ": leave it out with parallel.reduction=tree")
        return self

    @model_validator(mode="after")
    def _shards_have_ways_of_their_own(self) -> "ParallelConfig":
        if self.strategy == "hsdp" and self.shard < 2:
            raise ValueError(
                "parallel.strategy=hsdp needs parallel.shard, the number of ranks that share a model: such "
                "as 8, those of a host"
            )
        if self.shard and self.strategy != "hsdp":
            raise ValueError(
                f"parallel.shard is of parallel.strategy=hsdp: leave it out with {self.strategy}"
            )
        if self.strategy == "ddp":
            return self
        reasons = {
            "parallel.reduction": self.reduction == "tree" and "=tree adds whole gradients on each rank",
            "parallel.compress": self.compress != "none"
            and " is DDP's: with shards precision.mode=bf16 gathers in bfloat16",
            "parallel.find_unused_parameters": self.find_unused_parameters
            and " is DDP's: with shards all trained parameters must have a part in each step",
            "parallel.bucket_mb": self.bucket_mb != type(self).model_fields["bucket_mb"].default
            and " is DDP's: with shards a block is what is sent at once",
        }
        refuse(reasons, f"; leave it out with parallel.strategy={self.strategy}")
        return self


class AnomalyConfig(Section):
    """Reaction to a step whose loss or gradients are bad."""

    nonfinite: Literal["stop", "skip", "off"] = Field(
        "stop",
        description="reaction to a loss or gradient that isn't finite; skip: its update is not made",
    )
    spike: Literal["off", "stop"] = Field("off", description="reaction to a spike of the loss")
    spike_deviations: float = Field(
        10.0,
        gt=0,
        description="a spike: robust standard deviations above the median of earlier losses",
    )
    spike_history: int = Field(100, ge=10, le=10_000, description="number of earlier losses for the median")
    most: int = Field(
        20, ge=1, description="maximum number of anomalies, after which the run stops in any case"
    )

    @field_validator("nonfinite", "spike", mode="before")
    @classmethod
    def _no_rollback(cls, value: object) -> object:
        if value == "rollback":
            raise ValueError(
                "rollback is gone: take stop, and then --init-from RUN@STEP with anomaly.nonfinite=skip"
            )
        return value

    @property
    def skips_updates(self) -> bool:
        """True if updates whose loss or gradients aren't finite are skipped."""
        return self.nonfinite == "skip"


class HooksConfig(Section):
    """User code that is called during training; it doesn't change the results."""

    enabled: bool = Field(True, description="false: no hooks are called, not even those of a task's file")
    use: tuple[str, ...] = Field(
        (),
        description="file.py:NAME or module:NAME, each a class or object with after_step(row), "
        "after_evaluation(step, metrics) or after_checkpoint(step, folder)",
    )
    on_error: Literal["stop", "warn"] = Field(
        "stop",
        description="reaction to an error in a hook or a custom sink: stop the run, or warn",
    )

    @field_validator("use")
    @classmethod
    def _are_places(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for place in value:
            if not is_place(place):
                raise ValueError(f"'{place}': give file.py:NAME or module:NAME")
        return value


def is_place(text: str) -> bool:
    """True if a text names user code: file.py:NAME or module:NAME."""
    where, colon, name = text.rpartition(":")
    return bool(colon and where) and name.isidentifier()


class LogConfig(Section):
    """Logging."""

    every: int = Field(50, ge=1, description="steps between two metrics records")
    to: tuple[str, ...] = Field(
        ("jsonl", "tensorboard"),
        description=f"sinks of metrics records, in addition to the console: {sinks.described_sinks()}; also "
        "a name that an installed package brings, or a function of one's own, module:NAME or file.py:NAME",
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of the metrics page for Prometheus, /metrics on rank 0's host; 0: none",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address of the metrics page; 0.0.0.0: all interfaces",
    )
    price_per_hour: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="price of the run's machines, in any currency, for the cost in the summary",
    )
    fingerprints: bool = Field(
        True,
        description="checksums.jsonl: a fingerprint of every tensor with each metrics record, for trainer "
        "verify",
    )

    @field_validator("to")
    @classmethod
    def _is_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        ours = (*sinks.FILE_SINKS, *sinks.TRACKERS)
        for one in value:
            if (
                one not in ours
                and not is_place(one)
                and one not in (names := (*ours, *sinks.plugged_sinks()))
            ):
                raise ValueError(
                    f"'{one}' is none of {', '.join(names)}, nor module:NAME or file.py:NAME of a function"
                    f"{nearest(one, names)}"
                )
        return value


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept. These keys don't change the results."""

    every: int = Field(0, ge=0, description="steps between two checkpoints; 0: only by time")
    minutes: float = Field(10.0, ge=0, description="minutes between two checkpoints; 0: only by steps")
    keep: int = Field(2, ge=1, le=1000, description="number of newest checkpoints to keep")
    best: bool = Field(True, description="also keep the checkpoint with the best evaluation")
