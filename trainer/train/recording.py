"""What a run writes to its folder while it trains: manifest, configuration, rows of metrics, weights."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from trainer.checkpoint import FOLDER
from trainer.checkpoint.tensor_file import encode
from trainer.config.recipe import Recipe
from trainer.config.redact import redact
from trainer.distributed.parallel import differs_over_ranks
from trainer.distributed.sharding import own_rows
from trainer.errors import BadInputError, DivergedError
from trainer.host.files import remove_unfinished, write_file, written_whole
from trainer.launch.signals import Stopped
from trainer.models.finetune import plain_state
from trainer.observe.checksums import Checksums, checksums_to, fingerprints_of, last_names
from trainer.observe.console import warn
from trainer.observe.log import Sink
from trainer.observe.rows import FILES
from trainer.observe.sinks import csv_sink, jsonl_sink, keep_rows, opened_to_add, tensorboard_sink
from trainer.observe.text import listed
from trainer.optim.optimizers import bytes_of_moments
from trainer.train.run_folder import MANIFEST, set_status, write_json
from trainer.train.state import Run

# libyaml's writes the same ten times as fast; not every PyYAML has it.
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Says in one line that a run folder can't be written, before the training.

    Raises:
        BadInputError: In place of the disk's error.
    """
    try:
        yield
    except OSError as error:
        raise BadInputError(
            f"{error.filename or folder} can't be written ({error.strerror}); mend that, or give another "
            "--out"
        ) from error


@contextlib.contextmanager
def open_folder(
    folder: Path, run: Run, manifest: dict[str, Any]
) -> Iterator[tuple[list[Sink], Checksums | None]]:
    """Writes manifest and configuration, and opens the sinks and the trace that write to the folder.

    Rows of later steps than the run's, from an attempt that was lost, go. An error that ends it
    stands in the manifest afterwards.

    Raises:
        BadInputError: If the folder can't be written.
    """
    process = os.getpid()
    with writable(folder):
        _begin(folder, manifest, run.state.step)
    with contextlib.ExitStack() as closing:
        try:
            with writable(folder):
                sinks = _open(folder, run.recipe, run.state.step, closing)
                checksums = None
                if run.recipe.log.fingerprints:
                    checksums = _open_trace(folder / "checksums.jsonl", run, closing)
            yield sinks, checksums
        except BaseException as error:
            if os.getpid() == process:  # not in a fork of somebody's code
                set_status(folder, manifest, status_of(error), f"{type(error).__name__}: {error}")
            raise


def status_of(error: BaseException) -> str:
    """How a run stands that an error ended."""
    return {Stopped: "stopped", DivergedError: "diverged"}.get(type(error), "failed")


def _begin(folder: Path, manifest: dict[str, Any], step: int) -> None:
    remove_unfinished(folder)
    if not step:
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    for file in (*(folder / name for name in (*FILES.values(), "checksums.jsonl")), *folder.glob("*.csv")):
        if cut := keep_rows(file, step):
            warn(f"{file}: {cut} lines that can't be read were removed")
    write_json(folder / MANIFEST, manifest)


def _open(folder: Path, recipe: Recipe, step: int, closing: contextlib.ExitStack) -> list[Sink]:
    with written_whole(folder / "config.yaml") as beside:
        values = redact(recipe.model_dump(mode="json"))
        beside.write_text(yaml.dump(values, Dumper=_DUMPER, sort_keys=False))
    sinks: list[Sink] = []
    if "jsonl" in recipe.log.to:
        to_files, close_files = jsonl_sink(folder)
        closing.callback(_despite_the_disk(close_files))
        sinks.append(to_files)
    if "csv" in recipe.log.to:
        sinks.append(csv_sink(folder))
    if "tensorboard" in recipe.log.to:
        to_board, close_board = tensorboard_sink(folder / "tensorboard", step)
        closing.callback(_despite_the_disk(close_board))
        sinks.append(to_board)
    return [_despite_the_disk(sink) for sink in sinks]


def _open_trace(path: Path, run: Run, closing: contextlib.ExitStack) -> Checksums:
    known, state = last_names(path), run.state
    file = opened_to_add(path)
    closing.callback(_despite_the_disk(file.close))
    write = checksums_to(file, list(state.model.state_dict()), known, state.step)
    return Checksums(_fingerprints(run), _despite_the_disk(write), _drift_of(run))


def other_ranks_checksums(run: Run) -> Checksums | None:
    """What a rank that writes nothing has to do with them: its weights are compared with the other ranks'."""
    if not run.recipe.log.fingerprints:
        return None
    return Checksums(_fingerprints(run), lambda *_: None, _drift_of(run))


def _fingerprints(run: Run) -> Callable[[], torch.Tensor]:
    """Takes them, and which differ between ranks that should hold the same.

    Of a sharded model it is a sum over the ranks that share it, each rank's times an odd number of its own;
    what isn't sharded of it, and the sums of several such groups, are compared.
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
    """Makes what judges tensors that differ between ranks: buffers are told once, parameters end the run."""
    names = list(run.state.model.state_dict())
    weights = {name for name, _ in run.state.model.named_parameters(remove_duplicate=False)}
    alike, told = run.state.step, run.world.rank > 0

    def judge(step: int, flags: Sequence[int]) -> None:
        nonlocal alike, told
        odd = [name for name, flag in zip(names, flags, strict=True) if flag]
        if drifted := [name for name in odd if name in weights]:
            raise DivergedError(
                f"the ranks' weights differ after step {step}, as they did not after step {alike}: "
                f"{listed(drifted, 3)}; what changes them must be the same on all ranks: look for RANK, data "
                "or random numbers of a rank's own in the task, its hooks and its optimizer, or for a faulty "
                "device; --resume force goes on from the newest checkpoint"
            )
        if odd and not told:
            told = True
            warn(
                f"the buffers {listed(odd, 3)} differ between ranks after step {step}: each rank keeps its "
                "own, and checkpoints and the evaluation of rank 0's samples have rank 0's"
            )
        alike = step

    return judge


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


def save_weights(model: nn.Module, path: Path, whole: Mapping[str, torch.Tensor] | None = None) -> str:
    """Writes parameters and buffers of a model as safetensors, each tied one too, and LoRA merged.

    Args:
        model: Whose they are.
        path: The file.
        whole: Its state_dict, if it is sharded.

    Returns:
        The file's hash.
    """
    with written_whole(path) as beside:
        beside.unlink()  # it makes a new one
        return write_file(beside, encode(plain_state(model, whole)))


def check_space(folder: Path, recipe: Recipe, model: nn.Module, own_optimizer: bool = False) -> None:
    """Makes sure that checkpoints and final weights will fit on the disk.

    What earlier attempts left of them counts as free: it is replaced. The state of a task's own optimizer
    isn't counted: nobody knows it yet.

    Raises:
        BadInputError: If they won't.
    """
    more = " and the state of the task's own optimizer" * own_optimizer
    kept = recipe.checkpoint.keep + recipe.checkpoint.best + 1
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    average = sum(p.nbytes for p in model.parameters() if p.requires_grad) if recipe.ema.decay else 0
    state = 0 if own_optimizer else bytes_of_moments(recipe.optim, model)
    final = whole * (2 if recipe.ema.decay else 1)
    ours = [*(folder / FOLDER).rglob("*"), *folder.glob("*.safetensors")]
    taken = sum(path.lstat().st_size for path in ours if path.is_file())
    wanted, free = (
        final + kept * (whole + average + state) + (4 << 20),
        shutil.disk_usage(folder).free + taken,
    )
    if free < wanted:
        raise BadInputError(
            f"{folder}: {free >> 20} MiB are free but the run writes about {(wanted >> 20) + 1} MiB{more}; "
            "give another --out"
        )
