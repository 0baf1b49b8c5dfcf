"""Modules and tensors of a model, chosen by patterns on their names."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from trainer.config.suggest import nearest
from trainer.errors import BadInputError

_SHOWN = 3


def matching(names: Iterable[str], patterns: Sequence[str], key: str) -> list[str]:
    """Names that any of the patterns matches, in their order.

    Args:
        names: Names such as "blocks.0.conv1".
        patterns: Shell patterns; `*` also matches dots, so that "blocks.*" is all that lies below.
        key: The configuration key that holds the patterns, for messages.

    Raises:
        BadInputError: If a pattern matches nothing, which is nearly always a slip.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            likely = nearest(pattern, names) or f"; names are such as {', '.join(names[:_SHOWN]) or 'none'}"
            raise BadInputError(f"{key}: nothing in the model is called '{pattern}'{likely}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def chosen(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name is one of those: "fc" stands for all of that module, as "fc.*" does."""
    return lambda name: any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns
    )


def chosen_parameters(model: nn.Module, patterns: Sequence[str], key: str) -> Callable[[str], bool]:
    """The same, where each pattern must match a parameter; a tied one is meant by any of its names.

    Raises:
        BadInputError: As `matching` does.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(map(chosen([pattern]), parameters)):
            known = [*(name for name, _ in model.named_modules() if name), *parameters]
            likely = nearest(pattern.rstrip("*."), known) or (
                f"; names are such as {', '.join(known[:_SHOWN])} ({key}=[] names none)"
            )
            raise BadInputError(f"{key}: no parameter of the model is called '{pattern}'{likely}")
    matches = chosen(patterns)
    meant = {id(parameter) for name, parameter in parameters.items() if matches(name)}
    tied = {name for name, parameter in parameters.items() if id(parameter) in meant}
    return lambda name: name in tied or matches(name)
