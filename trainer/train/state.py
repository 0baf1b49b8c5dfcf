"""State that a run changes, and its part in a checkpoint.

Position and randomness are arithmetic (seed, epoch, step), so this is all there is to keep: weights and
buffers, the optimizer's state, the average, the scaler, the count of updates, the sum of losses since the
last row of metrics, and a few counters. What doesn't change is beside it, in `Run`.
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
from trainer.data.corrupt import Quarantine
from trainer.data.joined import EvaluationLoader
from trainer.data.loader import Loader
from trainer.data.sampling.plan import Plan, Share
from trainer.distributed.parallel import World
from trainer.distributed.sharding import Rows, own_part, own_rows, parameter_of, weights, whole_shapes
from trainer.models.batchnorm import StepStatistics
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
    """All that a checkpoint has to bring back. Who changes it is said where it isn't `train_step`.

    Attributes:
        model: The bare model; its parameters and buffers.
        optimizer: Fused; or the task's own.
        lr: Learning rate, and the count of updates, on the device; or on the host, if the task's own sets it.
        scaler: fp16's loss scaler, or None.
        average: Moving average of the weights, or None.
        statistics: BatchNorm's, and other buffers that a forward pass changes.
        loss: float64 (): sum of this rank's losses since the last row of metrics, each divided by its step's
            items; with a tree those of all ranks. float64 (n,) if the task has several: see `Run.losses`.
        norm: float (): gradient norm of the last step, before clipping.
        step: Steps done; by the loop.
        logged: Steps, seconds and samples at the last row of metrics; by the `MetricLogger`, in place.
        metrics: Of the last evaluation; like the next two by `evaluate_run`.
        best: The best evaluation's score (the larger, the better), and its step.
        no_better: Evaluations since the best one.
        history: Losses of the last steps that spikes are compared with; by the `AnomalyDetector`, in place.
        rows: Which rows of all that are this rank's, if the model is sharded; or None.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr: LRScheduler | HostSchedule
    scaler: GradScaler | None
    average: WeightAverage | None
    statistics: StepStatistics
    loss: torch.Tensor
    norm: torch.Tensor
    step: int = 0
    logged: Logged = field(default_factory=Logged)
    metrics: dict[str, float] = field(default_factory=dict)
    best: tuple[float, int] | None = None
    no_better: int = 0
    history: list[float] = field(default_factory=list)
    rows: Rows | None = None


class EvaluationSet(NamedTuple):
    """An additional evaluation set.

    Attributes:
        name: In the recipe.
        loader: Loads the batches of `share`.
        share: This rank's part of it.
    """

    name: str
    loader: EvaluationLoader
    share: Share


@dataclass(frozen=True)
class Run:
    """A run on this rank: its state, and what trains it, which stays the same objects for a whole attempt.

    Attributes:
        state: What changes from step to step, and a checkpoint keeps.
        recipe: The configuration.
        task: Gives model, loss and metrics.
        world: The ranks.
        share: This rank's part of the plan.
        replica: Gives the loss of a batch by the model as it is called: compiled, or within DDP.
        gradients: Of the trained parameters.
        reduction: Makes one gradient of the micro-batches of all ranks.
        precision: Backward pass and update, with or without a loss scale.
        items: What losses are divided by.
        recent: Loss and gradient norm of the last steps, for anomaly detection; or None.
        nonfinite: Looks for the first module that gives no finite numbers, or None.
        generators: Random generators that a forward pass may draw from.
        first_key: Of this rank's first micro-batch in step 0.
        loader: Loads the batches of `share`.
        evaluation_loader: Loads those of `evaluation_share`.
        evaluation_share: This rank's part of the evaluation.
        evaluation_sets: The others that are measured on.
        compiled: Whether torch.compile is in use.
        losses: What rows call the task's losses where it has several, and what it watches.
        notes: Lines for the user.
        quarantines: Of each data set: samples that were replaced.
        plan: Order of the samples.
        steps: Of the run.
        max_grad_norm: Largest gradient norm; 0: no clipping.
        micro_batches: Of a step, over all ranks.
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
    generators: tuple[torch.Generator, ...]
    first_key: int
    loader: Loader
    evaluation_loader: EvaluationLoader
    evaluation_share: Share
    compiled: bool
    notes: tuple[str, ...]
    losses: tuple[str, ...] = ()
    evaluation_sets: tuple[EvaluationSet, ...] = ()
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    # Looked up in every step, so not through three others.
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
        """Ends the loaders' workers."""
        self.loader.close()
        self.evaluation_loader.close()
        for one in self.evaluation_sets:
            one.loader.close()


def tensors_of(state: TrainState) -> Tensors:
    """The tensors of a run where they are, uncopied: `model`, `optimizer` and, if there is one, `ema`.

    Of a sharded run this rank's rows.
    """
    model = {name: own_rows(tensor) for name, tensor in state.model.state_dict().items()}
    tensors = {"model": model, "optimizer": dict(_optimizer_tensors(state))}
    if state.average is not None:
        tensors["optimizer"]["ema/moved_at"] = state.average.moved_at
        tensors["ema"] = state.average.tensors
    return tensors


def numbers_of(state: TrainState, losses: list[Any]) -> dict[str, Any]:
    """Returns the rest of the state, for a checkpoint's JSON; `losses` from `Reduction.gather_losses`."""
    return {
        "row": state.logged.step,
        "losses": [[*map(_word, one)] if isinstance(one, list) else _word(one) for one in losses],
        "seconds": state.logged.seconds,
        "samples": state.logged.samples,
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
    """Puts a checkpoint into a run.

    Args:
        saved: Its tensors.
        numbers: Its JSON; keys besides those of `numbers_of` are for people.

    Raises:
        KeyError: If a part is missing.
        ValueError: With the first thing that is wrong with it; no tensor has been changed then.
    """
    known, state = _read_numbers(step, numbers), run.state
    rows = [one if isinstance(one, list) else [one] for one in known.losses]
    if {len(row) for row in rows} != {state.loss.numel()}:
        raise ValueError("state.json: losses: it is of a task with others")
    if isinstance(state.lr, HostSchedule) and known.own is None:
        raise ValueError("state.json: own: it holds nothing of the task's own optimizer or scheduler")
    load_tensors(state, step, own_tensors(state, saved), known.own)
    losses = [run.reduction.own_loss([float(loss) for loss in each]) for each in zip(*rows, strict=True)]
    state.loss.copy_(torch.tensor(losses, dtype=torch.float64).view(state.loss.shape))
    state.step, state.logged = step, Logged(known.row, known.seconds, known.samples, _rows_of(known))
    state.metrics = {n: math.nan if metric is None else metric for n, metric in known.metrics.items()}
    state.best, state.no_better, state.history = known.best, known.no_better, known.history
    if state.average is not None:
        state.average.before = known.averaged_before


def whole_model(state: TrainState) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model, whole: of a sharded one on rank 0; collective."""
    model = {name: own_rows(tensor) for name, tensor in state.model.state_dict().items()}
    return gather_tensors(state, "model", model)


def gather_tensors(
    state: TrainState, kind: str, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Some of `tensors_of`, whole: what is sharded on rank 0, in the host's memory; collective."""
    shapes, whole = shapes_of(state, kind, tensors), dict[str, torch.Tensor]()
    for name, own in tensors.items():
        if state.rows is None or name not in shapes:
            whole[name] = own
        elif (gathered := state.rows.gather(own, shapes[name])) is not None:
            whole[name] = gathered
    return whole


def shapes_of(state: TrainState, kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    """The whole shapes of those of `tensors_of` that are sharded, by name."""
    if state.rows is None:
        return {}
    shapes = whole_shapes(state.model)
    found = {name: shapes.get(parameter_of(kind, name)) for name in tensors}
    # A count of steps belongs to a parameter, but has no rows.
    return {
        name: shape
        for name, shape in found.items()
        if shape is not None and tensors[name].shape == state.rows.shape_of(shape)
    }


def own_tensors(
    state: TrainState, saved: Mapping[str, Mapping[str, torch.Tensor]]
) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Returns this rank's part of a checkpoint's tensors: all, or rows of them.

    Raises:
        ValueError: If one has another shape than in the model.
    """
    return saved if state.rows is None else own_part(state.rows, whole_shapes(state.model), saved)


def load_tensors(
    state: TrainState, step: int, saved: Mapping[str, Mapping[str, torch.Tensor]], own: Any = None
) -> None:
    """Puts saved tensors into a run, in place, each with the strides and on the device of its target.

    Args:
        state: Of the run, as it was built.
        saved: As `tensors_of` gave them, with any strides.
        own: What `numbers_of` gave of the task's own optimizer and scheduler; None: they begin anew.

    Raises:
        ValueError: If names, shapes or types aren't those of this run; no tensor has been changed then, but
            in an optimizer of the task's own.
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
    # JSON has no word for what isn't finite, and a sum of losses must come back as it was.
    losses: list[_Loss | list[_Loss]] = Field(min_length=1)
    seconds: float = Field(ge=0)
    samples: int = Field(ge=0, lt=1 << 63)
    explained: dict[str, float | int | str] = {}
    metrics: dict[str, float | None]
    best: Annotated[tuple[float, int], Field(strict=False)] | None
    no_better: int = Field(0, ge=0)
    history: list[float] = []
    averaged_before: int = Field(0, ge=0, lt=1 << 53)
    own: Any = None


def _rows_of(known: _Numbers) -> list[Row]:
    return [known.explained] if known.explained else []


def _read_numbers(step: int, numbers: Mapping[str, Any]) -> _Numbers:
    try:
        known = _Numbers.model_validate(dict(numbers))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(f"state.json: {where}: {problem['msg']}") from error
    if known.row > step or (known.best and not 0 <= known.best[1] <= step):
        raise ValueError(f"state.json: it is of step {step} and speaks of later ones")
    return known


def fitting(state: TrainState, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of another run's optimizer that fit this one, by checkpoint names; no counts."""
    parameters = {name for name, parameter in state.model.named_parameters() if parameter.requires_grad}
    places = dict(_optimizer_tensors(state))
    lazy = _ADAMW if isinstance(state.optimizer, torch.optim.AdamW) else ()  # makes its own at the first step
    if isinstance(state.lr, HostSchedule):  # begins anew: what it keeps is a whole, not tensors alone
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
    # torch makes these two when the first loss is scaled, and has no public name for them on the device.
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(state.loss.device)
    value: torch.Tensor = getattr(scaler, name)
    return value


def _make_optimizer_state(state: TrainState, saved: Mapping[str, torch.Tensor]) -> None:
    """Makes the state that torch's AdamW would make at its first step, so that there is a place for it."""
    parameters = weights(state.model)
    missing = []
    for key, value in saved.items():
        name, slash, slot = key.rpartition("/")
        if slash and name in parameters and slot not in state.optimizer.state.get(parameters[name], {}):
            # The other optimizers here have theirs from the beginning.
            if not isinstance(state.optimizer, torch.optim.AdamW) or slot not in _ADAMW:
                raise ValueError(f"optimizer: {key} isn't what {type(state.optimizer).__name__} keeps")
            missing.append((parameters[name], slot, value))
    for parameter, slot, value in missing:
        like = parameter if value.shape == parameter.shape else value
        made = torch.zeros_like(like, dtype=value.dtype, device=parameter.device, requires_grad=False)
        state.optimizer.state[parameter][slot] = made
