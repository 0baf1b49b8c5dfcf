"""Tensors that share memory: transposed views, slices, `.data =`, another name for one tensor."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn


def sharing(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups of names whose tensors have numbers in common; a tensor that has its own is in none.

    Views of one buffer that lie beside each other share nothing. On the meta device it is found, too.
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
    open_ones: list[list[str]] = []  # groups that what comes may still share something with
    for name in sorted(tensors, key=lambda name: _reach(tensors[name])):
        first = _reach(tensors[name])[0]
        done += [group for group in open_ones if max(_reach(tensors[one])[1] for one in group) <= first]
        open_ones = [group for group in open_ones if group not in done]
        joined = [g for g in open_ones if any(_overlap(tensors[name], tensors[one]) for one in g)]
        open_ones = [group for group in open_ones if group not in joined]
        open_ones.append([*(one for group in joined for one in group), name])
    return done + open_ones


def sharing_memory(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of the tensors that share memory with another one."""
    return {name for group in sharing(tensors) for name in group}


def buffers_of_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Buffers that share memory with a parameter, and change when that is trained."""
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
    # With gaps: columns of a matrix, say. By their places, as many as lie between first and last.
    size, begin = one.element_size(), min(first, other_first)
    places = torch.zeros((max(last, other_last) - begin) // size, dtype=torch.bool, device="cpu")
    seen, looked_at = (
        places.as_strided(tensor.shape, tensor.stride(), (start - begin) // size)
        for tensor, start in ((one, first), (other, other_first))
    )
    seen.fill_(True)
    return bool(looked_at.any())


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first and last byte of a tensor in its storage."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (first + last + 1) * size


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in one piece, in whatever order; not a column of a matrix, or an expanded one."""
    if not tensor.numel() or tensor.layout != torch.strided:
        return True
    first, last = _reach(tensor)
    return last - first == tensor.nbytes


def first_names(groups: Iterable[list[str]]) -> str:
    """Returns the first two names of the first group, in quotes."""
    return " and ".join(f"'{name}'" for name in next(iter(groups))[:2])
