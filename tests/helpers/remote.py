"""Common parts of the tests of remote data: servers that count requests and fail on demand, a small pack."""

import hashlib
import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image
from werkzeug.serving import WSGIRequestHandler, make_server

from trainer.data.formats.index import Index, content_hash
from trainer.data.formats.sharded import About, Shard, about_of, write_index
from trainer.data.shared import name_columns

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
BUCKET = "bucket"


class Faulty:
    """A web application in front of another; it counts how often each path was `asked` for.

    `wire` has the addresses as they came, with their quotes; `faults`, for the last part of a path, what
    happens to one request after another, and then all is well: "503 9" is that status with `Retry-After: 9`,
    "lead X" a redirect to `gone?X`, "code X" a refusal as S3 words it. "hang" and "half" wait for `going`.
    """

    def __init__(self, app: App) -> None:
        self._app, self._lock = app, threading.Lock()
        self.asked, self.wire = Counter[str](), list[str]()
        self.faults: dict[str, Iterator[str]] = {}
        self.going = threading.Event()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        # WSGI gives the bytes of a path as latin-1.
        path = environ["PATH_INFO"].encode("latin-1").decode()
        with self._lock:
            self.asked[path] += 1
            self.wire.append(environ["REQUEST_URI"])
            fault = next(self.faults.get(path.rpartition("/")[2], iter(())), "")
        fault, _, after = fault.partition(" ")
        if fault.isdigit():
            more = [("Retry-After", after)] if after else []
            start(f"{fault} told so", [("Content-Type", "text/plain"), *more])
            return [b"no"]
        if fault == "code":
            start("400 Bad Request", [("Content-Type", "text/xml")])
            return [f"<Error><Code>{after}</Code></Error>".encode()]
        if fault in ("lead", "away"):
            there = f"{environ['SCRIPT_NAME']}/gone?{after}" if fault == "lead" else "file:///etc/passwd"
            start("302 Found", [("Location", there)])
            return []
        if fault == "hang":
            self.going.wait(300)
        given: list[Any] = []
        body = b"".join(self._app(environ, lambda status, headers, *_: given.extend((status, headers))))
        if fault == "cut":  # without a length, as by HTTP/1.0, the end of the connection is the end
            given[1], body = [], body[: len(body) // 2]
        if fault == "checksum":
            given[1].append(("x-amz-checksum-crc32", "AAAAAA=="))
        if fault == "more":  # of all of it, whatever was asked for
            body = 3 * body
            given[:] = "200 OK", [("Content-Length", str(len(body)))]
        start(*given)
        if fault == "truncate":
            body = body[: len(body) // 2]  # the length that is announced stays
        if fault == "half":
            return _in_halves(body, lambda: self.going.wait(300))
        if fault == "damage":
            body = body[:-1] + bytes([body[-1] ^ 1])
        return _in_halves(body, lambda: time.sleep(0.7)) if fault == "slow" else [body]


def _in_halves(body: bytes, between: Callable[[], object]) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    between()
    yield body[len(body) // 2 :]


class Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


class Web:
    """Files at http://127.0.0.1:PORT; ranges of them aren't known there."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.app = Faulty(self._answer)
        self._server = make_server("127.0.0.1", 0, self.app, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        found = self.files.get(environ["PATH_INFO"].encode("latin-1").decode().lstrip("/"))
        if found is None:
            start("404 Not Found", [])
            return []
        start("200 OK", [("Content-Length", str(len(found)))])
        return [found]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class S3:
    """moto's server, with files in a bucket: s3://bucket."""

    url = f"s3://{BUCKET}"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        from moto.server import ThreadedMotoServer  # here: the import takes two seconds

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        inner: Any = self._server._server
        inner.RequestHandlerClass = type("Quiet", (inner.RequestHandlerClass, Quiet), {"log": Quiet.log})
        self.app = inner.app = Faulty(inner.app)
        host, port = self._server.get_host_and_port()
        self.environment = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "someone"}
        self.environment |= {"AWS_SECRET_ACCESS_KEY": "something", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ.update(self.environment)
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for name, data in files.items():
            client.put_object(Bucket=BUCKET, Key=name, Body=data, ACL="public-read")
        self.app.asked.clear()

    def close(self) -> None:
        self._server.stop()
        for name in self.environment:
            os.environ.pop(name, None)


def wait_until_answered() -> None:
    """Waits until no server here is answering: what is forked meanwhile would have its thread's locks."""
    deadline = time.monotonic() + 300
    while busy := [thread for thread in threading.enumerate() if "process_request" in thread.name]:
        assert time.monotonic() < deadline, busy
        time.sleep(0.005)


def write_pack(folder: Path, samples: Iterable[int], seed: int = 0) -> About:
    """A pack of small images, so many in each shard; the names of the shards are awkward."""
    folder.mkdir(parents=True)
    random, rows = np.random.default_rng(seed), list[tuple[int, int, int, int, int]]()
    shards = []
    for number, count in enumerate(samples):
        content = io.BytesIO()
        for _ in range(count):
            file, label, at = io.BytesIO(), int(random.integers(4)), content.tell()
            pixels = random.integers(0, 60, (12, 12, 3), dtype=np.uint8) + np.uint8(label * 60)
            Image.fromarray(pixels).save(file, "PNG")
            content.write(file.getvalue())
            rows.append((number, at, len(file.getvalue()), label, content_hash(file.getvalue())))
        data, name = content.getvalue(), f"{number} #ä%20.bin"
        (folder / name).write_bytes(data)
        shards.append(Shard(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    types = {"shard": np.int32, "offset": np.int64, "bytes": np.int64, "label": np.int64, "hash": np.uint64}
    columns: dict[str, Any] = {
        name: np.array(column, dtype)
        for (name, dtype), column in zip(types.items(), zip(*rows, strict=True), strict=True)
    }
    columns |= name_columns([f"{sample}.png".encode() for sample in range(len(rows))])
    index = Index(columns, list("abcd"), (), {"shards": shards})
    return write_index(folder, index, about_of(index, "files", "made up"))


def files_below(folder: Path) -> dict[str, bytes]:
    """Path and content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def asked_for(app: Faulty, about: About) -> list[int]:
    """Counts the requests for each shard of the training data."""
    found = Counter[str]()
    for path, count in app.asked.items():
        folder, _, name = path.rpartition("/")
        if folder.endswith("/train"):
            found[name] += count
    assert quote("ä") not in "".join(found)
    return [found[shard.name] for shard in about.shards]
