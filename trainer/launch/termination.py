"""Termination message of a pod: `kubectl describe` shows how the job ended without the log."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from trainer.config.redact import redact_text
from trainer.errors import EXIT_DONE, EXIT_REQUEUE

TERMINATION_LOG = Path("/dev/termination-log")  # unless a pod says otherwise
_MOST = 4096  # bytes that Kubernetes keeps
_STOPPED = "stopped with a checkpoint, to be resumed"


def leave_message(code: int, text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Writes how a launcher ends to its pod's termination file, if that is writable.

    Args:
        code: The exit code.
        text: The message: lines, perhaps with a traceback.
    """
    if code == EXIT_DONE or "KUBERNETES_SERVICE_HOST" not in environment or not TERMINATION_LOG.is_file():
        return
    with contextlib.suppress(OSError):
        TERMINATION_LOG.write_bytes(message_of(code, text))


def message_of(code: int, text: str) -> bytes:
    """Makes the message: the code, then the text; of a text that is too long, its first line and its end."""
    text = redact_text(text).strip().removeprefix("trainer: ") or (_STOPPED if code == EXIT_REQUEUE else "")
    message = f"exit code {code}{': ' * bool(text)}{text}\n".encode("utf-8", "replace")
    if len(message) <= _MOST:
        return message
    first, _, rest = message.partition(b"\n")
    first = first[: _MOST // 2]
    kept = first + b"\n...\n" + rest[len(first) + 5 - _MOST :]
    return kept.decode("utf-8", "ignore").encode()  # without the halves of characters
