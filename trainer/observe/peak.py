"""Peaks of a GPU's allocated memory over stretches that may overlap: torch keeps one, since its reset."""

import torch

_open: list["Peak"] = []
_before: dict[torch.device, int] = {}  # the highest until torch's counter was last reset


class Peak:
    """The most bytes that were allocated on a GPU since this was made, until it is closed."""

    _device: torch.device
    _seen: int

    def __init__(self, device: torch.device) -> None:
        """Starts at what is allocated now."""
        reached = _since_reset(device)
        _before[device] = max(_before.get(device, 0), reached)
        for peak in _open:
            if peak._device == device:
                peak._seen = max(peak._seen, reached)
        if tells_figures():
            torch.cuda.reset_peak_memory_stats(device)
        self._device, self._seen = device, 0
        _open.append(self)

    def close(self) -> int:
        """Ends it and returns its bytes."""
        _open.remove(self)
        return max(self._seen, _since_reset(self._device))


def highest(device: torch.device) -> int:
    """The most bytes that this process allocated on a GPU, ever."""
    return max(_before.get(device, 0), _since_reset(device))


def tells_figures() -> bool:
    """Whether torch's allocator tells what it holds: one that is plugged in does not (pytorch#133281)."""
    return str(torch.cuda.memory.get_allocator_backend()) != "pluggable"


def _since_reset(device: torch.device) -> int:
    if not tells_figures():
        return 0
    # max_memory_allocated makes a flat dictionary of two hundred figures first.
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats["allocated_bytes"]["all"]["peak"]) if stats else 0
