"""Tensors that share memory: tied weights, and views such as slices and transposes."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn


def sharing(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Returns groups of names of tensors that share memory, directly or through others of the group.

    Views of one storage that don't overlap share nothing. Views of different dtypes share if their ranges of
    bytes overlap. DTensors, lazy, empty and non-strided tensors are left out. It also works on the meta
    device.

    Returns:
        Groups of at least two names; groups and names in the order of `tensors`.
    """
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        strided = tensor.layout == torch.strided and not hasattr(tensor, "to_local")
        if not nn.parameter.is_lazy(tensor) and strided and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    order = {name: number for number, name in enumerate(tensors)}
    groups = [
        sorted(group, key=order.__getitem__)
        for names in by_storage.values()
        if len(names) > 1
        for group in _groups_in_storage({name: tensors[name] for name in names})
        if len(group) > 1
    ]
    return sorted(groups, key=lambda group: order[group[0]])


def _groups_in_storage(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Returns groups of names of tensors that overlap, for tensors of one storage; also groups of one.

    Tensors are taken in the order of their first bytes, so a group is done once a later tensor begins behind
    its end.
    """
    done: list[list[str]] = []
    open_ones: list[list[str]] = []  # groups that later tensors may still overlap with
    for name in sorted(tensors, key=lambda name: _byte_range(tensors[name])):
        first = _byte_range(tensors[name])[0]
        done += [group for group in open_ones if max(_byte_range(tensors[one])[1] for one in group) <= first]
        open_ones = [group for group in open_ones if group not in done]
        joined = [g for g in open_ones if any(_overlap(tensors[name], tensors[one]) for one in g)]
        open_ones = [group for group in open_ones if group not in joined]
        open_ones.append([*(one for group in joined for one in group), name])
    return done + open_ones


def sharing_memory(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Returns the names of the tensors that share memory with another of `tensors`."""
    return {name for group in sharing(tensors) for name in group}


def buffers_of_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Returns the buffers of a model that share memory with a parameter, so that training changes them."""
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parameters = dict(model.named_parameters())
    groups = (group for group in sharing(tensors) if not parameters.keys().isdisjoint(group))
    return [tensors[name] for group in groups for name in group if name not in parameters]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if two tensors of one storage share memory."""
    (first, last), (other_first, other_last) = _byte_range(one), _byte_range(other)
    if last <= other_first or other_last <= first:
        return False
    if one.dtype != other.dtype or (is_dense(one) and is_dense(other)):
        return True
    # Views with gaps, such as columns of a matrix: compared by a mask of the elements that they span.
    size, begin = one.element_size(), min(first, other_first)
    elements = torch.zeros((max(last, other_last) - begin) // size, dtype=torch.bool, device="cpu")
    of_one, of_other = (
        elements.as_strided(tensor.shape, tensor.stride(), (start - begin) // size)
        for tensor, start in ((one, first), (other, other_first))
    )
    of_one.fill_(True)
    return bool(of_other.any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the byte offsets in its storage between which a tensor lies; the end is exclusive."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (first + last + 1) * size


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor's elements fill its range of memory once, in any order.

    False for columns of a matrix and for expanded tensors; True for empty and non-strided ones.
    """
    if not tensor.numel() or tensor.layout != torch.strided:
        return True
    filled = 1  # elements of the dimensions so far, which lie side by side
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != filled:
            return False
        filled *= length
    return True


def first_names(groups: Iterable[list[str]]) -> str:
    """Returns the first two names of the first group for a message: "'a' and 'b'"."""
    return " and ".join(f"'{name}'" for name in next(iter(groups))[:2])
