"""The folder of one launch, removed with it: files from the launcher to its processes, and back.

- `launch.json`: settings of every process (`Launch`); `as_launcher` reads the search path in it
- `request-N.json`: the request to rank N, which removes it: none stays if the launcher is killed
- `rank-N.pid`, `rank-N.fault`, `rank-N.json`: written by the ranks (`worker`, `exit_record`)
- `left.json`: what rank 0 leaves for the launcher, and for the request of a restart
- `meeting.json`: for several nodes (`meeting`); `met`: written by the `agent` once they have met
- `torchrun.json`: written by the `agent`

The command line names the folder, not an environment variable, so that children of a rank don't see the
launch. A request may hold tokens; only the owner can read the folder and these files.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.host.affinity import CpuShares, cpus_text
from trainer.host.limits import listed_cpus
from trainer.observe.console import Told

LEFT = "left.json"
_LAUNCH = "launch.json"
_AS_TEXT = Told()


@dataclass(frozen=True)
class Launch:
    """Settings that hold for every process of a launch on this host.

    Attributes:
        path: The launcher's search path.
        parent: Process id of the parent of the next process: the launcher, or the agent that it started.
        cpus: CPUs of the ranks.
        logs: Whether all ranks but the first write into a log of the run folder, and not to the terminal.
        told: Format of their log lines.
    """

    path: list[str]
    parent: int
    cpus: CpuShares
    logs: bool
    told: Told = _AS_TEXT


def write_launch(folder: Path, launch: Launch) -> None:
    """Writes `launch.json`, or replaces it."""
    content = {
        "path": launch.path,
        "parent": launch.parent,
        "cpus": [cpus_text(cpus) for cpus in launch.cpus.each],
        "pinned": launch.cpus.pinned,
        "logs": launch.logs,
        "told": launch.told,
    }
    write_content(folder / _LAUNCH, content)


def read_launch(folder: Path) -> Launch:
    """Reads what `write_launch` wrote."""
    content = read_content(folder / _LAUNCH)
    each = tuple(frozenset(listed_cpus(text) or ()) for text in content["cpus"])
    cpus = CpuShares(each, content["pinned"])
    return Launch(content["path"], content["parent"], cpus, content["logs"], Told(*content["told"]))


def write_request(folder: Path, request: Mapping[str, Any], ranks: Iterable[int]) -> None:
    """Writes the request to each of these ranks."""
    for rank in ranks:
        write_content(folder / f"request-{rank}.json", request)


def take_request(folder: Path, rank: int) -> dict[str, Any]:
    """Reads what `write_request` wrote for a rank, and removes it."""
    file = folder / f"request-{rank}.json"
    request = read_content(file)
    file.unlink()
    return request


def write_content(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all, readable by its owner only."""
    beside = path.with_suffix(".tmp")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)
    beside.replace(path)


def read_content(path: Path) -> dict[str, Any]:
    """Reads what `write_content` wrote."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content
