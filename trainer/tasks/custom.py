"""A custom task: a class with a few methods, in a file or in a notebook (see `trainer new`)."""

import contextlib
import inspect
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.config.beside import run_file
from trainer.config.task_file import read_source, source_hash
from trainer.data.dataset import NUM_ITEMS, ArrayDataset, Dataset, as_numbers, spread
from trainer.data.items import ArrayItems, ItemDataset, is_items
from trainer.data.loader import Batch, is_field_name
from trainer.errors import BadInputError
from trainer.host.here import from_here
from trainer.models.buffers import few
from trainer.models.modes import begin_training, in_evaluation_mode
from trainer.observe.console import warn
from trainer.observe.rows import is_name, why_no_metric
from trainer.optim.own import HostSchedule, Scheduler
from trainer.rng import Ints
from trainer.tasks.figures import as_tensor, told, why_unfit
from trainer.tasks.hints import of_class, of_data, of_error, of_updates
from trainer.tasks.trial import (
    Held,
    expanded,
    fall_short_when_doubled,
    find_no_sums,
    goes_on_alike,
    held,
    outside_of_checkpoint,
    stay_when_doubled,
)

_WANTED = {
    "data": "the samples to learn from and those to measure on: two dicts of arrays, (samples, ...) each, or "
    "two data sets with __getitem__ and __len__",
    "model": "a torch.nn.Module",
    "loss": "a float tensor of shape (): the sum over the samples of the batch; or several by name",
    "measure": "a dict of tensors by name: sums over the samples, each of shape ()",
}
_GIVEN = {
    **_WANTED,
    "summarize": "metrics by name, each a number",
    "transforms": "a function, or a list of them, that each take a training sample and give it back changed",
    "optimizer": "a torch.optim.Optimizer of the model's parameters, whose step() needs no arguments",
    "scheduler": "a scheduler of torch.optim.lr_scheduler, whose step() follows each update",
}
# What a task may have besides: methods, and plain attributes.
_METHODS = ("describe", "inputs", "predict", "collate", *(name for name in _GIVEN if name not in _WANTED))
_ATTRIBUTES = ("metric", "mode", "losses", "watched", "uniforms", "RECIPE")
_OF_DATASETS = ("fields", "num_items", "uniforms", "arrays", "in_process", "fingerprint", "read", "__len__")
_LETTERS = 160  # of what somebody gave, in a message
_TRIED = 4  # samples
_SLIP = 0.8  # how much alike names are of which one is a slip of the other
_SUMMARIZED = 32  # samples whose rows `summarize` is tried on


class CustomTask:
    """A task from somebody's class.

    Batches come to `loss` and `measure` without padding, so that these needn't know of weights.

    Args:
        own: Has the methods data, model, loss and measure, and may have describe, inputs, summarize, predict,
            collate, transforms, optimizer, scheduler, and the attributes metric (default: loss), mode ("min"
            or "max": which way the metric is better; not needed for loss and accuracy), losses (the names of
            several), watched (more names of what `loss` gives: what isn't trained) and uniforms.
        source: Where it comes from, for messages: a file, or a class of a notebook.

    Raises:
        BadInputError: If a method is missing, `data` gives something else, or nothing says which way the
            metric is better.
    """

    def __init__(self, own: Any, source: str) -> None:
        """Opens the data."""
        self._own, self._source = own, source
        self.source_hash = ""
        self.hooks: Any = ()
        for name, what in _WANTED.items():
            if not callable(getattr(own, name, None)):
                raise BadInputError(f"{source}: the method {name} is missing; it gives {what}{of_class(own)}")
        _check_names(own, source)
        self.metric: str = getattr(own, "metric", "loss")
        self.lower_is_better: bool = _lower_is_better(own, self.metric, source)
        self.uniforms: int = getattr(own, "uniforms", 0)
        self.watched = _names(own, "watched", source)
        trained = _names(own, "losses", source) or ("loss",) * bool(self.watched)
        if both := set(trained) & set(self.watched):
            raise BadInputError(
                f"{source}: {both.pop()!r} is in losses and in watched; what is watched isn't trained"
            )
        self.losses = (*trained, *self.watched)
        parts = self._call("data", own.data)
        self._refuse(of_data(parts))
        if not isinstance(parts, tuple | list) or len(parts) != 2:
            raise self._wrong("data", f"{type(parts).__name__}")
        transforms = self._transforms()
        self.train_data = self._call("data", self._dataset, parts[0], "training", transforms)
        self.evaluation_data = self._call("data", self._dataset, parts[1], "evaluation", ())
        for name in ("inputs", "predict"):
            if hasattr(own, name):
                setattr(self, name, getattr(own, name))
        for name in ("summarize", "optimizer", "scheduler"):
            if hasattr(own, name):
                setattr(self, name, getattr(self, f"_{name}"))

    def describe(self) -> Mapping[str, Any]:
        """What its own `describe` says, or nothing."""
        return self._own.describe() if hasattr(self._own, "describe") else {}

    def model(self) -> nn.Module:
        """A new model."""
        model = self._call("model", self._own.model)
        if not isinstance(model, nn.Module):
            raise self._wrong("model", type(model).__name__)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The sum over the samples that aren't padding; of all losses, if there are several."""
        real, padding = _without_padding(batch, self.train_data)
        loss = self._sum(self._own.loss(model, real))
        return loss * 0 if padding else loss

    def loss_parts(self, model: nn.Module, batch: Batch) -> list[torch.Tensor]:
        """Each of several losses, in the order of `losses`, summed over the samples that aren't padding."""
        real, padding = _without_padding(batch, self.train_data)
        parts = self._parts(self._own.loss(model, real))
        parts = [
            part if part.is_floating_point() else part.float() for part in parts
        ]  # a count that is watched
        return [part * 0 for part in parts] if padding else parts

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Sums over the samples that aren't padding, and rows with zeros for those that are."""
        real, padding = _without_padding(batch, self.evaluation_data)
        measured: Mapping[str, torch.Tensor] = self._own.measure(model, real)
        if batch.weight is None or not isinstance(measured, Mapping):
            return measured
        added = len(batch.weight) - len(next(iter(real.fields.values())))
        whole = {}
        for name, given in measured.items():
            whole[name] = value = as_tensor(given)
            if not isinstance(value, torch.Tensor):
                continue
            if padding:
                whole[name] = torch.zeros_like(value)
            elif value.ndim and added:
                whole[name] = torch.cat([value, value.new_zeros((added, *value.shape[1:]))])
        return whole

    def _parts(self, given: Any) -> list[torch.Tensor]:
        if not isinstance(given, Mapping) or given.keys() != set(self.losses):
            gave = f"losses named {', '.join(map(str, given))}" if isinstance(given, Mapping) else told(given)
            raise BadInputError(
                f"{self._source}: loss gave {gave}; by the class's attributes losses and watched it gives "
                f"{', '.join(self.losses)}, all of them each time"
            )
        return [given[name] for name in self.losses]

    def _sum(self, given: Any) -> torch.Tensor:
        if not self.losses:
            return cast(torch.Tensor, given)
        first, *others = self._parts(given)[: len(self.losses) - len(self.watched)]
        return sum(others, first)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = self._call("optimizer", self._own.optimizer, model)
        self._refuse(of_updates("optimizer", optimizer))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self._wrong("optimizer", told(optimizer))
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = {id(p): name for name, p in model.named_parameters()}
        if given - names.keys():
            raise self._wrong("optimizer", "one that updates what is no parameter of the model")
        left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in given]
        if left:
            raise BadInputError(
                f"{self._source}: optimizer leaves out '{left[0]}' ({len(left)} of {len(names)} parameters); "
                "give it all that are trained, and freeze the others in model() by requires_grad_(False)"
            )
        return optimizer

    def _scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Scheduler:
        wanted = inspect.signature(self._own.scheduler).parameters
        arguments = (optimizer, steps) if "steps" in wanted else (optimizer,)
        scheduler = self._call("scheduler", self._own.scheduler, *arguments)
        self._refuse(of_updates("scheduler", scheduler))
        if missing := [n for n in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, n)]:
            raise self._wrong("scheduler", f"{told(scheduler)} without {missing[0]}")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise self._wrong("scheduler", "one of another optimizer")
        return cast(Scheduler, scheduler)

    def check_updates(self, make: Callable[[nn.Module], HostSchedule]) -> None:
        """Tries its optimizer and scheduler on a few samples, on the CPU: do they go on from what is saved?

        Args:
            make: Makes both anew, for a model.

        Raises:
            BadInputError: If they can't be called, or a checkpoint couldn't hold what they keep.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = self.model()
            batch = self._two(self.train_data)

            def update(rates: HostSchedule) -> None:
                model.zero_grad(set_to_none=True)
                self.loss(model, batch).backward()
                self._call("optimizer", rates.optimizer.step)
                self._call("scheduler", rates.advance)

            try:
                alike = goes_on_alike(model, partial(make, model), update)
            except ValueError as error:
                raise BadInputError(
                    f"{self._source}: what optimizer or scheduler keep can't be put into a checkpoint "
                    f"({error}); keep tensors, numbers, words, lists and dicts"
                ) from error
        if not alike:
            raise BadInputError(
                f"{self._source}: the second update differs after state_dict() and load_state_dict() of "
                "optimizer and scheduler: a resumed run would end with other weights; keep all that they "
                "need in param_groups and state"
            )

    def _two(self, dataset: Dataset) -> Batch:
        count = min(_TRIED, len(dataset))
        return self._few(np.arange(max(2, count)) % count)  # BatchNorm wants two samples

    def check(self) -> None:
        """Tries every method on a few samples, on the CPU, so that what is wrong is found before training.

        Raises:
            BadInputError: Naming the method and what it should give.
        """
        for what, data in (("training", self.train_data), ("evaluation", self.evaluation_data)):
            if odd := [name for name in data.fields if not is_field_name(name)]:
                raise self._wrong("data", f"a field {odd[0]!r:.80} of the {what} data; its name is a text")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = self.model()
            if name := expanded(model):
                raise BadInputError(
                    f"{self._source}: several elements of the model's '{name}' are one number in memory (it "
                    "was expanded), which nothing can update; add .clone()"
                )
            begin_training(model)
            first = held(model)
            with in_evaluation_mode(model):
                self._check_loss(model)
                before = held(model)
                self._check_measure(model)
            changed = before.changed(model)
            self._check_made(first, model)
            self._check_state(model)
            self._check_made(first, model)
        if changed:
            warn(
                f"{self._source}: measure changes the model's {few(changed)}, in evaluation mode: what the "
                "training changes, too, is put back after it, all else stays so, on each rank for itself; "
                "change them only `if self.training`"
            )
        try:
            json.dumps(dict(self.describe()), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadInputError(f"{self._source}: describe gave what JSON can't hold ({error})") from error

    def _check_made(self, first: Held, model: nn.Module) -> None:
        if name := first.made(model):
            raise BadInputError(
                f"{self._source}: a forward pass makes the model's '{name}', or takes it away, of which "
                "optimizer and checkpoints know nothing: let model() make it; what can be computed again may "
                "be registered with persistent=False"
            )

    def _check_loss(self, model: nn.Module) -> None:
        few = np.arange(min(_TRIED, len(self.train_data)))
        once, twice = self._few(few), self._few(np.tile(few, 2))
        with self._dtypes_explained(model, once):
            loss = self._call("loss", self._own.loss, model, once)
        if isinstance(loss, Mapping) and not self.losses:
            raise BadInputError(
                f"{self._source}: loss gave several; name them in the class: losses = {tuple(loss)!r}"
            )
        parts = self._parts(loss) if self.losses else [loss]
        for name, part in zip(self.losses or ("",), parts, strict=True):
            wrong = not isinstance(part, torch.Tensor) or part.shape or part.is_complex()
            if wrong or not (part.is_floating_point() or name in self.watched):
                raise self._wrong("loss", f"{_called(name)}{told(part)}")
        if not any(part.requires_grad for part in parts[: len(parts) - len(self.watched)]):
            raise self._wrong("loss", "one without a gradient (is it detached, or under no_grad?)")
        # With gradients on: a loss may take some itself.
        tried = [partial(self._values, model, b) for b in (once, twice)]
        for name, stays in zip(self.losses or ("",), stay_when_doubled(*tried), strict=True):
            if stays:
                what = f'{_called(name)}a mean (reduction="sum" instead: the trainer divides)'
                raise self._wrong("loss", what)
        for name, short in zip(self.losses or ("",), fall_short_when_doubled(*tried), strict=True):
            if short:
                warn(
                    f"{self._source}: loss gave {_called(name)}what isn't doubled by the same samples twice: "
                    "a part of it is no sum over the samples and depends on data.micro_batch_size; give a "
                    "mean of pairs, or a penalty on weights, times len(batch.fields[…])"
                )
        num_items = (self.train_data.arrays or {}).get(NUM_ITEMS)
        empty = () if num_items is None else np.flatnonzero(num_items == 0)[:_TRIED]
        if len(empty):
            value = sum(self._values(model, self._few(np.asarray(empty))))
            if not np.isfinite(value):
                raise self._wrong("loss", f"{value} for samples of 0 items, which add nothing")

    def _check_measure(self, model: nn.Module) -> None:
        data = self.evaluation_data
        chosen = spread(len(data), _SUMMARIZED if hasattr(self, "summarize") else _TRIED)
        measured = self._measured(model, chosen)
        metrics = [name for name, value in measured.items() if not value.ndim]
        rows = {name: value.cpu() for name, value in measured.items() if value.ndim}
        self._check_sums(model, metrics, rows)
        if rows:
            # As many as there will be: `summarize` may hold them against what it knows of all samples.
            again = torch.arange(len(data)) % len(chosen)
            try:
                summarized = self._summarize({name: value[again] for name, value in rows.items()})
            except BadInputError as error:
                # So metrics complain of a class that these few samples lack.
                if not isinstance(error.__cause__, ValueError) or len(chosen) == len(data):
                    raise
                warn(f"{error} (tried on {len(chosen)} of {len(data)} samples)")
                return
            for name in summarized:
                if why := why_no_metric(name):
                    raise BadInputError(f"{self._source}: summarize gave {name!r:.80}, which {why}")
            metrics += summarized
        if self.metric not in metrics:
            gives = f"neither measure nor summarize gives (they give {', '.join(metrics)})"
            if not rows:
                gives = f"measure doesn't give (it gives {', '.join(metrics)})"
            raise BadInputError(
                f"{self._source}: metric is '{self.metric}', which {gives}; name one of these"
            )

    def _measured(self, model: nn.Module, samples: Ints) -> dict[str, torch.Tensor]:
        """What `measure` gives of some samples, each figure a tensor that fits."""
        batch = self._few(samples, evaluation=True)
        try:
            with torch.no_grad(), self._dtypes_explained(model, batch):
                given = self._call("measure", self._own.measure, model, batch)
        except BadInputError as error:
            if "not require grad" not in str(error):
                raise
            hint = "gradients are off in measure: put what takes them into `with torch.enable_grad():`"
            raise BadInputError(f"{error}; {hint}") from error.__cause__
        if not isinstance(given, Mapping) or not given:
            raise self._wrong("measure", told(given))
        measured = {name: as_tensor(value) for name, value in given.items()}
        for name, value in measured.items():
            if unfit := why_unfit(name, value, len(samples)):
                raise self._wrong("measure", unfit)
            if value.ndim and not hasattr(self, "summarize"):
                raise self._wrong("measure", f"'{name}' as {told(value)}, and there is no summarize")
        return measured

    def _check_sums(self, model: nn.Module, names: Sequence[str], rows: Mapping[str, torch.Tensor]) -> None:
        """Refuses means, which would be divided twice, and rows that differ between batches."""

        def figures(samples: Ints) -> list[float]:
            found = self._measured(model, samples)
            for name, value in rows.items():
                other = found.get(name)
                if other is None or other.shape[1:] != value.shape[1:] or other.dtype != value.dtype:
                    here = told(other)
                    raise self._wrong(
                        "measure", f"rows '{name}' as {told(value)} of one batch and as {here} of another"
                    )
            return [
                float(found[name]) if name in found and not found[name].ndim else np.nan for name in names
            ]

        means, others = find_no_sums(figures, spread(len(self.evaluation_data), _TRIED))
        for name in (name for name, mean in zip(names, means, strict=True) if mean):
            raise self._wrong(
                "measure",
                f"'{name}' as a mean, or another figure of the whole batch: the same for each sample twice "
                '(give reduction="sum": the trainer divides; or rows, of which summarize makes RMSE, F1 '
                "or AUC of all samples)",
            )
        for name, side in zip(names, others, strict=True):
            if not side or (name == "loss" and side > 0):  # a loss may compare the samples of a batch
                continue
            warn(
                f"{self._source}: measure gives '{name}', which is no sum over the samples: those of two "
                "halves of a batch don't add up to it, so it depends on data.eval_batch_size; give rows, of "
                "which summarize makes it of all samples"
            )

    def _check_state(self, model: nn.Module) -> None:
        batch = self._two(self.train_data)

        def loss() -> torch.Tensor:
            return self._sum(self._own.loss(model, batch))

        with self._dtypes_explained(model, batch):
            outside = self._call("loss", outside_of_checkpoint, model, loss, self._own)
        if outside.buffers:
            raise BadInputError(
                f"{self._source}: the model's buffer '{outside.buffers[0]}' is registered with "
                "persistent=False and changes in training: no checkpoint holds it; leave persistent=False out"
            )
        names = ", ".join(outside.attributes[:_TRIED])
        if outside.differs:
            changes = f" ({names} changes each time)" if names else ""
            raise BadInputError(
                f"{self._source}: in training {outside.differs} differs for the same samples, weights, "
                f"buffers and random numbers{changes}: a resumed run would end with other weights; keep what "
                "changes from step to step in a buffer (self.register_buffer), and draw random numbers from "
                "torch's default generator"
            )
        if names:
            warn(
                f"{self._source}: {names} changes with each forward pass, and no checkpoint holds it: if the "
                "training depends on it, make it a buffer (self.register_buffer), or a part of the model"
            )

    def _summarize(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        metrics = self._call("summarize", self._own.summarize, rows)
        if not isinstance(metrics, Mapping):
            raise self._wrong("summarize", told(metrics))
        plain = {}
        for name, value in metrics.items():
            try:
                plain[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise self._wrong("summarize", f"'{name}' as {told(value)}") from None
        return plain

    def _values(self, model: nn.Module, batch: Batch) -> list[float]:
        """Of each loss."""
        given = self._call("loss", self._own.loss, model, batch)
        return [float(part.detach()) for part in (self._parts(given) if self.losses else [given])]

    @contextlib.contextmanager
    def _dtypes_explained(self, model: nn.Module, batch: Batch) -> Iterator[None]:
        """Names the array whose type isn't that of the weights, where a method fails."""
        try:
            yield
        except BadInputError as error:
            weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
            for name, value in batch.fields.items():
                if weights and value.is_floating_point() and value.dtype != weights:
                    theirs, ours = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, weights))
                    raise BadInputError(
                        f"{error}; data gave '{name}' as {theirs} and the model's weights are {ours}: "
                        f"give it as .astype(np.{ours})"
                    ) from error.__cause__
            raise

    def _few(self, samples: Ints, evaluation: bool = False) -> Batch:
        data = self.evaluation_data if evaluation else self.train_data
        out = {n: np.zeros((len(samples), *f.shape), f.dtype) for n, f in data.fields.items()}
        numbers = None if evaluation else np.full((len(samples), max(1, data.uniforms)), 0.5, np.float32)
        data.read(samples, numbers, out)
        uniforms = 0 if evaluation else data.uniforms + self.uniforms
        uniform = torch.full((len(samples), uniforms), 0.5) if uniforms else None
        fields = {name: torch.from_numpy(array) for name, array in out.items()}
        num_items = int(out[NUM_ITEMS].sum()) if NUM_ITEMS in out else data.num_items * len(samples)
        return Batch(fields, None, uniform, num_items)

    def _transforms(self) -> tuple[Callable[[Any], Any], ...]:
        if not hasattr(self._own, "transforms"):
            return ()
        given = self._call("transforms", self._own.transforms)
        transforms = tuple(given) if isinstance(given, list | tuple) else (given,)
        if odd := [one for one in transforms if not callable(one)]:
            raise self._wrong("transforms", told(odd[0]))
        return transforms

    def _dataset(self, part: Any, what: str, transforms: tuple[Callable[[Any], Any], ...]) -> Dataset:
        collate = getattr(self._own, "collate", None)
        if not isinstance(part, Mapping) and not hasattr(part, "read") and is_items(part):
            return ItemDataset(part, what, collate, transforms, getattr(part, "num_items", 1))
        if not isinstance(part, Mapping):
            if missing := [name for name in _OF_DATASETS if not hasattr(part, name)]:
                raise self._wrong("data", f"a {type(part).__name__} without {missing[0]}")
            if transforms or collate:
                raise BadInputError(
                    f"{self._source}: data gave a data set with `read`, which fills batches itself: do there "
                    "what transforms and collate do, and leave them out"
                )
            for name, field in part.fields.items():
                self._numbers(name, np.empty(0, field.dtype))
            return cast(Dataset, part)
        arrays = {name: self._numbers(name, value) for name, value in part.items()}
        lengths = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or min(lengths.values()) < 1:
            raise self._wrong("data", f"arrays of different lengths or empty ones ({lengths})")
        num_items = arrays.get(NUM_ITEMS)
        if num_items is not None and (
            num_items.dtype.kind == "f" or num_items.ndim != 1 or num_items.min() < 0
        ):
            raise self._wrong("data", f"'{NUM_ITEMS}' that aren't one whole number from 0 on for each sample")
        if num_items is not None and not num_items.any():
            raise self._wrong("data", f"'{NUM_ITEMS}' that are 0 for every sample, so that nothing counts")
        whole = ArrayDataset(arrays)
        if not transforms and collate is None:
            return whole
        return ItemDataset(ArrayItems(arrays), what, collate, transforms, whole.num_items)

    def _numbers(self, name: str, value: Any) -> npt.NDArray[Any]:
        try:
            return as_numbers(name, value)
        except ValueError as error:
            raise self._wrong("data", str(error)) from error

    def _call(self, method: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except BadInputError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if Path(frame.filename) == Path(self._source)]
            where = f" line {lines[-1]}," if lines else ""
            what = (str(error) or "no message").splitlines()[0]
            raise BadInputError(
                f"{self._source}:{where} in {method}: {type(error).__name__}: {what}{of_error(error)}; "
                f"{method} gives {_GIVEN[method]}"
            ) from error

    def _refuse(self, why: str) -> None:
        if why:
            raise BadInputError(f"{self._source}: {why}")

    def _wrong(self, method: str, given: str) -> BadInputError:
        return BadInputError(f"{self._source}: {method} gave {given}; it gives {_GIVEN[method]}")


def custom_task(path: Path) -> CustomTask:
    """Runs somebody's file and makes the task that it defines: the one class in it with a method `loss`.

    Raises:
        BadInputError: If the file can't be run, holds no such class, or the class lacks a method.
    """
    path = from_here(path)
    read_source(path)
    try:
        _, module = run_file(path, "task")
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        where = f" line {lines[-1]}" if lines else ""
        raise BadInputError(f"{path}{where}: {type(error).__name__}: {error}; mend the file") from error
    found = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and hasattr(kind, "loss")
    ]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise BadInputError(
            f"{path}: one class with the methods {', '.join(_WANTED)} is wanted; found {names}"
        )
    try:
        own = found[0]()
    except Exception as error:
        raise BadInputError(
            f"{path}: {found[0].__name__}() raised {type(error).__name__}: {error}"
        ) from error
    task = CustomTask(own, str(path))
    task.source_hash = source_hash(path)
    task.hooks = getattr(module, "hooks", ())
    return task


def _check_names(own: Any, source: str) -> None:
    """Refuses what is all but called like something that a task may have: nothing would ever use it."""
    for kind in type(own).__mro__:
        if kind.__module__.partition(".")[0] in ("builtins", "torch", "typing"):
            continue
        for name, value in vars(kind).items():
            method = callable(value) or isinstance(value, staticmethod | classmethod)
            possible = _METHODS if method else _ATTRIBUTES
            meant = get_close_matches(name, possible, n=1, cutoff=_SLIP)
            if meant and not name.startswith("_") and name not in (*_GIVEN, *_METHODS, *_ATTRIBUTES):
                if hasattr(own, meant[0]):  # that is there, so this is something else
                    continue
                what = "method" if method else "attribute"
                raise BadInputError(
                    f"{source}: the {what} {name} is none that a task has; did you mean '{meant[0]}'? (If it "
                    f"is your own, call it _{name})"
                )


def _lower_is_better(own: Any, metric: str, source: str) -> bool:
    """From `mode`, or the metric's name where that leaves no doubt."""
    mode = getattr(own, "mode", None)
    if mode not in (None, "min", "max"):
        raise BadInputError(f'{source}: mode is {mode!r}; give "min" or "max": which way {metric} is better')
    if mode is not None or metric == "loss":
        return mode != "max"
    if metric == "acc" or "accuracy" in metric:
        return False
    raise BadInputError(
        f"{source}: metric is '{metric}', and nothing says which way it is better; add to the class "
        'mode = "min" (as of an error) or mode = "max" (as of an accuracy)'
    )


def _without_padding(batch: Batch, dataset: Dataset) -> tuple[Batch, bool]:
    """The batch without samples of weight 0; as it is, and True, where there is nothing else in it.

    Padding comes last. How much there is of it the host knows without asking the device, but where samples
    differ in their items.
    """
    if batch.weight is None:
        return batch, False
    ragged = NUM_ITEMS in dataset.fields
    count = int((batch.weight > 0).sum()) if ragged else batch.num_items // dataset.num_items
    if count in (0, len(batch.weight)):
        return batch._replace(weight=None), not count
    fields = {name: value[:count] for name, value in batch.fields.items()}
    uniform = None if batch.uniform is None else batch.uniform[:count]
    return batch._replace(fields=fields, weight=None, uniform=uniform), False


def _names(own: Any, attribute: str, source: str) -> tuple[str, ...]:
    """Of several losses, or of what is watched."""
    given = getattr(own, attribute, ())
    names = tuple(given) if isinstance(given, tuple | list) else ("",)
    if not all(map(is_name, names)) or len(set(names)) < len(names):
        told = f"{given!r}"[:_LETTERS]
        raise BadInputError(
            f'{source}: {attribute} is {told}; give their names, short texts such as ("content", "style")'
        )
    return names


def _called(name: str) -> str:
    return f"'{name}' as " if name else ""
