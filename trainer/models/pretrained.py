"""Pretrained weights by name, from the Hugging Face hub or torchvision; fetched once, then cached.

Files of the hub are fetched and cached by its own client (huggingface_hub), so that its variables apply, such
as HF_ENDPOINT and HF_HUB_OFFLINE, and other programs share its cache: XDG_CACHE_HOME/huggingface/hub.
torchvision's files are pickles: each is verified, read once and cached as safetensors in
XDG_CACHE_HOME/trainer/weights, with the SHA-256 of that file beside it.
"""

import pickle
import re
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

import safetensors.torch
import torch

from trainer.config.data import at_home
from trainer.config.model import HUB, TORCHVISION, ModelConfig
from trainer.config.models import HF
from trainer.config.suggest import nearest
from trainer.errors import BadInputError, first_line
from trainer.host.files import (
    cache_folder,
    hash_inside,
    locked,
    remove_unfinished,
    write_whole,
    written_whole,
)
from trainer.host.here import from_here
from trainer.models.hf_files import find_model
from trainer.models.hub import FILE, hub_file
from trainer.observe.console import say

_SHA256 = re.compile(r"[0-9a-f]{64}")
# As torch.hub reads it: the first digits of the file's SHA-256, in its name.
_PUBLISHED_HASH = re.compile(r"[-_]([0-9a-f]{8,})\.pth$")
# Older versions run code from a pickle even with weights_only (CVE-2025-32434).
_READS_PICKLES = (2, 6)
# torchvision's files of densenets have old names, which its models rename when they load one.
_OLD_NAME = re.compile(r"(.*denselayer\d+\.(?:norm|conv))\.([12]\..*)")


class Weights(NamedTuple):
    """Pretrained weights in a local file.

    Attributes:
        file: Local path; for a model of transformers its folder.
        exact: The source, pinned: on the hub with the commit.
        revision: Commit on the hub, or the name of torchvision's file; None for a path.
        sha256: Expected SHA-256, from the hub or from the conversion; None if unknown.
    """

    file: Path
    exact: Path | str
    revision: str | None = None
    sha256: str | None = None


def find_weights(config: ModelConfig) -> Weights | None:
    """Finds the configured weights, and fetches them if they aren't cached; None without any.

    Raises:
        BadInputError: If they don't exist, or can't be fetched or cached.
    """
    source = config.pretrained
    if config.name.startswith(HF):
        found = find_model(config.name)
        return Weights(found.folder, found.exact, found.revision)
    if source is None:
        return None
    if isinstance(source, Path):
        return Weights(from_here(at_home(source, "model.pretrained")), source)
    try:
        if named := HUB.fullmatch(source):
            return _of_hub(source, named["repository"], named["revision"])
        named = TORCHVISION.fullmatch(source)
        assert named is not None  # the configuration was checked
        return _of_torchvision(source, named["name"])
    except OSError as error:
        raise BadInputError(
            f"model.pretrained={source}: the cache can't be used ({error.strerror or error}); give a folder "
            "that can be written by XDG_CACHE_HOME"
        ) from error


def _of_hub(source: str, repository: str, revision: str) -> Weights:
    file, commit = hub_file(f"model.pretrained={source}", repository, revision, FILE)
    # The cache's own layout: a snapshot links to a blob that is named by its hash.
    blob = file.resolve().name
    return Weights(file, f"hub:{repository}@{commit}", commit, blob if _SHA256.fullmatch(blob) else None)


def _of_torchvision(source: str, name: str) -> Weights:
    url, known = _torchvision_url(name)
    if url is None:
        raise BadInputError(
            f"model.pretrained={source}: torchvision has no such weights{nearest(name, known)}"
        )
    published = url.rpartition("/")[2]
    folder = cache_folder("weights")
    kept = folder / f"{published.removesuffix('.pth')}.safetensors"
    digest = kept.with_suffix(".sha256")
    if not (kept.exists() and digest.exists()):  # a complete cache may be read-only
        folder.mkdir(parents=True, exist_ok=True)
        with locked(kept.with_suffix(".lock")):
            if not (kept.exists() and digest.exists()):
                remove_unfinished(folder, kept.stem)
                with written_whole(kept) as beside:
                    _fetch_converted(source, url, beside)
                    write_whole(digest, f"{hash_inside(beside)}\n")  # before the weights have their name
    return Weights(kept, source, published, digest.read_text().strip())


def _torchvision_url(name: str) -> tuple[str | None, list[str]]:
    """Returns the URL of torchvision's weights of this name, or None, and all known names."""
    from torchvision import models

    members: dict[str, Any] = {
        f"{weights.__name__}.{key}": member
        for weights in map(models.get_model_weights, models.list_models())
        for key, member in weights.__members__.items()
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
        torch.hub.download_url_to_file(url, str(pickled), published[1], progress=False)
        safetensors.torch.save_file(_state_in(pickled, source), to)
    except (URLError, HTTPException, ConnectionError, TimeoutError) as error:
        raise BadInputError(
            f"model.pretrained={source} isn't in {to.parent} yet, and {url} can't be fetched "
            f"({first_line(error)}); fetch it where there is a network, or give a safetensors file"
        ) from error
    except RuntimeError as error:  # another hash
        raise BadInputError(
            f"model.pretrained={source}: {url} isn't what torchvision published, by its SHA-256 "
            f"({first_line(error)}); fetch it again, or give a safetensors file"
        ) from error
    finally:
        pickled.unlink(missing_ok=True)


def _state_in(file: Path, source: str) -> dict[str, torch.Tensor]:
    """Reads the tensors of a pickled state_dict, which may hold nothing else."""
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise BadInputError(
            f"model.pretrained={source}: its file holds more than tensors, or isn't torch's "
            f"({first_line(error)[:200]}); give a safetensors file"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(one, torch.Tensor) for one in state.values()):
        raise BadInputError(f"model.pretrained={source}: its file is no state_dict; give a safetensors file")
    return {_OLD_NAME.sub(r"\1\2", name): tensor.clone().contiguous() for name, tensor in state.items()}
