"""Words that checks share."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.commands.doctor.facts import GIB, MIB


def size(count: float) -> str:
    """Bytes for people."""
    for unit, bytes_ in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB)):
        if count >= bytes_:
            return f"{count / bytes_:.{1 if count < 10 * bytes_ else 0}f} {unit}".replace(".0 ", " ")
    return f"{count / 1024:.0f} KiB"


def some(words: Iterable[str], most: int = 4) -> str:
    """The first few of a list."""
    listed = list(words)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def pod_volume(name: str, source: str, path: str) -> str:
    """The lines of a pod that mount a volume, as one.

    Args:
        name: Of the volume.
        source: What it is, such as "emptyDir: {}".
        path: Where it is mounted.
    """
    mounts = f"containers: [{{volumeMounts: [{{name: {name}, mountPath: {path}}}]}}]"
    return f"spec: {{volumes: [{{name: {name}, {source}}}], {mounts}}}"


def ranks(count: int) -> str:
    """So many ranks."""
    return f"{count} rank{'s' * (count != 1)}"
