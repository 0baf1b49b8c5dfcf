"""Weights to start from, by name: of the Hugging Face hub or torchvision; fetched once, then in a cache.

What the hub has is fetched and kept by its own client (huggingface_hub), so that its variables hold, such as
HF_ENDPOINT and HF_HUB_OFFLINE, and other programs share its cache: XDG_CACHE_HOME/huggingface/hub.
torchvision's files are pickles: each is checked, read once and kept as safetensors in
XDG_CACHE_HOME/trainer/weights, with the SHA-256 of that file beside it.
"""

import contextlib
import hashlib
import logging
import mmap
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from trainer.config.data import at_home
from trainer.config.model import HUB, TORCHVISION, ModelConfig
from trainer.config.suggest import nearest
from trainer.data.remote.access import DiskError, NotThereError, Sink, WrongContentError, fetch, join
from trainer.errors import BadInputError
from trainer.host.files import locked, remove_unfinished, write_whole, written_whole
from trainer.host.here import from_here
from trainer.observe.console import say

FILE = "model.safetensors"
_CONNECT_S = 5.0  # for an answer of the hub
_LONGEST_WAIT_S = 60  # that the hub may ask for
# The hub's client makes a path of it.
_ETAG = re.compile(r'(W/)?"?[\w=+-][\w.=+-]{0,127}"?', re.ASCII)
_WAIT = re.compile(r"(?:^|t=)(\d+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# As torch.hub reads it: the first digits of the file's SHA-256, in its name.
_PUBLISHED_HASH = re.compile(r"[-_]([0-9a-f]{8,})\.pth$")
# Before, weights_only runs what a pickle says (CVE-2025-32434).
_READS_PICKLES = (2, 6)
_LARGEST = 8 << 30  # torchvision's own have 2.5 GB at most
# Names in torchvision's files of densenets are older than its models, which rename them when they load one.
_OLD_NAME = re.compile(r"(.*denselayer\d+\.(?:norm|conv))\.([12]\..*)")


class Weights(NamedTuple):
    """A file to start from.

    Attributes:
        file: Where it lies here.
        exact: What names the same file tomorrow: the source, on the hub with the commit.
        revision: The hub's commit, or the name of torchvision's file; None for a path.
        sha256: What its SHA-256 is to be, where somebody says so: the hub, or who converted it.
    """

    file: Path
    exact: Path | str
    revision: str | None = None
    sha256: str | None = None


def find_weights(config: ModelConfig) -> Weights | None:
    """Finds what a model starts from, and fetches it if it isn't here yet; None where it starts from nothing.

    Raises:
        BadInputError: If there is no such thing, or it can't be had or kept.
    """
    source = config.pretrained
    if source is None:
        return None
    if isinstance(source, Path):
        return Weights(from_here(at_home(source, "model.pretrained")), source)
    try:
        if named := HUB.fullmatch(source):
            return _of_hub(source, named["repository"], named["revision"])
        named = TORCHVISION.fullmatch(source)
        assert named is not None  # the configuration was checked
        return _of_torchvision(source, named["name"], config.mirror)
    except OSError as error:
        raise BadInputError(
            f"model.pretrained={source}: the cache can't be used ({error.strerror or error}); give a folder "
            "that can be written by XDG_CACHE_HOME"
        ) from error


def _of_hub(source: str, repository: str, revision: str) -> Weights:
    import httpx2
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what is wrong is said here, in one line
    constants.HF_HUB_DISABLE_TELEMETRY = True  # asks the hub for more than the file
    if not sys.stderr.isatty():
        disable_progress_bars()
    what, hub = f"model.pretrained={source}", constants.ENDPOINT
    try:
        with _answers_checked():
            file = _downloaded(repository, revision)
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
        raise BadInputError(
            f"{what}: {repository} holds no {FILE} there, and nothing else is read (no pickles, no weights "
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
        raise BadInputError(f"{what}: {hub} doesn't give it ({_first_line(error)}); try again") from error
    # The cache's own layout: snapshots/COMMIT/FILE is a link to a blob that is named by its hash.
    commit, blob = file.parent.name, file.resolve().name
    if not _COMMIT.fullmatch(commit):
        raise BadInputError(f"{what}: {hub} names no commit; set HF_ENDPOINT to a hub")
    return Weights(file, f"hub:{repository}@{commit}", commit, blob if _SHA256.fullmatch(blob) else None)


def _downloaded(repository: str, revision: str) -> Path:
    from huggingface_hub import errors, hf_hub_download

    if _COMMIT.fullmatch(revision):  # what is kept of it is what the hub has
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            return Path(hf_hub_download(repository, FILE, revision=revision, local_files_only=True))
    return Path(hf_hub_download(repository, FILE, revision=revision, local_files_only=not _answers()))


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


def _of_torchvision(source: str, name: str, mirror: str | None) -> Weights:
    url, known = _torchvision_url(name)
    if url is None:
        raise BadInputError(
            f"model.pretrained={source}: torchvision has no such weights{nearest(name, known)}"
        )
    published = url.rpartition("/")[2]
    folder = _cache()
    kept = folder / f"{published.removesuffix('.pth')}.safetensors"
    digest = kept.with_suffix(".sha256")
    if not (kept.exists() and digest.exists()):  # else it may lie where nobody can write
        folder.mkdir(parents=True, exist_ok=True)
        with locked(kept.with_suffix(".lock")):
            if not (kept.exists() and digest.exists()):
                remove_unfinished(folder, kept.stem)
                with written_whole(kept) as beside:
                    _fetch_converted(source, url if mirror is None else join(mirror, published), beside)
                    write_whole(digest, f"{_sha256(beside)}\n")  # first: nobody finds the weights without
    return Weights(kept, source, published, digest.read_text().strip())


def _torchvision_url(name: str) -> tuple[str | None, list[str]]:
    """Returns the URL of torchvision's weights of this name, if any, and all names that it knows."""
    import inspect

    from torchvision import models

    modules = [models, *(module for _, module in inspect.getmembers(models, inspect.ismodule))]
    kinds = (kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass))
    members: dict[str, Any] = {
        f"{kind.__name__}.{word}": member
        for kind in kinds
        if issubclass(kind, models.WeightsEnum)
        for word, member in getattr(kind, "__members__", {}).items()
    }
    return (members[name].url if name in members else None), list(members)


def _fetch_converted(source: str, url: str, to: Path) -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < _READS_PICKLES:
        raise BadInputError(
            f"model.pretrained={source}: torch {torch.__version__} can't read its pickle safely "
            "(CVE-2025-32434); convert it with torch 2.6 or newer and give that file: "
            "model.pretrained=FILE.safetensors, or take a hub:ORG/NAME@REVISION"
        )
    published = _PUBLISHED_HASH.search(url)
    if published is None:
        raise BadInputError(f"model.pretrained={source}: {url} says no hash in its name; give a file")
    pickled = to.with_suffix(".pth")
    say(f"fetching {url}")
    try:
        file = os.open(pickled, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            sink = Sink(file, most=_LARGEST)
            fetch(url, sink, at_once=True)
            os.ftruncate(file, sink.done)  # of a longer try before
        finally:
            os.close(file)
        if not sink.sha256().startswith(published[1]):
            raise BadInputError(
                f"model.pretrained={source}: {url} isn't what torchvision published: its SHA-256 begins with "
                f"{sink.sha256()[:8]}, not {published[1]}; fetch it from elsewhere by model.mirror=URL"
            )
        safetensors.torch.save_file(_state_in(pickled, source), to)
    except NotThereError as error:
        raise BadInputError(f"model.pretrained={source}: {url} isn't there; mend model.mirror") from error
    except BadInputError as error:
        if str(error).startswith("model.pretrained"):
            raise
        raise BadInputError(
            f"model.pretrained={source} isn't in {to.parent} yet, and can't be fetched: {error}"
        ) from error
    except WrongContentError as error:
        raise BadInputError(
            f"model.pretrained={source}: {url} is more than {_LARGEST >> 30} GiB, and none of torchvision's "
            "is; mend model.mirror"
        ) from error
    except DiskError as error:
        raise (error.__cause__ if isinstance(error.__cause__, OSError) else error) from error
    finally:
        pickled.unlink(missing_ok=True)


def _state_in(file: Path, source: str) -> dict[str, torch.Tensor]:
    """The tensors in a pickle, which may hold nothing else."""
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise BadInputError(
            f"model.pretrained={source}: its file holds more than tensors, or isn't torch's "
            f"({_first_line(error)}); give a safetensors file"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(one, torch.Tensor) for one in state.values()):
        raise BadInputError(f"model.pretrained={source}: its file is no state_dict; give a safetensors file")
    return {_OLD_NAME.sub(r"\1\2", name): tensor.clone().contiguous() for name, tensor in state.items()}


def _sha256(file: Path) -> str:
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return hashlib.sha256(data).hexdigest()


def _cache() -> Path:
    home = Path(os.environ.get("HOME") or "/", ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or home, "trainer", "weights")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
