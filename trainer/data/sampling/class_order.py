"""Order of samples that are drawn by class weights, with replacement.

Each position of an epoch draws a class, then one of its samples, by two random numbers keyed by (seed, epoch,
position); no draw depends on earlier ones.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainer.config.suggest import nearest
from trainer.errors import BadInputError
from trainer.rng import Ints, Purpose, key, keys

Floats = npt.NDArray[np.float64]
_NAMED = 6  # classes


@dataclass(frozen=True, eq=False)
class ClassDraws:
    """Distribution that classes are drawn from.

    Attributes:
        names: Class names.
        counts: int64 (classes,), samples of each class.
        chances: float64 (classes,), probability of each class; the sum is 1.
        by_class: int64 (samples,), sample numbers sorted by class.
    """

    names: tuple[str, ...]
    counts: Ints
    chances: Floats
    by_class: Ints

    def fingerprint(self) -> str:
        """Returns a hash of labels and probabilities."""
        digest = hashlib.sha256(self.by_class.tobytes() + self.counts.tobytes() + self.chances.tobytes())
        return f"drawn by class {digest.hexdigest()[:16]}"

    def told(self) -> str:
        """Returns a line with each class's fraction of the data and of an epoch's draws."""
        samples = len(self.by_class)
        shown = np.argsort(-self.chances / np.maximum(self.counts, 1), kind="stable")
        if len(shown) > _NAMED:
            shown = np.concatenate((shown[: _NAMED // 2], shown[-(_NAMED // 2) :]))
        each = ", ".join(
            f"{self.names[at]} {100 * self.counts[at] / samples:.3g} % -> {100 * self.chances[at]:.3g} %"
            for at in shown.tolist()
        )
        more = f" (of {len(self.names):,} classes the most and the least raised)" * (len(self.names) > _NAMED)
        return f"data.class_weights: an epoch is {samples:,} draws with replacement; {each}{more}"

    def drawn(self, seed: int, epoch: Ints, position: Ints) -> Ints:
        """Returns the sample at a position of an epoch's order.

        Args:
            seed: The run's seed.
            epoch: int64, any shape.
            position: int64, same shape.

        Returns:
            int64, same shape.
        """
        up_to = np.cumsum(self.chances)
        up_to /= up_to[-1]  # so that the last is exactly 1, above every random number
        of_class = np.searchsorted(up_to, _uniform(seed, 0, epoch, position), side="right")
        inside = (_uniform(seed, 1, epoch, position) * self.counts[of_class]).astype(np.int64)
        samples: Ints = self.by_class[(np.cumsum(self.counts) - self.counts)[of_class] + inside]
        return samples


def weigh(
    given: Any, names: Sequence[str], weights: Literal["balanced"] | Mapping[str, float], samples: int
) -> ClassDraws:
    """Makes the distribution from class weights.

    Args:
        given: Class of each sample, integers from 0.
        names: Class names; empty: their numbers.
        weights: Weight of a class's samples by class name; 1 for classes that aren't named. "balanced": 1
            over the samples of the class, so that all classes are drawn equally often.
        samples: Number of samples.

    Raises:
        BadInputError: If the labels aren't class numbers, a class is unknown, or all weights are 0.
    """
    labels = _checked(given, samples)
    names = names or [str(number) for number in range(int(labels.max()) + 1)]
    if labels.max() >= len(names):
        raise BadInputError(
            f"data.class_weights: a label is {labels.max()}, and there are {len(names)} classes"
        )
    counts = np.bincount(labels, minlength=len(names)).astype(np.int64)
    if weights == "balanced":
        each = (counts > 0).astype(np.float64)
    else:
        for name in weights:
            if name not in names:
                raise BadInputError(
                    f"data.class_weights: there is no class '{name}'{nearest(name, names)}; there are "
                    f"{', '.join(names[:_NAMED])}{', …' * (len(names) > _NAMED)}"
                )
        each = counts * np.array([weights.get(name, 1.0) for name in names])
    up_to = np.cumsum(each)  # summed in a fixed order, the same on any machine
    if not 0 < up_to[-1] < np.inf:
        raise BadInputError(
            "data.class_weights leaves nothing to draw: give a class that has samples a weight above 0"
        )
    return ClassDraws(tuple(names), counts, each / up_to[-1], np.argsort(labels, kind="stable"))


def _uniform(seed: int, number: int, epoch: Ints, position: Ints) -> Floats:
    """Returns keyed random numbers in [0, 1), 53 bits each."""
    bits = keys(key(seed, Purpose.DRAW, number), epoch, position) >> np.uint64(11)
    return np.asarray(bits.astype(np.float64) * 2.0**-53)


def _checked(given: Any, samples: int) -> Ints:
    labels, wrong = np.asarray(given), ""
    if labels.shape != (samples,):
        wrong = f"of shape {labels.shape}, and there are {samples:,} samples"
    elif labels.dtype.kind not in "biu":
        wrong = f"of type {labels.dtype}, and classes are whole numbers"
    elif labels.min() < 0:
        wrong = f"{labels.min()} and more, and classes are numbers from 0 on"
    if wrong:
        raise BadInputError(f"data.class_weights: the labels are {wrong}; give one for each sample")
    return labels.astype(np.int64)
