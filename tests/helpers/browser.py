"""A headless Chromium, driven through a pipe: what it shows of a file, and what it says of it.

`python -m tests.helpers.browser RUN/report.html docs/report.png` takes a picture of a report.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = [
    *["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"],
    *["--no-first-run", "--disable-extensions", "--disable-background-networking"],
    "--disable-component-update",
]
# The pipe's ends become 3 and 4, where Chromium looks for them.
_PLACE = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
_SECONDS = 1500  # for all tests of a file, as long as one that hangs may take


def find_chromium() -> str | None:
    """Path of a Chromium; None if none is installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab of a browser that runs."""

    def __init__(self, read: int, write: int) -> None:
        """Opens a tab on the two ends of the pipe."""
        self._from, self._to = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol; what else arrives meanwhile becomes `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._from.fileno(), 1 << 20)
            if not part:
                raise RuntimeError("the browser is gone")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, what: Path | str, width: int, height: int = 900, dark: bool = False) -> None:
        """Shows a file or a URL, in a window of so many CSS pixels; `events` begin anew."""
        self.prefer("dark" if dark else "light")
        self.resize(width, height)
        self.events.clear()
        self.call("Page.navigate", url=what if isinstance(what, str) else what.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def prefer(self, scheme: str) -> None:
        """Asks pages for their light or their dark colors."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Makes the window so large."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; this works although the page may run none."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def screenshot(self, full: bool = False) -> bytes:
        """PNG of the window, or of all of the page."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=full)
        return base64.b64decode(taken["data"])


@contextlib.contextmanager
def chromium(path: str) -> Iterator[Page]:
    """Starts a browser with an empty profile; it is killed if it hangs."""
    (ours, theirs), (result, answers) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        words = ["timeout", "-k", "1", str(_SECONDS), "bash", "-c", _PLACE, "bash", str(ours), str(answers)]
        words += [path, *_FLAGS, f"--user-data-dir={home}", "--remote-debugging-pipe", "about:blank"]
        silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        own = {**os.environ, "HOME": home}
        started = subprocess.Popen(words, pass_fds=(ours, answers), env=own, **silent)
        os.close(ours)
        os.close(answers)
        try:
            yield Page(result, theirs)
        finally:
            started.terminate()
            started.wait()


if __name__ == "__main__":
    with chromium(find_chromium() or _NAMES[0]) as tab:
        tab.open(Path(sys.argv[1]), 1440, 1800)
        Path(sys.argv[2]).write_bytes(tab.screenshot())
