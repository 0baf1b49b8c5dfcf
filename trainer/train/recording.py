"""Files that a run writes while it trains: manifest, configuration, metrics records, weights."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.tensor_file import safetensors_bytes
from trainer.config.recipe import Recipe
from trainer.config.registry import named
from trainer.config.sinks import FILE_SINKS, SINKS
from trainer.config.yaml_text import to_yaml
from trainer.distributed.parallel import differs_over_ranks
from trainer.distributed.sharding import own_rows
from trainer.errors import BadInputError, DivergedError
from trainer.host.files import remove, remove_unfinished, write_file, written_whole
from trainer.host.latest import EVALUATION
from trainer.models.finetune import plain_state
from trainer.observe.checksums import Checksums, checksums_to, fingerprints_of, last_names
from trainer.observe.console import warn
from trainer.observe.log import Sink
from trainer.observe.rows import FILES
from trainer.observe.sinks import keep_rows, opened_to_add
from trainer.observe.text import enumerated
from trainer.runs.manifest import Manifest, status_after, update_manifest
from trainer.train.state import Run


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Replaces an OSError by one line: the run folder can't be written.

    Raises:
        BadInputError: In place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise BadInputError(
            f"{error.filename or folder} can't be written ({error.strerror}); mend that, or give another "
            "run folder"
        ) from error


@contextlib.contextmanager
def open_recording(
    folder: Path, run: Run, manifest: Manifest
) -> Iterator[tuple[list[Sink], Checksums | None]]:
    """Writes manifest and configuration, and opens the sinks and checksums that write to the folder.

    Records of steps after the run's, from an attempt that was lost, are removed. An error inside the context
    is written to the manifest.

    Yields:
        The sinks; and the checksums, or None without log.fingerprints.

    Raises:
        BadInputError: If the folder can't be written.
    """
    process = os.getpid()
    with writable(folder):
        _begin(folder, manifest, run.state.step)
    with contextlib.ExitStack() as closing:
        try:
            with writable(folder):
                sinks = _open(folder, run.recipe, manifest.config, run.state.step, closing)
                checksums = None
                if run.recipe.log.fingerprints:
                    checksums = _open_trace(folder / "checksums.jsonl", run, closing)
            yield sinks, checksums
        except BaseException as error:
            if os.getpid() == process:  # not in a process that user code forked
                reason = f"{type(error).__name__}: {error}"
                with contextlib.suppress(OSError):  # such as a full disk: it must not hide the error
                    step = run.state.step
                    update_manifest(
                        folder, manifest, status=status_after(error), reason=reason, steps_done=step
                    )
            raise


def _begin(folder: Path, manifest: Manifest, step: int) -> None:
    remove_unfinished(folder)
    remove(folder / EVALUATION)  # of other weights than those that this attempt ends with
    for one in SINKS.values():
        if one.folder and not step:
            shutil.rmtree(folder / one.folder, ignore_errors=True)
    for file in (folder / name for name in (*FILES.values(), "checksums.jsonl")):
        if cut := keep_rows(file, step):
            warn(f"{file}: {cut} lines that can't be read were removed")
    update_manifest(folder, manifest)


def _open(
    folder: Path, recipe: Recipe, config: Mapping[str, Any], step: int, closing: contextlib.ExitStack
) -> list[Sink]:
    with written_whole(folder / "config.yaml") as beside:
        beside.write_text(to_yaml(dict(config)))
    sinks: list[Sink] = []
    for name in FILE_SINKS:
        if name in recipe.log.to:
            sink, close = named(SINKS[name].opens)(folder / SINKS[name].folder, step)
            closing.callback(_tolerating_disk_errors(close))
            sinks.append(_tolerating_disk_errors(sink))
    return sinks


def _open_trace(path: Path, run: Run, closing: contextlib.ExitStack) -> Checksums:
    known, state = last_names(path), run.state
    file = opened_to_add(path)
    closing.callback(_tolerating_disk_errors(file.close))
    write = checksums_to(file, list(state.model.state_dict()), known, state.step)
    return Checksums(_fingerprints(run), _tolerating_disk_errors(write), _drift_of(run))


def other_ranks_checksums(run: Run) -> Checksums | None:
    """Returns the checksums of a rank that writes none: they are compared over the ranks; None without."""
    if not run.recipe.log.fingerprints:
        return None
    return Checksums(_fingerprints(run), lambda *_: None, _drift_of(run))


def _fingerprints(run: Run) -> Callable[[], torch.Tensor]:
    """Returns a function that takes fingerprints of all tensors, and flags those that differ between ranks.

    A sharded tensor's fingerprint is a sum over the ranks that share it, each rank's times an odd number of
    its own. Unsharded tensors, and the sums of several sharding groups, are compared over the ranks.
    """
    state, group = run.state, run.world.group
    take, rows = fingerprints_of(state.model, own_rows), state.rows
    if group is None:
        return take
    if rows is None:
        return lambda: torch.stack(((own := take()), differs_over_ranks(own, group)))
    tensors = state.model.state_dict().values()
    whole = torch.tensor([own_rows(one) is one for one in tensors], device=run.world.device)
    if rows.ranks == run.world.size and not whole.any():
        return lambda: rows.sum(take() * (2 * rows.rank + 1))

    def taken() -> torch.Tensor:
        own = take()
        summed = rows.sum(own * (2 * rows.rank + 1))
        return torch.stack((summed, differs_over_ranks(torch.where(whole, own, summed), group)))

    return taken


def _drift_of(run: Run) -> Callable[[int, Sequence[int]], None]:
    """Returns a function that judges tensors that differ between ranks.

    Buffers give one warning, on rank 0; parameters end the run.
    """
    names = list(run.state.model.state_dict())
    weights = {name for name, _ in run.state.model.named_parameters(remove_duplicate=False)}
    alike, warned = run.state.step, run.world.rank > 0

    def judge(step: int, flags: Sequence[int]) -> None:
        nonlocal alike, warned
        odd = [name for name, flag in zip(names, flags, strict=True) if flag]
        if drifted := [name for name in odd if name in weights]:
            raise DivergedError(
                f"the ranks' weights differ after step {step}, as they did not after step {alike}: "
                f"{enumerated(drifted, 3)}; what changes them must be the same on all ranks: look for RANK, "
                "data or random numbers of a rank's own in the task, its hooks and its optimizer, or for a "
                "faulty device; --resume force resumes from the newest checkpoint"
            )
        if odd and not warned:
            warned = True
            warn(
                f"the buffers {enumerated(odd, 3)} differ between ranks after step {step}: each rank keeps "
                "its own, and checkpoints and the evaluation of rank 0's samples have rank 0's"
            )
        alike = step

    return judge


def _tolerating_disk_errors(write: Callable[..., None]) -> Callable[..., None]:
    """Wraps a writer of metrics records: a disk error doesn't end the run; the first one is a warning."""
    warned = False

    def tolerant(*row: Any) -> None:
        nonlocal warned
        try:
            write(*row)
        except OSError as error:
            if row and not warned:
                warn(f"metrics records are lost ({error.strerror}); the training goes on")
            warned = True

    return tolerant


def save_weights(model: nn.Module, path: Path, whole: Mapping[str, torch.Tensor] | None = None) -> str:
    """Writes parameters and buffers of a model as safetensors: tied ones under each name, LoRA merged.

    Args:
        model: The model.
        path: The file.
        whole: The unsharded state_dict of a sharded model; None: the model's own.

    Returns:
        The file's SHA-256.
    """
    with written_whole(path) as beside:
        beside.unlink()  # write_file makes a new one
        return write_file(beside, safetensors_bytes(plain_state(model, whole)))
