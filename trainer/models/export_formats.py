"""Formats that a model is exported to: writers, wrappers of inputs and outputs, and the error of a file."""

import importlib.util
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

ModelTensors = Sequence[torch.Tensor]

INSTALL_ONNX = "pip install onnx onnxscript onnxruntime, or make venv GROUPS='train dev'"
# Protocol buffers end at 2 GiB.
_LARGEST_ONNX = (1 << 31) - (64 << 20)


def input_names(inputs: ModelTensors) -> list[str]:
    """Returns the names of the model's inputs in a file: "input", or "input_0" and so on."""
    return ["input"] if len(inputs) == 1 else [f"input_{number}" for number in range(len(inputs))]


def output_names(outputs: ModelTensors) -> list[str]:
    """Returns the names of the model's outputs in a file: "output", or "output_0" and so on."""
    return ["output"] if len(outputs) == 1 else [f"output_{number}" for number in range(len(outputs))]


def exported_program(model: nn.Module, inputs: ModelTensors) -> Any:
    """Exports a model by torch.export, with a dynamic batch dimension shared by all inputs."""
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    if len(inputs[0]) == 1:  # torch.export would make the size a constant
        inputs = [torch.cat([value, value]) for value in inputs]
    # Non-strict: without tracing bytecode, which is slower and fails more often.
    return torch.export.export(
        model, tuple(inputs), dynamic_shapes=_shapes(model, inputs, {0: batch}), strict=False
    )


def _shapes(model: nn.Module, inputs: ModelTensors, shape: dict[int, Any]) -> Any:
    """Returns the dynamic shapes of the inputs; for a forward(*values) they are one argument."""
    import inspect

    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    each = tuple(dict(shape) for _ in inputs)
    return (each,) if inspect.Parameter.VAR_POSITIONAL in kinds else each


def write_torch_export(model: nn.Module, inputs: ModelTensors, folder: Path) -> Path:
    """Writes torch.export's archive, which needs no Python code of the model."""
    file = folder / "model.pt2"
    with quiet():
        _save(partial(torch.export.save, exported_program(model, inputs)), file)
    return file


def write_onnx(model: nn.Module, inputs: ModelTensors, folder: Path) -> Path:
    """Writes ONNX from torch.export's program, before torch 2.6 from TorchScript."""
    file = folder / "model.onnx"
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    with torch.no_grad():
        outputs = leaves(model(*inputs))
    takes, gives = input_names(inputs), output_names(outputs)
    new: dict[str, Any] = {"dynamo": True, "external_data": size > _LARGEST_ONNX}
    # Before 2.6 the exporter by torch.export needs an old onnxscript.
    old = {"dynamo": False, "dynamic_axes": {name: {0: "batch"} for name in (*takes, *gives)}}
    is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
    with quiet():
        torch.onnx.export(
            exported_program(model, inputs) if is_new else model,
            tuple(inputs),
            str(file),
            verbose=False,
            input_names=takes,
            output_names=gives,
            **(new if is_new else old),
        )
    return file


def _save(save: Callable[[io.BytesIO], object], file: Path) -> None:
    """Saves to memory, then to the file: on a full disk torch's own writer aborts the process.

    Raises:
        OSError: If the file can't be written.
    """
    archive = io.BytesIO()
    save(archive)
    file.write_bytes(archive.getbuffer())


def missing_packages(*names: str) -> str:
    """Lists the packages that aren't installed, separated by commas; "" if none."""
    return ", ".join(name for name in names if importlib.util.find_spec(name) is None)


@contextmanager
def quiet() -> Iterator[None]:
    """A context without the exporters' warnings and log lines on their internals."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def leaves(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of a model's output in order: a tensor, a tuple, a mapping, or these nested."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


class InLowPrecision(nn.Module):
    """Wraps a bfloat16 model so that its inputs and outputs are float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *values: torch.Tensor) -> Any:
        """Casts floating-point inputs to bfloat16, and outputs to float32."""
        output = self.model(*(v.to(torch.bfloat16) if v.is_floating_point() else v for v in values))
        return pytree.tree_map(_float32, output)


def _float32(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if low else value


class FromPixels(nn.Module):
    """Wraps a classifier: uint8 (n, height, width, channels) to probabilities (n, classes)."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(
        self, model: nn.Module, mean: Sequence[float], std: Sequence[float], several: bool = False
    ) -> None:
        """Takes mean and standard deviation of each channel on the scale 0 to 1.

        Args:
            model: The classifier.
            mean: Mean of each channel.
            std: Standard deviation of each channel.
            several: True if an image may have several classes: a sigmoid, not softmax.
        """
        super().__init__()
        self.model, self.several = model, several
        deviation = torch.tensor(std).view(-1, 1, 1)
        self.register_buffer("scale", 1 / (255 * deviation))
        self.register_buffer("shift", -torch.tensor(mean).view(-1, 1, 1) / deviation)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Normalizes, classifies, softmax or sigmoid."""
        planes = image.permute(0, 3, 1, 2).float() * self.scale + self.shift
        logits = self.model(planes).float()
        return torch.sigmoid(logits) if self.several else torch.softmax(logits, 1)


ModelOutputs = Sequence[torch.Tensor]

LIMITS = {"fp32": 1e-4, "bf16": 2e-2}


def relative_error(wanted: ModelOutputs, given: ModelOutputs) -> float:
    """Returns the largest absolute difference over the largest absolute value, for the worst output.

    Args:
        wanted: ModelOutputs of the trained model.
        given: ModelOutputs of the exported file.

    Returns:
        Infinity if they can't be compared: different shapes, a NaN in either, or no output.
    """
    if [one.shape for one in wanted] != [one.shape for one in given]:
        return math.inf
    pairs = zip(wanted, given, strict=True)
    return max((_error(one.double(), other.double()) for one, other in pairs), default=math.inf)


def _error(wanted: torch.Tensor, given: torch.Tensor) -> float:
    if torch.equal(wanted, given):
        return 0.0
    difference, largest = float((wanted - given).abs().max()), float(wanted.abs().max())
    return difference / largest if difference < math.inf and 0 < largest < math.inf else math.inf
