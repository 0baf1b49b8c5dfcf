"""Arguments of every `docker run` of the image. Standard library only: scripts/runtime.py imports it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

STACK_BYTES = 64 << 20  # compilers recurse deeply


def run_words(
    user: str,
    shm_gib: int,
    stop_seconds: int,
    mounts: Iterable[tuple[str, str, bool]],
    variables: Mapping[str, str],
) -> list[str]:
    """`docker run` without a capability that isn't needed; more options, the image and its command follow.

    Args:
        user: UID and GID, as `1000:1000`.
        shm_gib: Size of /dev/shm.
        stop_seconds: From the signal to the end.
        mounts: Folders, files (absolute) or named volumes, where the container sees each, and whether it may
            write there.
        variables: To set.
    """
    words = ["docker", "run", "--user", user, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    words += ["--shm-size", f"{shm_gib}g", "--ulimit", f"stack={STACK_BYTES}"]
    words += ["--stop-timeout", str(stop_seconds)]
    for source, target, written in mounts:
        kind = "bind" if Path(source).is_absolute() else "volume"
        fields = [f"type={kind}", f"source={source}", f"target={target}", *([] if written else ["readonly"])]
        # The engine reads --mount as a line of CSV: a folder's name may hold a comma.
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(fields)
        words += ["--mount", line.getvalue()]
    for name, value in variables.items():
        words += ["--env", f"{name}={value}"]
    return words
