"""Division of a model into a bounded number of parts, for tables and profiles."""

from typing import NamedTuple

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Part(NamedTuple):
    """One or several modules of a model.

    Attributes:
        name: Name such as "blocks.0"; "" for the parameters that are in no other part.
        kind: Class, or count and class of its members: "Linear", "12 x Block".
        modules: Names of its modules.
    """

    name: str
    kind: str
    modules: tuple[str, ...] = ()


def parts(model: nn.Module, most: int) -> list[Part]:
    """Divides a model into at most `most` parts, in its order; each parameter is in one of them.

    Modules with blocks are opened level by level while the number allows it; if the children of the model are
    too many, the smallest are merged. Blocks aren't opened: they may be compiled or checkpointed.
    """
    names = [name for name, _ in model.named_children()]
    while True:
        opened = [one for name in names for one in _inside(model, name, alone=len(names) == 1)]
        if opened == names or len(opened) > most - 1:
            break
        names = opened
    found = [Part(name, _kind(_at(model, name)), (name,)) for name in names]
    if len(found) > most - 1:
        sizes = {name: sum(p.numel() for p in _at(model, name).parameters()) for name in names}
        kept = set(sorted(names, key=lambda name: -sizes[name])[: most - 2])
        rest = tuple(name for name in names if name not in kept)
        found = [*(part for part in found if part.name in kept), Part("others", f"{len(rest)} modules", rest)]
    return [*found, Part("", type(model).__name__)]


def _inside(model: nn.Module, name: str, alone: bool) -> list[str]:
    """Returns the names of a module's children, or its own name where it isn't opened."""
    module = _at(model, name)
    inner = [f"{name}.{child}" for child, _ in module.named_children()]
    is_member = isinstance(_at(model, name.rpartition(".")[0]), _CONTAINERS)
    has_blocks = alone or any(isinstance(child, _CONTAINERS) for child in module.children())
    opens = isinstance(module, _CONTAINERS) or (has_blocks and not is_member)
    return inner if inner and opens else [name]


def _at(model: nn.Module, name: str) -> nn.Module:
    return nn.Module.get_submodule(model, name)  # TorchScript's own raises


def _kind(module: nn.Module) -> str:
    kinds = [type(child).__name__ for child in module.children()]
    if isinstance(module, _CONTAINERS) and len(kinds) > 1 and len(set(kinds)) == 1:
        return f"{len(kinds)} x {kinds[0]}"
    return type(module).__name__


def called(model: nn.Module, part: Part) -> list[nn.Module]:
    """Returns the modules of a part that a forward pass calls: for a list, its members."""
    found = list[nn.Module]()
    for module in (_at(model, name) for name in part.modules):
        found += module.children() if type(module).forward is nn.Module.forward else [module]
    return found


def parameters_of(model: nn.Module, parts: list[Part]) -> dict[str, list[nn.Parameter]]:
    """Returns the parameters of each part by its name; a shared one belongs to the first part."""
    seen, found = set[int](), dict[str, list[nn.Parameter]]()
    for part in parts:
        modules = (_at(model, name) for name in part.modules or ("",))
        own = {id(p): p for module in modules for p in module.parameters() if id(p) not in seen}
        found[part.name] = list(own.values())
        seen.update(own)
    return found
