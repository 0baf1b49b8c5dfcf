"""Randomness that is looked up, not carried: pure functions of a key, so that there is no state to lose.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators", OOPSLA 2014). It is written out here because NumPy may change what its generators
return between versions (NEP 19), and a resumed run must not change with it.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB

# Up to here an epoch's order is sorted from keys: any permutation, each as likely, where the rounds below
# reach some permutations only. It is also cheaper: 43 us for a batch of 1024 samples, 166 us by rounds.
_SORTED = 1024

# With 6 rounds neighbors in the order of 50 samples are measurably dependent, with 10 those of 10
# samples; with 12 chi-squared finds nothing in 10**6 draws above _SORTED (tests/data/test_plan.py).
_ROUNDS = 12


class Purpose(IntEnum):
    """Purpose of a key; two purposes never share a stream."""

    ORDER = 1
    AUGMENT = 2
    WEIGHTS = 3
    MICRO_BATCH = 4
    SPLIT = 5
    DATA = 6
    REPLACEMENT = 7
    SHARDS = 8
    BLOCK = 9
    FINGERPRINT = 10
    UPDATE = 11
    ITEM = 12
    DRAW = 13


def key(*parts: int) -> int:
    """Hashes integers into one 64-bit key.

    Args:
        *parts: Any integers; their order matters.

    Returns:
        A key in [0, 2**64).
    """
    state = 0
    for part in parts:
        state = (state + _GOLDEN + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * _MULTIPLY_1) & _MASK
        state = ((state ^ (state >> 27)) * _MULTIPLY_2) & _MASK
        state ^= state >> 31
    return state


def keys(prefix: int, *parts: npt.ArrayLike) -> UInt64:
    """The array form of `key`: folds arrays of integers into one key per element.

    `keys(key(a), b)[i] == key(a, b[i])`.

    Args:
        prefix: A key to start from.
        *parts: Integer arrays that broadcast against each other.

    Returns:
        uint64 array of the broadcast shape.
    """
    state = np.array(prefix, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = _mix(state + np.uint64(_GOLDEN) + np.asarray(part).astype(np.uint64))
    return np.asarray(state)


def uniforms(seed: int, epoch: Ints, sample: Ints, count: int) -> Float32:
    """Uniform numbers for the augmentation of each sample, the same wherever the sample is read.

    Args:
        seed: The run's seed.
        epoch: int64, any shape.
        sample: int64, same shape.
        count: How many numbers per sample.

    Returns:
        float32, shape (*epoch.shape, count), in [0, 1), 24 bits each.
    """
    each = keys(key(seed, Purpose.AUGMENT), epoch[..., None], sample[..., None], np.arange(count))
    numbers: Float32 = (each >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return numbers


def permuted(seed: int, epoch: Ints, position: Ints, size: int) -> Ints:
    """The sample at a position of an epoch's order, computed without building the order.

    Up to 1024 samples: a uniform shuffle, by sorting a 64-bit key for each sample. Above: a Feistel network
    over Z_a x Z_b with a*b >= size, walked again from whatever falls outside (Black and Rogaway: "Ciphers
    with arbitrary finite domains", CT-RSA 2002). So a position costs the same in a data set of a thousand
    samples and in one of 10**9, and nothing is stored.

    Args:
        seed: The run's seed.
        epoch: int64, any shape.
        position: int64, same shape, each in [0, size).
        size: Number of samples in an epoch, below 2**60.

    Returns:
        int64, same shape: for each epoch a permutation of range(size).
    """
    epochs, which = np.unique(epoch, return_inverse=True)
    found = np.array(position, dtype=np.int64).reshape(-1)
    if size <= _SORTED:
        order = keys(key(seed, Purpose.ORDER), epochs[:, None], np.arange(size)).argsort(1, kind="stable")
        return order[which.reshape(-1), found].reshape(np.shape(position))
    rows = max(1, int(size**0.5))
    columns = -(-size // rows)
    round_keys = keys(key(seed, Purpose.ORDER), np.arange(_ROUNDS)[:, None], epochs)[:, which.reshape(-1)]
    walking = np.arange(found.size)
    while walking.size:
        row, column = np.divmod(found[walking], columns)
        for odd, round_key in enumerate(round_keys[:, walking]):
            if odd % 2:
                column = _rotate(column, _mix(round_key + row.view(np.uint64)), columns)
            else:
                row = _rotate(row, _mix(round_key + column.view(np.uint64)), rows)
        found[walking] = row * columns + column
        walking = walking[found[walking] >= size]
    return found.reshape(np.shape(position))


def _mix(state: UInt64) -> UInt64:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MULTIPLY_1)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MULTIPLY_2)
    mixed: UInt64 = state ^ (state >> np.uint64(31))
    return mixed


def _rotate(value: Ints, random: UInt64, modulus: int) -> Ints:
    # Multiply-shift instead of a division (Lemire 2019); its bias is below modulus / 2**32.
    shift = ((random >> np.uint64(32)) * np.uint64(modulus) >> np.uint64(32)).view(np.int64)
    value = value + shift
    return np.where(value >= modulus, value - modulus, value)
