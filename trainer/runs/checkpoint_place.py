"""Folder of a run's checkpoints: in the run folder, or where `checkpoint.folder` says. Imports no torch.

With `checkpoint.folder`, RUN/checkpoints is a link, and a file in its target names the run that owns the
checkpoints. A target without that file, as in a run folder from elsewhere, is refused: nothing in it is
listed, read, written or removed.
"""

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainer.checkpoint import CHECKPOINTS
from trainer.errors import BadInputError
from trainer.host.files import check_writable, names, oddity, write_whole
from trainer.runs.folder import MANIFEST, OWNER, RUNS, newest_run, read_json

_ELSEWHERE = "a run has its checkpoints elsewhere by checkpoint.folder=DIR, given when it begins"


class _Owner(NamedTuple):
    """Owner of a folder of checkpoints: the run folder, and the run's id ("" until it has one)."""

    folder: str
    run_id: str


def checkpoints_of(run: Path) -> Path:
    """Returns the folder of a run's checkpoints, for reading.

    Raises:
        BadInputError: If RUN/checkpoints is a link to a missing folder, or to one that isn't this run's.
    """
    inside = run / CHECKPOINTS
    if not inside.is_symlink():
        return inside
    place = _real(inside)
    if not place.is_dir():
        raise BadInputError(
            f"{inside}: leads to {place}, which isn't there: bring that folder back, or link it to where it "
            "is now"
        )
    if not _is_of(_owner(place), run):
        raise BadInputError(
            f"{inside}: is a symbolic link to {place}, which isn't marked as this run's: bring the folder "
            f"back; {_ELSEWHERE}"
        )
    return place


def place_checkpoints(run: Path, wanted: Path | None) -> None:
    """Prepares the folder of a run's checkpoints for writing.

    Args:
        wanted: `checkpoint.folder`.

    Raises:
        BadInputError: If the checkpoints lie elsewhere, or the wanted folder is another run's or can't be
            written.
    """
    inside = run / CHECKPOINTS
    if not inside.is_symlink():
        if wanted is None:
            return
        if oddity(inside, folder=True) or names(inside):
            raise BadInputError(
                f"checkpoint.folder={wanted}: the checkpoints of {run} lie in {inside}: leave the key out, "
                f"or begin another run from them by --init-from {run}"
            )
        _make(run, wanted)
    elif wanted is not None and _real(wanted) != _real(inside):
        if not _is_of(_owner(_real(wanted)), run):
            raise BadInputError(
                f"checkpoint.folder={wanted}: the checkpoints of {run} lie in {_real(inside)}: move that "
                "folder to the new place first, or give the key as it was"
            )
    else:
        _refuse_copy(run, checkpoints_of(run))
    try:
        if wanted is not None and not (inside.is_symlink() and _real(wanted) == _real(inside)):
            _link(inside, _real(wanted))
        check_writable(_real(inside))
    except OSError as error:
        raise _unwritable(_real(wanted or inside), error) from error
    mark_checkpoints(run)


def mark_checkpoints(run: Path) -> None:
    """Writes the run as owner into its folder of checkpoints, if that is outside of the run folder.

    Raises:
        BadInputError: If the file can't be written.
    """
    place, owner = _real(run / CHECKPOINTS), _Owner(str(run.absolute()), _run_id(run))
    if not (run / CHECKPOINTS).is_symlink() or _owner(place) == owner:
        return
    try:
        write_whole(place / OWNER, json.dumps(owner._asdict(), indent=2) + "\n")
    except OSError as error:
        raise _unwritable(place, error) from error


def has_checkpoint(out: Path | None, newest: bool, recipe: str) -> bool:
    """True if the run that a command names has a checkpoint, judged by the folder's name only."""
    try:
        folder = out or (newest_run(RUNS, recipe) if newest else None)
        return folder is not None and _holds_any(checkpoints_of(folder))
    except (BadInputError, OSError):  # called by a signal's handler: an error there would end in a traceback
        return False


def _make(run: Path, wanted: Path) -> None:
    """Makes the folder for a new run's checkpoints, or accepts one that is empty or already this run's."""
    place, root = _real(wanted), _real(run)
    if root in (place, *place.parents):
        raise BadInputError(f"checkpoint.folder={wanted}: lies in the run folder itself: leave the key out")
    try:
        place.mkdir(parents=True, exist_ok=True)
        owner, there = _owner(place), names(place)
    except OSError as error:
        raise _unwritable(place, error) from error
    if (owner is None and there) or (_holds_any(place) and not _is_of(owner, run)):
        holds = f"the checkpoints of {owner.folder}" if owner else there[0]
        raise BadInputError(
            f"checkpoint.folder={wanted}: holds {holds}; give a folder for this run alone, a new or an empty "
            "one"
        )
    _refuse_copy(run, place)


def _refuse_copy(run: Path, place: Path) -> None:
    """Refuses checkpoints that a copied run folder shares with its original: each run would remove them."""
    owner = _owner(place)
    if owner and _holds_any(place) and not _same(owner.folder, run) and _run_id(Path(owner.folder)):
        raise BadInputError(
            f"{run}: its checkpoints in {place} are those of {owner.folder}, of which this is a copy: copy "
            f"them, too, and give the copy's folder by --set checkpoint.folder=DIR"
        )


def _link(inside: Path, place: Path) -> None:
    beside = inside.with_name(f".{CHECKPOINTS}-{secrets.token_hex(8)}")
    if not inside.is_symlink() and inside.exists():
        inside.rmdir()
    beside.symlink_to(place)
    beside.replace(inside)


def _owner(place: Path) -> _Owner | None:
    try:
        facts = read_json(place / OWNER)
        return _Owner(str(facts["folder"]), str(facts["run_id"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_of(owner: _Owner | None, run: Path) -> bool:
    if owner is None:
        return False
    return owner.run_id == _run_id(run) if owner.run_id else _same(owner.folder, run)


def _run_id(run: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(read_json(run / MANIFEST)["run_id"])
    return ""


def _holds_any(place: Path) -> bool:
    return any(name.startswith("step-") for name in names(place))


def _same(folder: str, run: Path) -> bool:
    with suppress(OSError):
        return os.path.samefile(folder, run)  # noqa: PTH121
    return False


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _unwritable(place: Path, error: OSError) -> BadInputError:
    return BadInputError(
        f"checkpoint.folder={place}: can't be used ({error.strerror}); mend that, or give another folder"
    )
