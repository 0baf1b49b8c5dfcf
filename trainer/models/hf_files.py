"""Files of a language model that `model.name=hf/…` names: configuration, weights, tokenizer, chat template.

A folder as `save_pretrained` of transformers writes it, or a repository of the Hugging Face hub at a
revision; of a repository only the files named here are fetched. Nothing in them is run: no pickle is read,
and a model that brings code of its own is rejected.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.data import at_home
from trainer.config.models import HF
from trainer.data.formats.chat import TEMPLATE_FILES
from trainer.errors import BadInputError
from trainer.host.files import hash_inside, read_inside, real_inside
from trainer.host.here import from_here
from trainer.host.strict_json import parse
from trainer.models.hub import FILE, NoSuchFileError, hub_file

CONFIG, GENERATION = "config.json", "generation_config.json"
_ADAPTER = "adapter_config.json"
INDEX = f"{FILE}.index.json"
# What belongs to the text and not to the weights; a folder need not have each.
TEXT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(*TEMPLATE_FILES.values(), GENERATION, "vocab.json", "merges.txt", "tokenizer.model"),
)
_REPOSITORY = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)@(?P<revision>[\w-][\w./-]*)", re.ASCII)
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)  # no way out of the folder
_OF_NO_EFFECT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


class HfModel(NamedTuple):
    """A language model's files.

    Attributes:
        folder: Where they lie.
        exact: What names the same files tomorrow: the name, of the hub with the commit.
        revision: The hub's commit; None for a folder.
    """

    folder: Path
    exact: str
    revision: str | None


def find_model(name: str) -> HfModel:
    """Finds the files of `hf/FOLDER` or `hf/OWNER/REPO@REVISION`; fetches the hub's once.

    Raises:
        BadInputError: If there is no such model, or it can't be had.
    """
    asked, what = name.removeprefix(HF), f"model.name={name}"
    if (named := _REPOSITORY.fullmatch(asked)) is not None:
        return _of_hub(what, named["repository"], named["revision"])
    folder = from_here(at_home(Path(asked), "model.name"))
    if not folder.is_dir():
        raise BadInputError(
            f"{what}: there is no folder {folder}; give hf/FOLDER with {CONFIG} and {FILE}, or "
            "hf/OWNER/REPO@REVISION of the hub"
        )
    if (folder / _ADAPTER).exists():
        raise BadInputError(
            f"{what}: {folder} holds {_ADAPTER}, what LoRA learned beside another model; merge the two first "
            "(peft: merge_and_unload(), then save_pretrained())"
        )
    if not (folder / CONFIG).exists():
        raise BadInputError(f"{what}: {folder} holds no {CONFIG}: give a folder that save_pretrained() wrote")
    return HfModel(folder, name, None)


def read_config(name: str, folder: Path) -> dict[str, Any]:
    """Reads the configuration in a model's folder.

    Raises:
        BadInputError: If it can't be read, or the model wants code of its own to be run.
    """
    config = _json(f"model.name={name}", folder / CONFIG)
    if "auto_map" in config:
        raise BadInputError(
            f"model.name={name}: {CONFIG} has auto_map, code of the repository's own that would be run; "
            "choose a model that transformers itself knows, in a folder whose configuration has no auto_map"
        )
    return config


def end_tokens(name: str, *of_text: int | None) -> set[int]:
    """Tokens that end an answer: those of its text, and those of a model's generation_config.json."""
    ends = set(of_text)
    if name.startswith(HF) and (file := find_model(name).folder / GENERATION).exists():
        more = _json(f"model.name={name}", file).get("eos_token_id")
        ends |= set(more if isinstance(more, list) else [more])
    return {one for one in ends if isinstance(one, int)}


def hf_vocabulary(name: str, of_text: int) -> int:
    """Vocabulary size of a model.

    Args:
        of_text: Vocabulary size that the text needs.

    Raises:
        BadInputError: If the model knows fewer.
    """
    known = read_config(name, find_model(name).folder).get("vocab_size")
    if not isinstance(known, int) or isinstance(known, bool):
        raise BadInputError(f"model.name={name}: {CONFIG} says no vocab_size; bring back the model's own")
    if of_text > known:
        raise BadInputError(
            f"model.name={name} knows {known} tokens (vocab_size), and this text has {of_text}: tokenize it "
            "with the model's own tokenizer"
        )
    return known


def hf_config_hash(name: str) -> str:
    """SHA-256 of a model's configuration, without what names its place and the library that wrote it."""
    config = read_config(name, find_model(name).folder)
    about = {key: value for key, value in config.items() if key not in _OF_NO_EFFECT}
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Lists the files with a model's weights: one, or those of an index.

    Raises:
        BadInputError: If there are none that can be read here.
    """
    what = f"model.name={HF}{folder}"
    if (folder / FILE).exists():
        return (_inside(what, folder / FILE),)
    if not (folder / INDEX).exists():
        pickled = next((one.name for one in sorted(folder.glob("*.bin"))), None)
        remedy = (
            f"{pickled} is a pickle, which can run code and is never read; save the model elsewhere by "
            "save_pretrained(FOLDER), which writes safetensors"
            if pickled
            else "give a folder that save_pretrained() wrote"
        )
        raise BadInputError(f"{what}: {folder} holds no {FILE} and no {INDEX}: {remedy}")
    return tuple(_inside(what, folder / shard) for shard in _shards(what, folder / INDEX))


def files_hash(folder: Path) -> str:
    """SHA-256 of what decides a model's numbers: its configuration and its weights, by name and content.

    Raises:
        BadInputError: If a file can't be read.
    """
    digest = hashlib.sha256()
    for file in (folder / CONFIG, *weight_files(folder)):
        try:
            digest.update(f"{hash_inside(file)}  {file.name}\n".encode())
        except OSError as error:
            raise BadInputError(f"model.name={HF}{folder}: {file} {error.strerror}; bring it back") from error
    return digest.hexdigest()


def _of_hub(what: str, repository: str, revision: str) -> HfModel:
    """Fetches the files of a repository, all of one commit."""
    file, commit = hub_file(what, repository, revision, CONFIG)
    shards: list[str] = []
    try:
        hub_file(what, repository, commit, FILE)
    except NoSuchFileError as none:
        try:
            index, _ = hub_file(what, repository, commit, INDEX)
        except NoSuchFileError:
            raise none from None
        shards = _shards(what, index)
    for name in shards:
        hub_file(what, repository, commit, name)
    for name in TEXT_FILES:
        try:
            hub_file(what, repository, commit, name)
        except NoSuchFileError:
            continue
    return HfModel(file.parent, f"{HF}{repository}@{commit}", commit)


def _shards(what: str, index: Path) -> list[str]:
    """Names of the files that an index lists, each once."""
    found = _json(what, index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise BadInputError(f"{what}: {index} has no weight_map; bring back the index that was published")
    names = sorted({str(name) for name in found.values()})
    if odd := [name for name in names if not _SHARD.fullmatch(name)]:
        raise BadInputError(
            f"{what}: {index} names {odd[0]!r}, which is no safetensors file beside it; bring back the index"
        )
    return names


def _json(what: str, file: Path) -> dict[str, Any]:
    try:
        found = parse(read_inside(file, 16 << 20))
    except OSError as error:
        raise BadInputError(f"{what}: {file} {error.strerror or error}; bring it back") from error
    except ValueError as error:
        raise BadInputError(f"{what}: {file} is {error}; bring it back") from error
    if not isinstance(found, dict):
        raise BadInputError(f"{what}: {file} is no JSON object; bring it back")
    return found


def _inside(what: str, file: Path) -> Path:
    """Returns the file, if it lies in its folder; links of the hub's cache lead to its blobs."""
    real = real_inside(file)
    if real.is_symlink():
        raise BadInputError(f"{what}: {file} is a link, which may lead anywhere; copy the file there")
    if not real.is_file():
        raise BadInputError(f"{what}: {file} isn't there, or isn't a regular file; fetch the model again")
    return file
