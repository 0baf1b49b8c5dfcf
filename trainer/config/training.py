"""How weights are updated, by whom, and what is guarded, logged and kept meanwhile."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.section import Section

Binding = Literal["auto", "none", "node", "cores"]
_Beta = Annotated[float, Field(ge=0, lt=1)]
_Share = Annotated[float, Field(ge=0, le=1)]


class OptimConfig(Section):
    """How weights are updated."""

    name: Literal["sgd", "adamw", "muon"] = Field(
        "adamw", description="optimiser: sgd (Nesterov), adamw, or muon (hidden matrices; adamw for the rest)"
    )
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    schedule: Literal["cosine", "one-cycle", "step", "wsd", "constant"] = Field(
        "cosine",
        description="after the warm-up: cosine, one-cycle (cosine up as well), step (see milestones), "
        "wsd (constant, then a decay over the last part) or constant",
    )
    warmup: float = Field(
        0.05, ge=0, lt=1, description="share of the updates with a linear rise of the learning rate"
    )
    final_lr: _Share = Field(
        0.0, description="where cosine, one-cycle (4e-6 at least) and wsd end, as a share of the peak"
    )
    milestones: tuple[_Share, ...] = Field(
        (1 / 3, 2 / 3, 8 / 9), description="shares of the run after which the rate falls (step)"
    )
    gamma: float = Field(0.1, gt=0, le=1, description="factor at each milestone (step)")
    decay: float = Field(0.2, gt=0, le=1, description="share of the updates that the decay takes (wsd)")
    weight_decay: float = Field(0.01, ge=0, description="weight decay; not on norms and biases")
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="factor of the learning rate from a block to the one before; 1: none"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum (sgd; muon, usually 0.95)")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.999), description="decay of the moments (adamw, muon)")
    eps: float = Field(1e-8, gt=0, description="added to the denominator (adamw, muon)")
    max_grad_norm: float = Field(0.0, ge=0, description="largest global gradient norm; 0: no clipping")

    @model_validator(mode="after")
    def _parts_come_one_after_the_other(self) -> "OptimConfig":
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise ValueError("optim.warmup and optim.decay are together more than the run")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("optim.milestones must rise, such as [0.3, 0.6, 0.9]")
        return self


class AverageConfig(Section):
    """Exponential moving average of the weights (EMA); what is evaluated where there is one."""

    decay: float = Field(0.0, ge=0, lt=1, description="decay of the average at each update; 0: no average")
    every: int = Field(1, ge=1, description="steps between two movements, which are then larger")
    on_cpu: bool = Field(False, description="keep it in the host's memory, at the price of a copy each time")

    @model_validator(mode="after")
    def _without_a_decay_there_is_none(self) -> "AverageConfig":
        if not self.decay and (self.every > 1 or self.on_cpu):
            raise ValueError("ema.every and ema.on_cpu have no effect without ema.decay, such as 0.999")
        return self


class ParallelConfig(Section):
    """Processes and threads."""

    threads: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = Field(
        "auto",
        description="intra-op CPU threads per rank, part of the arithmetic on a CPU; auto: the rank's share, "
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
        description="seconds without progress after which the ranks name the one that hangs and end with "
        "code 76; never more than half of timeout_s; 0: off",
    )
    bucket_mb: int = Field(25, ge=1, description="DDP's bucket size in MiB")
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
    static_graph: bool = Field(
        False, description="tell DDP that every step uses the same parameters; not with accumulation"
    )
    find_unused_parameters: bool = Field(
        False,
        description="let DDP look for parameters that a step doesn't use; costs time each step",
    )

    @model_validator(mode="after")
    def _a_tree_is_exact(self) -> "ParallelConfig":
        if self.reduction == "tree":
            reasons = {
                "compress": self.compress != "none" and "rounds what crosses the network",
                "static_graph": self.static_graph and "is DDP's, which a tree doesn't use",
                "find_unused_parameters": self.find_unused_parameters
                and "is DDP's; a tree takes unused parameters as they are",
                "sync_batchnorm": self.sync_batchnorm and "makes statistics depend on the number of ranks",
            }
            for key, reason in reasons.items():
                if reason:
                    raise ValueError(f"parallel.{key} {reason}: leave it out with parallel.reduction=tree")
        return self

    @model_validator(mode="after")
    def _a_static_graph_is_known(self) -> "ParallelConfig":
        if self.static_graph and self.find_unused_parameters:
            raise ValueError(
                "parallel.static_graph says that all parameters are used, find_unused_parameters looks: "
                "set one"
            )
        return self


class AnomalyConfig(Section):
    """What happens when a step's numbers are bad."""

    nonfinite: Literal["stop", "skip", "rollback", "off"] = Field(
        "stop",
        description="a loss or gradient that isn't finite; skip: its update is not made; rollback: go on "
        "from the checkpoint before it, without its samples",
    )
    spike: Literal["off", "stop", "rollback"] = Field("off", description="the same for a loss that leaps")
    spike_deviations: float = Field(
        10.0,
        gt=0,
        description="a leap: robust standard deviations above the median of the losses before",
    )
    spike_history: int = Field(100, ge=10, le=10_000, description="how many earlier losses that median is of")
    most: int = Field(20, ge=1, description="anomalies of a run, after which it stops in any case")


class LogConfig(Section):
    """What is logged."""

    every: int = Field(50, ge=1, description="steps between two rows of metrics")
    to: tuple[Literal["jsonl", "csv", "tensorboard"], ...] = Field(
        ("jsonl", "tensorboard"), description="what the run folder holds of them, besides the console"
    )
    price_per_hour: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="of the run's machines, in any currency: the summary says its cost",
    )
    tracemalloc: bool = Field(
        False, description="record Python's allocations, so that a leak is named with its line; slow"
    )
    fingerprints: bool = Field(
        True, description="checksums.jsonl: a fingerprint of every tensor with each row, for trainer verify"
    )


class CheckpointConfig(Section):
    """When what a run has learned is made durable. None of this changes what it learns."""

    every: int = Field(0, ge=0, description="steps between two checkpoints; 0: only by time")
    minutes: float = Field(10.0, ge=0, description="minutes between two checkpoints; 0: only by steps")
    keep: int = Field(2, ge=1, le=1000, description="how many of the newest are kept")
    best: bool = Field(True, description="keep the one with the best evaluation, too")
