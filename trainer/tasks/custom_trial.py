"""The trial of a custom task: each of its methods on a few samples, on the CPU, before training."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from trainer.data.batch import Batch
from trainer.data.dataset import NUM_ITEMS, spread
from trainer.data.items import HostGenerators, draws_alone, state_kept
from trainer.data.loader import is_field_name
from trainer.errors import BadInputError
from trainer.models.buffers import few
from trainer.models.modes import begin_training, in_evaluation_mode
from trainer.observe.console import warn
from trainer.observe.rows import why_no_metric
from trainer.optim.own import HostSchedule
from trainer.rng import Ints
from trainer.tasks.bytecode import COMPILER
from trainer.tasks.own_methods import OwnMethods, len_of
from trainer.tasks.trial import (
    Read,
    Snapshot,
    beside_others,
    memory_of,
    moving,
    of_halves,
    outside_of_checkpoint,
    resumes_alike,
    size_of_weights,
    snapshot,
)
from trainer.tasks.values import OLD_SUM, Values, describe_value

_TRIED = 4  # samples
_SUMMARIZED = 32  # samples for a trial of `summarize`
_NO_VALUES = "without values in evaluation mode: whether it compares samples wasn't tried"


def try_updates(task: OwnMethods, make: Callable[[nn.Module], HostSchedule]) -> None:
    """Tries the user's optimizer and scheduler on a few samples, on the CPU, with a save and a load between.

    Args:
        make: Creates both for a model.

    Raises:
        BadInputError: If they can't be called, or a checkpoint can't hold or restore their state.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = task.model()
        batch = _training_batch(task)

        made = list[HostSchedule]()

        def make_another() -> HostSchedule:
            made.append(make(model))
            if made[0].optimizer is made[-1].optimizer and len(made) > 1:
                raise BadInputError(
                    f"{task._source}: optimizer gave the same one twice: it keeps learning rates and moments "
                    "of an earlier run; make a new one each time"
                )
            return made[-1]

        def update(rates: HostSchedule) -> None:
            model.zero_grad(set_to_none=True)
            task.loss(model, batch).backward()
            task._call("optimizer", rates.optimizer.step)
            task._call("scheduler", rates.advance)

        try:
            alike = resumes_alike(model, make_another, update)
        except ValueError as error:
            raise BadInputError(
                f"{task._source}: what optimizer or scheduler keep can't be put into a checkpoint "
                f"({error}); keep tensors, numbers, words, lists and dicts"
            ) from error
    if not alike:
        raise BadInputError(
            f"{task._source}: the second update differs after state_dict() and load_state_dict() of "
            "optimizer and scheduler: a resumed run would end with other weights; keep all that they "
            "need in param_groups and state"
        )


def _training_batch(task: OwnMethods) -> Batch:
    count = min(_TRIED, len(task.train_data))
    return few_samples(task, np.arange(max(2, count)) % count)  # BatchNorm needs two samples


def try_task(task: OwnMethods) -> dict[str, str]:
    """Tries every method on a few samples, on the CPU, before training.

    Returns:
        The first loss and the initial weights, each as one number, for comparison with an earlier trial;
        the environment ("environment"), in which they are equal up to rounding; and, where there is something
        to tell of them, "values" and "means" of the loss.

    Raises:
        BadInputError: Naming the method that is wrong, and the result that it should give.
    """
    for what, data in (("training", task.train_data), ("evaluation", task.evaluation_data)):
        if odd := [name for name in data.fields if not is_field_name(name)]:
            raise task._wrong("data", f"a field {odd[0]!r:.80} of the {what} data; its name is a text")
    with torch.random.fork_rng(devices=[]):
        with state_kept():
            memory = memory_of(task.model())  # nothing holds that model, so there is one at a time
        torch.default_generator.manual_seed(0)
        model = task.model()
        weights = size_of_weights(model)
        begin_training(model)
        _reject_shared(task, model, memory.shared(model))
        first = snapshot(model)
        told = _try_loss(task, model)
        with in_evaluation_mode(model):
            before = snapshot(model)
            _try_measure(task, model)
        changed = before.changed(model)
        _reject_new_tensors(task, first, model)
        loss = _try_state(task, model)
        _reject_new_tensors(task, first, model)
    if changed:
        warn(
            f"{task._source}: measure changes the model's {few(changed)}, in evaluation mode: what the "
            "training changes, too, is put back after it, all else stays so, on each rank for itself; "
            "change them only `if task.training`"
        )
    try:
        json.dumps(dict(task.describe()), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"{task._source}: describe gave what JSON can't hold ({error})") from error
    environment = f"{COMPILER}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    return {"environment": environment, "initial weights": weights, "first loss": f"{loss:.9g}", **told}


def initial_weights(task: OwnMethods) -> str:
    """Returns the initial weights of another model as one number, as `try_task` does."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return size_of_weights(task.model())


def _reject_shared(task: OwnMethods, model: nn.Module, shared: Mapping[str, torch.Tensor]) -> None:
    """Rejects tensors that a second model has in common with the first and that a training changes."""
    if not shared:
        return
    trained = [name for name, tensor in shared.items() if tensor.requires_grad]

    def forward() -> None:
        batch = _training_batch(task)
        with _dtypes_explained(model, batch):
            task._call("loss", task.given_loss, model, batch)

    if changes := trained or moving(shared, forward):
        raise BadInputError(
            f"{task._source}: model gave the same {few(changes)} twice, and training changes that: a second "
            "run, such as the next fold, would begin with the first one's values; give a new one each time, "
            "for example copy.deepcopy(…) of what you keep (what has requires_grad_(False), and no forward "
            "pass changes, may be shared)"
        )


def _reject_new_tensors(task: OwnMethods, first: Snapshot, model: nn.Module) -> None:
    if name := first.added_or_removed(model):
        raise BadInputError(
            f"{task._source}: a forward pass makes the model's '{name}', or takes it away, of which "
            "optimizer and checkpoints know nothing: let model() make it; what can be computed again may "
            "be registered with persistent=False"
        )


def _try_loss(task: OwnMethods, model: nn.Module) -> dict[str, str]:
    """Tries the loss in training mode, and its values in evaluation mode; returns what is to be told."""
    batch = _training_batch(task)
    with _dtypes_explained(model, batch):
        given = task.read_loss(task._call("loss", task.given_loss, model, batch), len_of(batch))
    for name, one in zip(task.losses or ("",), given, strict=True):
        if not (one.values.is_floating_point() or name in task.watched):
            raise task._wrong("loss", f"{_called(name)}{describe_value(one.values)}")
        if one.counts is not None and bool((one.counts < 0).any()):
            raise task._wrong("loss", f"{_called(name)}values with counts below 0")
    trained = given[: len(given) - len(task.watched)]
    if any(one.counts is not None and one.counts.requires_grad for one in trained):
        raise BadInputError(
            f"{task._source}: loss gave counts that need a gradient, and the sum of the values is divided by "
            "theirs as by a number: detach them, or put what they learn from into the values"
        )
    if not any(one.values.requires_grad for one in trained):
        raise task._wrong("loss", "one without a gradient (is it detached, or under no_grad?)")

    def losses(samples: Ints, seed: int) -> dict[str, Values]:
        torch.default_generator.manual_seed(seed)
        # With gradients enabled: a loss may compute gradients itself.
        values = task.read_loss(task.given_loss(model, few_samples(task, samples)), len(samples))
        return dict(zip(task.losses or ("loss",), values, strict=True))

    samples = np.arange(min(_TRIED, len(task.train_data)))
    with in_evaluation_mode(model):
        try:
            told = _try_values(task, losses, samples)
        except Exception:  # a detector gives boxes in evaluation mode
            told = {"values": _NO_VALUES}
    if task.mean:
        with nullcontext() if told.get("values") == _NO_VALUES else in_evaluation_mode(model):
            told |= _try_means(task, losses, samples)
    return told


def _try_values(task: OwnMethods, losses: Read, samples: Ints) -> dict[str, str]:
    """Warns of values that depend on which samples are beside theirs; tells which weren't tried."""
    draws, compares = beside_others(losses, samples)
    if compares:
        warn(
            f"{task._source}: loss compares the samples of a micro-batch ({', '.join(compares)}): what a "
            "sample gives depends on those beside it, and so on data.micro_batch_size"
        )
    why = f"random ({', '.join(draws)}): whether it compares the samples of a micro-batch wasn't tried"
    return {"values": why} if draws else {}


def _try_means(task: OwnMethods, losses: Read, samples: Ints) -> dict[str, str]:
    """Rejects sums among the means; tells whether the mean of a step depends on its micro-batches."""
    try:
        found = of_halves(losses, samples, lambda some: few_samples(task, some).num_items)
    except Exception:  # BatchNorm in training mode has to have two samples
        return {"means": "a mean whose dependence on the micro-batch couldn't be tried"}
    if sums := [name for name, why in found.items() if why is None]:
        raise BadInputError(
            f'{task._source}: loss gave a sum ({", ".join(sums)}), and the class says reduction = "mean": it '
            f"is twice as much for the samples twice; {OLD_SUM}"
        )
    return {"means": ", ".join(f"{name} {why}" for name, why in found.items())} if found else {}


def _try_measure(task: OwnMethods, model: nn.Module) -> None:
    data, summarizes = task.evaluation_data, hasattr(task, "summarize")
    chosen = spread(len(data), _SUMMARIZED if summarizes else _TRIED)
    measured = _measured(task, model, chosen)
    if not measured:
        raise task._wrong("measure", "nothing")
    _try_rows(task, model, measured)
    metrics = list(measured)
    if summarizes:
        # As many rows as in a run: `summarize` may compare them with facts of the whole set.
        times = -(-len(data) // len(chosen))

        def every(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([rows] * times)[: len(data)]  # an index has no kernel for unsigned integers

        values = {
            name: Values(every(one), None if counts is None else every(counts)).rows()
            for name, (one, counts) in measured.items()
        }
        try:
            metrics = list(task._summarize(values))
        except BadInputError as error:
            # Metrics raise ValueError for a class that is absent from these few samples.
            if not isinstance(error.__cause__, ValueError) or len(chosen) == len(data):
                raise
            warn(f"{error} (tried on {len(chosen)} of {len(data)} samples)")
            return
        for name in metrics:
            if why := why_no_metric(name):
                raise BadInputError(f"{task._source}: summarize gave {name!r:.80}, which {why}")
    if task.metric not in metrics:
        by = "summarize" if summarizes else "measure"
        raise BadInputError(
            f"{task._source}: metric is '{task.metric}', which {by} doesn't give (it gives "
            f"{', '.join(metrics)}); name one of these"
        )


def _measured(task: OwnMethods, model: nn.Module, samples: Ints) -> dict[str, Values]:
    """Calls `measure` on some samples and checks each result; returns them by name."""
    batch = few_samples(task, samples, evaluation=True)
    try:
        with torch.no_grad(), _dtypes_explained(model, batch):
            given = task._call("measure", task.given_measure, model, batch)
    except BadInputError as error:
        if "not require grad" not in str(error):
            raise
        hint = "gradients are off in measure: put what takes them into `with torch.enable_grad():`"
        raise BadInputError(f"{error}; {hint}") from error.__cause__
    return task.read_measured(given, len(samples))


def _try_rows(task: OwnMethods, model: nn.Module, measured: Mapping[str, Values]) -> None:
    """Rejects rows that differ between batches, and warns of values that depend on those beside them."""

    def figures(samples: Ints, seed: int) -> dict[str, Values]:
        torch.default_generator.manual_seed(seed)
        found = _measured(task, model, samples)
        for name, one in measured.items() if hasattr(task, "summarize") else ():
            value, other = one.values, found[name].values if name in found else None
            if other is None or other.shape[1:] != value.shape[1:] or other.dtype != value.dtype:
                raise task._wrong(
                    "measure",
                    f"rows '{name}' as {describe_value(value)} of one batch and as "
                    f"{describe_value(other)} of another",
                )
        return found

    _, compares = beside_others(figures, spread(len(task.evaluation_data), _TRIED))
    for name in compares:
        if name != "loss":  # which may compare the samples of a batch, as that of the training
            warn(
                f"{task._source}: measure gives '{name}', in which a sample's value depends on those beside "
                "it, and so on data.eval_batch_size; give values, of which summarize makes a figure of all"
            )


def _try_state(task: OwnMethods, model: nn.Module) -> float:
    """Checks that checkpoints hold all state; returns the first loss in training, on one thread."""
    batch, losses = _training_batch(task), list[torch.Tensor]()

    def loss() -> torch.Tensor:
        if draws_alone():  # then a run keys them
            HostGenerators().manual_seed(torch.initial_seed())
        before = HostGenerators()
        losses.append(task.loss(model, batch))
        task.draws_on_host |= before.moved()
        return losses[-1]

    with _dtypes_explained(model, batch), state_kept():
        outside = task._call("loss", outside_of_checkpoint, model, loss, task._own)
    if outside.buffers:
        raise BadInputError(
            f"{task._source}: the model's buffer '{outside.buffers[0]}' is registered with "
            "persistent=False and changes in training: no checkpoint holds it; leave persistent=False out"
        )
    names = ", ".join(outside.attributes[:_TRIED])
    if outside.differs:
        changes = f" ({names} changes each time)" if names else ""
        raise BadInputError(
            f"{task._source}: in training {outside.differs} differs for the same samples, weights, "
            f"buffers and random numbers{changes}: a resumed run would end with other weights; keep what "
            "changes from step to step in a buffer (task.register_buffer), and draw random numbers from "
            "torch's default generator (numpy's and Python's are keyed only where no other thread lives)"
        )
    if names:
        warn(
            f"{task._source}: {names} changes with each forward pass, and no checkpoint holds it: if the "
            "training depends on it, make it a buffer (task.register_buffer), or a part of the model"
        )
    rows = [n for n, one in model.named_modules() if getattr(one, "scale_grad_by_freq", False)]
    if odd := outside.disproportionate + [f"{name}.weight" for name in rows]:
        warn(
            f"{task._source}: the gradient of {few(odd)} isn't proportional to the loss (a hook or Function "
            "that clips, say, or scale_grad_by_freq): the training depends on data.micro_batch_size, the "
            "number of ranks and, with fp16, the loss's scale; clip by optim.max_grad_norm, or in the step "
            "of an optimizer of your own"
        )
    task.sparse = tuple(outside.sparse)
    return float(losses[0].detach())


@contextlib.contextmanager
def _dtypes_explained(model: nn.Module, batch: Batch) -> Iterator[None]:
    """A context that adds to an error the array whose dtype isn't that of the weights."""
    try:
        yield
    except BadInputError as error:
        weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        for name, value in batch.fields.items():
            if weights and value.is_floating_point() and value.dtype != weights:
                given, wanted = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, weights))
                how = f"give it as .astype(np.{wanted})" if hasattr(np, wanted) else "cast it in loss"
                raise BadInputError(
                    f"{error}; data gave '{name}' as {given} and the model's weights are {wanted}: {how}"
                ) from error.__cause__
        raise


def few_samples(task: OwnMethods, samples: Ints, evaluation: bool = False) -> Batch:
    """Reads samples of a task into a batch, on the CPU, with 0.5 for each uniform random number."""
    data = task.evaluation_data if evaluation else task.train_data
    out = {n: np.zeros((len(samples), *f.shape), f.dtype) for n, f in data.fields.items()}
    numbers = None if evaluation else np.full((len(samples), max(1, data.uniforms)), 0.5, np.float32)
    task._call("data", data.read, samples, numbers, MappingProxyType(out))
    uniforms = 0 if evaluation else data.uniforms + task.uniforms
    uniform = torch.full((len(samples), uniforms), 0.5) if uniforms else None
    fields = {name: torch.from_numpy(array) for name, array in out.items()}
    num_items = int(out[NUM_ITEMS].sum()) if NUM_ITEMS in out else data.num_items * len(samples)
    return Batch(fields, None, uniform, num_items)


def _called(name: str) -> str:
    return f"'{name}' as " if name else ""
