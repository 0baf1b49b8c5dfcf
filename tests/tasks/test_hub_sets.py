"""Promise: a data set of the hub is fetched once, all of one commit, which the run keeps."""

import http.server
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import preloaded
from tests.helpers.chat_folders import chat_folder
from tests.helpers.refusals import refusal
from tests.models.test_pretrained import Hub, manifest

OLD, NEW = "1" * 40, "2" * 40
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

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        if path.startswith("/api/datasets/"):
            self.asked[f"{request.command} {path}"] += 1
            repository, _, revision = path.removeprefix("/api/datasets/").partition("/revision/")
            commit = self.commits.get(revision, revision)
            names = [{"rfilename": name} for name in self.sets.get((repository, commit), {})]
            known = repository in {one for one, _ in self.sets}
            body = json.dumps({"id": repository, "sha": commit, "siblings": names}).encode() if names else b""
            request.send_response(200 if names else 404)
            if not names:
                request.send_header("X-Error-Code", "RevisionNotFound" if known else "RepoNotFound")
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
            return
        repository, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        self.files = {(f"datasets/{repository}", revision): None}
        self.others = self.sets.get((repository, self.commits.get(revision, revision)), {})
        self.name = name
        request.path = f"/datasets/{repository}/resolve/{revision}/{name}"
        super().answer(request)


@pytest.fixture
def hub() -> Iterator[Sets]:
    server = Sets()
    server.sets["org/talks", OLD] = {
        "README.md": b"# talks",
        "data/train-00000-of-00001.jsonl": rows(12),
        "data/test-00000-of-00001.jsonl": rows(3),
        "extra/rows.jsonl": rows(20),
    }
    server.commits = {"main": OLD}
    yield server
    server.close()


def trained(tmp_path: Path, url: str, path: str, *words: str) -> Any:
    """A run on a data set of the hub at a URL, with the cache in a folder."""
    if not (tmp_path / "chat").exists():
        chat_folder(tmp_path / "chat")
    recipe = {
        "task": "language",
        "epochs": 9,
        "max_steps": 2,
        "data": {
            "name": "conversations",
            "path": path,
            "global_batch_size": 2,
            "micro_batch_size": 2,
            "eval_batch_size": 2,
        },
        "language": {"sequence_length": 128, "tokenizer": "chat", "layers": 1, "width": 16, "heads": 2},
        "parallel": {"threads": 1},
    }
    (tmp_path / "talks.yaml").write_text(json.dumps(recipe))
    environment = {**os.environ, "HF_ENDPOINT": url, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "trainer", "train", "talks.yaml", *words]
    return preloaded.run(command, env=environment, cwd=tmp_path)


def files_of(hub: Sets) -> list[str]:
    return sorted(one.rpartition("/")[2] for one in hub.asked if one.startswith("GET /datasets/"))


def test_a_set_is_fetched_once_and_its_commit_is_kept(tmp_path: Path, hub: Sets) -> None:
    done = trained(tmp_path, hub.url, "hub:org/talks@main:data", "--out", "run", "--stop-after", "1")
    assert done.returncode == 75, done.stdout + done.stderr
    assert files_of(hub) == ["test-00000-of-00001.jsonl", "train-00000-of-00001.jsonl"]
    facts = manifest(tmp_path / "run")
    assert facts["config"]["data"]["path"] == f"hub:org/talks@{OLD}:data"
    # The branch moves on: the run doesn't, and asks for nothing; a new one does, and stays within the set.
    files = {"../outside.jsonl": rows(9), "train.jsonl": rows(5), "val.jsonl": rows(1)}
    hub.sets["org/talks", NEW], hub.commits["main"] = files, NEW
    hub.asked.clear()
    done = trained(tmp_path, hub.url, "hub:org/talks@main:data", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not hub.asked
    assert manifest(tmp_path / "run")["fingerprint"] == facts["fingerprint"]
    done = trained(tmp_path, hub.url, "hub:org/talks@main", "--out", "other")
    assert done.returncode == 0, done.stdout + done.stderr
    assert manifest(tmp_path / "other")["config"]["data"]["path"] == f"hub:org/talks@{NEW}"
    assert files_of(hub) == ["train.jsonl", "val.jsonl"] and not list(tmp_path.rglob("outside.jsonl"))
    hub.close()
    assert trained(tmp_path, hub.url, "hub:org/talks@main", "--out", "without a network").returncode == 0
    done = trained(tmp_path, hub.url, "hub:org/talks@v2", "--out", "third")
    refusal(done.returncode, done.stderr, "hub:org/talks@v2", hub.url, folder=tmp_path / "third")


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("hub:org/talks@main:gone", "gone org/talks .parquet"),
        ("hub:org/talks", "data.path hub:OWNER/NAME@REVISION"),
    ],
)
def test_what_the_hub_lacks_is_one_line(tmp_path: Path, hub: Sets, path: str, names: str) -> None:
    done = trained(tmp_path, hub.url, path, "--out", "run")
    refusal(done.returncode, done.stderr, names, folder=tmp_path / "run")
