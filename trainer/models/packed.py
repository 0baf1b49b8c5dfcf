"""Attention within documents of packed rows: by a dense mask, or by FlexAttention's block mask.

FlexAttention (Dong et al., 2024) skips blocks that are fully masked, and evaluates the mask only in partial
blocks; its fused kernel holds no length x length matrix.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from trainer.config.tasks import GPTConfig
from trainer.models.compiling import missing_for_compiling, set_up_torch

if TYPE_CHECKING:  # importing it takes seconds
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128  # FlexAttention's own default
_NARROWEST, _WIDEST = 16, 256  # channels of a head: Triton's smallest product, and what fits shared memory


def documents(segment: torch.Tensor) -> torch.Tensor:
    """Numbers the documents of each row from 0 on in their order; padding is the last one.

    Args:
        segment: Integers (n, length): neighbors with the same number belong to one document.

    Returns:
        int32 (n, length), nondecreasing along a row.
    """
    begins = F.pad(segment[:, 1:] != segment[:, :-1], (1, 0))
    return begins.cumsum(1, dtype=torch.int32)


def pairs_mask(segment: torch.Tensor) -> torch.Tensor:
    """Returns the dense causal mask: a token attends to itself and to those before it in its document.

    Args:
        segment: As in `documents`.

    Returns:
        bool (n, 1, length, length), True where the query attends to the key.
    """
    document, length = documents(segment), segment.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=segment.device).tril()
    return ((document[:, None, :] == document[:, :, None]) & before)[:, None]


def blocks_mask(segment: torch.Tensor) -> "BlockMask":
    """Returns the mask of `pairs_mask` as a BlockMask of 128 x 128 blocks, without a length x length matrix.

    Args:
        segment: As in `documents`, the length a multiple of 128.

    Returns:
        A mask for n rows, the same for all heads.
    """
    from torch.nn.attention.flex_attention import BlockMask

    document = documents(segment)

    def sees(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (document[row, query] == document[row, key]) & (query >= key)

    first, last = document[:, ::_BLOCK], document[:, _BLOCK - 1 :: _BLOCK]
    count = first.shape[1]
    not_after = torch.ones(count, count, dtype=torch.bool, device=segment.device).tril()
    # Numbers rise along a row: a key block shares a document with a later query block if it ends with it.
    some = (last[:, None, :] >= first[:, :, None]) & not_after
    whole = (first[:, None, :] == last[:, :, None]) & not_after.tril(-1)
    partial = _indices((some & ~whole)[:, None])
    result: BlockMask = BlockMask.from_kv_blocks(
        *partial, *_indices(whole[:, None]), BLOCK_SIZE=_BLOCK, mask_mod=sees
    )
    return result


def attend_by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: "BlockMask"
) -> torch.Tensor:
    """Computes attention by FlexAttention, without dropout; compiled on a GPU, eager on a CPU.

    Args:
        query: Float (n, heads, length, channels); `key` and `value` alike.
        mask: From `blocks_mask`.

    Returns:
        Shape and dtype of `query`.
    """
    from torch.nn.attention.flex_attention import flex_attention

    as_it_is = torch.compiler.is_compiling() or query.device.type == "cpu"
    attend: Callable[..., Any] = flex_attention if as_it_is else _compiled()
    result: torch.Tensor = attend(query, key, value, block_mask=mask)
    return result


def missing_for_blocks(config: GPTConfig, device: torch.device) -> str | None:
    """Returns the reason why FlexAttention can't be used on a device; None if it can."""
    channels = config.width // config.heads
    if device.type != "cuda":
        return "FlexAttention trains on a GPU only"
    if config.dropout:
        return f"FlexAttention has no dropout, and language.dropout is {config.dropout:g}"
    if config.sequence_length % _BLOCK:
        return f"language.sequence_length={config.sequence_length} is not a multiple of {_BLOCK}"
    if channels & (channels - 1) or not _NARROWEST <= channels <= _WIDEST:
        return (
            f"a head has {channels} channels (language.width / language.heads), and not a power of two from "
            f"{_NARROWEST} to {_WIDEST}"
        )
    return missing_for_compiling(device)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    set_up_torch()
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _indices(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's number of true entries, int32 (…, rows), and columns, true first, (…, rows, n)."""
    order = dense.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), order.to(torch.int32)
