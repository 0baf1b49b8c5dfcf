"""Which GPUs a request means. Imports nothing heavy: `scripts/runtime.py` asks it, too."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.errors import BadInputError


def chosen_gpus(request: str, visible: Sequence[str]) -> list[str]:
    """The GPUs of `--gpus`, out of those that CUDA_VISIBLE_DEVICES leaves; never one more.

    Args:
        request: A count ("2"), indices ("0,1"), or indices that say so ("id:1", "id:0,1").
        visible: What names each visible GPU; indices count these.

    Raises:
        BadInputError: If it is neither, or names a GPU that isn't there.
    """
    listed = request.startswith("id:")
    words = request[3 * listed :].split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 5 for word in words):
        raise BadInputError(
            f"--gpus {request}: give a count (2), a list of indices (0,1) or a single index (id:1)"
        )
    indices = [int(word) for word in words] if listed or len(words) > 1 else list(range(int(words[0])))
    if not indices or max(indices) >= len(visible) or len(set(indices)) < len(indices):
        numbered = ", numbered from 0" if visible else ""
        raise BadInputError(f"--gpus {request}: there are {len(visible)} GPUs here{numbered}")
    return [visible[index] for index in indices]
