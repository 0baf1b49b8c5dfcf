"""A learning-rate range test (Smith, 2015, arXiv:1506.01186): the loss while the rate rises, as a hook."""

import math


class LRRange:
    """Prints the smoothed loss at each rate, and a tenth of the rate at which it was lowest."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.smoothed: list[float] = []
        self.mean = 0.0
        self.ended = False

    def after_step(self, row: dict[str, float]) -> None:
        """Takes a row of metrics; the test ends where the loss leaves all bounds."""
        if self.ended:
            return
        if math.isfinite(row["loss"]):
            self.mean = 0.9 * self.mean + 0.1 * row["loss"]
            self.rates.append(row["lr"])
            self.smoothed.append(self.mean / (1 - 0.9 ** len(self.rates)))
            print(f"  lr {row['lr']:<9.3g} smoothed loss {self.smoothed[-1]:.4g}")
        if not math.isfinite(row["loss"]) or self.smoothed[-1] > 4 * min(self.smoothed):
            self.judge(f"the loss diverged at {row['lr']:.3g}")

    def after_evaluation(self, step: int, _: dict[str, float]) -> None:
        """Takes the evaluation at the end."""
        if not self.ended:
            self.judge(f"the loss did not diverge in {step} steps: a higher optim.lr may show more")

    def judge(self, end: str) -> None:
        """Says what the curve shows."""
        self.ended = True
        lowest = min(range(len(self.smoothed)), key=self.smoothed.__getitem__, default=0)
        fell = lowest > 0 and f"suggestion: optim.lr={self.rates[lowest] / 10:.2g}"
        print(f"{end}; {fell or 'the loss never fell: no suggestion; try a lower optim.lr'}")
