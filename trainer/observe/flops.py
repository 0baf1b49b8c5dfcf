"""Floating-point operations of a model, counted once, and the fraction of the GPU's peak (MFU).

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

# Dense peaks in TFLOP/s at the boost clock, with sums in float32: bf16, fp16, TF32; 0: the GPU has none. By
# the whole name, as nvidia-smi tells it (older drivers leave "NVIDIA" out). Sources: NVIDIA's data sheet of
# the GPU; for RTX cards the tables of the whitepapers of Turing, GA102, Ada and RTX Blackwell. A slice (MIG,
# vGPU), a laptop's chip and a cut-down variant have other names, and so no peak.
# Not every value was held against its sheet: those of RTX PRO 6000 were, the others are as commonly cited.
_PEAKS: tuple[tuple[tuple[float, float, float], tuple[str, ...]], ...] = (
    ((2500, 2500, 1250), ("GB200",)),
    ((2250, 2250, 1125), ("B200",)),
    ((989.5, 989.5, 494.7), ("H100 80GB HBM3", "H200", "GH200 120GB", "GH200 480GB", "GH200 144G HBM3e")),
    ((835, 835, 417.5), ("H100 NVL", "H200 NVL")),
    ((756, 756, 378), ("H100 PCIe",)),
    ((312, 312, 156), ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe")),
    ((165, 165, 82), ("A30",)),
    ((125, 125, 62.5), ("A10",)),
    ((70, 70, 35), ("A10G",)),
    ((149.7, 149.7, 74.8), ("A40",)),
    ((362, 362, 183), ("L40S",)),
    ((181, 181, 90.5), ("L40",)),
    ((121, 121, 60.5), ("L4",)),
    ((503.8, 503.8, 251.9), ("RTX PRO 6000 Blackwell Workstation Edition",)),
    ((438.9, 438.9, 219.5), ("RTX PRO 6000 Blackwell Max-Q Workstation Edition",)),
    ((364.2, 364.2, 182.1), ("RTX 6000 Ada Generation",)),
    ((154.8, 154.8, 77.4), ("RTX A6000",)),
    ((209.5, 209.5, 104.8), ("GeForce RTX 5090",)),
    ((165.2, 165.2, 82.6), ("GeForce RTX 4090",)),
    ((71, 71, 35.6), ("GeForce RTX 3090",)),
    ((0, 130.5, 0), ("Quadro RTX 6000",)),
    ((0, 125, 0), ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB")),
    ((0, 112, 0), ("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB")),
    ((0, 130, 0), ("Tesla V100S-PCIE-32GB",)),
    ((0, 65, 0), ("Tesla T4",)),
)
# Of an operation that asks the device for a value, and so waits for all that it was given.
_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
_COPIES = ("aten::_to_copy", "aten::copy_")  # .cpu(), .numpy(), .tolist() and to("cpu")


def peak_flops(device_name: str, mode: str) -> float | None:
    """Peak FLOP/s of a GPU for `precision.mode` ("bf16", "fp16", "tf32"); None where it isn't known."""
    if mode not in ("bf16", "fp16", "tf32"):
        return None
    peaks = next((peaks for peaks, names in _PEAKS if short_name(device_name) in names), (0, 0, 0))
    return peaks[("bf16", "fp16", "tf32").index(mode)] * 1e12 or None


def short_name(device_name: str) -> str:
    """The whole name of a GPU without the maker's, which older drivers leave out."""
    return device_name.removeprefix("NVIDIA ")


@dataclass(frozen=True)
class Count:
    """FLOPs of a model.

    Attributes:
        per_sample: FLOPs of forward and backward of a sample; 0.0: they couldn't be counted.
        waits: "file:line" of the first operation of a forward pass that waits for the device, or "".
        by_part: `per_sample` by module of the model; "" is the rest.
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
    """Returns True if an operation of aten stops the host until a device has done all before it."""
    if name in _WAITS:
        return bool(args[0].device.type == device.type)
    if name not in _COPIES or kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:] == (True,)):
        return False
    source, target = (args[1], args[0].device) if name == "aten::copy_" else (args[0], kwargs.get("device"))
    leaves = source.device.type == device.type != "cpu"
    return leaves and target is not None and torch.device(target).type == "cpu"


def _line_of_the_model() -> str:
    """Returns file and line of the running code outside torch: the user's, or the model's library."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    outside = [frame for frame in frames if not _within_torch(frame.filename)]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else ""


def _within_torch(file: str) -> bool:
    return "/site-packages/torch/" in file or file.startswith("<")
