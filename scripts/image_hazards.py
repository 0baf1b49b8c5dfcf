"""Finds forbidden content of an image, in the tree that a container sees and, for secrets, in any layer."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from image_tar import SECRET, Entry, Files, Image, secrets_in

# Folders that anybody may write to; all have the sticky bit or are the user's own.
OPEN = {"tmp", "var/tmp", "cache", "home/trainer", "workspace", "run/lock", "dev/shm", "dev/mqueue"}
# Of each library one real file, or a process may load two; also under the names that auditwheel gives copies.
LIBRARY = re.compile(r"(?:^|/)(libcudnn|libcublas|libnccl|libcudart)(?:[.-][0-9a-f]{8})?\.so(?:\.\d+)*$")
# torchvision's wheel has a copy of its own, under a name of its own; to remove it would change the wheel.
PRIVATE = re.compile(r"(?:^|/)torchvision\.libs/libcudart\.[0-9a-f]{8}\.so\.\d+")
NAMES = (
    ("history", r"\.(?:ash|bash|sh|zsh|python|node_repl|sqlite|psql|mysql)_?history|\.lesshst|\.viminfo"),
    ("history", r"\.ipython/.*/history\.sqlite|fish_history|\.wget-hsts"),
    ("git", r"\.git"),
    ("env", r"\.env(?:\.[^/]*)?"),
    ("key", r"etc/ssh/ssh_host_[^/]*_key|\.ssh/id_[^/.]*|\.ssh/authorized_keys"),
    ("token", r"\.netrc|\.pypirc|\.npmrc|\.git-credentials|\.docker/config\.json|\.aws/credentials"),
    ("token", r"\.?huggingface/(?:stored_)?tokens?|\.kaggle/kaggle\.json|\.config/gh/hosts\.yml"),
    ("cache", r"\.cache|\.conda/pkgs|var/cache/apt/archives|var/lib/apt/lists"),
    ("cache", r"opt/[^/]+/pkgs|cache/(?:pip|uv)|uv-cache|\.pip"),
)
PATTERNS = [(kind, re.compile(f"(?:^|.*?/)(?:{pattern})(?=/|$)")) for kind, pattern in NAMES]
SUDO = re.compile(r"(?:^|/)s?bin/(?:sudo|sudoedit|doas|pkexec)$")


class Finding(NamedTuple):
    """A finding: its kind, path and reason."""

    kind: str
    path: str
    why: str


def modes(files: Files, base: Files) -> Iterator[Finding]:
    """Yields setuid and world-writable files, devices, and programs to become root."""
    for path, entry in files.items():
        if entry.kind == "file" and entry.mode & 0o6000:
            yield Finding("setuid", path, f"mode {entry.mode:o}")
        if entry.kind == "file" and entry.mode & 0o002:
            yield Finding("writable", path, f"by anybody, mode {entry.mode:o}")
        if entry.kind == "folder" and entry.mode & 0o002 and path not in OPEN:
            yield Finding("writable", path, f"a folder, by anybody, mode {entry.mode:o}")
        if entry.kind == "device" and path not in base:
            yield Finding("device", path, "not of the base image")
        if entry.kind != "folder" and SUDO.search(path):
            yield Finding("sudo", path, "a way to become root")


def libraries(files: Files) -> Iterator[Finding]:
    """Yields libraries that are in the image as more than one real file."""
    found: dict[str, list[str]] = {}
    for path, entry in files.items():
        match = LIBRARY.search(path)
        if match and entry.kind == "file" and not entry.hard and not PRIVATE.search(path):
            found.setdefault(match[1], []).append(path)
    for name, paths in found.items():
        for path in sorted(paths)[1:] if len(paths) > 1 else []:
            yield Finding("library", path, f"a second {name} beside /{min(paths)}")


def named(path: str) -> tuple[str, str] | None:
    """Returns the kind and the folder of a secret, history or cache, by a path's name; else None."""
    for kind, pattern in PATTERNS:
        if match := pattern.match(path):
            return kind, match[0]
    return None


def left_behind(layers: Iterable[Files], public: set[str], base: Files) -> Iterator[Finding]:
    """Yields secrets, histories and caches, also those that a later layer hides.

    A file of `public`'s hashes, or unchanged from the base, is no secret.
    """
    layers = list(layers)
    places: dict[tuple[str, str, int], list[Entry]] = {}
    for number, layer in enumerate(layers, 1):
        for path, entry in layer.items():
            known = base.get(path)
            if entry.kind == "folder" or (known and known.digest == entry.digest):
                continue
            place = named(path)
            if place and (place[0] == "cache" or entry.digest not in public):
                places.setdefault((*place, number), []).append(entry)
            for secret in entry.secrets if entry.digest not in public else ():
                yield Finding(
                    secret.split()[-1 if secret.endswith("key") else 0], path, f"{secret} in layer {number}"
                )
    for (kind, path, number), entries in places.items():
        if kind == "cache" and not any(entry.size for entry in entries):
            continue  # locks and empty marks
        yield Finding(
            kind, path, f"{len(entries)} files in layer {number}" if len(entries) > 1 else f"layer {number}"
        )


def configured(image: Image) -> Iterator[Finding]:
    """Yields secrets in the settings or the build history of an image."""
    for line in image.config.get("config", {}).get("Env") or []:
        if SECRET.fullmatch(line):
            yield Finding("token", "ENV", line.partition("=")[0])
    for secret in secrets_in(json.dumps(image.config).encode()):
        yield Finding("token", "configuration", secret)


def hazards(image: Image, public: set[str], base: Files) -> list[Finding]:
    """Returns all findings; `public` has the hashes of packages' files, `base` the base's files."""
    found = [*modes(image.files, base), *libraries(image.files), *configured(image)]
    return sorted({*found, *left_behind(image.layers, public, base)})
