"""A task of one's own: a class with a few methods, in a file or in a notebook (see `trainer new`)."""

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from trainer.data.dataset import UNITS, ArrayDataset, Dataset
from trainer.data.loader import Batch
from trainer.errors import BadInputError
from trainer.own_file import MODULE, read_source, source_hash

_WANTED = {
    "data": "the samples to learn from and those to measure on: two dicts of arrays, (samples, ...) each",
    "model": "a torch.nn.Module",
    "loss": "a float tensor of shape (): the sum of the losses of the samples of the batch",
    "measure": "a dict of tensors by name: sums over the samples, each of shape ()",
}
_OF_DATASETS = ("fields", "units", "uniforms", "arrays", "in_process", "fingerprint", "read", "__len__")
_TRIED = 4  # samples


class OwnTask:
    """A task from somebody's class.

    Batches come to `loss` and `measure` without padding, so that these needn't know of weights.

    Args:
        own: Has the methods data, model, loss and measure, and may have describe, inputs, summarise, predict,
            and the attributes metric (default: loss), lower_is_better and uniforms.
        source: Where it comes from, for messages: a file, or a class of a notebook.

    Raises:
        BadInputError: If a method is missing or `data` gives something else.
    """

    def __init__(self, own: Any, source: str) -> None:
        """Opens the data."""
        self._own, self._source = own, source
        self.source_hash = ""
        for name, what in _WANTED.items():
            if not callable(getattr(own, name, None)):
                raise BadInputError(f"{source}: the method {name} is missing; it gives {what}")
        self.metric: str = getattr(own, "metric", "loss")
        self.lower_is_better: bool = getattr(own, "lower_is_better", self.metric == "loss")
        self.uniforms: int = getattr(own, "uniforms", 0)
        parts = self._call("data", own.data)
        if not isinstance(parts, tuple | list) or len(parts) != 2:
            raise self._wrong("data", f"{type(parts).__name__}")
        self.train_data, self.evaluation_data = (self._call("data", self._dataset, part) for part in parts)
        for name in ("inputs", "summarise", "predict"):
            if hasattr(own, name):
                setattr(self, name, getattr(own, name))

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
        """The sum over the samples that aren't padding."""
        real, padding = _without_padding(batch, self.train_data)
        loss: torch.Tensor = self._own.loss(model, real)
        return loss * 0 if padding else loss

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Sums over the samples that aren't padding, and rows with zeros for those that are."""
        real, padding = _without_padding(batch, self.evaluation_data)
        measured: Mapping[str, torch.Tensor] = self._own.measure(model, real)
        if batch.weight is None:
            return measured
        whole = {}
        for name, value in measured.items():
            if not value.ndim:
                whole[name] = torch.zeros_like(value) if padding else value
                continue
            whole[name] = value.new_zeros((len(batch.weight), *value.shape[1:]))
            whole[name][batch.weight > 0] = value[: int((batch.weight > 0).sum())]
        return whole

    def check(self) -> None:
        """Tries every method on a few samples, on the CPU, so that what is wrong is found before training.

        Raises:
            BadInputError: Naming the method and what it should give.
        """
        model = self.model().eval()
        count = min(_TRIED, len(self.train_data))
        whole, *halves = (self._few(range(*part)) for part in ((count,), (count // 2,), (count // 2, count)))
        loss = self._call("loss", self._own.loss, model, whole)
        if not isinstance(loss, torch.Tensor) or loss.shape or not loss.is_floating_point():
            raise self._wrong("loss", _told(loss))
        if not loss.requires_grad:
            raise self._wrong("loss", "one without a gradient (is it detached, or under no_grad?)")
        if count == _TRIED:
            added = sum(float(self._call("loss", self._own.loss, model, half).detach()) for half in halves)
            if np.isclose(float(loss.detach()) * 2, added, rtol=1e-3) and abs(added) > 1e-6:
                raise self._wrong("loss", 'a mean (reduction="sum" instead: the trainer divides)')
        with torch.inference_mode():
            measured = self._call("measure", self._own.measure, model, whole)
        if not isinstance(measured, Mapping) or not measured:
            raise self._wrong("measure", _told(measured))
        for name, value in measured.items():
            if not isinstance(value, torch.Tensor) or (value.ndim and len(value) != count):
                raise self._wrong("measure", f"'{name}' as {_told(value)} for {count} samples")
            if value.ndim and not hasattr(self, "summarise"):
                raise self._wrong("measure", f"'{name}' as {_told(value)}, and there is no summarise")
        try:
            json.dumps(dict(self.describe()))
        except (TypeError, ValueError) as error:
            raise BadInputError(f"{self._source}: describe gave what JSON can't hold ({error})") from error
        if self.metric not in measured and not hasattr(self, "summarise"):
            raise BadInputError(
                f"{self._source}: metric is '{self.metric}', which measure doesn't give (it gives "
                f"{', '.join(measured)}); name one of these"
            )

    def _few(self, samples: range) -> Batch:
        data = self.train_data
        out = {n: np.zeros((len(samples), *f.shape), f.dtype) for n, f in data.fields.items()}
        numbers = np.full((len(samples), max(1, data.uniforms)), 0.5, np.float32)
        data.read(np.array(samples), numbers, out)
        uniforms = data.uniforms + self.uniforms
        uniform = torch.full((len(samples), uniforms), 0.5) if uniforms else None
        fields = {name: torch.from_numpy(array) for name, array in out.items()}
        return Batch(fields, None, uniform, data.units * len(samples))

    def _dataset(self, part: Any) -> Dataset:
        if not isinstance(part, Mapping):
            if missing := [name for name in _OF_DATASETS if not hasattr(part, name)]:
                raise self._wrong("data", f"a {type(part).__name__} without {missing[0]}")
            return cast(Dataset, part)
        arrays = {name: np.ascontiguousarray(value) for name, value in part.items()}
        lengths = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or min(lengths.values()) < 1:
            raise self._wrong("data", f"arrays of different lengths or empty ones ({lengths})")
        if odd := [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]:
            raise self._wrong("data", f"'{odd[0]}' of dtype {arrays[odd[0]].dtype}, which is no number")
        return ArrayDataset(arrays)

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
                f"{self._source}:{where} in {method}: {type(error).__name__}: {what}; {method} gives "
                f"{_WANTED[method]}"
            ) from error

    def _wrong(self, method: str, given: str) -> BadInputError:
        return BadInputError(f"{self._source}: {method} gave {given}; it gives {_WANTED[method]}")


def own_task(path: Path) -> OwnTask:
    """Runs somebody's file and makes the task that it defines: the one class in it with a method `loss`.

    Raises:
        BadInputError: If the file can't be run, holds no such class, or the class lacks a method.
    """
    read_source(path)
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as if the file were run: what lies beside it can be imported
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        where = f" line {lines[-1]}" if lines else ""
        raise BadInputError(f"{path}{where}: {type(error).__name__}: {error}; mend the file") from error
    found = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == MODULE and hasattr(kind, "loss")
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
    task = OwnTask(own, str(path))
    task.source_hash = source_hash(path)
    return task


def _without_padding(batch: Batch, dataset: Dataset) -> tuple[Batch, bool]:
    """The batch without samples of weight 0; as it is, and True, where there is nothing else in it.

    Padding comes last. How much there is of it the host knows without asking the device, but where samples
    differ in their units.
    """
    if batch.weight is None:
        return batch, False
    ragged = UNITS in dataset.fields
    count = int((batch.weight > 0).sum()) if ragged else batch.units // dataset.units
    if count in (0, len(batch.weight)):
        return batch._replace(weight=None), not count
    fields = {name: value[:count] for name, value in batch.fields.items()}
    uniform = None if batch.uniform is None else batch.uniform[:count]
    return batch._replace(fields=fields, weight=None, uniform=uniform), False


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return "nothing" if value is None else f"a {type(value).__name__}"
