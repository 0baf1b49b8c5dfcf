"""Hooks and sinks of the user: code called after steps, evaluations and checkpoints; the results of hooks.

A hook gets metrics records when they are read from the device, some steps late, so it never makes the host
wait. A hook that only reads changes no bit of the run: all randomness of the training is keyed.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.config.sinks import FILE_SINKS
from trainer.config.suggest import nearest
from trainer.config.task_file import source_bytes
from trainer.config.training import HooksConfig, LogConfig, is_place
from trainer.config.user_file import import_from, run_file
from trainer.errors import BadInputError, Finish, StopRun, reading
from trainer.host.files import own_folder, written_whole
from trainer.host.here import folder_kept, from_here
from trainer.observe.console import say, warn
from trainer.observe.log import MetricLogger, Row, Sink
from trainer.observe.rows import PICTURES, why_no_metric
from trainer.runs.tracking.tracker import plugged, trackers_of

_FAILURES = (Exception, SystemExit)  # a sys.exit() would look like the end of a finished run
HOOK_METHODS = ("after_step", "after_evaluation", "after_checkpoint")
_CHANNELS = (1, 3, 4)
_LONGEST_FILE = 200  # bytes of a file's name
HookResult = Mapping[str, Any]


class Hook(Protocol):
    """Interface of hooks: any class or object with at least one of these methods; no base class is needed.

    Hooks run on rank 0; with an attribute `ranks = "all"` on every rank, except for `after_checkpoint`, which
    runs on the rank that writes. Figures and pictures that `after_step` and `after_evaluation` return on rank
    0, by name, become a record of kind "hook".
    """

    def after_step(self, row: dict[str, Any]) -> object:
        """Takes a metrics record: each log.every steps, and before evaluations."""

    def after_evaluation(self, step: int, metrics: dict[str, float]) -> object:
        """Takes the metrics of an evaluation after so many steps.

        With a third parameter `model` it also gets the model as it was evaluated: in evaluation mode, with
        the averaged weights if the run keeps them, whole on each rank. It may be called, not changed.
        """

    def after_checkpoint(self, step: int, folder: Path) -> object:
        """Takes the folder of a checkpoint that is complete on the disk, and can be copied elsewhere."""


class HookError(Exception):
    """Failure of user code in a hook or a sink; `fit` raises the original error, except for SystemExit."""


def checked(given: object) -> HookResult:
    """Checks a hook's result: figures and pictures by name; empty for None.

    Raises:
        BadInputError: If it is anything else, or a name is reserved for the trainer's metrics.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise BadInputError(f"returned a {type(given).__name__}; return figures by name in a dict, or None")
    for name, value in given.items():
        if why := why_no_metric(name):
            raise BadInputError(f"returned {name!r:.80}, which {why}")
        if not (_is_picture(value) or _is_number(value)):
            shape = f" {value.dtype} {tuple(value.shape)}" if hasattr(value, "dtype") else ""
            raise BadInputError(
                f"returned '{name}' as a {type(value).__name__}{shape}; a figure is a number or a tensor of "
                "one element, a picture a uint8 array (height, width) or (height, width, 1, 3 or 4)"
            )
    return given


def _is_picture(value: object) -> bool:
    if not isinstance(value, np.ndarray | torch.Tensor) or value.dtype not in (np.uint8, torch.uint8):
        return False
    shape = tuple(value.shape)
    return len(shape) in (2, 3) and min(shape) > 0 and (len(shape) == 2 or shape[2] in _CHANNELS)


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "fiub"
    return isinstance(value, Real | np.bool_)


class HookRows:
    """Logs the results of hooks as records of kind "hook"."""

    def __init__(self, folder: Path, logger: MetricLogger) -> None:
        """Writes pictures into a run folder, and rows to a logger's sinks."""
        self._folder, self._logger = folder, logger
        self._owners = dict[str, str]()

    def add(self, step: int, given: Sequence[tuple[str, HookResult]]) -> None:
        """Logs a record of a step's results; tensors on a GPU are copied without a host synchronization.

        Args:
            step: Steps done.
            given: Name of each hook's method, and its result.

        Raises:
            BadInputError: If two methods use the same name.
        """
        numbers, later = dict[str, Any](), dict[str, torch.Tensor]()
        for who, values in given:
            for name, value in values.items():
                owner = self._owners.setdefault(name, who)
                if owner != who or name in numbers or name in later:
                    raise BadInputError(f"return '{name}' twice: {owner} and {who}; give one another name")
                if _is_picture(value):
                    numbers[name] = self._write(name, step, value)
                elif isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    later[name] = value.detach().reshape(()).double()
                else:
                    # NumPy's own conversion refuses an array of one element that has dimensions.
                    numbers[name] = float(value.item() if isinstance(value, np.ndarray) else value)
        if numbers or later:
            staged = torch.stack([*later.values()]) if later else torch.empty(0)
            self._logger.stage_later(
                step, "hook", staged, lambda read: {**numbers, **dict(zip(later, read, strict=True))}
            )

    def _write(self, name: str, step: int, picture: torch.Tensor | npt.NDArray[np.uint8]) -> str:
        """Writes a PNG; returns its path relative to the run folder."""
        from PIL import Image  # here: runs without pictures need none

        file = f"{quote(name, safe='')}-{step:08d}.png"
        if len(file) > _LONGEST_FILE:
            raise BadInputError(f"return '{name:.40}…': too long a name for a picture's file")
        array = picture.cpu().numpy() if isinstance(picture, torch.Tensor) else picture
        png = BytesIO()
        Image.fromarray(array[:, :, 0] if array.shape[2:] == (1,) else array).save(png, "PNG")
        with written_whole(own_folder(self._folder / PICTURES) / file, lasting=False) as beside:
            beside.write_bytes(png.getvalue())
        return f"{PICTURES}/{file}"


def find_hooks(config: HooksConfig, brought: object = ()) -> list[tuple[str, Any]]:
    """Finds and checks the hooks of a run, by name; classes aren't called yet.

    Args:
        config: The section `hooks`.
        brought: Hooks of the task's file or of the caller of `fit`: a list of objects or classes.

    Raises:
        BadInputError: If one can't be loaded, has none of the methods, or is a class that wants arguments.
    """
    if not config.enabled:
        return []
    if not isinstance(brought, list | tuple):
        raise BadInputError(f"hooks is a {type(brought).__name__}; give a list of classes or objects")
    found = [(place, _load(place, "hooks.use")) for place in config.use]
    found += [(getattr(one, "__name__", type(one).__name__), one) for one in brought]
    for name, one in found:
        for method in dir(one):
            if method.startswith("after_") and method not in HOOK_METHODS:
                raise BadInputError(f"hook {name}: nothing calls {method}{nearest(method, HOOK_METHODS)}")
        if not any(callable(getattr(one, method, None)) for method in HOOK_METHODS):
            raise BadInputError(f"hook {name} has none of the methods {', '.join(HOOK_METHODS)}")
        if inspect.isclass(one) and (wanted := _wants(one)):
            raise BadInputError(
                f"hook {name} is called without arguments, and wants {wanted}; give defaults, or an object"
            )
        if getattr(one, "ranks", "first") not in ("first", "all"):
            raise BadInputError(f'hook {name}: ranks is {one.ranks!r}; give "first" or "all"')
    return found


class HooksOfRank(NamedTuple):
    """Hooks of a rank.

    Attributes:
        made: The objects.
        ask: True if one of the job's hooks asks for the model; equal on all ranks.
    """

    made: list[Any]
    ask: bool


def make_hooks(config: HooksConfig, brought: Sequence[Any], rank: int) -> HooksOfRank:
    """Makes the hooks of a rank: all on rank 0, elsewhere those with `ranks = "all"`.

    Args:
        config: The section `hooks`.
        brought: See `find_hooks`.
        rank: Number of the rank.

    Raises:
        BadInputError: If a class can't be called without arguments.
    """
    made, found = list[Any](), find_hooks(config, brought)
    for name, one in found:
        if rank == 0 or getattr(one, "ranks", "first") == "all":
            try:
                made.append(one() if inspect.isclass(one) else one)
            except _FAILURES as error:
                raise BadInputError(f"hook {name}: {_text_of(error)}") from error
    asks = any(asks_for_model(getattr(one, "after_evaluation", None)) for _, one in found)
    return HooksOfRank(made, asks)


def load_sinks(config: LogConfig, hooks: HooksConfig) -> list[Sink]:
    """Loads the functions that `log.to` names; file sinks and trackers are opened elsewhere.

    Raises:
        BadInputError: If one can't be loaded, or isn't a function; or a tracker isn't installed.
    """
    sinks = list[Sink]()
    trackers = trackers_of(config.to)
    for place in config.to:
        if place in FILE_SINKS or place in trackers:
            continue
        function = _load(place, "log.to") if is_place(place) else plugged(place)
        if not callable(function) or inspect.isclass(function):
            raise BadInputError(f"log.to: {place} is a {type(function).__name__}; name a function of a row")
        sinks.append(partial(_on_a_copy, guarded(function, place, hooks)))
    return sinks


def _on_a_copy(sink: Sink, row: Row) -> None:
    """Gives a sink its own copy of a record, which it may change."""
    sink(dict(row))


def asks_for_model(method: object) -> bool:
    """True if a hook's `after_evaluation` has a parameter `model`."""
    try:
        return callable(method) and "model" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # written in C
        return False


def hook_sink(
    hooks: Sequence[Any],
    config: HooksConfig,
    rows: HookRows | None = None,
    model: nn.Module | None = None,
    asked: list[str] | None = None,
) -> Sink:
    """Makes a sink that calls hooks with metrics records, and logs their results to `rows`.

    Args:
        model: What hooks get that ask for it; within `Outputs.for_hooks` they may call it.
        asked: Gets the names of hooks that raise `Finish`.
    """
    steps = _calls(hooks, "after_step", config, asked)
    evaluations = _calls(hooks, "after_evaluation", config, asked, model)
    add = guarded(rows.add, "hooks", config) if rows is not None else lambda *_: None

    def take(row: Row) -> None:
        given = list[tuple[str, HookResult]]()
        if row["kind"] == "train":
            given = [(name, call(dict(row)) or {}) for name, call in steps]
        elif row["kind"] == "eval":
            metrics = {k: v for k, v in row.items() if k not in ("kind", "step", "epoch")}
            given = [(name, call(row["step"], dict(metrics)) or {}) for name, call in evaluations]
        if any(values for _, values in given):
            add(row["step"], given)

    return take


def checkpoint_hook(
    hooks: Sequence[Any], config: HooksConfig, asked: list[str] | None = None
) -> Callable[[int, Path], None] | None:
    """Returns a function of step and folder that calls all `after_checkpoint`; None if no hook has one."""
    calls = _calls(hooks, "after_checkpoint", config, asked)

    def call_all(step: int, folder: Path) -> None:
        for name, call in calls:
            if call(step, folder):
                warn(
                    f"{name} returned figures, which no row has; return them from "
                    f"{' or '.join(HOOK_METHODS[:2])}"
                )

    return call_all if calls else None


def guarded(
    call: Callable[..., object], name: str, config: HooksConfig, asked: list[str] | None = None
) -> Callable[..., Any]:
    """Wraps a call of user code: errors name it, and end the run or become warnings (hooks.on_error).

    Args:
        asked: Gets the name at `Finish`, which is no error then; the loop reads it.
    """

    def guard(*arguments: Any) -> Any:
        try:
            with folder_kept():
                return call(*arguments)
        except Finish as error:
            if asked is None:
                raise
            if not asked:
                say(f"  {name} finishes the run{': ' * bool(str(error))}{error}")
            asked.append(name)
            return None
        except StopRun as error:
            if not error.args:
                error.args = (f"{name} stops the run",)
            raise
        except _FAILURES as error:
            ours = isinstance(error, BadInputError)
            line = f"{name} {error}" if ours else f"{name}: {_text_of(error)}"
            if config.on_error == "stop":
                if ours:
                    raise BadInputError(line) from None
                raise HookError(f"{line}; hooks.on_error=warn goes on without it") from error
            warn(line)
            return None

    return guard


def _calls(
    hooks: Sequence[Any],
    method: str,
    config: HooksConfig,
    asked: list[str] | None,
    model: nn.Module | None = None,
) -> list[tuple[str, Callable[..., Any]]]:
    """Returns the guarded calls of a method, each with its name."""

    def checks(call: Callable[..., object]) -> Callable[..., HookResult]:
        more = {"model": model} if method == "after_evaluation" and asks_for_model(call) else {}
        return lambda *arguments: checked(call(*arguments, **more))

    named = [(f"{type(one).__name__}.{method}", getattr(one, method, None)) for one in hooks]
    return [(name, guarded(checks(call), name, config, asked)) for name, call in named if callable(call)]


def _wants(kind: type) -> str:
    """Returns the names of arguments without which a class can't be called; "" if there are none."""
    try:
        needed = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # written in C
        return ""
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(one.name for one in needed if one.default is one.empty and one.kind not in various)


def _text_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _load(place: str, key: str) -> Any:
    where, _, name = place.rpartition(":")
    path = from_here(Path(where)).absolute() if where.endswith(".py") else None
    if path:
        with reading(f"{key}: {where}", "give another file"):
            source_bytes(path)
    try:
        with folder_kept():
            module = run_file(path) if path else import_from(from_here(Path()).absolute(), where)
    except BadInputError as error:
        raise BadInputError(f"{key}: {error}") from error
    except _FAILURES as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = f" line {lines[-1]}" if lines else ""
        raise BadInputError(f"{key}: {where}{line} can't be loaded ({_text_of(error)})") from error
    if not hasattr(module, name):
        raise BadInputError(f"{key}: {where} has no {name}{nearest(name, vars(module))}")
    return getattr(module, name)
