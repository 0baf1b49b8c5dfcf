"""What a run starts from: found and hashed once, before any rank starts, and the same when it is resumed.

A run that goes on from a checkpoint, its own or that of `--from`, takes all weights from there: what it once
started from isn't asked for any more, and may be gone.
"""

from contextlib import suppress
from pathlib import Path

from trainer.checkpoint import FOLDER
from trainer.checkpoint.folder import Damaged, Unreadable, read_state, verify
from trainer.checkpoint.store import listing
from trainer.config.recipe import Recipe
from trainer.errors import BadInputError
from trainer.models.pretrained import find_weights
from trainer.models.weights import regular
from trainer.train.manifest import Manifest, Pretrained, read_run
from trainer.train.provenance import file_hash
from trainer.train.resume import Mode, StartingPoint


def begins_fresh(folder: Path | None, stored: Manifest | None, mode: Mode) -> bool:
    """Whether an attempt takes the weights that it starts from, and not a checkpoint's.

    Args:
        folder: The run folder.
        stored: What earlier attempts left there.
    """
    if folder is None or stored is None:
        return True
    # The first two begin nothing, or from a checkpoint alone; the third has that of another run.
    over = stored.status == "finished" or (stored.status == "diverged" and mode != "force")
    if over or stored.begun_from is not None:
        return False
    try:
        entries = listing(folder / FOLDER)
    except OSError:  # which ends the attempt, in words of its own
        return False
    # Where none can be trusted only `force` begins again.
    return not entries or (mode == "force" and not any(_good(entry.path, stored) for entry in entries))


def _good(checkpoint: Path, stored: Manifest) -> bool:
    try:
        verify(checkpoint)
        return stored.foreign(read_state(checkpoint)) is None
    except Unreadable:  # as above
        return True
    except Damaged:
        return False


def resolve_pretrained(
    recipe: Recipe,
    stored: Manifest | None,
    folder: Path | None = None,
    mode: Mode = "auto",
    source: StartingPoint | None = None,
) -> tuple[Recipe, Pretrained | None, bool]:
    """Finds what a recipe starts from, and fetches it if it isn't here; not where a checkpoint is taken.

    Args:
        recipe: As it was given.
        stored: What earlier attempts left: a resumed run keeps the commit that it began with, wherever the
            branch that was named is now.
        folder: Where they left it.
        source: The other run that a new one begins from.

    Returns:
        The recipe, naming a commit in place of a branch; what the file is, or None; and whether ranks are to
        read it.

    Raises:
        BadInputError: If it can't be had, or is another file than was published.
    """
    fresh, known = begins_fresh(folder, stored, mode), stored
    if stored is None and source is not None:
        fresh = False
        with suppress(BadInputError):  # said in the words of --from
            known = read_run(source.run).manifest
    if recipe.model.pretrained is None:
        return recipe, None, fresh
    if not fresh and known is not None and (before := known.pretrained) is not None:
        exact = known.config.get("model", {}).get("pretrained")
        asked = recipe.model.pretrained
        if str(asked) in (before.source, exact):
            if isinstance(asked, Path):
                with suppress(BadInputError, OSError):  # it may be gone; if it is another file, that is said
                    now = file_hash(regular(asked))
                    before = before.model_copy(update={"sha256": now})
                return recipe, before, fresh
            model = recipe.model.model_copy(update={"pretrained": exact})
            return recipe.model_copy(update={"model": model}), before, fresh
    return *_found(recipe, stored), fresh


def _found(recipe: Recipe, stored: Manifest | None) -> tuple[Recipe, Pretrained]:
    model, before = recipe.model, stored.pretrained if stored is not None else None
    asked = str(model.pretrained)
    if before is not None and before.source == asked and asked.startswith("hub:"):
        model = model.model_copy(update={"pretrained": f"{asked.rpartition('@')[0]}@{before.revision}"})
    found = find_weights(model)
    assert found is not None
    file = regular(found.file)
    try:
        sha256 = file_hash(file)
    except OSError as error:
        raise BadInputError(
            f"model.pretrained: can't read {file} ({error.strerror}); give another file, "
            "hub:ORG/NAME@REVISION or torchvision:WEIGHTS"
        ) from error
    if found.sha256 not in (None, sha256):
        raise BadInputError(
            f"model.pretrained={asked}: {file.resolve()} isn't what was fetched and checked (another "
            "SHA-256): remove it, and it is fetched again"
        )
    model = model.model_copy(update={"pretrained": found.exact})
    # A run that is resumed without its recipe asks for the commit: it goes on to say whose branch that was.
    same = before is not None and found.revision is not None and found.revision == before.revision
    source = before.source if before is not None and same else asked
    what = Pretrained(source=source, revision=found.revision, sha256=sha256)
    return recipe.model_copy(update={"model": model}), what
