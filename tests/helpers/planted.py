"""A host in a folder: the files of /proc and /sys that tell its limits."""

from pathlib import Path

GIB = 1 << 30
MACHINE = {
    "/sys/devices/system/cpu/online": "0-63",
    "/proc/meminfo": f"MemTotal:       {512 * GIB // 1024} kB\nMemFree:        1024 kB",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    """Writes the files of a machine with 64 CPUs and 512 GiB, and these."""
    return write(root, {**MACHINE, **files})


def put(root: Path, *names: str, content: bytes = b"") -> Path:
    """Writes files of one content below a folder, and returns that."""
    for path in (root / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def write(root: Path, files: dict[str, str]) -> Path:
    """Writes these files below a folder that stands for "/"."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root
