"""The points of the chart of `python -m benchmarks scale`."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.charts import as_svg
from benchmarks.scale import formulas
from benchmarks.scale.chart import Curve, chart, spaced
from benchmarks.scale.figures import Figures, Job
from benchmarks.scale.simulate import simulate, simulate_losses
from trainer.errors import BadInputError
from trainer.host.files import written_whole

_AROUND = 20.0  # times the best interval, to both sides
_LINE, _DOTS, _FAILURES = 41, 9, 2000


def draw(plot: Path, job: Job, gpus: Sequence[int], seed: int) -> None:
    """Writes the chart.

    Raises:
        BadInputError: If it can't be written.
    """
    figures = job.figures
    dots = [
        (float(one), simulate(figures, one, formulas.steps_between(figures, one), seed, _FAILURES).goodput)
        for one in gpus
    ]
    line = [(float(one), formulas.estimate(figures, one).goodput) for one in _between(figures, gpus)]
    figure = chart(job.about, Curve("", line, dots), [_losses(figures, one, seed) for one in gpus])
    try:
        with written_whole(plot) as beside:
            beside.write_text(as_svg(figure), encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"--plot {plot}: can't be written ({error.strerror}); give another") from error


def _between(figures: Figures, gpus: Sequence[int]) -> list[int]:
    """Numbers of GPUs from the first to the last, whole nodes."""
    per = figures.gpus_per_node
    numbers = {round(one) for one in spaced(gpus[0], max(gpus[-1], gpus[0] + 1), _LINE)}
    return sorted({one if one <= per else one // per * per for one in numbers} | set(gpus))


def _losses(figures: Figures, gpus: int, seed: int) -> Curve:
    stall, write = formulas.stall_s(figures), formulas.write_s(figures)
    mtbf, restart = formulas.mtbf_s(figures, gpus), formulas.restart_s(figures, gpus)
    best = formulas.best_interval_s(stall, write, mtbf)

    def lost(interval: float) -> float:
        return formulas.lost_share(interval, stall, write, restart, mtbf)

    line = [(one, lost(one)) for one in spaced(best / _AROUND, best * _AROUND, _LINE)]
    intervals = spaced(best / _AROUND, best * _AROUND, _DOTS)
    simulated = simulate_losses(figures, gpus, intervals, seed, _FAILURES)
    dots = list(zip(intervals, simulated, strict=True))
    return Curve(f"{gpus:,}", line, dots, (best, lost(best)))
