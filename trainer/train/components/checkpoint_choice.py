"""Choice of a run's checkpoint (newest intact, best, or of a step), and its loading."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.folder import Checkpoint, Damaged, Unreadable, look_up, read_state
from trainer.checkpoint.store import listing, names_of, newest_good, remove_leftovers
from trainer.distributed.parallel import World, words_of_ranks
from trainer.errors import BadInputError
from trainer.host.affinity import binding_note
from trainer.launch.worker import cpu_shares
from trainer.optim.own import HostSchedule
from trainer.runs.folder import checkpoints_of
from trainer.runs.manifest import Manifest
from trainer.train.components.updates import refuse_later_end
from trainer.train.options import Mode
from trainer.train.state import Run, load_state, read_numbers

_SHOWN = 4
_NOTHING: Mapping[str, Any] = {}


def newest_checkpoint(
    folder: Path, mode: Mode, world: World, stored: Manifest | None = None, sharded: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """Finds the checkpoint to resume from.

    Args:
        folder: The run folder.
        mode: The flag --resume; "force" begins again if no checkpoint is intact.
        world: The ranks.
        stored: The manifest of earlier attempts, or None.
        sharded: True if each rank verifies a part of the files, and reads its rows of the tensors later;
            collective then. Otherwise each rank reads the whole checkpoint.

    Returns:
        The checkpoint, or None; and a line for each newer one that was skipped.

    Raises:
        BadInputError: If there are checkpoints and none is intact, or they can't be read.
    """
    place = checkpoints_of(folder)
    try:
        if world.rank == 0:
            remove_leftovers(place)
        if sharded:
            found, skipped = _newest_together(place, world, stored)
        else:
            found, skipped = newest_good(place, stored.foreign if stored else None)
    except OSError as error:
        raise BadInputError(
            f"{place} can't be used ({error.strerror}); mend that, or give another run folder"
        ) from error
    except Unreadable as error:
        raise BadInputError(
            f"{place}: {error}; mend that, or move it away to resume from the one before"
        ) from error
    if skipped and found is None and mode != "force":
        more = f"; and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
        raise BadInputError(
            f"{folder}: none of its checkpoints can be trusted ({'; '.join(skipped[:_SHOWN])}{more}); "
            "bring one back, give another run folder, or begin again by --resume force"
        )
    if stored is None or stored.status != "finished":
        return found, skipped
    if found is None:
        raise BadInputError(
            f"{folder}: the finished run has no checkpoint to be extended from; give another run folder"
        )
    if found.step < stored.last_step and mode != "force":
        raise BadInputError(
            f"{folder}: it ended at step {stored.last_step}, and its newest good checkpoint is of step "
            f"{found.step}: what came between would be trained again; do that by --resume force, or give "
            "another run folder"
        )
    return found, skipped


def _newest_together(
    folder: Path, world: World, stored: Manifest | None
) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest checkpoint that all ranks find intact, and lines on skipped ones; collective."""
    skipped = list[str]()
    names = "\n".join(names_of(folder)) if world.rank == 0 else ""
    for name in words_of_ranks(names, world)[0].split():
        found, damage, unreadable = None, "", ""
        try:
            found = look_up(folder / name, (world.rank, world.size))
            damage = (stored.foreign(found.state) if stored else None) or ""
        except Unreadable as error:
            unreadable = str(error)
        except Damaged as error:
            damage = str(error)
        if line := next(filter(None, words_of_ranks(unreadable, world)), ""):
            raise Unreadable(f"{name}: {line}")
        if line := next(filter(None, words_of_ranks(damage, world)), ""):
            skipped.append(f"{name}: {line}")
        else:
            return found, skipped
    return None, skipped


def chosen_checkpoint(run: Path, which: str, word: str) -> tuple[int, Path]:
    """Returns step and folder of a run's checkpoint, which isn't verified yet.

    Args:
        run: The run folder.
        which: "last", "best" or a step.
        word: The flag and its value, for messages.

    Raises:
        BadInputError: If there is no such checkpoint.
    """
    folder = checkpoints_of(run)
    try:
        entries = listing(folder)
    except OSError as error:
        raise BadInputError(f"{word}: {folder} can't be read ({error.strerror}); mend that") from error
    if not entries:
        raise BadInputError(f"{word}: {run} holds no checkpoint; train it with checkpoint.every above 0")
    if which == "last":
        return entries[0].step, entries[0].path
    steps = ", ".join(str(entry.step) for entry in entries)
    step, what = which, f"no checkpoint of step {which}"
    if which == "best":
        try:
            best = read_numbers(entries[0].step, read_state(entries[0].path)).best
        except (Damaged, Unreadable, ValueError) as error:
            raise BadInputError(
                f"{word}: {entries[0].path.name}, which says what was best: {error}; give one of step {steps}"
            ) from error
        if not best:
            raise BadInputError(f"{word}: nothing was evaluated before its newest checkpoint; take the last")
        step, what = (
            str(best[1]),
            f"the best one, of step {best[1]}, wasn't kept (checkpoint.best=true keeps it)",
        )
    found = next(((entry.step, entry.path) for entry in entries if entry.step == int(step)), None)
    if found is None:
        raise BadInputError(f"{word}: {what}; there are those of step {steps}")
    return found


def load_checkpoint(
    run: Run, found: Checkpoint | None, stop_after: int | None = None, stored: Manifest | None = None
) -> None:
    """Loads a checkpoint into a run; without one the run stays as it was built.

    Args:
        run: A run as it was built.
        found: The checkpoint, or None.
        stop_after: The step of --stop-after, or None.
        stored: The manifest of earlier attempts, or None.

    Raises:
        BadInputError: If the checkpoint doesn't fit the run, or nothing is left to train.
    """
    if found is None:
        return
    if stop_after is not None and found.step >= stop_after:
        raise BadInputError(
            f"--stop-after {stop_after}: {found.path} is of step {found.step} already; give a later one"
        )
    # A run whose last checkpoint is at its end lacks only its final weights: these are written again.
    at_its_end = stored is not None and found.step == run.plan.steps == stored.last_step
    if found.step >= run.plan.steps and not (at_its_end and found.state.get("metrics")):
        raise BadInputError(
            f"{found.path} is of step {found.step}, and this configuration ends at {run.plan.steps}: "
            "nothing is left to train; raise epochs or max_steps, or give another run folder"
        )
    try:
        load_state(run, found.step, found.tensors, found.state)
    except (KeyError, ValueError) as error:
        raise BadInputError(
            f"{found.path}: isn't a checkpoint of this run ({error}); give another run folder, or remove it"
        ) from error
    except (Damaged, Unreadable) as error:  # in a sharded run tensors are read only now
        raise BadInputError(f"{found.path}: {error}; it was sound a moment ago: start again") from error
    if isinstance(run.state.lr, HostSchedule):
        refuse_later_end(found.path, run.state.lr.last_update, run.plan.steps)


def resume_notes(
    stored: Manifest | None,
    skipped: list[str],
    step: int,
    world: World,
    steps: int = 0,
    parallel: Mapping[str, Any] = _NOTHING,
) -> list[str]:
    """Returns lines on where an attempt begins, and how it differs from the one before.

    Args:
        stored: The manifest of earlier attempts, or None.
        skipped: Lines on checkpoints that were skipped.
        step: Steps done before the attempt.
        world: The ranks.
        steps: Number of steps at which the run is to end.
        parallel: The section `parallel` of the configuration.
    """
    notes = [note] if (note := binding_note(cpu_shares())) else []
    notes += [f"checkpoint left out: {line}" for line in skipped]
    if stored is None:
        return notes
    if not step:
        return [*notes, "begins again: the earlier attempt left no checkpoint"]
    notes.append(f"resumes after step {step}")
    if stored.status == "finished":
        early = ", out of patience," if stored.out_of_patience else ""
        notes[-1] += f": the run ended at step {stored.last_step}{early} and is extended"
    elif stored.extended and steps > stored.last_step:
        notes[-1] += f": its end moves from step {stored.last_step} to {steps}"
    if stored.world_size != world.size:
        tree = stored.config.get("parallel", {}).get("reduction") == "tree"
        repeats = world.device.type == "cpu" or stored.config.get("deterministic", False)
        sums = "but sums in another order"
        if tree:
            sums = "and the same bits (parallel.reduction=tree)"
        if tree and not repeats:
            sums = "summed in the same order (parallel.reduction=tree; the same bits want deterministic=true)"
        notes.append(
            f"on {world.size} rank{'s' * (world.size > 1)} instead of {stored.world_size}: the same "
            f"samples in the same steps, {sums}"
        )
    before, now = (
        (one.get("strategy", "ddp"), one.get("shard", 0))
        for one in (stored.config.get("parallel", {}), parallel)
    )
    if before != now and world.size > 1:
        notes.append(
            f"parallel.strategy={now[0]} instead of {before[0]}: the same samples in the same steps, but "
            "sums in another order"
        )
    return notes
