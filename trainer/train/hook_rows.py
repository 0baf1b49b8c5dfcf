"""Results of hooks, figures and pictures, as records of kind "hook"."""

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch

from trainer.errors import BadInputError
from trainer.host.files import own_folder, written_whole
from trainer.observe.log import MetricLogger
from trainer.observe.rows import PICTURES, why_no_metric

_CHANNELS = (1, 3, 4)
_LONGEST_FILE = 200  # bytes of a file's name
HookResult = Mapping[str, Any]


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


def _merge(numbers: Mapping[str, float | str], names: Sequence[str], values: list[float]) -> dict[str, Any]:
    return {**numbers, **dict(zip(names, values, strict=True))}


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
        numbers, later = dict[str, float | str](), dict[str, torch.Tensor]()
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
                    numbers[name] = float(value)
        if numbers or later:
            staged = torch.stack([*later.values()]) if later else torch.empty(0)
            metrics = partial(_merge, numbers, tuple(later))
            self._logger.stage_later(step, "hook", staged, metrics)

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
