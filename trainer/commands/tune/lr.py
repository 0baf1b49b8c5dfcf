"""`trainer tune RECIPE --lr`: a learning-rate range test, as lines and as a picture."""

import argparse
import math
import shlex
from collections.abc import Iterator

from trainer.config.recipe_file import provisional
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.observe.charts.axis import make_axis
from trainer.observe.conditions import conditions
from trainer.observe.console import warn
from trainer.train.local_ranks import plan_local_ranks
from trainer.train.run import check_request, make_task
from trainer.train.tune.auto import KEY
from trainer.train.tune.job import Interrupted
from trainer.train.tune.lr_range import Curve, ramp, range_test

_LINES, _BAR = 24, 40
_WIDE, _TALL, _LEFT, _BELOW = 640, 320, 60, 40


def tune_lr(options: argparse.Namespace) -> int:
    """Does the test that `trainer tune --lr` asks for.

    Returns:
        0 there is a suggestion; 1 the loss never fell, or a signal came.

    Raises:
        BadInputError: If the request is wrong, or the recipe can't be trained here.
    """
    low = 1e-6 if options.lr_low is None else options.lr_low
    high = 10.0 if options.lr_high is None else options.lr_high
    steps = 100 if options.lr_steps is None else options.lr_steps
    if not 0 < low < high < math.inf:
        raise BadInputError(
            f"--lr-low {low:g} --lr-high {high:g}: give two rates above 0, the lower one first"
        )
    if not 10 <= steps <= 100_000:
        raise BadInputError(f"--lr-steps {steps}: give 10 to 100,000; 100 are usual")
    if options.check or options.tuned is not None:
        raise BadInputError("--lr is a test of its own: leave --check and --tuned out")
    if options.plot is not None and options.plot.suffix != ".svg":
        raise BadInputError(f"--plot {options.plot}: give a file name that ends in .svg")
    if options.plot is not None and not options.plot.absolute().parent.is_dir():  # before minutes are spent
        raise BadInputError(f"--plot {options.plot}: there is no such folder")
    recipe, auto = provisional(options.recipe, options.set)
    if auto:
        raise BadInputError(f"--lr: give {KEY}=N, such as trainer tune finds; auto is for the start of a run")
    local = plan_local_ranks(recipe, options.gpus, options.nproc_per_node)
    task = make_task(recipe)
    if own := [name for name in ("optimizer", "scheduler") if hasattr(task, name)]:
        raise BadInputError(f"--lr: {recipe.task} has a method {own[0]}, so that optim.lr isn't its rate")
    check_request(recipe, task, local.ranks)
    several = "s" * (local.ranks > 1)
    print(
        f"{conditions()}\n{options.recipe}, {local.ranks} rank{several}: optim.lr from {low:g} to {high:g} "
        f"in {steps} steps of {recipe.data.global_batch_size}, the run's own first ones",
        flush=True,
    )
    try:
        curve = range_test(recipe, local, ramp(low, high, steps))
    except Interrupted as interrupted:
        warn(f"stopped by {interrupted}: nothing is left behind")
        return EXIT_FAILED
    for line in lines(curve):
        print(line)
    if options.plot is not None:
        try:
            options.plot.write_text(picture(curve))
        except OSError as error:
            raise BadInputError(f"--plot {options.plot}: can't be written ({error.strerror})") from error
        print(f"  curve: {options.plot}")
    if curve.suggestion is None:
        return EXIT_FAILED
    rest = [word for word in options.set if word.partition("=")[0] != "optim.lr"]
    again = shlex.join(["trainer", "train", options.recipe, *rest, f"optim.lr={curve.suggestion:.2g}"])
    print(f"  {again}")
    return EXIT_DONE


def lines(curve: Curve) -> Iterator[str]:
    """The curve, and what it says."""
    steps, smoothed = curve.steps, curve.smoothed
    # A loss that diverges would leave no room for how it fell.
    least, most = min(smoothed), max(smoothed[: curve.lowest + 1])
    every = max(1, -(-len(steps) // _LINES))
    marked = {n for n in (curve.lowest, curve.steepest) if n is not None}
    yield "   optim.lr    loss  (smoothed)"
    for n, (step, loss) in enumerate(zip(steps, smoothed, strict=True)):
        if n % every and n not in marked and n != len(steps) - 1:
            continue
        bar = "#" * min(_BAR, round(_BAR * (loss - least) / (most - least or 1)))
        what = [name for name, at in (("lowest", curve.lowest), ("steepest", curve.steepest)) if at == n]
        yield f"  {step.lr:>9.3g} {loss:>7.4g}  {bar}{' <- ' * bool(what)}{', '.join(what)}"
    if curve.steepest is None:
        yield "  the loss never fell: no suggestion; try another --lr-low and --lr-high, or more --lr-steps"
        return
    at = (
        "at which the loss diverged" if curve.diverged else "the last: it did not diverge, try more --lr-high"
    )
    yield f"  ended at {steps[-1].lr:.3g}, {at}"
    yield (
        f"  suggestion: optim.lr={curve.suggestion:.2g}, a tenth of the rate with the lowest smoothed "
        f"loss; it fell fastest at {steps[curve.steepest].lr:.2g}"
    )


def picture(curve: Curve) -> str:
    """The curve as an SVG: losses as dots, their smoothed mean as a line, both over the rate's logarithm."""
    rates = [step.lr for step in curve.steps]
    across = make_axis(min(rates), max(rates), unit="optim.lr", may_log=True)
    up = make_axis(min(curve.smoothed), max(curve.smoothed), unit="loss")

    def place(lr: float, loss: float) -> tuple[float, float]:
        return _LEFT + _WIDE * across.at(lr), 20 + _TALL * (1 - up.at(loss))

    width, height = _LEFT + _WIDE + 20, 20 + _TALL + _BELOW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for value, text in up.ticks:
        _, y = place(rates[0], value)
        parts.append(f'<path d="M{_LEFT},{y:.1f}h{_WIDE}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{text}</text>')
    for value, text in across.ticks:
        x, _ = place(value, 0)
        parts.append(f'<text x="{x:.1f}" y="{_TALL + 38}" text-anchor="middle" fill="#555555">{text}</text>')
    parts.append(
        f'<text x="{_LEFT + _WIDE}" y="{_TALL + 54}" text-anchor="end" fill="#555555">optim.lr</text>'
    )
    parts.append(f'<text x="{_LEFT}" y="12" fill="#555555">loss (line: smoothed)</text>')
    dots = [place(step.lr, step.loss) for step in curve.steps]
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="#9ab8d0"/>' for x, y in dots]
    points = [place(lr, loss) for lr, loss in zip(rates, curve.smoothed, strict=True)]
    way = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<path d="M{way}" fill="none" stroke="#0064a2" stroke-width="2"/>')
    if curve.suggestion is not None:
        x, _ = place(max(curve.suggestion, rates[0]), 0)
        parts.append(f'<path d="M{x:.1f},20v{_TALL}" stroke="#bd4a00" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x + 5:.1f}" y="32" fill="#bd4a00">{curve.suggestion:.2g}</text>')
    return "\n".join([*parts, "</svg>\n"])
