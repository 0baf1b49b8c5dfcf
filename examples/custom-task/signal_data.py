"""A long signal in a file, and the data set that cuts windows out of it.

In a module of its own, so that every process can import it. `python signal_data.py` writes a signal.
"""

import hashlib
from pathlib import Path

import numpy as np

from trainer import Field

PAST, FUTURE = 64, 16  # values that the model sees, and values that it predicts
FILE = Path(__file__).with_name("signal.npy")


class Windows:
    """Windows of a signal, float32 (PAST,) and (FUTURE,), read from the file when they are needed."""

    num_items = 1  # of a sample
    uniforms = 1  # random numbers for each sample in training: how far its window is moved
    arrays = None  # not in memory
    in_process = False  # read by loader workers

    def __init__(self, first, last):
        self.first, self.last = first, last  # of the values of the signal
        float32 = np.dtype(np.float32)
        self.fields = {"past": Field((PAST,), float32), "future": Field((FUTURE,), float32)}

    def __len__(self):
        return (self.last - self.first) // (PAST + FUTURE) - 1  # the last one leaves room to move

    def fingerprint(self):
        """Other words for other data: a run isn't resumed on another signal."""
        signal = np.load(FILE, mmap_mode="r")[self.first : self.last]
        return hashlib.sha256(signal.tobytes()).hexdigest()[:16]

    def read(self, samples, random, out):
        """Fills the arrays of a batch; random is None in evaluation, where no window moves."""
        signal = np.load(FILE, mmap_mode="r")
        for row, sample in enumerate(samples):
            moved = 0 if random is None else int(random[row, 0] * (PAST + FUTURE))
            at = self.first + int(sample) * (PAST + FUTURE) + moved
            out["past"][row] = signal[at : at + PAST]
            out["future"][row] = signal[at + PAST : at + PAST + FUTURE]


if __name__ == "__main__":
    time = np.arange(200_000)
    waves = sum(np.sin(2 * np.pi * time / period) for period in (11.3, 27.1, 63.7))
    np.save(FILE, (waves + np.random.default_rng(0).normal(0, 0.1, len(time))).astype(np.float32))
    print(f"{FILE.name}: {len(time):,} values")
