"""Files of the Hugging Face hub, by its own client (huggingface_hub); fetched once, then in its cache."""

import contextlib
import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import BadInputError, first_line
from trainer.host import strict_json
from trainer.host.files import cache_folder, read_inside, write_whole
from trainer.observe.console import say

FILE = "model.safetensors"
_CONNECT_S = 5.0  # for an answer of the hub
# The hub's client makes a path of it.
_ETAG = re.compile(r'(W/)?"?[\w=+-][\w.=+-]{0,127}"?', re.ASCII)
_OF_ROWS = (".jsonl", ".json", ".ndjson", ".parquet")
_NO_DATA = (".md", ".gitattributes", ".gitignore", "LICENSE")
_ABOUT = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")  # no rows
_PLAIN = re.compile(r"((?!\.)[^/\\\0]+/)*(?!\.)[^/\\\0]+")  # no way out of the folder
_COMMIT = re.compile(r"[0-9a-f]{40}")


class NoSuchFileError(BadInputError):
    """A repository that holds no file of a name."""


def hub_file(what: str, repository: str, revision: str, name: str, kind: str = "model") -> tuple[Path, str]:
    """A file of a repository on the hub, fetched if it isn't here yet, and the commit that it is of.

    Args:
        what: Whose wish it is, for errors: KEY=VALUE.
        revision: A branch, a tag or a whole commit.
        name: Of the file.
        kind: "model" or "dataset".

    Raises:
        BadInputError: If there is no such thing, or it can't be had; `NoSuchFileError` where the repository
            holds no file of the name.
    """
    with _in_one_line(what, repository, revision, name):
        file = _downloaded(repository, revision, name, kind)
    commit = file.parents[name.count("/")].name  # the cache's own layout: snapshots/COMMIT/FILE
    if not _COMMIT.fullmatch(commit):
        raise BadInputError(f"{what}: the hub names no commit; set HF_ENDPOINT to a hub")
    return file, commit


def hub_rows(what: str, repository: str, revision: str, below: str | None = None) -> tuple[Path, str]:
    """The files of rows of a data set on the hub, fetched if they aren't here yet, and their commit.

    Which files a commit has is kept beside the trainer's other copies, so that a set of which only some were
    fetched isn't taken for whole where there is no network.

    Args:
        what: Whose wish it is, for errors: KEY=VALUE.
        revision: A branch, a tag or a whole commit.
        below: A file, or a folder, of the repository; None: all of it.

    Returns:
        The file, or the folder.

    Raises:
        BadInputError: If there is no such thing, or it can't be had.
    """
    from huggingface_hub import HfApi, constants

    def kept(revision: str) -> Path:
        return cache_folder("hub") / f"{hashlib.sha256(f'{repository}@{revision}'.encode()).hexdigest()}.json"

    listed = kept(revision)
    if not (_COMMIT.fullmatch(revision) and listed.exists()):
        with _in_one_line(what, repository, revision, "files"):
            if _answers():
                about = HfApi().dataset_info(repository, revision=revision)
                if not _COMMIT.fullmatch(commit := str(about.sha)):
                    raise ValueError("it names no commit")
                every = [str(one.rfilename) for one in about.siblings or []]
                names = sorted(name for name in every if _is_of_rows(name))
                others = [name for name in every if name not in names and not name.endswith(_NO_DATA)]
                if others:
                    say(f"{what}: {len(others):,} other files aren't fetched, such as {others[0]!r:.80}")
                for file in {listed, kept(commit)}:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(file, json.dumps({"commit": commit, "names": names}))
    try:
        found = strict_json.parse(read_inside(listed, strict_json.LARGEST))
        commit, names = found["commit"], [name for name in found["names"] if _is_of_rows(name)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"{what}: {constants.ENDPOINT} can't be reached from here, and the set wasn't fetched before; "
            "fetch it once where there is a network, set HF_ENDPOINT to a mirror, or give a folder"
        ) from error
    chosen = [name for name in names if below is None or name == below or name.startswith(f"{below}/")]
    if not chosen:
        where = repository if below is None else f"{below} of {repository}"
        raise BadInputError(
            f"{what}: {where} holds no {', '.join(_OF_ROWS)}; give another revision, or a file or folder "
            f"behind it, as in @{revision}:FOLDER{f' (it has {names[0]})' * bool(names)}"
        )
    files = [hub_file(what, repository, commit, name, "dataset")[0] for name in chosen]
    folder = files[0].parents[chosen[0].count("/")]
    return folder / (below or ""), commit


def _is_of_rows(name: str) -> bool:
    return bool(_PLAIN.fullmatch(name)) and name.endswith(_OF_ROWS) and name.rpartition("/")[2] not in _ABOUT


@contextlib.contextmanager
def _in_one_line(what: str, repository: str, revision: str, name: str) -> Iterator[None]:
    """Turns errors of the hub's client into one line."""
    import httpx2
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what is wrong is said here, in one line
    constants.HF_HUB_DISABLE_TELEMETRY = True  # asks the hub for more than the file
    if not sys.stderr.isatty():
        disable_progress_bars()
    hub = constants.ENDPOINT
    try:
        with _answers_checked():
            yield
    except errors.GatedRepoError as error:
        raise BadInputError(
            f"{what}: {hub} gives it to those only who were granted access: set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise BadInputError(
            f"{what}: {hub} has no repository {repository}; mend the name, or set HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise BadInputError(
            f"{what}: {repository} has no revision {revision}; give a branch, a tag or a whole commit"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise NoSuchFileError(
            f"{what}: {repository} holds no {name} there, and nothing else is read (no pickles, no weights "
            "in several files); choose a repository or revision that does"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        answer = getattr(error.__cause__, "response", None)
        how = "can't be reached from here" if answer is None else f"answers HTTP {answer.status_code}"
        raise BadInputError(
            f"{what}: {hub} {how}, and {constants.HF_HUB_CACHE} doesn't hold it; fetch "
            "it once where there is a network, set HF_ENDPOINT to a mirror, or give the path of a copy"
        ) from error
    except (httpx2.HTTPError, ValueError, RuntimeError) as error:
        raise BadInputError(
            f"{what}: {hub} doesn't give it ({first_line(error)[:200]}); try again"
        ) from error


def _downloaded(repository: str, revision: str, name: str, kind: str) -> Path:
    from huggingface_hub import _CACHED_NO_EXIST, errors, hf_hub_download, try_to_load_from_cache

    if _COMMIT.fullmatch(revision):  # what is kept of it is what the hub has
        if try_to_load_from_cache(repository, name, revision=revision, repo_type=kind) is _CACHED_NO_EXIST:
            raise NoSuchFileError(f"{repository} holds no {name}")
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            return Path(
                hf_hub_download(repository, name, revision=revision, repo_type=kind, local_files_only=True)
            )
    here = not _answers()
    return Path(hf_hub_download(repository, name, revision=revision, repo_type=kind, local_files_only=here))


@contextlib.contextmanager
def _answers_checked() -> Iterator[None]:
    """Looks at what the hub answers before its client does, which makes paths of headers."""
    from huggingface_hub import get_session

    session = get_session()
    before = session.event_hooks
    session.event_hooks = {**before, "response": [*before.get("response", []), _check_answer]}
    try:
        yield
    finally:
        session.event_hooks = before


def _check_answer(answer: Any) -> None:
    """Looks at the headers of one answer.

    Raises:
        ValueError: If one leads out of the cache.
    """
    headers = answer.headers
    for name in ("etag", "x-linked-etag"):
        if name in headers and not _ETAG.fullmatch(headers[name]):
            raise ValueError(f"the header {name} it sends isn't the name of a file's content")
    if not _COMMIT.fullmatch(headers.get("x-repo-commit", "0" * 40)):
        raise ValueError("the header x-repo-commit it sends isn't a commit")


def _answers() -> bool:
    """Whether there is a hub that answers: its client would try for half a minute to find out."""
    import httpx2
    from huggingface_hub import constants, errors, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_CONNECT_S, follow_redirects=False)
    except (httpx2.TransportError, errors.OfflineModeIsEnabled):
        return False
    return True
