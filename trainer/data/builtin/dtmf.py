"""Telephone tones (DTMF, ITU-T Q.23) in noise, synthesized: the embedded data set for audio.

A telephone key is the sum of two sinusoids, one from a low and one from a high group of frequencies. Each
recording has one key in white noise; deviations of frequency, levels, phases and times are random, seeded by
the recording's number.
"""

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.dataset import ArrayDataset
from trainer.data.formats.audio import AUDIO
from trainer.data.formats.records import LABEL
from trainer.rng import Ints, Purpose, key, keys

# ITU-T Recommendation Q.23, in Hz.
LOW = (697, 770, 852, 941)
HIGH = (1209, 1336, 1477, 1633)
KEYS = "123A456B789C*0#D"  # telephone key k: LOW[k // 4] and HIGH[k % 4]

RATE = 8000  # samples per second
SAMPLES = 1024  # of a recording: 0.128 s
# Samples of a tone: 40 ms (the shortest that ITU-T Q.24 requires to be recognized) to 100 ms.
SHORTEST, LONGEST = 320, 800
OFFSET = 0.015  # largest relative error of each frequency
TWIST = 6.0  # dB, largest level difference between the two tones
LEVELS = (-24.0, 0.0)  # dB relative to LOUDEST, lowest and highest level of a recording
LOUDEST = 4000.0  # root mean square of the tone, in int16 steps: the sum of tone and noise seldom clips
TRAIN, TEST = 8192, 2048  # recordings

_Floats = npt.NDArray[np.float64]
_CHUNK = 1024  # recordings synthesized at once


class Recordings(NamedTuple):
    """Components of recordings, before they are summed and rounded.

    Attributes:
        tone: float64 (n, SAMPLES), of mean square 1 over the tone's duration, 0 elsewhere.
        noise: float64 (n, SAMPLES), white and Gaussian, of variance 1: a signal-to-noise ratio of 0 dB.
        key: int64 (n,), index into KEYS.
        frequency: float64 (n, 2), of the low and the high tone in Hz.
        twist: float64 (n,), level of the high tone relative to the low one in dB.
        start: int64 (n,), first sample of the tone.
        duration: int64 (n,), samples of the tone.
        gain: float64 (n,), factor of tone and noise to int16 steps.
    """

    tone: _Floats
    noise: _Floats
    key: Ints
    frequency: _Floats
    twist: _Floats
    start: Ints
    duration: Ints
    gain: _Floats


def synthesize(part: int, number: Ints) -> Recordings:
    """Synthesizes recordings from their numbers; a number modulo 16 is the index of the telephone key.

    Args:
        part: 0 for training, 1 for testing: two streams of random numbers.
        number: int64 (n,), numbers of the recordings.
    """
    own = keys(key(Purpose.DATA, part), number)
    low, high, twist, duration, start, level, phase1, phase2 = _unit(keys(0, own[:, None], np.arange(8))).T
    which = number % len(KEYS)
    frequency = np.stack((np.take(LOW, which // 4), np.take(HIGH, which % 4)), 1).astype(np.float64)
    frequency *= 1 + OFFSET * (2 * np.stack((low, high), 1) - 1)
    twist = TWIST * (2 * twist - 1)
    duration = SHORTEST + (duration * (LONGEST - SHORTEST + 1)).astype(np.int64)
    start = (start * (SAMPLES - duration + 1)).astype(np.int64)
    time = np.arange(SAMPLES)
    angle = 2 * np.pi * (frequency[:, :, None] * time / RATE + np.stack((phase1, phase2), 1)[:, :, None])
    sine = np.sin(angle)
    tone = sine[:, 0] + 10 ** (twist[:, None] / 20) * sine[:, 1]
    tone[(time < start[:, None]) | (time >= (start + duration)[:, None])] = 0
    # Measured: over a few periods, the mean square of two sinusoids differs from its long-term value.
    tone /= np.sqrt((tone**2).sum(1) / duration)[:, None]
    gain = LOUDEST * 10 ** ((LEVELS[0] + (LEVELS[1] - LEVELS[0]) * level) / 20)
    return Recordings(tone, _gaussian(own), which, frequency, twist, start, duration, gain)


@functools.lru_cache(maxsize=2)  # a forked rank inherits the recordings that its launcher made
def recordings(part: int, count: int) -> ArrayDataset:
    """Returns recordings 0 to `count` - 1 of a part: fields audio, int16 (SAMPLES,), and label, int64 ()."""
    audio = np.empty((count, SAMPLES), np.int16)
    label = np.empty(count, np.int64)
    for first in range(0, count, _CHUNK):
        rows = slice(first, min(first + _CHUNK, count))
        made = synthesize(part, np.arange(rows.start, rows.stop))
        mixed = (made.tone + made.noise) * made.gain[:, None]
        audio[rows] = np.clip(np.rint(mixed), -32768, 32767)
        label[rows] = made.key
    return ArrayDataset({AUDIO: audio, LABEL: label})


def _unit(bits: npt.NDArray[np.uint64]) -> _Floats:
    """Converts the upper 53 of 64 random bits to floats in [0, 1)."""
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _gaussian(own: npt.NDArray[np.uint64]) -> _Floats:
    """Returns standard normal numbers (n, SAMPLES) by the Box-Muller transform, from random keys (n,)."""
    half = SAMPLES // 2
    first, second = np.split(_unit(keys(1, own[:, None], np.arange(SAMPLES))), 2, axis=1)
    radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * np.pi * second
    noise = np.empty((len(own), SAMPLES))
    noise[:, :half], noise[:, half:] = radius * np.cos(angle), radius * np.sin(angle)
    return noise
