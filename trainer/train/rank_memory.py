"""What a rank holds of a model and its training state, by formula: whole, or spread over ranks by FSDP."""

from collections.abc import Sequence
from typing import NamedTuple


class RankMemory(NamedTuple):
    """Bytes that a rank holds when it holds most, in a backward pass; activations aren't among them.

    Attributes:
        kept: Weights, moments and average: held between steps, too.
        gathered: Whole parameters, while it computes.
        gradients: This rank's rows of them, and whole ones while it computes.
    """

    kept: int
    gathered: int
    gradients: int


def rank_memory(
    blocks: Sequence[int], rest: int, ranks: int, copies: int, *, accumulates: bool, low: bool = False
) -> RankMemory:
    """The memory of one of the ranks that share a model, all of it trained.

    While a block is computed backward it is whole, the one before it is being gathered, its gradient grows,
    and that of the one after it is being summed over the ranks. The rest of the model is whole all the time.

    Args:
        blocks: Bytes of each block's parameters.
        rest: Bytes of the parameters outside of blocks.
        ranks: How many share the model; 1: nothing is gathered.
        copies: Tensors kept of a parameter besides it: the optimizer's moments, an average.
        accumulates: Whether a step has several micro-batches: until the last one gradients are whole.
        low: Whether blocks are gathered in half their bytes (bfloat16); gradients are summed in full.
    """
    whole = sum(blocks) + rest
    if ranks == 1:
        return RankMemory((1 + copies) * whole, 0, whole)
    own, largest = -(-whole // ranks), max(blocks, default=0)
    computed = largest // 2 if low else largest
    before = whole if accumulates else own + rest
    return RankMemory((1 + copies) * own, rest + 2 * computed, before + computed + largest)
