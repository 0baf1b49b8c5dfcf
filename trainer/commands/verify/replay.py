"""Trains a run again in another folder, with its configuration, on as many ranks as it had."""

import argparse
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.checkpoint.folder import folder_name as step_name
from trainer.commands.verify.recorded import Recorded, Segment
from trainer.config.own_code import refuse_unnamed
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, provisional
from trainer.config.redact import REDACTED
from trainer.config.section import validated
from trainer.config.yaml_text import to_yaml
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, BadInputError
from trainer.host.files import copy_folder, oddity
from trainer.observe.console import say, warn
from trainer.runs.differences import FREE, flat, names_a_place, other_arithmetic
from trainer.runs.folder import KEPT, MANIFEST, checkpoints_of
from trainer.runs.manifest import update_manifest
from trainer.train.components.task import data_of, make_task, refuse_other_task
from trainer.train.options import TrainOptions
from trainer.train.start.job import start
from trainer.train.starting_weights import resolve_pretrained

# What a replay may take from elsewhere: where things lie, and how they come.
_SUMS = ("parallel.strategy", "parallel.shard")  # another one adds in another order
_ELSEWHERE = [key for key in FREE if key.startswith("parallel.") and key not in _SUMS] + ["model.pretrained"]


def begin(run: Recorded, folder: Path) -> None:
    """Makes the folder of a replay."""
    folder.mkdir()
    if not oddity(run.path / KEPT, folder=True) and (run.path / KEPT).exists():  # what it began from
        copy_folder(run.path / KEPT, folder / KEPT)
    # As if it had been stopped: the replay goes on with it, at its start.
    update_manifest(folder, run.manifest.model_copy(), status="stopped")


def replay_config(run: Recorded, settings: Sequence[str]) -> dict[str, Any]:
    """Returns the configuration of the replay: the run's, without sinks, hooks and checkpoints.

    Raises:
        BadInputError: If a setting would change what is computed, a value was redacted, or the data is gone
            or another; or if the run was trained by another arithmetic.
    """
    path = run.path / MANIFEST
    for attempt in run.manifest.attempts:
        if other := other_arithmetic(attempt.arithmetic):
            raise BadInputError(f"{path}: {other[0]}: verify it with the version of trainer that trained it")
    config: dict[str, Any] = dict(run.manifest.config)
    for setting in settings:
        if not names_a_place(setting, config) and setting.partition("=")[0].strip() not in _ELSEWHERE:
            raise BadInputError(
                f"--set {setting}: would change what is computed; verify takes data.path, data.cache, "
                "data.workers, model.pretrained and the like"
            )
    config = override(config, settings)
    for name, value in flat(config).items():
        if REDACTED in str(value):
            remedy = (
                f"; give it with --set {name}=…"
                if name in _ELSEWHERE or names_a_place(name, config)
                else ", so that it can't be replayed"
            )
            raise BadInputError(f"{path}: {name} was redacted{remedy}")
    config = override(
        config,
        [
            f"device={run.manifest.device.kind}",
            "log.fingerprints=true",
            "log.to=[]",
            "log.metrics_port=0",
            "hooks.enabled=false",
            "checkpoint={every: 0, minutes: 0, best: false}",
        ],
    )
    recipe = validated(Recipe, config, str(path))
    refuse_unnamed(run.path, recipe, override({}, settings), run.manifest.recipe)
    # One that began from another run's checkpoint has that, and starts from nothing else.
    before = run.manifest if run.manifest.begun_from else None
    _, pretrained, _ = resolve_pretrained(recipe, before, run.path)
    task = make_task(recipe)
    recorded, here = run.manifest.fingerprint, data_of(recipe, task, pretrained)
    other = [
        f"{name}: {recorded.get(name, 'nothing')}, now {here.get(name, 'nothing')}"
        for name in {**recorded, **here}
        if recorded.get(name) != here.get(name) and name != "task"
    ]
    refuse_other_task(run, task)
    if other:
        raise BadInputError(
            f"{run.path}: its data isn't here ({other[0]}); say where it lies with --set data.path=…, "
            "model.pretrained=… or model.name=hf/…"
        )
    return config


def replay(
    config: Mapping[str, Any], parts: Sequence[Segment], steps: int, folder: Path, gpus: str | None
) -> int:
    """Trains in a folder, with the real launcher; returns 0, or the exit code of the failure."""
    recipe = folder.with_name("replay.yaml")
    recipe.write_text(to_yaml(dict(config)))
    cuda = config["device"] == "cuda"
    for part in parts:
        ends = part.until == steps
        # Where one part ends there is a checkpoint for the next, also if the run was to end there.
        settings = [] if ends else [f"checkpoint.every={part.until}"]
        options = TrainOptions(
            recipe=str(recipe),
            set=[*part.settings, f"parallel.threads={part.threads}", f"log.every={part.every}", *settings],
            out=folder,
            resume="force",  # another number of threads is another configuration
            gpus=(gpus or str(part.ranks)) if cuda else None,
            nproc_per_node=None if cuda else part.ranks,
            stop_after=None if ends else part.until,
            nnodes="1",  # all of its ranks here, however many nodes it had
        )
        with _progress() as output:
            code = start(options, *provisional(options.recipe, options.set), output)
        done = code == EXIT_DONE if ends else (checkpoints_of(folder) / step_name(part.until)).exists()
        if code not in (EXIT_DONE, EXIT_REQUEUE):
            return code
        if not done:
            warn("the replay was stopped before it was through: nothing is proved")
            return EXIT_FAILED
    return EXIT_DONE


def ranks_wanted(options: argparse.Namespace, device: str) -> int | None:
    """Returns the requested number of ranks; None for the run's.

    Raises:
        BadInputError: If it is below 1, or one of GPUs where the run was trained on CPUs (`device`).
    """
    if options.nproc_per_node is not None:
        if options.nproc_per_node < 1:
            raise BadInputError(f"--nproc-per-node {options.nproc_per_node}: give a number from 1 on")
        return int(options.nproc_per_node)
    if options.gpus is None:
        return None
    if device == "cpu":
        raise BadInputError(
            f"--gpus {options.gpus}: the run was trained on CPUs; leave it out, or give --nproc-per-node N"
        )
    return int(options.gpus) if options.gpus.isdecimal() else len(options.gpus.split(","))


@contextmanager
def _progress() -> Iterator[int]:
    """Opens a file descriptor for the replay's output, of which only the progress is shown."""
    reading, writing = os.pipe()

    def pass_on() -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                if line.startswith(("  step ", "  epoch ")):
                    say(line.rstrip())

    thread = threading.Thread(target=pass_on)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        thread.join()
