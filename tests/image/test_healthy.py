"""A container is healthy while the server that it was started for answers, or was started for none."""

import runpy
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.programs import Quiet, served

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = runpy.run_path(str(ROOT / "scripts/healthy"))["answers"]
INIT = ["/opt/env/bin/dumb-init", "--", "/opt/image/entrypoint"]


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Notes the paths that it is asked for; below /broken it has an error."""

    asked: list[str] = []

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(500 if self.path.startswith("/broken") else 404)
            self.end_headers()

    with served(Handler) as one:
        one.asked = asked  # type: ignore[attr-defined]
        yield one


@pytest.mark.parametrize(
    ("words", "env", "path"),
    [
        (["jupyter", "--ServerApp.port=PORT"], {}, "/api"),
        (["jupyter", "--port", "PORT", "--ServerApp.base_url=/x/y/"], {}, "/x/y/api"),
        (["jupyter"], {"JUPYTERHUB_SERVICE_URL": "http://0.0.0.0:PORT/user/me/"}, "/user/me/api"),
        (["tensorboard", "--port", "PORT", "--logdir", "x"], {"NB_PREFIX": "/notebook/me"}, "/"),
    ],
)
def test_a_server_that_answers(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, words: list[str], env: Any, path: str
) -> None:
    port = str(server.server_port)
    for name, value in env.items():
        monkeypatch.setenv(name, value.replace("PORT", port))
    assert ANSWERS([*INIT, *(word.replace("PORT", port) for word in words)])
    assert server.asked == [path]  # type: ignore[attr-defined]


def test_one_that_fails_or_is_gone(server: ThreadingHTTPServer) -> None:
    """And no server at all was asked for."""
    assert ANSWERS(["bash"]) and ANSWERS([*INIT, "trainer", "train", "jupyter"])
    port = server.server_port
    assert not ANSWERS([*INIT, "jupyter", f"--port={port}", "--ServerApp.base_url=/broken"])
    server.shutdown()
    server.server_close()
    with pytest.raises(OSError):
        ANSWERS([*INIT, "jupyter", f"--port={port}"])


@pytest.mark.parametrize(("said", "healthy"), [(b"SSH-2.0-x\r\n", True), (b"HTTP", False)])
def test_sshd_greets(said: bytes, healthy: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with server.accept()[0] as client:
                client.sendall(said)

        threading.Thread(target=greet, daemon=True).start()
        assert ANSWERS([*INIT, "sshd", "-p", str(server.getsockname()[1])]) == healthy
