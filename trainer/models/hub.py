"""Files of the Hugging Face hub, by its own client (huggingface_hub); fetched once, then in its cache."""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import BadInputError, first_line

FILE = "model.safetensors"
_CONNECT_S = 5.0  # for an answer of the hub
_LONGEST_WAIT_S = 60  # that the hub may ask for
# The hub's client makes a path of it.
_ETAG = re.compile(r'(W/)?"?[\w=+-][\w.=+-]{0,127}"?', re.ASCII)
_WAIT = re.compile(r"(?:^|t=)(\d+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class NoSuchFileError(BadInputError):
    """A repository that holds no file of a name."""


def hub_file(what: str, repository: str, revision: str, name: str) -> tuple[Path, str]:
    """A file of a repository on the hub, fetched if it isn't here yet, and the commit that it is of.

    Args:
        what: Whose wish it is, for errors: KEY=VALUE.
        revision: A branch, a tag or a whole commit.
        name: Of the file.

    Raises:
        BadInputError: If there is no such thing, or it can't be had; `NoSuchFileError` where the repository
            holds no file of the name.
    """
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
            file = _downloaded(repository, revision, name)
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
            "it once where there is a network, set HF_ENDPOINT to a mirror, or give a file"
        ) from error
    except (httpx2.HTTPError, ValueError, RuntimeError) as error:
        raise BadInputError(
            f"{what}: {hub} doesn't give it ({first_line(error)[:200]}); try again"
        ) from error
    commit = file.parent.name  # the cache's own layout: snapshots/COMMIT/FILE
    if not _COMMIT.fullmatch(commit):
        raise BadInputError(f"{what}: {hub} names no commit; set HF_ENDPOINT to a hub")
    return file, commit


def _downloaded(repository: str, revision: str, name: str) -> Path:
    from huggingface_hub import _CACHED_NO_EXIST, errors, hf_hub_download, try_to_load_from_cache

    if _COMMIT.fullmatch(revision):  # what is kept of it is what the hub has
        if try_to_load_from_cache(repository, name, revision=revision) is _CACHED_NO_EXIST:
            raise NoSuchFileError(f"{repository} holds no {name}")
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            return Path(hf_hub_download(repository, name, revision=revision, local_files_only=True))
    return Path(hf_hub_download(repository, name, revision=revision, local_files_only=not _answers()))


@contextlib.contextmanager
def _answers_checked() -> Iterator[None]:
    """Looks at what the hub answers before its client does, which makes paths of headers and waits."""
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
        ValueError: If one leads out of the cache, asks to wait for long, or the length of a file isn't said.
    """
    headers = answer.headers
    for name in ("etag", "x-linked-etag"):
        if name in headers and not _ETAG.fullmatch(headers[name]):
            raise ValueError(f"the header {name} it sends isn't the name of a file's content")
    if not _COMMIT.fullmatch(headers.get("x-repo-commit", "0" * 40)):
        raise ValueError("the header x-repo-commit it sends isn't a commit")
    waits = [*_WAIT.findall(headers.get("retry-after", "")), *_WAIT.findall(headers.get("ratelimit", ""))]
    if answer.status_code in (429, 503) and any(
        len(wait) > 9 or int(wait) > _LONGEST_WAIT_S for wait in waits
    ):
        raise ValueError(f"it answers HTTP {answer.status_code} and asks to wait for long")
    plain = "content-length" in headers and headers.get("content-encoding", "identity") == "identity"
    asked = answer.request
    file = asked.method == "GET" and "/api/" not in asked.url.path
    if file and answer.status_code < 300 and not plain:
        raise ValueError("it doesn't say how long the file is")


def _answers() -> bool:
    """Whether there is a hub that answers: its client would try for half a minute to find out."""
    import httpx2
    from huggingface_hub import constants, errors, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_CONNECT_S, follow_redirects=False)
    except (httpx2.TransportError, errors.OfflineModeIsEnabled):
        return False
    return True
