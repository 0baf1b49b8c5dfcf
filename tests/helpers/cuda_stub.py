"""torch.cuda without a GPU: what is computed is the CPU's, and who would have to wait for whom is checked.

A copy to or from the device is made at once, but counts as under way until its stream is waited for. What a
GPU would do wrong without a word is a line in `problems`: memory of the host that is written or read while a
copy of it is under way, a tensor of the device that is used before its stream was waited for, and
one that is freed while a stream may still read it that its allocator doesn't know of.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
Span = tuple[int, int]


@dataclass(eq=False)
class Stream:
    """A stream that counts what it was given, and what of it and of others is known to be done."""

    given: int = 0
    done: int = 0
    waited: dict["Stream", int] = field(default_factory=dict)

    def wait_event(self, event: "Event") -> None:
        assert event.stream is not None, "an event that was never recorded"
        self.waited[event.stream] = max(self.waited.get(event.stream, 0), event.given)

    def wait_stream(self, other: "Stream") -> None:
        self.waited[other] = max(self.waited.get(other, 0), other.given)

    def synchronize(self) -> None:
        self.done = self.given

    def sees(self, other: "Stream", number: int) -> bool:
        """Whether what this stream does now comes after another's."""
        return other is self or other.done >= number or self.waited.get(other, 0) >= number


class Event:
    stream: Stream | None = None
    given = 0

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Stream) -> None:
        self.stream, self.given = stream, stream.given

    def synchronize(self) -> None:
        assert self.stream is not None, "an event that was never recorded"
        self.stream.done = max(self.stream.done, self.given)


@dataclass(eq=False)
class Held:
    """A tensor of the device: the stream that it was allocated and written on, and those that use it."""

    stream: Stream
    written: int
    used: set[Stream] = field(default_factory=set)
    recorded: set[Stream] = field(default_factory=set)


class Cuda(TorchFunctionMode):
    """Stand-in for the GPU: its `streams`, the `problems`, and what was `done`; see the file's first lines.

    What was done is the stream's number (0: the default one), the operation, and the address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.problems: list[str] = []
        self.done: list[tuple[int, str, int]] = []
        self.locked: dict[int, int] = {}
        self._default = Stream()
        self._current = [self._default]
        self._copies: list[tuple[Stream, int, str, Span]] = []
        self._held: dict[int, Held] = {}

    # What torch.cuda has.

    def make_stream(self, *_: Any, **__: Any) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def current_stream(self, _: Any = None) -> Stream:
        return self._current[-1]

    def synchronize(self, _: Any = None) -> None:
        for one in (self._default, *self.streams):
            one.synchronize()

    def cudart(self) -> "Cuda":
        return self

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:  # noqa: N802
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._held[tensor.data_ptr()].recorded.add(stream)

    # What a test tells.

    def host_writes(self, tensor: torch.Tensor) -> None:
        """The host writes to a tensor of its own."""
        self._touched(tensor, "written", ("reads", "writes"))

    def host_reads(self, tensor: torch.Tensor) -> None:
        """The host reads one."""
        self._touched(tensor, "read", ("writes",))

    def computes(self, tensor: torch.Tensor) -> None:
        """The current stream computes with a tensor of the device."""
        held, current = self._held[tensor.data_ptr()], self.current_stream()
        current.given += 1
        held.used.add(current)
        self._note("computes", tensor)
        if not current.sees(held.stream, held.written):
            self.problems.append("computed with before its copy was waited for")

    # What torch is asked for.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        to_device = any(_is_cuda(one) for one in tree_leaves((args, kwargs)))
        args, kwargs = tree_map(lambda one: torch.device("cpu") if _is_cuda(one) else one, (args, kwargs))
        if name == "to" and to_device:
            out = args[0].detach().clone()
            self._copies_to(out, args[0])
            return out
        if name == "copy_" and args[0].data_ptr() != args[1].data_ptr():
            self._copy_within(*args[:2])
        return func(*args, **kwargs)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Says that a tensor is one of the device, written by the default stream."""
        self._holds(tensor, self._default)
        return tensor

    def _copies_to(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self.current_stream()
        stream.given += 1
        self._copies.append((stream, stream.given, "reads", _span(source)))
        self._note("copies to the device", source)
        self._holds(target, stream)

    def _copy_within(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.data_ptr() in self._held:
            stream = self.current_stream()
            self.computes(source)
            self.host_writes(target)
            self._copies.append((stream, stream.given, "writes", _span(target)))
            self._note("copies to the host", target)
        else:
            self.host_reads(source)
            self.host_writes(target)

    def _holds(self, tensor: torch.Tensor, stream: Stream) -> None:
        address = tensor.data_ptr()
        self._held[address] = Held(stream, stream.given)
        weakref.finalize(tensor, self._freed, address)

    def _freed(self, address: int) -> None:
        held = self._held.pop(address)
        others = held.used - held.recorded - {held.stream}
        unknown = [one for one in others if one.done < one.given]
        if unknown:
            self.problems.append("freed while a stream may read it that its allocator doesn't know of")

    def _touched(self, tensor: torch.Tensor, what: str, by: tuple[str, ...]) -> None:
        first, end = _span(tensor)
        self._copies = [one for one in self._copies if one[0].done < one[1]]
        for _, _, kind, (start, stop) in self._copies:
            if kind in by and start < end and first < stop:
                self.problems.append(f"{what} while a copy {kind} it")

    def _note(self, what: str, tensor: torch.Tensor) -> None:
        stream = self.current_stream()
        number = 0 if stream is self._default else self.streams.index(stream) + 1
        self.done.append((number, what, tensor.data_ptr()))


@contextlib.contextmanager
def stubbed_cuda() -> Iterator[Cuda]:
    """Lets `torch.cuda` be the stub's."""
    cuda = Cuda()
    with pytest.MonkeyPatch.context() as patch, cuda:
        patch.setattr(torch.cuda, "Stream", cuda.make_stream)
        patch.setattr(torch.cuda, "Event", Event)
        for name in ("stream", "current_stream", "cudart"):
            patch.setattr(torch.cuda, name, getattr(cuda, name))
        recorded = lambda one, stream: cuda.record_stream(one, stream)  # noqa: E731, PLW0108
        patch.setattr(torch.Tensor, "record_stream", recorded)
        patch.setattr(torch.cuda, "synchronize", cuda.synchronize)
        yield cuda


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _span(tensor: torch.Tensor) -> Span:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
