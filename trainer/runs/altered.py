"""Finds files of a run folder that differ from what the run wrote, by the manifest's hashes. No torch."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.section import hash_of
from trainer.host.files import hash_inside
from trainer.observe.rows import FILES

# Files that rank 0 alone writes, so that they are complete when a status is written.
_ROWS = (*FILES.values(), "checksums.jsonl", "anomalies.jsonl")


def hashes_of_rows(folder: Path) -> dict[str, str]:
    """Returns "SHA-256 SIZE" of each records file by name, for the manifest at the end of an attempt."""
    hashes = dict[str, str]()
    for name in _ROWS:
        with contextlib.suppress(OSError):
            hashes[name] = f"{hash_inside(folder / name)} {(folder / name).lstat().st_size}"
    return hashes


def altered_config(facts: Mapping[str, Any]) -> list[str]:
    """Returns a line if a manifest's configuration doesn't match its hash; else an empty list."""
    config, wanted = facts.get("config"), facts.get("config_hash")
    if not isinstance(config, dict) or (digest := hash_of(config)) == wanted:
        return []
    return [
        f"manifest.json: the hash of its config is {digest[:8]} and was {str(wanted)[:8]}: it was changed "
        "after the run"
    ]


def altered_rows(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Returns a line for each records file that changed since the end of the newest attempt."""
    hashes, lines = facts.get("rows"), list[str]()
    for name, wanted in hashes.items() if isinstance(hashes, dict) else ():
        if name not in _ROWS:
            continue
        try:
            size = (folder / name).lstat().st_size  # before it is read: it may be endless
            if str(wanted).split()[1:] != [str(size)] or f"{hash_inside(folder / name)} {size}" != wanted:
                lines.append(f"{name} isn't the file that the run wrote (another hash)")
        except OSError as error:
            lines.append(f"{name} can't be read ({error.strerror})")
    return lines
