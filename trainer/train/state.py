"""State of a run, and its form in a checkpoint.

Position and randomness follow from seed, epoch and step. So a checkpoint has to keep only the weights and
buffers, the optimizer's state, the average, the loss scaler, the number of updates, the sum of losses since
the last metrics record, and a few counters. `Run` holds the objects that stay the same from step to step.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn
from torch.amp.grad_scaler import GradScaler

from trainer.config.recipe import Recipe
from trainer.config.section import first_problem
from trainer.data.corrupt import Quarantine
from trainer.data.items import HostGenerators
from trainer.data.loader import Loader
from trainer.data.sampling.plan import Plan, Share
from trainer.distributed.parallel import World
from trainer.distributed.sharding import Rows, own_part, own_rows, parameter_of, weights, whole_shapes
from trainer.models.batchnorm import StepStatistics
from trainer.models.buffers import StillTensors
from trainer.models.nonfinite import FirstNonFinite
from trainer.models.precision import Precision
from trainer.observe.diagnosis import explained
from trainer.observe.log import Logged, Row
from trainer.observe.sinks import finite
from trainer.optim.average import WeightAverage
from trainer.optim.optimizers import LRScheduler
from trainer.optim.own import HostSchedule
from trainer.tasks import Task
from trainer.train.anomaly import RecentLosses
from trainer.train.reduction import Gradients, ItemCount, Reduction

Tensors = dict[str, dict[str, torch.Tensor]]

_ADAMW = ("step", "exp_avg", "exp_avg_sq")
_SCALER = ("_scale", "_growth_tracker")


@dataclass
class TrainState:
    """State that changes from step to step, and that a checkpoint restores.

    `train_step` changes it, except for the attributes that name another writer.

    Attributes:
        model: The bare model, with its parameters and buffers.
        optimizer: The recipe's fused optimizer, or the task's own.
        lr: Learning rate and number of updates: on the device, or on the host with a task's own scheduler.
        scaler: Loss scaler of fp16, or None.
        average: Moving average of the weights, or None.
        statistics: BatchNorm's running statistics, and other buffers that a forward pass changes.
        loss: Sum of this rank's losses since the last metrics record, each divided by its step's items:
            float64 (), or (1 + n,) if the task has several, see `Run.losses`. With a tree, of all ranks.
        norm: Gradient norm of the last step before clipping, float (); each step makes it anew.
        left_out: Number of steps since the last metrics record that anomaly.nonfinite=skip left out: their
            losses aren't in `loss`; float64 (), on the device; None with another policy.
        step: Steps done; written by the loop.
        logged: Steps, seconds and samples at the last metrics record; written by `MetricLogger`, in place.
        metrics: Metrics of the last evaluation; written by `evaluate_run`, like `best` and `no_better`.
        best: Score of the best evaluation (higher is better), and its step; None before the first.
        no_better: Number of evaluations since the best one.
        history: Losses of the last steps, to judge spikes by; written by `AnomalyDetector`, in place.
        rows: This rank's rows of a sharded model, or None.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr: LRScheduler | HostSchedule
    scaler: GradScaler | None
    average: WeightAverage | None
    statistics: StepStatistics
    loss: torch.Tensor
    norm: torch.Tensor
    left_out: torch.Tensor | None = None
    step: int = 0
    logged: Logged = field(default_factory=Logged)
    metrics: dict[str, float] = field(default_factory=dict)
    best: tuple[float, int] | None = None
    no_better: int = 0
    history: list[float] = field(default_factory=list)
    rows: Rows | None = None


class EvaluationSet(NamedTuple):
    """Additional evaluation set.

    Attributes:
        name: Its name in the recipe.
        loader: Loads the batches of `share`.
        share: This rank's part of the set.
    """

    name: str
    loader: Loader
    share: Share


@dataclass(frozen=True)
class Run:
    """Run on this rank: its state, and all that trains it, the same objects for a whole attempt.

    Attributes:
        state: State that changes from step to step, and that checkpoints keep.
        recipe: The configuration.
        task: Defines model, loss and metrics.
        world: The ranks.
        share: This rank's part of the plan.
        replica: Module whose forward pass is the loss of a batch; wrapped in DDP, its model may be compiled.
        gradients: Gradients of the trained parameters.
        reduction: Reduces the gradients of all micro-batches and ranks to one.
        precision: Number format of forward pass, backward pass and update; the loss scale.
        items: Divisor of the losses.
        recent: Loss and gradient norm of the last steps, for anomaly detection; or None.
        nonfinite: Finds the first module whose output isn't finite, or None.
        generators: Random generators that a forward pass may draw from; seeded for each micro-batch.
        still: What no forward pass is to change, where a step has several micro-batches; or None.
        host_generators: Those among them that are numpy's and Python's, or None.
        first_key: Seed of this rank's first micro-batch in step 0.
        loader: Loads the batches of `share`.
        evaluation_loader: Loads the batches of `evaluation_share`.
        evaluation_share: This rank's part of the main evaluation set.
        evaluation_sets: Additional evaluation sets.
        compiled: True if torch.compile is in use.
        losses: Names in metrics records of a task's several losses and of the values that it watches.
        notes: Lines for the user.
        quarantines: Samples that were replaced, by data set.
        plan: Order of the samples.
        steps: Number of steps of the run.
        max_grad_norm: Largest gradient norm; 0: no clipping.
        micro_batches: Micro-batches of a step, over all ranks.
        gradient_accumulation_steps: Micro-batches of a step on this rank.
    """

    state: TrainState
    recipe: Recipe
    task: Task
    world: World
    share: Share
    replica: nn.Module
    gradients: Gradients
    reduction: Reduction
    precision: Precision
    items: ItemCount
    recent: RecentLosses | None
    nonfinite: FirstNonFinite | None
    generators: tuple[torch.Generator | HostGenerators, ...]
    first_key: int
    loader: Loader
    evaluation_loader: Loader
    evaluation_share: Share
    compiled: bool
    notes: tuple[str, ...]
    losses: tuple[str, ...] = ()
    host_generators: HostGenerators | None = None
    still: StillTensors | None = None
    evaluation_sets: tuple[EvaluationSet, ...] = ()
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    # Read in every step, so not through three attributes each.
    plan: Plan = field(init=False)
    steps: int = field(init=False)
    max_grad_norm: float = field(init=False)
    micro_batches: int = field(init=False)
    gradient_accumulation_steps: int = field(init=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("plan", self.share.plan),
            ("steps", self.share.plan.steps),
            ("max_grad_norm", self.recipe.optim.max_grad_norm),
            ("micro_batches", self.share.plan.micro_batches),
            ("gradient_accumulation_steps", self.share.gradient_accumulation_steps),
        ):
            object.__setattr__(self, name, value)

    def close(self) -> None:
        """Ends the loader workers."""
        if self.host_generators is not None:
            self.host_generators.close()
        self.loader.close()
        self.evaluation_loader.close()
        for one in self.evaluation_sets:
            one.loader.close()


def tensors_of(state: TrainState) -> Tensors:
    """Returns the tensors of a run, uncopied: `model`, `optimizer` and, with an average, `ema`.

    A sharded run gives this rank's rows.
    """
    model = {name: own_rows(tensor) for name, tensor in state.model.state_dict().items()}
    tensors = {"model": model, "optimizer": dict(_optimizer_tensors(state))}
    if state.average is not None:
        tensors["optimizer"]["ema/moved_at"] = state.average.moved_at
        tensors["ema"] = state.average.tensors
    return tensors


def numbers_of(state: TrainState, losses: list[Any]) -> dict[str, Any]:
    """Returns the state other than tensors, for a checkpoint's JSON.

    Args:
        state: The run's state.
        losses: From `Reduction.gather_losses`, as lists.
    """
    return {
        "row": state.logged.step,
        "left_out": 0 if state.left_out is None else int(state.left_out),
        "losses": [[*map(_word, one)] if isinstance(one, list) else _word(one) for one in losses],
        "seconds": state.logged.seconds,
        "samples": state.logged.samples,
        "tokens": state.logged.tokens,
        "explained": explained(state.logged.rows),
        "metrics": finite(state.metrics),
        "best": list(state.best) if state.best else None,
        "no_better": state.no_better,
        "history": list(state.history),
        "averaged_before": 0 if state.average is None else state.average.before,
        "own": state.lr.kept()[1] if isinstance(state.lr, HostSchedule) else None,
    }


def _word(loss: float) -> float | str:
    return loss if math.isfinite(loss) else str(loss)


def load_state(run: Run, step: int, saved: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
    """Loads a checkpoint into a run, in place.

    Args:
        run: A run as it was built.
        step: The checkpoint's step.
        saved: Its tensors.
        numbers: Its JSON; only the keys of `numbers_of` are read.

    Raises:
        KeyError: If a part is missing.
        ValueError: If it doesn't fit the run, naming the first fault; no tensor has been changed then.
    """
    known, state = read_numbers(step, numbers), run.state
    rows = [one if isinstance(one, list) else [one] for one in known.losses]
    if {len(row) for row in rows} != {state.loss.numel()}:
        raise ValueError("state.json: losses: it is of a task with others")
    if isinstance(state.lr, HostSchedule) and known.own is None:
        raise ValueError("state.json: own: it holds nothing of the task's own optimizer or scheduler")
    load_tensors(state, step, own_tensors(state, saved), known.own)
    losses = [run.reduction.own_loss([float(loss) for loss in each]) for each in zip(*rows, strict=True)]
    state.loss.copy_(torch.tensor(losses, dtype=torch.float64).view(state.loss.shape))
    if state.left_out is not None:
        state.left_out.fill_(known.left_out)
    state.step = step
    timed: list[Row] = [known.explained] if known.explained else []
    state.logged = Logged(known.row, known.seconds, known.samples, timed, known.tokens)
    state.metrics = {n: math.nan if metric is None else metric for n, metric in known.metrics.items()}
    state.best, state.no_better, state.history = known.best, known.no_better, known.history
    if state.average is not None:
        state.average.before = known.averaged_before


def whole_model(state: TrainState) -> dict[str, torch.Tensor]:
    """Returns the unsharded parameters and buffers of a model, if sharded on rank 0 only; collective."""
    model = {name: own_rows(tensor) for name, tensor in state.model.state_dict().items()}
    return gather_tensors(state, "model", model)


def gather_tensors(
    state: TrainState, kind: str, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns tensors of `tensors_of`, unsharded: sharded ones on rank 0 only, on the CPU; collective."""
    shapes, whole = shapes_of(state, kind, tensors), dict[str, torch.Tensor]()
    for name, own in tensors.items():
        if state.rows is None or name not in shapes:
            whole[name] = own
        elif (gathered := state.rows.gather(own, shapes[name])) is not None:
            whole[name] = gathered
    return whole


def shapes_of(state: TrainState, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    """Returns the unsharded shapes of the sharded tensors of `tensors_of`, by name."""
    if state.rows is None:
        return {}
    shapes = whole_shapes(state.model)
    found = {name: shapes.get(parameter_of(kind, name)) for name in tensors}
    # An optimizer's step count belongs to a parameter, but isn't sharded.
    return {
        name: shape
        for name, shape in found.items()
        if shape is not None and tensors[name].shape == state.rows.shape_of(shape)
    }


def own_tensors(
    state: TrainState, saved: Mapping[str, Mapping[str, torch.Tensor]]
) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Returns a checkpoint's tensors as this rank needs them: this rank's rows if the model is sharded.

    Raises:
        ValueError: If a tensor has another shape than in the model.
    """
    return saved if state.rows is None else own_part(state.rows, whole_shapes(state.model), saved)


def load_tensors(
    state: TrainState, step: int, saved: Mapping[str, Mapping[str, torch.Tensor]], own: Any = None
) -> None:
    """Copies saved tensors into a run, in place; strides and devices stay those of the run.

    Args:
        state: State of a run as it was built.
        step: The checkpoint's step.
        saved: Tensors from `tensors_of`, with any strides.
        own: State of the task's own optimizer and scheduler, from `numbers_of`; None: they start without.

    Raises:
        ValueError: If names, shapes or dtypes aren't those of this run; no tensor has been changed then,
            except in a task's own optimizer.
    """
    if isinstance(state.lr, HostSchedule):
        if own is not None:
            state.lr.load(saved["optimizer"], own)
    else:
        _make_optimizer_state(state, saved["optimizer"])
    targets = tensors_of(state)
    for kind, tensors in targets.items():
        given = saved.get(kind, {})
        odd = tensors.keys() ^ given.keys()
        odd |= {name for name in tensors.keys() & given.keys() if _type(tensors[name]) != _type(given[name])}
        if odd:
            raise ValueError(f"{kind}: {sorted(odd)[0]} isn't the same in the checkpoint and in the model")
    if not 0 <= int(saved["optimizer"]["updates"]) <= step:
        raise ValueError(f"optimizer: more updates were applied than the {step} steps that were done")
    with torch.no_grad():
        for kind, tensors in targets.items():
            for name, target in tensors.items():
                target.copy_(saved[kind][name])
    if state.average is not None:
        state.average.go_on(step)
    state.lr.look_up()
    state.statistics.reload()


_Loss = float | Literal["nan", "inf", "-inf"]


class _Numbers(BaseModel):
    """`numbers_of`, as read back."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    row: int = Field(ge=0)
    left_out: int = Field(0, ge=0)
    # JSON has no NaN or infinity, and a sum of losses must be restored exactly.
    losses: list[_Loss | list[_Loss]] = Field(min_length=1)
    seconds: float = Field(ge=0)
    samples: int = Field(ge=0, lt=1 << 63)
    tokens: int | None = Field(None, ge=0, lt=1 << 63)
    explained: dict[str, float | int | str] = {}
    metrics: dict[str, float | None]
    best: Annotated[tuple[float, int], Field(strict=False)] | None
    no_better: int = Field(0, ge=0)
    history: list[float] = []
    averaged_before: int = Field(0, ge=0, lt=1 << 53)
    own: Any = None


def read_numbers(step: int, numbers: Mapping[str, Any]) -> _Numbers:
    """Reads what `numbers_of` returned, from a checkpoint of this step.

    Raises:
        ValueError: If a part is missing or malformed; names it.
    """
    try:
        known = _Numbers.model_validate(dict(numbers))
    except ValidationError as error:
        raise ValueError(f"state.json: {first_problem(error)}") from error
    if known.row > step or (known.best and not 0 <= known.best[1] <= step):
        raise ValueError(f"state.json: it is of step {step} and speaks of later ones")
    return known


def fitting(state: TrainState, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors of another run's optimizer that fit this run's, by checkpoint name; without counts."""
    parameters = {name for name, parameter in state.model.named_parameters() if parameter.requires_grad}
    places = dict(_optimizer_tensors(state))
    lazy = _ADAMW if isinstance(state.optimizer, torch.optim.AdamW) else ()  # made at the first step
    if isinstance(state.lr, HostSchedule):  # starts without: its state is more than tensors
        places, lazy = {key: tensor for key, tensor in places.items() if key.startswith("scaler/")}, ()
    found = {}
    for key, tensor in saved.items():
        name, slash, slot = key.rpartition("/")
        place = places.get(key)
        if (name in parameters and slot in lazy) or (
            slash and place is not None and _type(place) == _type(tensor)
        ):
            found[key] = tensor
    return found


def _type(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _optimizer_tensors(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state.lr, HostSchedule):
        yield from state.lr.kept()[0].items()
    else:
        names = {id(parameter): name for name, parameter in weights(state.model).items()}
        for parameter, slots in state.optimizer.state.items():
            for slot, value in slots.items():
                yield f"{names[id(parameter)]}/{slot}", value
    yield "updates", state.lr.updates
    if state.scaler is not None:
        for name in _SCALER:
            yield f"scaler/{name}", _of_scaler(state, state.scaler, name)


def _of_scaler(state: TrainState, scaler: GradScaler, name: str) -> torch.Tensor:
    # torch makes these two tensors when it scales the first loss, and has no public name for them.
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(state.loss.device)
    value: torch.Tensor = getattr(scaler, name)
    return value


def _make_optimizer_state(state: TrainState, saved: Mapping[str, torch.Tensor]) -> None:
    """Allocates the state that torch's AdamW makes at its first step, so that it can be loaded."""
    parameters = weights(state.model)
    missing = []
    for key, value in saved.items():
        name, slash, slot = key.rpartition("/")
        if slash and name in parameters and slot not in state.optimizer.state.get(parameters[name], {}):
            # The other optimizers of this package have their state from the start.
            if not isinstance(state.optimizer, torch.optim.AdamW) or slot not in _ADAMW:
                raise ValueError(f"optimizer: {key} isn't what {type(state.optimizer).__name__} keeps")
            missing.append((parameters[name], slot, value))
    for parameter, slot, value in missing:
        like = parameter if value.shape == parameter.shape else value
        made = torch.zeros_like(like, dtype=value.dtype, device=parameter.device, requires_grad=False)
        state.optimizer.state[parameter][slot] = made
