"""Explains a failed build in one line with the remedy, from the programs' output; and keeps the log.

The log has neither tokens nor the passwords of URLs.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

LAST = 60  # lines searched for the reason: earlier failures were retried with success


class Failure(NamedTuple):
    """A kind of failure: a pattern of programs' messages, its name, and the remedy."""

    sign: str
    what: str
    remedy: str


FULL = Failure(
    r"no space left on device|Errno 28\b|disk quota exceeded",
    "the disk is full",
    "free some (docker system prune removes what is unused), or give the engine's data-root another disk",
)
FAILURES = (
    FULL,
    Failure(
        r"(sha256|md5) differs: refused|hash mismatch|do not match the hashes",
        "a package is another file than the locked one",
        "a mirror, a proxy or the channel changed it: find out which before anything is locked anew",
    ),
    Failure(
        r"certificate has expired|not yet valid",
        "a certificate's dates don't hold here",
        "set this machine's clock (timedatectl); if that is right, the server's owner must renew it",
    ),
    Failure(
        r"certificate is (not )?valid for|hostname mismatch|unrecognized name",
        "a certificate is another host's",
        "something between answers for the server: check HTTPS_PROXY and the name's address",
    ),
    Failure(
        r"http response to https client|wrong.version.number",
        "a server answers without TLS",
        "HTTPS_PROXY begins with http:// for most proxies; a registry of yours without TLS belongs into "
        "insecure-registries of the engine's daemon.json",
    ),
    Failure(
        r"x509:|certificate verify failed|self[- ]signed certificate|unknown authority|unknownissuer"
        r"|unable to get local issuer",
        "a certificate's authority is unknown here",
        "for packages give SSL_CERT_FILE=FILE with its certificates; for images put them into the engine's "
        "/etc/docker/certs.d/HOST/ca.crt, or the system's, and restart it",
    ),
    Failure(
        r"toomanyrequests|429 too many|HTTP 429",
        "the server answers no more for now",
        "docker login raises a registry's limit; else wait",
    ),
    Failure(
        r"pull access denied|access to the resource is denied|no basic auth credentials|unauthorized"
        r"|HTTP 40[137]\b|40[13] forbidden|proxy authentication required",
        "access is refused",
        "docker login HOST; a proxy may want a password (HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT)",
    ),
    Failure(
        r"HTTP 404|HTTP 410|404 not found|410 gone|manifest unknown|no such manifest|: not found$",
        "what is pinned is gone from its server",
        "look for a mirror that has it (ARGS of make lock: --pool FILE), or lock anew: make lock STACK=…",
    ),
    Failure(
        r"no such host|name or service not known|temporary failure in name resolution|nodename nor servname"
        r"|network is unreachable|no route to host|connection refused|connection reset|timed? ?out"
        r"|server misbehaving|dns error|proxyconnect|context deadline exceeded|unexpected eof"
        r"|network was disabled",
        "a server can't be reached",
        "check the network and HTTPS_PROXY (the engine has its own: docs.docker.com/engine/daemon/proxy)",
    ),
)


def scrubbed(line: str) -> str:
    """Returns a line with *** for tokens and for passwords in URLs."""
    line = re.sub(r"(?<=://)[^/\s@]+@", "***@", line)
    return re.sub(r"(?i)\b(token|password|secret|authorization)([=:]\s*)[^\s&\"']+", r"\1\2***", line)


def explain(text: str, failures: Sequence[Failure] = FAILURES) -> str:
    """Returns error and remedy for the last line that matches a known failure; "" if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()][-LAST:]
    for failure in failures:
        said = [line for line in lines if re.search(failure.sign, line, re.I)]
        if said:
            return f"{failure.what} ({scrubbed(said[-1])[-240:]}): {failure.remedy}"
    return ""


@contextmanager
def logged(file: Path) -> Iterator[Callable[[], str]]:
    """Copies what this process and its children print into a file, too.

    Yields:
        A function that returns the last lines printed since its last call.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    mark, heard, recent = f"{os.urandom(8).hex()}\n", threading.Event(), deque[str](maxlen=4 * LAST)
    saved, (source, sink) = (os.dup(1), os.dup(2)), os.pipe()

    def copy() -> None:
        with os.fdopen(source, errors="replace") as lines, file.open("w") as log:
            for line in lines:
                if line.endswith(mark):
                    heard.set()
                    continue
                clean = scrubbed(line)
                recent.append(clean)
                log.write(clean)
                log.flush()
                os.write(saved[0], clean.encode())

    def since() -> str:
        heard.clear()
        sys.stdout.flush()
        os.write(1, f"\n{mark}".encode())
        heard.wait(10)
        text = "".join(recent)
        recent.clear()
        return text

    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield since
    finally:
        sys.stdout.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        thread.join(5)  # longer only if a child lives on
