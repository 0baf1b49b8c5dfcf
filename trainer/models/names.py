"""Modules and tensors of a model, chosen by patterns on their names."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from trainer.config.suggest import nearest
from trainer.errors import BadInputError


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
            likely = nearest(pattern, names) or f"; names are such as {', '.join(names[:3]) or 'none'}"
            raise BadInputError(f"{key}: nothing in the model is called '{pattern}'{likely}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
