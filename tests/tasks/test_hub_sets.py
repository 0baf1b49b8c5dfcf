"""Promise: a data set of the hub is fetched once, all of one commit, which the run keeps."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.helpers.chat_folders import chat_folder
from tests.helpers.refusals import refused
from tests.helpers.small_gpt import SMALL
from tests.helpers.toys import make_recipe
from tests.models.test_pretrained import NEW, OLD, Hub, ask_here
from trainer.config.recipe import Recipe
from trainer.config.tasks import LanguageConfig
from trainer.tasks.conversations import local_path, with_commits
from trainer.train.request import Request
from trainer.train.start.prepare import prepare

TALK = {"messages": [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "the cat"}]}


def rows(count: int) -> bytes:
    return b"".join(json.dumps(TALK).encode() + b"\n" for _ in range(count))


class Sets(Hub):
    """A server that speaks the hub's protocol for data sets.

    Attributes:
        sets: Files by name, of each repository and commit.
    """

    def __init__(self) -> None:
        self.sets: dict[tuple[str, str], dict[str, bytes]] = {}
        super().__init__()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/api/datasets/"):
            repository, _, revision = path.removeprefix("/api/datasets/").partition("/revision/")
            commit = self.commits.get(revision, revision)
            if names := [{"rfilename": name} for name in self.sets.get((repository, commit), {})]:
                return 200, {}, json.dumps({"id": repository, "sha": commit, "siblings": names}).encode()
            known = repository in {one for one, _ in self.sets}
            return 404, {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"}, b""
        repository, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
        revision = rest.partition("/")[0]
        commit = self.commits.get(revision, revision)
        self.files = {(f"datasets/{repository}", commit): None}
        self.others = self.sets.get((repository, commit), {})
        return super().answer(path)


@pytest.fixture
def hub() -> Iterator[Sets]:
    with closing(Sets()) as server:
        files = {f"data/{name}-00000-of-00001.jsonl": rows(n) for name, n in (("train", 12), ("test", 3))}
        others = {"README.md": b"# talks", "extra/rows.jsonl": rows(20)}
        server.sets["org/talks", OLD], server.commits = {**files, **others}, {"main": OLD}
        yield server


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, hub: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ask_here(monkeypatch, hub, tmp_path)
    # As the client sets it by the constants when it is imported.
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.url)


def recipe_of(path: str) -> Recipe:
    return make_recipe(task="language", data={"name": "conversations", "path": path})


def files_of(hub: Sets) -> list[str]:
    return sorted(one.rpartition("/")[2] for one in hub.asked if one.startswith("GET /datasets/"))


def test_a_set_is_fetched_once_and_its_commit_is_kept(tmp_path: Path, hub: Sets) -> None:
    begun = with_commits(recipe_of("hub:org/talks@main:data"), None)
    assert str(begun.data.path) == f"hub:org/talks@{OLD}:data"
    folder = local_path(begun.data.path)  # type: ignore[arg-type]
    assert files_of(hub) == ["test-00000-of-00001.jsonl", "train-00000-of-00001.jsonl"]
    assert (folder / "train-00000-of-00001.jsonl").read_bytes() == rows(12)
    # The branch moves on: the run doesn't, and asks for nothing; a new one does, and stays within the set.
    files = {"../outside.jsonl": rows(9), "train.jsonl": rows(5), "val.jsonl": rows(1)}
    hub.sets["org/talks", NEW], hub.commits["main"] = files, NEW
    hub.asked.clear()
    stored = begun.model_dump(mode="json")
    resumed = with_commits(recipe_of("hub:org/talks@main:data"), stored)
    assert resumed.data.path == begun.data.path and local_path(resumed.data.path) == folder  # type: ignore[arg-type]
    assert not hub.asked
    new = with_commits(recipe_of("hub:org/talks@main"), None)
    assert str(new.data.path) == f"hub:org/talks@{NEW}"
    assert files_of(hub) == ["train.jsonl", "val.jsonl"] and not list(tmp_path.rglob("outside.jsonl"))
    hub.close()
    assert with_commits(recipe_of("hub:org/talks@main"), None) == new, "without a network"
    with refused("hub:org/talks@v2", hub.url):
        with_commits(recipe_of("hub:org/talks@v2"), None)


def test_a_run_keeps_the_commit(tmp_path: Path) -> None:
    recipe = recipe_of("hub:org/talks@main:data")
    recipe.language = LanguageConfig.model_validate(
        {**SMALL, "text": "packed", "sequence_length": 160, "tokenizer": chat_folder(tmp_path / "chat")}
    )
    recipe.data = recipe.data.model_copy(update={"global_batch_size": 2, "micro_batch_size": 2})
    with ExitStack() as stack:
        prepared, _ = prepare(Request(recipe, "talks", tmp_path / "run"), 1, stack)
    assert str(prepared.recipe.data.path) == f"hub:org/talks@{OLD}:data"


def test_what_the_hub_lacks_is_one_line() -> None:
    with refused("gone org/talks .parquet"):
        with_commits(recipe_of("hub:org/talks@main:gone"), None)
    with refused("data.path hub:OWNER/NAME@REVISION", by=ValueError):
        recipe_of("hub:org/talks")
