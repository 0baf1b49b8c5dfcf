"""The methods of the user's class, called as a task, and checks of their results."""

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.data.batch import Batch
from trainer.data.dataset import NUM_ITEMS, ArrayDataset, Dataset, as_numbers
from trainer.data.items import ArrayItems, ItemDataset, is_items
from trainer.errors import BadInputError
from trainer.observe.rows import is_name
from trainer.optim.own import Scheduler
from trainer.tasks.hints import of_class, of_data, of_error, of_updates
from trainer.tasks.values import NARROW, Values, describe_value, read_values, why_no_name

WANTED = {
    "data": "the samples to learn from and those to measure on: two dicts of arrays, (samples, ...) each, or "
    "two data sets with __getitem__ and __len__",
    "model": "a torch.nn.Module",
    "loss": "a value for each sample, a float tensor (n,); or several by name",
    "measure": "a dict of values by name, (n,) each",
}
GIVEN = {
    **WANTED,
    "describe": "a dict of what JSON can hold, such as the names of classes",
    "summarize": "metrics by name, each a number",
    "transforms": "a function, or a list of them, that each take a training sample and give it back changed",
    "optimizer": "a torch.optim.Optimizer of the model's parameters, whose step() needs no arguments",
    "scheduler": "a scheduler of torch.optim.lr_scheduler, whose step() follows each update; it may ask for "
    "steps (of the run) and epoch_steps",
}
# Optional methods and attributes of a task.
OPTIONAL_METHODS = (
    "inputs",
    "predict",
    "collate",
    *(name for name in GIVEN if name not in WANTED),
)
_ATTRIBUTES = ("metric", "mode", "reduction", "losses", "watched", "uniforms", "hooks", "RECIPE")
_OF_DATASETS = ("fields", "num_items", "uniforms", "arrays", "in_process", "fingerprint", "read", "__len__")
_LETTERS = 160  # of a value in a message
_SLIP = 0.8  # similarity from which a name counts as a misspelling of another


class OwnMethods:
    """The user's class as a task.

    `loss` and `measure` get batches without padding, and needn't know of sample weights.

    Args:
        own: An object with the methods data, model, loss and measure. Optional are describe, inputs,
            summarize, predict, collate, transforms, optimizer, scheduler, and the attributes metric (default:
            loss), mode ("min" or "max": which way the metric is better; not needed for loss and accuracy),
            losses (the names of several), watched (names of results of `loss` that aren't trained),
            reduction ("mean": a loss may be one mean of the micro-batch), uniforms, and the class's hooks.
        source: Its origin, for messages: a file, or a class of a notebook.

    Attributes:
        tried: Results of the trial by name, see `trainer.tasks.custom_trial.try_task`; {} before it.
        source_hash: Hash of the file and the modules beside it; "" for a class without a file.

    Raises:
        BadInputError: If a method is missing, `data` gives something else, or it isn't known which way the
            metric is better.
    """

    def __init__(self, own: Any, source: str) -> None:
        """Opens the data."""
        self._own, self._source = own, source
        self.tried: Mapping[str, str] = {}
        self.source_hash = ""
        self.hooks: Any = getattr(type(own), "hooks", ())
        self.draws_on_host = False  # whether `loss` drew from numpy's or Python's generators in the trial
        self.sparse: tuple[str, ...] = ()  # parameters with sparse gradients, once the trial has run
        self._counted: bool | None = None  # whether `loss` gives counts: always, or never
        for name, what in WANTED.items():
            if not callable(getattr(own, name, None)):
                raise BadInputError(f"{source}: the method {name} is missing; it gives {what}{of_class(own)}")
        _check_names(own, source)
        self.metric: str = getattr(own, "metric", "loss")
        self.lower_is_better: bool = _lower_is_better(own, self.metric, source)
        self.uniforms: int = getattr(own, "uniforms", 0)
        if not isinstance(self.uniforms, int) or self.uniforms < 0:
            raise BadInputError(f"{source}: uniforms is {self.uniforms!r:.80}; give a whole number from 0 on")
        self.watched = _names(own, "watched", source)
        trained = _names(own, "losses", source) or ("loss",) * bool(self.watched)
        if both := set(trained) & set(self.watched):
            raise BadInputError(
                f"{source}: {both.pop()!r} is in losses and in watched; what is watched isn't trained"
            )
        self.losses = (*trained, *self.watched)
        if (reduction := getattr(own, "reduction", "none")) not in ("none", "mean"):
            raise BadInputError(
                f"{source}: reduction is {reduction!r}; leave it out (loss gives a value for a sample), or "
                'give "mean" (loss gives a mean of the micro-batch)'
            )
        self.mean = reduction == "mean"
        data = self._call("data", own.data)
        self._refuse(of_data(data))
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise self._wrong("data", f"{type(data).__name__}")
        transforms = self._transforms()
        self.train_data = self._call("data", self._dataset, data[0], "training", transforms)
        self.evaluation_data = self._call("data", self._dataset, data[1], "evaluation", ())
        for what, dataset in (("training", self.train_data), ("evaluation", self.evaluation_data)):
            if NUM_ITEMS in dataset.fields and not self.mean:
                raise BadInputError(
                    f"{source}: the {what} data has a field {NUM_ITEMS}, which counts only with reduction = "
                    '"mean" in the class; leave it out, and let loss give the pair (values, counts), such as '
                    "(each, target > 0)"
                )
        for name in ("inputs", "predict"):
            if hasattr(own, name):
                setattr(self, name, getattr(own, name))
        for name in ("summarize", "optimizer", "scheduler"):
            if hasattr(own, name):
                setattr(self, name, getattr(self, f"_{name}"))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the trial found of the loss, as lines for the run."""
        return tuple(f"loss: {self.tried[one]}" for one in ("values", "means") if one in self.tried)

    def describe(self) -> Mapping[str, Any]:
        """Returns the facts of the class's `describe`, {} without one."""
        return self._call("describe", self._own.describe) if hasattr(self._own, "describe") else {}

    def model(self) -> nn.Module:
        """Returns a new model."""
        model = self._call("model", self._own.model)
        if not isinstance(model, nn.Module):
            raise self._wrong("model", type(model).__name__)
        return model

    def given_loss(self, model: nn.Module, batch: Batch) -> Any:
        """Returns what the user's loss gives for a batch without padding."""
        return self._own.loss(model, batch)

    def given_measure(self, model: nn.Module, batch: Batch) -> Any:
        """Returns what the user's measure gives for a batch without padding."""
        return self._own.measure(model, batch)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the sum of all trained losses over the samples that aren't padding, float ()."""
        parts, _ = self.parts(model, batch)
        first, *others = parts[: len(parts) - len(self.watched)]
        return sum(others, first)

    def parts(self, model: nn.Module, batch: Batch) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Returns each loss, summed over what counts, and the sum of the counts; None: the batch's items."""
        real, padding = _without_padding(batch, self.train_data)
        given = self.read_loss(self.given_loss(model, real), len_of(real))
        counts = next((one.number() for one in given if one.counts is not None), None)
        if (counts is not None) is not self._counted and self._counted is not None:
            raise self._wrong("loss", "counts beside its values for some micro-batches and none for others")
        self._counted = counts is not None
        items = batch.num_items if counts is None else counts
        sums = [self._sum(one, items) for one in given]
        if padding:
            sums, counts = [one * 0 for one in sums], None if counts is None else counts * 0
        return sums, counts

    def _sum(self, one: Values, items: int | torch.Tensor) -> torch.Tensor:
        if not one.values.ndim:
            mean = one.values.float() if one.values.element_size() < NARROW else one.values
            return mean * items
        total = one.total() if one.values.is_floating_point() else one.total().float()
        each = self.train_data.num_items if one.counts is None else 1
        return total if each == 1 else total * each

    def read_loss(self, given: Any, samples: int) -> list[Values]:
        """Reads what `loss` gave: each loss, in the order of `losses`."""
        if self.losses:
            given = self._several(given)
        elif isinstance(given, Mapping):
            raise BadInputError(
                f"{self._source}: loss gave several; name them in the class: losses = {tuple(given)!r}"
            )
        names = self.losses or ("",)
        several = given if self.losses else [given]
        read = [self._read("loss", name, one, samples) for name, one in zip(names, several, strict=True)]
        if len({id(one.counts) for one in read if one.values.ndim}) > 1:
            raise BadInputError(
                f"{self._source}: loss gave losses with different counts; a step's gradient is divided once: "
                "give each the same tensor as counts, or none"
            )
        if NUM_ITEMS in self.train_data.fields and any(o.values.ndim and o.counts is None for o in read):
            raise BadInputError(
                f"{self._source}: loss gave a value for each sample, and the data has a field {NUM_ITEMS}: "
                "it weighs means, (); give .mean(), or the pair (values, counts)"
            )
        return read

    def read_measured(self, given: Any, samples: int) -> dict[str, Values]:
        """Reads what `measure` gave: values by name."""
        if not isinstance(given, Mapping):
            raise self._wrong("measure", describe_value(given))
        read = {}
        for name, one in given.items():
            if why := why_no_name(name, hasattr(self._own, "summarize")):
                raise self._wrong("measure", f"{name!r:.80}, which {why}")
            read[name] = self._read("measure", name, one, samples)
        return read

    def _read(self, method: str, name: str, given: Any, samples: int) -> Values:
        rows = method == "measure" and hasattr(self._own, "summarize")
        try:
            return read_values(given, samples, self.mean and not rows, rows)
        except ValueError as error:
            called = f"'{name}' as " if name else ""
            raise BadInputError(f"{self._source}: {method} gave {called}{error}") from None

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Returns pairs by name: a figure's sum over the samples that aren't padding, and what it counts.

        With `summarize` they are rows, (samples, …), with zeros for padding; or pairs of such.
        """
        real, _ = _without_padding(batch, self.evaluation_data)
        count = len_of(real)
        given = self.read_measured(self.given_measure(model, real), count)
        if hasattr(self._own, "summarize"):
            added = 0 if batch.weight is None else len(batch.weight) - count
            return {name: one.rows(added) for name, one in given.items()}
        figures = dict[str, Any]()
        for name, one in given.items():
            wide = one._replace(values=one.values.double())
            if not one.values.ndim:
                figures[name] = wide.values * batch.num_items, batch.num_items
            else:
                figures[name] = wide.total(), count if one.counts is None else one.number()
        return figures

    def _several(self, given: Any) -> list[Any]:
        """Checks the names of several losses; returns the losses in the order of `losses`."""
        if not isinstance(given, Mapping) or given.keys() != set(self.losses):
            named = isinstance(given, Mapping)
            gave = f"losses named {', '.join(map(str, given))}" if named else describe_value(given)
            raise BadInputError(
                f"{self._source}: loss gave {gave}; by the class's attributes losses and watched it gives "
                f"{', '.join(self.losses)}, all of them each time"
            )
        return [given[name] for name in self.losses]

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = self._call("optimizer", self._own.optimizer, model)
        self._refuse(of_updates("optimizer", optimizer))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self._wrong("optimizer", describe_value(optimizer))
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

    def _scheduler(self, optimizer: torch.optim.Optimizer, steps: int, epoch_length: float) -> Scheduler:
        parameters = inspect.signature(self._own.scheduler).parameters
        known = {"steps": steps, "epoch_steps": max(1, round(epoch_length))}
        given = {name: value for name, value in known.items() if name in parameters}
        scheduler = self._call("scheduler", partial(self._own.scheduler, **given), optimizer)
        self._refuse(of_updates("scheduler", scheduler))
        if missing := [n for n in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, n)]:
            raise self._wrong("scheduler", f"{describe_value(scheduler)} without {missing[0]}")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise self._wrong("scheduler", "one of another optimizer")
        return cast(Scheduler, scheduler)

    def _summarize(self, rows: Mapping[str, Any]) -> Mapping[str, float]:
        metrics = self._call("summarize", self._own.summarize, rows)
        if not isinstance(metrics, Mapping):
            raise self._wrong("summarize", describe_value(metrics))
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise self._wrong("summarize", f"'{name}' as {describe_value(value)}") from None
        return numbers

    def _transforms(self) -> tuple[Callable[[Any], Any], ...]:
        if not hasattr(self._own, "transforms"):
            return ()
        given = self._call("transforms", self._own.transforms)
        transforms = tuple(given) if isinstance(given, list | tuple) else (given,)
        if odd := [one for one in transforms if not callable(one)]:
            raise self._wrong("transforms", describe_value(odd[0]))
        return transforms

    def _dataset(self, given: Any, what: str, transforms: tuple[Callable[[Any], Any], ...]) -> Dataset:
        collate = getattr(self._own, "collate", None)
        if not isinstance(given, Mapping) and not hasattr(given, "read") and is_items(given):
            return ItemDataset(given, what, collate, transforms, getattr(given, "num_items", 1))
        if not isinstance(given, Mapping):
            if missing := [name for name in _OF_DATASETS if not hasattr(given, name)]:
                raise self._wrong("data", f"a {type(given).__name__} without {missing[0]}")
            if transforms or collate:
                raise BadInputError(
                    f"{self._source}: data gave a data set with `read`, which fills batches itself: do there "
                    "what transforms and collate do, and leave them out"
                )
            for name, field in given.fields.items():
                self._numbers(name, np.empty(0, field.dtype))
            buckets = getattr(given, "buckets", ()) or (len(given),)
            if min(len(given), given.num_items) < 1 or given.uniforms < 0 or sum(buckets) != len(given):
                facts = f"{len(given)} samples, num_items {given.num_items}, uniforms {given.uniforms}"
                raise self._wrong("data", f"a {type(given).__name__} of {facts}, buckets {buckets!r:.40}")
            return cast(Dataset, given)
        arrays = {name: self._numbers(name, value) for name, value in given.items()}
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
        dataset = ArrayDataset(arrays)
        if not transforms and collate is None:
            return dataset
        return ItemDataset(ArrayItems(arrays), what, collate, transforms, dataset.num_items)

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
            line = line_of(error, Path(self._source))
            message = (str(error) or "no message").splitlines()[0]
            raise BadInputError(
                f"{self._source}:{line}{',' * bool(line)} in {method}: {type(error).__name__}: "
                f"{message}{of_error(error)}; {method} gives {GIVEN[method]}"
            ) from error

    def _refuse(self, why: str) -> None:
        if why:
            raise BadInputError(f"{self._source}: {why}")

    def _wrong(self, method: str, given: str) -> BadInputError:
        return BadInputError(f"{self._source}: {method} gave {given}; it gives {GIVEN[method]}")


def line_of(error: Exception, path: Path) -> str:
    """Returns the last line of a file in an error's traceback, such as " line 7"; "" without one."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f" line {lines[-1]}" if lines else ""


def _check_names(own: Any, source: str) -> None:
    """Rejects a misspelled optional method or attribute, which would never be used."""
    for kind in type(own).__mro__:
        if kind.__module__.partition(".")[0] in ("builtins", "torch", "typing"):
            continue
        for name, value in vars(kind).items():
            method = callable(value) or isinstance(value, staticmethod | classmethod)
            possible = OPTIONAL_METHODS if method else _ATTRIBUTES
            meant = get_close_matches(name, possible, n=1, cutoff=_SLIP)
            if meant and not name.startswith("_") and name not in (*GIVEN, *OPTIONAL_METHODS, *_ATTRIBUTES):
                if hasattr(own, meant[0]):  # the class has the right name, too: this is something else
                    continue
                what = "method" if method else "attribute"
                raise BadInputError(
                    f"{source}: the {what} {name} is none that a task has; did you mean '{meant[0]}'? (If it "
                    f"is your own, call it _{name})"
                )


def _lower_is_better(own: Any, metric: str, source: str) -> bool:
    """Returns the direction of a metric, from `mode` or from a well-known name."""
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
    """Returns the batch without padding, samples of weight 0; unchanged, and True, if all of it is padding.

    Padding comes last. Its length follows from `num_items` without a synchronization with the device, except
    where samples have different numbers of items.
    """
    if batch.weight is None:
        return batch, False
    ragged = NUM_ITEMS in dataset.fields
    count = int((batch.weight > 0).sum()) if ragged else batch.num_items // dataset.num_items
    if count in (0, len(batch.weight)):
        return replace(batch, weight=None), not count
    fields = {name: value[:count] for name, value in batch.fields.items()}
    uniform = None if batch.uniform is None else batch.uniform[:count]
    return replace(batch, fields=fields, weight=None, uniform=uniform), False


def len_of(batch: Batch) -> int:
    """Returns the samples of a batch."""
    return len(next(iter(batch.fields.values())))


def _names(own: Any, attribute: str, source: str) -> tuple[str, ...]:
    """Returns the names in `losses` or `watched`."""
    given = getattr(own, attribute, ())
    names = tuple(given) if isinstance(given, tuple | list) else ("",)
    if not all(map(is_name, names)) or len(set(names)) < len(names):
        raise BadInputError(
            f"{source}: {attribute} is {repr(given)[:_LETTERS]}; give their names, short texts such as "
            '("content", "style")'
        )
    return names
