"""Selection of modules and parameters by patterns on their names."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from trainer.config.suggest import nearest
from trainer.errors import BadInputError

_SHOWN = 3


def matching(names: Iterable[str], patterns: Sequence[str], key: str) -> list[str]:
    """Returns the names that match any of the patterns, in their order.

    Args:
        names: Names such as "blocks.0.conv1".
        patterns: Shell patterns; `*` also matches dots, so "blocks.*" matches all modules inside.
        key: The configuration key that holds the patterns, for messages.

    Raises:
        BadInputError: If a pattern matches nothing.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            likely = nearest(pattern, names) or f"; names are such as {', '.join(names[:_SHOWN]) or 'none'}"
            raise BadInputError(f"{key}: nothing in the model is called '{pattern}'{likely}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def as_endings(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Returns patterns as peft reads them: "q_proj", if nothing is called so, as the end of names."""
    names = list(names)

    def is_end(pattern: str) -> bool:
        whole = any(fnmatchcase(name, pattern) for name in names)
        return not whole and any(name.endswith(f".{pattern}") for name in names)

    return [f"*.{pattern}" if is_end(pattern) else pattern for pattern in patterns]


def chosen(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that is true for matching names; "fc" also matches all of that module, as "fc.*"."""
    return lambda name: any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns
    )


def chosen_parameters(model: nn.Module, patterns: Sequence[str], key: str) -> Callable[[str], bool]:
    """Returns `chosen(patterns)` with each pattern checked against the parameters; tied ones match together.

    Raises:
        BadInputError: If a pattern matches no parameter.
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
