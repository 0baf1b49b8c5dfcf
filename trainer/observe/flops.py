"""Floating-point operations of a model, counted once, and the share of what the GPU could do (MFU).

MFU (model FLOPs utilization; Chowdhery et al., 2022, "PaLM", appendix B) = FLOPs of forward and backward of a
sample x samples per second / (GPUs x peak FLOP/s of one at the dtype of its matrix products). Multiplications
and additions count one each. What activation checkpointing computes again isn't counted: it's no progress.
"""

import functools
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Dense peaks in FLOP/s as NVIDIA's data sheets give them, at the boost clock: of the first name that is part
# of the device's. bf16 and fp16, then TF32; 0: it has none.
_PEAKS = {
    "GB200": (2500e12, 1250e12),
    "B200": (2250e12, 1125e12),
    "H200": (989.5e12, 494.7e12),
    "H100 PCIe": (756e12, 378e12),
    "H100 NVL": (835e12, 417.5e12),
    "H100": (989.5e12, 494.7e12),
    "GH200": (989.5e12, 494.7e12),
    "A100": (312e12, 156e12),
    "A30": (165e12, 82e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 62.5e12),
    "A40": (149.7e12, 74.8e12),
    "L40S": (362e12, 183e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 60.5e12),
    "RTX 4090": (165.2e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "V100": (125e12, 0.0),
    "T4": (65e12, 0.0),
}
# Of an operation that asks the device for a value, and so waits for all that it was given.
_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
_COPIES = ("aten::_to_copy", "aten::copy_")  # .cpu(), .numpy(), .tolist() and to("cpu")


def peak_flops(device_name: str, mode: str) -> float | None:
    """Peak FLOP/s of a GPU for `precision.mode` ("bf16", "fp16", "tf32"); None where it isn't known."""
    low = mode in ("bf16", "fp16")
    if not low and mode != "tf32":
        return None
    found = next((peaks for name, peaks in _PEAKS.items() if name in device_name), None)
    return (found[0 if low else 1] or None) if found else None


@dataclass(frozen=True)
class Count:
    """What a model computes.

    Attributes:
        per_sample: FLOPs of forward and backward of a sample; 0.0: they couldn't be counted.
        waits: "file:line" of the first operation of a forward pass that waits for the device, or "".
        by_part: `per_sample` by the parts of the model; "" is what none of them computes.
    """

    per_sample: float = 0.0
    waits: str = ""
    by_part: Mapping[str, float] = field(default_factory=dict)


class Operations(TorchDispatchMode):
    """Adds up the FLOPs of what is computed within it, and finds who waits for the device.

    Autograd takes other paths within a dispatch mode, and torch.compile gives functions up that it meets
    there: nothing that is trained may be computed within it.

    Attributes:
        flops: Until now.
        waits: "file:line" of the first operation that waits for the device, or "".
        by_part: The FLOPs of each part that is watched; "": of none of them.
    """

    def __init__(self, device: torch.device) -> None:
        """Counts from 0.

        Args:
            device: Where the tensors lie that stand for those of the device that is trained on.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.waits = ""
        self.by_part = Counter[str]()
        self._device = device
        self._within = list[str]()

    def watch(self, part: str, modules: Iterable[nn.Module]) -> None:
        """Counts for a part what these modules compute, which are for nothing but to be counted."""
        for module in modules:
            module.register_forward_pre_hook(functools.partial(self._enters, part))
            module.register_forward_hook(functools.partial(self._leaves, part))

    # The backward pass of a module begins with the gradient of what it gave and ends with that of what it was
    # given. Neighbors share that tensor, and so the one may end after the other has begun: hence no stack.
    def _enters(self, part: str, _module: nn.Module, inputs: Any) -> None:
        self._within.append(part)
        self._at_gradient(inputs, functools.partial(self._end, part))

    def _leaves(self, part: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._end(part)
        self._at_gradient(outputs, functools.partial(self._begin, part))

    def _begin(self, part: str, _gradient: Any = None) -> None:
        if part not in self._within:
            self._within.append(part)

    def _end(self, part: str, _gradient: Any = None) -> None:
        if part in self._within:
            self._within.remove(part)

    @staticmethod
    def _at_gradient(values: Any, do: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(do)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if "c10d" in name:
            raise RuntimeError("the other ranks don't count, and would not answer")
        # Before it runs: with shapes alone it fails.
        if not self.waits and waits(name, args, kwargs, self._device):
            self.waits = _line_of_the_model()
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            self.flops += flops
            self.by_part[self._within[-1] if self._within else ""] += flops
        return out


def waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Whether an operation of the aten library stops the host until a device has done all before it."""
    if name in _WAITS:
        return bool(args[0].device.type == device.type)
    if name not in _COPIES or kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:] == (True,)):
        return False
    source, target = (args[1], args[0].device) if name == "aten::copy_" else (args[0], kwargs.get("device"))
    leaves = source.device.type == device.type != "cpu"
    return leaves and target is not None and torch.device(target).type == "cpu"


def _line_of_the_model() -> str:
    """Where the code is, of the user or of the library that the model comes from."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    outside = [frame for frame in frames if not _within_torch(frame.filename)]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else ""


def _within_torch(file: str) -> bool:
    return "/site-packages/torch/" in file or file.startswith("<")
