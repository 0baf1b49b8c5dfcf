"""Goertzel's filters, as a telephone exchange has them, on the test set of the recipe `dtmf`: no learning.

A filter gives the energy at one frequency in one window. The start and the length of a tone are unknown to
all of them here, as they are to the model, so windows slide over the recording and the best one counts.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.data.builtin import dtmf
from trainer.data.formats.audio import AUDIO, LABEL
from trainer.observe.conditions import conditions

TEXTBOOK = 205  # samples at 8 kHz: the usual choice, whose bins lie close to the eight frequencies
_LENGTHS = (320, 400, 500, 630, 800)  # of the bank: those that a tone can have
_OFFSETS = tuple(np.linspace(-dtmf.OFFSET, dtmf.OFFSET, 7).tolist())
_HOPS = 8  # windows that overlap: a step is an eighth of a window

_Floats = npt.NDArray[np.float64]


def energies(sound: _Floats, frequencies: Sequence[float], length: int) -> _Floats:
    """Energy at each frequency in windows that slide over recordings.

    Goertzel's recursion ends with the modulus of the discrete-time Fourier transform at its frequency; that
    is computed here as a product, which numpy is faster at.

    Args:
        sound: float64 (n, samples).
        frequencies: In Hz.
        length: Of a window, in samples.

    Returns:
        float64 (n, windows, frequencies): squared modulus over the length of the window, so that white noise
        of variance 1 gives 1 on average.
    """
    angle = -2j * np.pi * np.asarray(frequencies) / dtmf.RATE
    wave = np.exp(np.arange(length)[:, None] * angle)
    cut = np.lib.stride_tricks.sliding_window_view(sound, length, axis=1)[:, :: max(1, length // _HOPS)]
    return np.asarray(np.abs(cut @ wave) ** 2 / length)


def textbook(sound: _Floats) -> npt.NDArray[np.int64]:
    """The filters at the eight frequencies; the key of the window with most energy in its two tones.

    Args:
        sound: float64 (n, samples).

    Returns:
        int64 (n,): index into `dtmf.KEYS`.
    """
    low, high = (energies(sound, group, TEXTBOOK) for group in (dtmf.LOW, dtmf.HIGH))
    best = (low.max(2) + high.max(2)).argmax(1)
    row = np.arange(len(sound))
    return np.asarray(low[row, best].argmax(1) * 4 + high[row, best].argmax(1))


def bank(sound: _Floats) -> npt.NDArray[np.int64]:
    """Filters at offset frequencies too and windows of all lengths: close to the likeliest key.

    The energy of a window is that over the noise's, in which the best of its frequencies is looked for; the
    sum over both groups is compared between starts and lengths, as the likelihood ratio of two sinusoids of
    unknown amplitude, phase and frequency in white noise is.
    """
    best = np.full((len(sound), 16), -np.inf)
    for length in _LENGTHS:
        low, high = (
            energies(sound, [f * (1 + offset) for f in group for offset in _OFFSETS], length)
            .reshape(len(sound), -1, 4, len(_OFFSETS))
            .max(3)
            for group in (dtmf.LOW, dtmf.HIGH)
        )
        both = (low[:, :, :, None] + high[:, :, None, :]).max(1).reshape(len(sound), 16)
        best = np.maximum(best, both)
    return np.asarray(best.argmax(1))


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the options of the bench."""
    bench.set_defaults(run=lambda _: bench_goertzel())


def bench_goertzel() -> int:
    """Prints the accuracy of both on the test set of `dtmf`; exit code 0."""
    arrays = dtmf.recordings(1, dtmf.TEST).arrays
    assert arrays is not None
    sound, label = np.asarray(arrays[AUDIO], np.float64), np.asarray(arrays[LABEL])
    print(conditions())
    print(f"{len(label)} test recordings of the recipe dtmf; keys that are right:")
    for name, detector in (
        (f"Goertzel, 8 frequencies, best window of {TEXTBOOK} samples", textbook),
        (f"Goertzel bank, {len(_OFFSETS)} offsets, windows of {_LENGTHS[0]} to {_LENGTHS[-1]}", bank),
    ):
        right = sum(
            int((detector(sound[first : first + 64]) == label[first : first + 64]).sum())
            for first in range(0, len(label), 64)
        )
        print(f"  {name:<55} {right / len(label):8.2%}")
    return 0
