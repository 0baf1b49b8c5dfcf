"""The run folder: its name, what is written to it, its metrics and its weights."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from torch import nn

from trainer import checkpoint
from trainer.config.recipe import Recipe
from trainer.config.redact import redact
from trainer.config.section import config_hash
from trainer.errors import BadInputError, DivergedError
from trainer.host.disks import read_mount
from trainer.host.files import written_whole
from trainer.launch.nodes import EXIT_CODE, LOGS, MEETING
from trainer.launch.signals import Stopped
from trainer.observe.checksums import Checksums, checksums_to, fingerprints_of, read_checksums
from trainer.observe.console import warn
from trainer.observe.log import Sink
from trainer.observe.sinks import csv_sink, jsonl_sink, keep_rows, tensorboard_sink
from trainer.train.manifest import outcome
from trainer.train.run_lock import LOCK, lock

_PROBE = ".writable"
# What a start leaves that was killed before there was a manifest.
_LEFTOVERS = {LOCK, _PROBE, MEETING, LOGS, EXIT_CODE, "manifest.tmp"}


def new_folder(root: Path, recipe_name: str, recipe: Recipe) -> Path:
    """Makes a run folder that nobody else has: <recipe>-<hash8>-<n>.

    Raises:
        BadInputError: If it can't be made.
    """
    stem = f"{Path(recipe_name).stem}-{config_hash(recipe)[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            with contextlib.suppress(FileExistsError):
                folder = root / f"{stem}-{number}"
                folder.mkdir()
                return folder
            number += 1
    except OSError as error:
        raise BadInputError(
            f"{root}: can't make a run folder there ({_why(root, error)}); give another --out"
        ) from error


def _why(folder: Path, error: OSError) -> str:
    """A link to nowhere is "File exists" to mkdir(2)."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, which isn't there"
    return str(error.strerror)


def warn_of_loss(folder: Path) -> None:
    """Says so if a folder for runs goes with the container in which it lies."""
    if read_mount(folder).how == "container layer":
        warn(
            f"{folder} lies in the container itself and goes with it: "
            f'docker run -v "$PWD/{folder.name}:{folder.absolute()}" keeps it'
        )


def shown(path: Path) -> Path:
    """A path as one would type it here: relative if it lies below the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def claim_folder(folder: Path) -> bool:
    """Makes sure that a folder the user named can be written and is empty, but for what a killed start left.

    Returns:
        True if it was made by this call.

    Raises:
        BadInputError: If it can't be used.
    """
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / _PROBE
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInputError(
            f"--out {folder}: can't be written ({_why(folder, error)}); give another folder"
        ) from error
    if (folder / "manifest.json").exists():
        raise BadInputError(f"--out {folder}: holds a run already; give another folder or remove it")
    if any(path.name not in _LEFTOVERS for path in folder.iterdir()):
        raise BadInputError(f"--out {folder}: isn't empty; give a new or an empty folder")
    return made


def remove_unused(folder: Path) -> None:
    """Removes a run folder in which no run has begun, nor is about to."""
    with contextlib.suppress(OSError, BadInputError):
        if all(path.name in _LEFTOVERS for path in folder.iterdir()):
            file = lock(folder)
            shutil.rmtree(folder)
            os.close(file)


@contextlib.contextmanager
def open_folder(
    folder: Path, recipe: Recipe, manifest: dict[str, Any], step: int = 0, model: nn.Module | None = None
) -> Iterator[tuple[list[Sink], Checksums | None]]:
    """Writes manifest and configuration, and opens the sinks and the trace that write to the folder.

    Args:
        folder: The run folder.
        recipe: The configuration.
        manifest: From `trainer.train.manifest.make_manifest`.
        step: Steps that were done before: rows of later ones, from an attempt that was lost, go.
        model: Whose fingerprints the trace holds.

    Raises:
        BadInputError: If the folder can't be written.
    """
    with contextlib.ExitStack() as closing:
        try:
            sinks = _open(folder, recipe, manifest, step, closing)
            checksums = recipe.log.fingerprints and model is not None
            trace = _open_trace(folder / "checksums.jsonl", model, step, closing) if checksums else None  # type: ignore[arg-type]
        except OSError as error:
            raise BadInputError(
                f"{error.filename or folder} can't be written ({error.strerror}); mend that, or give another "
                "--out"
            ) from error
        try:
            yield sinks, trace
        except BaseException as error:
            kinds = {Stopped: "stopped", DivergedError: "diverged"}
            status = kinds.get(type(error), "failed")
            set_status(folder, manifest, status, f"{type(error).__name__}: {error}")
            raise


def _open(
    folder: Path, recipe: Recipe, manifest: dict[str, Any], step: int, closing: contextlib.ExitStack
) -> list[Sink]:
    if not step:
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    for file in (folder / "metrics.jsonl", folder / "checksums.jsonl", *folder.glob("*.csv")):
        if cut := keep_rows(file, step):
            warn(f"{file}: {cut} lines that can't be read were removed")
    write_json(folder / "manifest.json", manifest)
    with written_whole(folder / "config.yaml") as beside:
        beside.write_text(yaml.safe_dump(redact(recipe.model_dump(mode="json")), sort_keys=False))
    sinks: list[Sink] = []
    if "jsonl" in recipe.log.to:
        rows = (folder / "metrics.jsonl").open("a")
        closing.callback(_despite_the_disk(rows.close))
        sinks.append(jsonl_sink(rows))
    if "csv" in recipe.log.to:
        sinks.append(csv_sink(folder))
    if "tensorboard" in recipe.log.to:
        to_board, close_board = tensorboard_sink(folder / "tensorboard", step)
        closing.callback(_despite_the_disk(close_board))
        sinks.append(to_board)
    return [_despite_the_disk(sink) for sink in sinks]


def _open_trace(path: Path, model: nn.Module, step: int, closing: contextlib.ExitStack) -> Checksums:
    _, known, _ = read_checksums(path)
    file = path.open("a")
    closing.callback(_despite_the_disk(file.close))
    write = checksums_to(file, list(model.state_dict()), known, step)
    return Checksums(fingerprints_of(model), _despite_the_disk(write))


def _despite_the_disk(write: Callable[..., None]) -> Callable[..., None]:
    """Rows and the closing of their file are not worth a training: the first fault of a disk is told."""
    told = False

    def written(*row: Any) -> None:
        nonlocal told
        try:
            write(*row)
        except OSError as error:
            if row and not told:
                warn(f"rows of metrics are lost ({error.strerror}); the training goes on")
            told = True

    return written


def set_status(folder: Path, manifest: Mapping[str, Any], status: str, reason: str) -> None:
    """Says in the manifest how the run stands; if the disk is full, say, what happened matters more."""
    with contextlib.suppress(OSError):
        write_json(
            folder / "manifest.json", {**manifest, **outcome(folder), "status": status, "reason": reason}
        )


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file in one move, for good when it returns; without the secrets in the value."""
    with written_whole(path) as beside:
        beside.write_text(json.dumps(redact(value), indent=2) + "\n")


def save_weights(model: nn.Module, path: Path) -> None:
    """Writes a model's parameters and buffers as safetensors, contiguous, tied ones each by itself."""
    state = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    with written_whole(path) as beside:
        safetensors.torch.save_file(state, beside)


def check_space(folder: Path, model: nn.Module, copies: int) -> None:
    """Makes sure that the weights will fit on the disk at the end.

    What earlier attempts left of checkpoints and weights counts as free: it is replaced.

    Raises:
        BadInputError: If they won't.
    """
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    ours = [*(folder / checkpoint.FOLDER).rglob("*"), *folder.glob("*.safetensors")]
    taken = sum(path.lstat().st_size for path in ours if path.is_file())
    wanted, free = copies * weights + (4 << 20), shutil.disk_usage(folder).free + taken
    if free < wanted:
        raise BadInputError(
            f"{folder}: {free >> 20} MiB are free but the run writes about {(wanted >> 20) + 1} MiB; "
            "give another --out"
        )
