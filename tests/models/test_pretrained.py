"""Promise: weights are fetched once, by name, and checked before any rank starts; then without a network."""

import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
import safetensors.torch
import torch
from huggingface_hub import constants
from torch import nn
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from tests.helpers.forked import attempt, small
from tests.helpers.refusals import refusal, refused
from tests.helpers.remote import Quiet, Web
from tests.helpers.waiting import SECONDS, until
from trainer.config.model import ModelConfig
from trainer.config.recipe import Recipe
from trainer.models import pretrained
from trainer.models.hub import _check_answer
from trainer.models.images import build_model
from trainer.models.pretrained import find_weights
from trainer.models.weights import load_initial
from trainer.train.recording import save_weights
from trainer.train.starting_weights import resolve_pretrained

OLD, NEW = "1" * 40, "2" * 40
SOURCE = "hub:org/name@main"


class Hub:
    """A server that speaks the hub's protocol for one file of each repository.

    Attributes:
        files: Weights by repository and revision.
        others: Other files by name, the same in each repository.
        commits: What branches are.
        asked: How often what was asked for, by method and path.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes | None] = {}
        self.others: dict[str, bytes] = {}
        self.commits: dict[str, str] = {}
        self.asked = Counter[str]()
        self.status = 0
        self.headers: dict[str, str] = {}
        self._server = make_server("127.0.0.1", 0, self._app, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _app(self, environ: Any, start: Any) -> Any:
        request = Request(environ)
        self.asked[f"{request.method} {request.path}"] += 1
        status, headers, body = self.answer(request.path)
        return Response(body, status, {**headers, **self.headers})(environ, start)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body."""
        repository, _, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        commit = self.commits.get(revision, revision)
        content = self.files.get((repository, commit)) if name == "model.safetensors" else None
        content = self.others.get(name, content)
        if self.status:
            return self.status, {}, b""
        if repository not in {known for known, _ in self.files}:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if (repository, commit) not in self.files:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if content is None:
            return 404, {"X-Repo-Commit": commit, "X-Error-Code": "EntryNotFound"}, b""
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, content

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def weights(folder: Path, seed: int = 5) -> bytes:
    torch.manual_seed(seed)
    save_weights(build_model(ModelConfig(width=4), 1, 10), folder / "start.safetensors")
    return (folder / "start.safetensors").read_bytes()


def recipe_of(source: str = SOURCE) -> Recipe:
    digits = {"name": "digits", "global_batch_size": 16, "micro_batch_size": 16}
    return small(model={"pretrained": source}, data=digits, max_steps=2)


def ask_here(monkeypatch: pytest.MonkeyPatch, hub: Hub, folder: Path) -> None:
    """In this process, the hub is this server, and the cache is in a folder."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """One with weights in org/name, of a commit that is its branch's."""
    with closing(Hub()) as server:
        server.files, server.commits = {("org/name", OLD): weights(tmp_path)}, {"main": OLD}
        ask_here(monkeypatch, server, tmp_path)
        yield server


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def test_a_branch_is_fetched_once_and_its_commit_is_kept(tmp_path: Path, hub: Hub) -> None:
    done = attempt(tmp_path / "run", recipe_of(), stop_after=1)
    assert done.code == 75, done.said
    got = [name for name in hub.asked.elements() if name.startswith("GET")]
    assert got == ["GET /org/name/resolve/main/model.safetensors"]
    facts = manifest(tmp_path / "run")
    sha256 = hashlib.sha256((tmp_path / "start.safetensors").read_bytes()).hexdigest()
    assert facts["pretrained"] == {"source": SOURCE, "revision": OLD, "sha256": sha256}
    assert facts["fingerprint"]["initial weights"] == sha256
    assert facts["config"]["model"]["pretrained"] == f"hub:org/name@{OLD}"
    # The branch moves on: the run doesn't, even where it begins anew; a new one does.
    hub.files["org/name", NEW], hub.commits["main"] = weights(tmp_path, 6), NEW
    for asked in (SOURCE, facts["config"]["model"]["pretrained"]):
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        assert attempt(tmp_path / "run", recipe_of(asked), stop_after=1).code == 75
        assert manifest(tmp_path / "run")["pretrained"] == facts["pretrained"]
    assert attempt(tmp_path / "other", recipe_of()).code == 0
    assert manifest(tmp_path / "other")["pretrained"]["revision"] == NEW


def test_without_a_network_the_cache_serves(tmp_path: Path, hub: Hub) -> None:
    recipe = Recipe(task="classification", epochs=1, model=ModelConfig(pretrained=SOURCE, width=4))
    found = resolve_pretrained(recipe, None)
    hub.close()
    assert resolve_pretrained(recipe, None) == found and found[1] is not None
    # What was damaged in the cache isn't trained from.
    (blob,) = (tmp_path / "cache").rglob("blobs/*")
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    with refused(SOURCE, found[1].sha256):
        resolve_pretrained(recipe, None)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("hub:org/other@main", "org/other"),
        ("hub:org/pickles@main", "org/pickles model.safetensors"),
        ("hub:org/odd@main", "safetensors"),
        ("torchvision:ResNet18_Weights.IMAGENET1K_V3", "ResNet18_Weights.IMAGENET1K_V1"),
    ],
)
def test_what_cannot_be_fetched_is_named(hub: Hub, source: str, names: str) -> None:
    hub.files = {("org/pickles", OLD): None, ("org/odd", OLD): b"\x80\x04" * 40}
    with refused(names):
        load_initial(nn.Linear(1, 1), find_weights(ModelConfig(pretrained=source)).file, ())  # type: ignore[union-attr]


@pytest.mark.parametrize(("status", "etag", "names"), [(403, None, "403"), (0, "elsewhere", "etag")])
def test_a_hub_that_refuses_or_leads_elsewhere(
    tmp_path: Path, hub: Hub, status: int, etag: str | None, names: str
) -> None:
    hub.status, hub.headers = status, {"ETag": str(tmp_path / etag)} if etag else {}
    with refused(names):
        find_weights(ModelConfig(pretrained=SOURCE))
    assert not list(tmp_path.glob("elsewhere*")) and max(hub.asked.values()) <= 8


HEADERS: list[tuple[dict[str, str], str, int]] = [
    *(({name: "../x"}, name.lower(), 200) for name in ("ETag", "X-Linked-Etag", "X-Repo-Commit")),
    *(({"ETag": etag}, "etag", 302) for etag in ("", '"a/b"', "a" * 200)),
    ({"X-Repo-Commit": "main"}, "x-repo-commit", 200),
]


@pytest.mark.parametrize(("headers", "message", "status"), HEADERS)
def test_headers_of_a_hub_that_lead_astray_are_refused(headers: Any, message: str, status: int) -> None:
    asked = httpx2.Request("GET", "http://hub/org/name/resolve/main/model.safetensors")
    with refused(message, by=ValueError):
        _check_answer(httpx2.Response(status, headers=headers, request=asked))
    good = {"ETag": 'W/"1f-b0"', "X-Linked-Etag": "0" * 64, "X-Repo-Commit": OLD}
    _check_answer(httpx2.Response(200, headers=good, request=asked))


def test_a_hub_that_cannot_be_connected_to_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, str]]()

    def unreachable(client: httpx2.Client, method: str, url: Any, **_: Any) -> None:  # noqa: ARG001
        asked.append((method, str(url)))
        raise httpx2.ConnectError("no network")

    monkeypatch.setattr(httpx2.Client, "request", unreachable)
    monkeypatch.setattr(httpx2.Client, "stream", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with refused(f"model.pretrained={SOURCE}", constants.ENDPOINT):
        find_weights(ModelConfig(pretrained=SOURCE))
    assert asked == [("HEAD", constants.ENDPOINT)]


def test_a_run_with_a_checkpoint_needs_no_more_what_it_started_from(tmp_path: Path, hub: Hub) -> None:
    assert attempt(tmp_path / "whole", recipe_of()).code == 0
    for name in ("run", "lost"):
        assert attempt(tmp_path / name, recipe_of(), stop_after=1).code == 75
    asked = hub.asked.total()
    hub.files.clear()
    shutil.rmtree(tmp_path / "cache")
    done = attempt(tmp_path / "run", recipe_of())
    assert done.code == 0, done.said
    whole, run = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run"))
    assert run == whole and hub.asked.total() == asked
    facts = manifest(tmp_path / "run")
    assert facts["pretrained"] == manifest(tmp_path / "whole")["pretrained"]
    assert facts["attempts"][1]["changed"] == []
    # One that has no checkpoint needs it still.
    shutil.rmtree(tmp_path / "lost" / "checkpoints")
    done = attempt(tmp_path / "lost", recipe_of())
    refusal(done.code, f"{done.line}\n", "org/name")


@pytest.mark.usefixtures("hub")
def test_a_run_whose_checkpoint_is_damaged_begins_with_them_again(tmp_path: Path) -> None:
    assert attempt(tmp_path / "whole", recipe_of()).code == 0
    assert attempt(tmp_path / "run", recipe_of(), stop_after=1).code == 75
    (file,) = (tmp_path / "run").glob("checkpoints/*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    shutil.rmtree(tmp_path / "cache")
    done = attempt(tmp_path / "run", recipe_of(), "force")
    assert done.code == 0, done.said
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole"))
    assert one == two


def test_another_file_in_its_place_is_named(tmp_path: Path) -> None:
    before = hashlib.sha256(weights(tmp_path)).hexdigest()
    source = str(tmp_path / "start.safetensors")
    assert attempt(tmp_path / "run", recipe_of(source), stop_after=1).code == 75
    now = hashlib.sha256(weights(tmp_path, 6)).hexdigest()
    done = attempt(tmp_path / "run", recipe_of(source))
    refusal(done.code, f"{done.line}\n", before, now)


def pickled(content: Any) -> tuple[bytes, str]:
    """A file as torchvision publishes it, and its name."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue(), f"tiny-{hashlib.sha256(file.getvalue()).hexdigest()[:8]}.pth"


Serve = Callable[[bytes, str], Web]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """torchvision's weights are the file that this is given, at the server that it starts."""
    with ExitStack() as stack:

        def start(content: bytes, name: str) -> Web:
            web = stack.enter_context(closing(Web({f"models/{name}": content})))
            monkeypatch.setattr(pretrained, "_torchvision_url", lambda _: (f"{web.url}/models/{name}", []))
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            return web

        yield start


TINY = ModelConfig(pretrained="torchvision:Tiny_Weights.V1")


def test_a_pickle_of_torchvision_is_converted_once(tmp_path: Path, serve: Serve) -> None:
    old, new = "f.denselayer1.norm.2.weight", "f.denselayer1.norm2.weight"
    state = {"a.weight": torch.randn(3, 4).t(), old: torch.ones(2, dtype=torch.float16)}
    content, name = pickled(state)
    web = serve(content, name)
    found = [find_weights(TINY) for _ in range(2)]
    web.close()
    assert found[0] == found[1] == find_weights(TINY) and found[0] is not None  # the last without a network
    assert (found[0].revision, found[0].exact) == (name, "torchvision:Tiny_Weights.V1")
    assert sum(web.app.asked.values()) == 1
    read = safetensors.torch.load_file(found[0].file)
    assert torch.equal(read["a.weight"], state["a.weight"]) and torch.equal(read[new], state[old])
    assert not list((tmp_path / "cache").rglob("*.pth"))


def test_two_processes_that_want_it_at_once_fetch_it_once(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, name = pickled({"a": torch.arange(4)})
    web = serve(content, name)
    web.app.faults[name] = iter(["hang", "hang"])
    wants, flock = tmp_path / "wants", fcntl.flock
    wants.mkdir()

    def told(file: int, how: int) -> None:
        (wants / str(os.getpid())).touch()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", told)
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as both:
        found = [both.submit(find_weights, TINY) for _ in range(2)]
        try:
            # One has asked the server, the other one waits for it, or is about to.
            until(lambda: web.app.asked.total() and max(web.app.asked.total(), len([*wants.iterdir()])) == 2)
        finally:
            web.app.going.set()
        first, second = (one.result(SECONDS) for one in found)
    assert web.app.asked.total() == 1 and first == second and first is not None
    assert torch.equal(safetensors.torch.load_file(first.file)["a"], torch.arange(4))


def test_what_was_converted_is_checked_when_it_is_read(serve: Serve) -> None:
    content, name = pickled({"a": torch.arange(4)})
    web = serve(content, name)
    recipe = Recipe(task="classification", epochs=1, model=TINY)
    found = find_weights(recipe.model)
    assert found is not None
    whole = found.file.read_bytes()
    assert found.sha256 == hashlib.sha256(whole).hexdigest()
    found.file.write_bytes(whole[:-1] + b"?")
    with refused("torchvision:Tiny_Weights.V1", found.file):
        resolve_pretrained(recipe, None)
    found.file.unlink()
    assert resolve_pretrained(recipe, None)[1] is not None
    # One whose hash nobody wrote down isn't trusted.
    found.file.with_suffix(".sha256").unlink()
    found.file.write_bytes(whole[:-1] + b"?")
    assert find_weights(recipe.model) == found and found.file.read_bytes() == whole
    assert web.app.asked.total() == 3


class Code:
    """Runs code where it is read."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


@pytest.mark.parametrize("content", [{"a": Code()}, [1], b"?"], ids=["code", "no tensors", "another file"])
def test_of_what_is_no_file_of_tensors_nothing_is_taken(
    content: Any, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, name = pickled({"a": torch.zeros(2)} if content == b"?" else content)
    serve(file[:-1] + content if content == b"?" else file, name)
    with refused("SHA-256" if content == b"?" else "Tiny_Weights.V1"):
        find_weights(TINY)
    assert not Path("ran").exists() and not list((tmp_path / "cache").rglob("*.[ps]*t*"))


def test_a_server_that_lacks_it_and_one_that_is_not_there(serve: Serve) -> None:
    web = serve(*pickled({"a": torch.zeros(2)}))
    web.files = {}
    with refused("model.pretrained=torchvision:Tiny_Weights.V1", "404"):
        find_weights(TINY)
    web.close()
    with refused("trainer/weights"):
        find_weights(TINY)


def test_the_names_and_files_are_torchvisions_own() -> None:
    url, names = pretrained._torchvision_url("ResNet18_Weights.IMAGENET1K_V1")
    assert url is not None and url.endswith("/resnet18-f37072fd.pth")
    assert "FasterRCNN_ResNet50_FPN_Weights.COCO_V1" in names and len(names) > 200
    assert all(
        pretrained._PUBLISHED_HASH.search(str(pretrained._torchvision_url(name)[0])) for name in names[:9]
    )


@pytest.mark.parametrize("version", ["2.5.1+cu124", "2.4.0a0+git1"])
def test_a_torch_whose_weights_only_runs_code_reads_no_pickle(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    web = serve(*pickled({"a": torch.zeros(2)}))
    with monkeypatch.context() as old:
        old.setattr(torch, "__version__", version)
        with refused("CVE-2025-32434 model.pretrained=FILE.safetensors"):
            find_weights(TINY)
        assert web.app.asked.total() == 0
    assert find_weights(TINY) is not None
    with monkeypatch.context() as old:  # what a newer torch converted is no pickle any more
        old.setattr(torch, "__version__", version)
        assert find_weights(TINY) is not None
