"""`trainer verify RUN --anomaly N`: trains a run again up to an anomaly, and reports whether it recurs."""

import argparse
import tempfile
from pathlib import Path

from trainer.checkpoint import CHECKPOINTS
from trainer.checkpoint.folder import Damaged, Unreadable, read
from trainer.checkpoint.store import listing
from trainer.commands.verify.recorded import Recorded, parts_of, read_recorded
from trainer.commands.verify.replay import begin, ranks_wanted, replay, replay_config
from trainer.errors import EXIT_DONE, EXIT_FAILED, BadInputError
from trainer.host.files import copy_folder
from trainer.observe.console import say
from trainer.runs.checkpoint_place import checkpoints_of
from trainer.train.anomaly import ending_at, read_anomalies, rolled_back

_COMPARED = ("kind", "loss", "grad_norm", "median", "deviation", "epochs", "samples")


def verify_anomaly(options: argparse.Namespace) -> int:
    """Runs `trainer verify --anomaly`; returns the exit code: 0 if it recurred with the same bits, else 1."""
    run = read_recorded(options.folder, rows_needed=False)
    anomalies = read_anomalies(run.path)
    if not 1 <= options.anomaly <= len(anomalies):
        known = f"anomalies 1 to {len(anomalies)} were recorded" if anomalies else "no anomaly was recorded"
        raise BadInputError(f"--anomaly {options.anomaly}: {known} in {run.path}")
    wanted = anomalies[options.anomaly - 1]
    step = int(wanted["step"])
    config = ending_at(replay_config(run, options.set, options.trust), wanted)
    with tempfile.TemporaryDirectory(prefix="trainer-verify-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "run"
        refused = rolled_back(anomalies[: options.anomaly - 1])
        begin(run, folder, refused)
        start = _checkpoint_before(run, folder, step)
        steps = f"step {step}" if step == start + 1 else f"steps {start + 1} to {step}"
        say(f"{run.path}: training {steps} again, in {temporary}")
        parts = parts_of(run, step, ranks_wanted(options))
        parts = [part for part in parts if part.until > start]
        code = replay(config, parts, run.manifest.steps, folder, options.gpus)
        if code not in (EXIT_DONE, EXIT_FAILED):  # it fails where the anomaly comes again
            return code
        again = [one for one in read_anomalies(folder)[len(refused) :] if one["step"] == step]
    number = f"anomaly {options.anomaly}, step {step}"
    if not again:
        say(f"{number}: did not come again")
        return EXIT_FAILED
    differing = [key for key in _COMPARED if again[0].get(key) != wanted.get(key)]
    if differing:
        key = differing[0]
        say(f"{number}: came again, but {key} was {wanted.get(key)} and is {again[0].get(key)}")
        return EXIT_FAILED
    numbers = f"loss ({wanted['loss']}) and gradient norm ({wanted['grad_norm']})"
    say(f"{number}: came again, with the same samples, {numbers}")
    return EXIT_DONE


def _checkpoint_before(run: Recorded, folder: Path, step: int) -> int:
    """Copies the run's newest checkpoint before a step, if there is one; returns its step, or 0."""
    for entry in listing(checkpoints_of(run.path)):
        if entry.step >= step:
            continue
        try:
            read(entry.path)
        except (Damaged, Unreadable):
            continue
        copy_folder(entry.path, folder / CHECKPOINTS / entry.path.name)
        return entry.step
    return 0
