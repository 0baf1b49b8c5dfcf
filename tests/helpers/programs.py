"""Programs that tests run, and small ones that they put in the place of others."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def ran(*words: object, code: int | None = None, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a program, its output captured as text; fails if it ends with another code than the given one."""
    taken: dict[str, Any] = {"capture_output": True, "text": True, **options}
    done = subprocess.run(list(map(str, words)), check=False, **taken)
    assert code in (None, done.returncode), f"{done.returncode}: {done.stdout}{done.stderr}"
    return done


def program(file: Path, text: str) -> Path:
    """Writes a program."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


class Quiet:
    """What makes a handler of requests one that writes no log."""

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(handler: Any, host: str = "127.0.0.1") -> Iterator[ThreadingHTTPServer]:
    """A server in this process."""
    with ThreadingHTTPServer((host, 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def folder_served(folder: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves a folder over http; gives the address."""

    class Files(Quiet, SimpleHTTPRequestHandler):
        pass

    with served(partial(Files, directory=str(folder)), host) as server:
        yield f"http://{host}:{server.server_port}"
