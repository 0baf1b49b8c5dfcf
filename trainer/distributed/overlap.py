"""Tensors that share memory: transposed views, slices, `.data =`, another name for one tensor."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn


def sharing(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Returns groups of names whose tensors have elements in common.

    Adjacent views of one buffer share nothing. It also works on the meta device.
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
        for group in _of_one_storage({name: tensors[name] for name in names})
        if len(group) > 1
    ]
    return sorted(groups, key=lambda group: order[group[0]])


def _of_one_storage(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    done: list[list[str]] = []
    open_ones: list[list[str]] = []  # groups that later tensors may still overlap with
    for name in sorted(tensors, key=lambda name: _reach(tensors[name])):
        first = _reach(tensors[name])[0]
        done += [group for group in open_ones if max(_reach(tensors[one])[1] for one in group) <= first]
        open_ones = [group for group in open_ones if group not in done]
        joined = [g for g in open_ones if any(_overlap(tensors[name], tensors[one]) for one in g)]
        open_ones = [group for group in open_ones if group not in joined]
        open_ones.append([*(one for group in joined for one in group), name])
    return done + open_ones


def sharing_memory(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Returns the names of the tensors that share memory with another one."""
    return {name for group in sharing(tensors) for name in group}


def buffers_of_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Returns the buffers that share memory with a parameter, and change when it is trained."""
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parameters = dict(model.named_parameters())
    groups = (group for group in sharing(tensors) if not parameters.keys().isdisjoint(group))
    return [tensors[name] for group in groups for name in group if name not in parameters]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (first, last), (other_first, other_last) = _reach(one), _reach(other)
    if last <= other_first or other_last <= first:
        return False
    if one.dtype != other.dtype or (is_dense(one) and is_dense(other)):
        return True
    # With gaps, as columns of a matrix: by a mask of the elements between the first and the last.
    size, begin = one.element_size(), min(first, other_first)
    elements = torch.zeros((max(last, other_last) - begin) // size, dtype=torch.bool, device="cpu")
    of_one, of_other = (
        elements.as_strided(tensor.shape, tensor.stride(), (start - begin) // size)
        for tensor, start in ((one, first), (other, other_first))
    )
    of_one.fill_(True)
    return bool(of_other.any())


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first and last byte of a tensor in its storage."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (first + last + 1) * size


def is_dense(tensor: torch.Tensor) -> bool:
    """True if a tensor's elements fill its memory range, in any order; False for columns, or expanded."""
    if not tensor.numel() or tensor.layout != torch.strided:
        return True
    first, last = _reach(tensor)
    return last - first == tensor.nbytes


def first_names(groups: Iterable[list[str]]) -> str:
    """Returns the first two names of the first group, in quotes."""
    return " and ".join(f"'{name}'" for name in next(iter(groups))[:2])
