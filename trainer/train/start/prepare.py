"""Preparation of a run: weights, task, decision, checks and run folder, in one order for every way in.

Rank 0 prepares for all ranks (`prepare`), before there is a process group; the others wait for what it says,
and open the data (`prepared_in_turns`).
"""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.distributed.turns import Turns, heard, say_to_all, wait_for_all
from trainer.errors import BadInputError
from trainer.host.files import own_folder, read_inside, write_whole
from trainer.host.here import from_here
from trainer.launch.worker import current
from trainer.models.precision import check_precision
from trainer.observe.console import warn
from trainer.runs.folder import (
    TOKEN,
    check_inside,
    claim_folder,
    has_checkpoint,
    lock,
    new_folder,
    remove_unused,
)
from trainer.runs.manifest import Manifest, read_stored
from trainer.runs.report.write import failure_reported
from trainer.tasks import Task
from trainer.tasks.custom import CustomTask
from trainer.train.components.task import check_request, device_kind, make_task
from trainer.train.hooks import HooksOfRank, make_hooks
from trainer.train.request import PreparedRun, Request, as_json, from_json
from trainer.train.start.checks import Start, check_start, threads_line
from trainer.train.start.decision import Decision, Finished, From, Resume, decide
from trainer.train.start.job import restarted
from trainer.train.starting_weights import keep_beginning, resolve_pretrained

SHOWN_SECONDS = 60.0  # until a file server shows one host's new file to another
_POLL_SECONDS = 0.2
_READY_FACTOR = 3.0  # of the time that rank 0 took, and the other ranks may take for the same data


def prepared_in_turns(
    request: Request, turns: Turns, stack: ExitStack, task: Task | None = None, hooks: Sequence[Any] = ()
) -> tuple[PreparedRun, Task | None, HooksOfRank]:
    """Returns what rank 0 has prepared, and the task and hooks of this rank.

    The task is None where nothing is trained.

    Args:
        request: What the start asks for.
        turns: The ranks.
        stack: What it closes is held until the run's end.
        task: The task, where it is made already.
        hooks: Hooks that `fit` was given.

    Raises:
        BadInputError: If a check fails.
        RefusedElsewhereError: If one fails on another rank.
    """
    began, place = time.monotonic(), turns.place
    if place.rank == 0:
        given, (prepared, task) = task, prepare(request, place.size, stack, task)
        token = "" if place.local_size == place.size or prepared.ended else secrets.token_hex(8)
        if token:
            write_whole(own_folder(prepared.folder) / TOKEN, token)
            stack.callback(lambda: (prepared.folder / TOKEN).unlink(missing_ok=True))
        stack.enter_context(_folder_kept(request, prepared))
        seconds = time.monotonic() - began
        say_to_all(turns, "prepared", {"token": token, "seconds": seconds, **as_json(prepared)})
        if given is None and isinstance(task, CustomTask) and prepared.ended is None:
            task = make_task(prepared.recipe, task.anew())  # as the other ranks have it: never tried
    else:
        said = heard(turns, "prepared")
        token, seconds = said.pop("token"), said.pop("seconds")
        prepared = from_json(PreparedRun, said)
        if prepared.ended is None:
            first = turns.first_here
            if place.rank != first:
                heard(turns, f"opened-{first}")
            else:
                prepared = _prepared_on_this_host(request, prepared, token)
            task = task or make_task(prepared.recipe)
            if place.rank == first:
                check_start(Start(prepared.recipe, task, prepared.folder, prepared.stored), {"host"})
                say_to_all(turns, f"opened-{first}")
    if turns.first_here == 0 == place.rank:
        say_to_all(turns, "opened-0")
    if isinstance(task, CustomTask):
        task.tried = prepared.tried
    # Here, where all ranks hear of it if one can't be made.
    brought = [*getattr(task, "hooks", ()), *hooks] if prepared.ended is None else []
    made = make_hooks(prepared.recipe.hooks, brought, place.rank)
    wait_for_all(turns, request.recipe.parallel.timeout_s + _READY_FACTOR * seconds)
    return prepared, task, made


def _prepared_on_this_host(request: Request, prepared: PreparedRun, token: str) -> PreparedRun:
    """Checks the run folder of another host than rank 0's, and hashes the weights that lie here."""
    until = time.monotonic() + SHOWN_SECONDS
    while token and _shown(prepared.folder) != token:
        if time.monotonic() > until:
            raise BadInputError(
                f"rank {os.environ.get('RANK')} on {os.uname().nodename} sees another folder at --out "
                f"{prepared.folder} than rank 0: give one on a file system that all hosts have"
            )
        time.sleep(_POLL_SECONDS)
    asked = (prepared.stored, prepared.folder, prepared.resume, request.source)
    recipe, pretrained, _ = resolve_pretrained(prepared.recipe, *asked)
    return replace(prepared, recipe=recipe, pretrained=pretrained)


def _shown(folder: Path) -> str:
    with suppress(OSError):
        return read_inside(folder / TOKEN, 100).decode(errors="replace")
    return ""


@contextmanager
def _folder_kept(request: Request, prepared: PreparedRun) -> Iterator[None]:
    """Leaves the run folder for a restart; without a launcher, removes one in which no run has begun."""
    worker, folder = current(), prepared.folder
    made = prepared.made or request.made

    def resumable() -> bool:
        if made and worker is not None and worker.launch is None:
            remove_unused(folder)
        return has_checkpoint(folder, False, request.name)

    if worker is not None:
        worker.prepares(resumable)
    if worker is not None and worker.launch is not None:
        worker.leave_for_launcher(as_json(restarted(request, folder, made)))
        yield
        return
    if request.marker is not None:
        write_whole(request.marker, str(folder))
    try:
        with failure_reported(folder):
            yield
    finally:
        if made:
            remove_unused(folder)


def prepare(
    request: Request, ranks: int, stack: ExitStack, task: Task | None = None
) -> tuple[PreparedRun, Task]:
    """Prepares a run. Bad input leaves no folder.

    Args:
        request: What the start asks for.
        ranks: Number of ranks of the job.
        stack: What it closes is held until the run's end: the folder's lock.
        task: The task, where it is made already.

    Raises:
        BadInputError: If a check fails.
    """
    folder, resume = request.folder, request.resume
    _check_devices(request)
    stored = None if folder is None else read_stored(folder)
    if line := threads_line(request.recipe, stored, resume):
        warn(line)
    recipe, pretrained, fresh = resolve_pretrained(request.recipe, stored, folder, resume, request.source)
    if recipe.task == "language":
        from trainer.tasks.conversations import with_commits

        recipe = with_commits(recipe, None if stored is None else stored.config)
    task = task or make_task(recipe)
    check_request(recipe, task, ranks, fresh)
    # Code of the task may have left the folder of the start.
    folder, runs = folder and from_here(folder), from_here(request.runs)
    source = request.source and request.source._replace(run=from_here(request.source.run))

    def decided(folder: Path | None) -> Decision:
        return decide(recipe, folder, task, pretrained=pretrained, resume=resume, source=source)

    decision, made = decided(folder), False
    if not isinstance(decision, Finished):
        check_start(Start(recipe, task, folder or runs, _stored(decision), request.settings), {"job", "host"})
        if folder is None:
            folder, made = new_folder(runs, request.name, recipe), True
        else:
            made = not (isinstance(decision, Resume) or request.again) and claim_folder(folder)
        with _removed_if_refused(folder if made else None):
            _hold(folder, stack)
            if read_stored(folder) != _stored(decision):  # another process has trained there meanwhile
                decision = decided(folder)
            if isinstance(decision, From):
                keep_beginning(folder, decision.checkpoint)
    begun_from = decision.checkpoint if isinstance(decision, From) else None
    prepared = PreparedRun(
        recipe,
        request.name,
        (folder or runs).absolute(),  # the same after each restart
        resume,
        request.stop_after,
        request.profile,
        request.command,
        _stored(decision),
        begun_from,
        pretrained,
        dict(getattr(task, "tried", {})),
        made,
        (decision.line, decision.code) if isinstance(decision, Finished) else None,
    )
    return prepared, task


@contextmanager
def _removed_if_refused(folder: Path | None) -> Iterator[None]:
    """Removes a folder that was just made where the run is refused after all."""
    try:
        yield
    except BaseException:
        if folder is not None:
            remove_unused(folder)
        raise


def _stored(decision: Decision) -> Manifest | None:
    return decision.stored if isinstance(decision, Resume) else None


def _hold(folder: Path, stack: ExitStack) -> None:
    """Locks the run folder: a rank's lock is held until its process ends."""
    check_inside(folder)
    file = lock(folder)
    if current() is None:
        stack.callback(os.close, file)


def _check_devices(request: Request) -> None:
    """Checks that the device has what the recipe asks for, and that PyTorch can use what the launcher saw."""
    recipe = request.recipe
    if device_kind(recipe) == "cpu":
        if request.gpus:
            raise BadInputError(
                f"the driver lists {request.gpus} GPUs, and PyTorch {torch.__version__} can't use them: is "
                "the driver too old for it (nvidia-smi)? device=cpu trains without them"
            )
        check_precision(recipe.precision, torch.device("cpu"))
