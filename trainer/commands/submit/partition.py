"""Checks a job against its Slurm partition before it waits in a queue."""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from trainer.commands.submit.spec import JobSpec, Site
from trainer.errors import BadInputError
from trainer.host.disks import read_mount

_OWN_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay")


class Node(NamedTuple):
    """A node as sinfo(1) lists it: partition, CPUs, memory in MiB, GPUs; the time limit in minutes."""

    partition: str
    cpus: int
    memory: int
    gpus: int
    minutes: int | None


def check_partition(spec: JobSpec, site: Site) -> None:
    """Refuses a job that the partition can't run; without sinfo, checks nothing.

    Raises:
        BadInputError: If the job asks for more.
    """
    if shutil.which("sinfo") is None:
        return
    words = ["sinfo", "--noheader", "--Node", "--format=%P|%c|%m|%G|%l"]
    try:
        told = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:  # no slurmctld answers: sbatch will say so
        return
    if told.returncode == 0:
        check_nodes(spec, site, parsed(told.stdout))


def unseen_folders(spec: JobSpec, site: Site, other: Mapping[str, str]) -> list[str]:
    """Returns a line for each folder or file of the job on a local disk, which compute nodes may not see.

    Args:
        spec: The job.
        site: The cluster's settings.
        other: Further paths, by the option that names them.
    """
    folders = {"--runs": spec.runs, "--data": spec.data, "--cache": spec.cache}
    if site.container == "venv":
        folders["--venv"] = site.venv
    if spec.recipe_text is not None:
        folders["the recipe"] = spec.recipe
    folders |= {f"the file {name}": file for name, file in spec.files.items()} | dict(other)
    lines = []
    for option, folder in folders.items():
        kind = read_mount(Path(folder).absolute()).kind if folder else ""
        if kind in _OWN_DISKS:
            lines.append(
                f"{option} {folder} lies on a disk of this machine ({kind}): every node of the job must "
                "see it, so keep it on the cluster's file system (a head node may export this one)"
            )
    return lines


def parsed(text: str) -> list[tuple[Node, bool]]:
    """Parses sinfo's lines: each node, and whether its partition is the default; other lines are skipped."""
    found = []
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) != 5 or not words[1].isdecimal() or not words[2].isdecimal():
            continue
        gpus = sum(int(n) for n in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", words[3]))
        minutes = _limit(words[4])
        name = words[0].removesuffix("*")
        found.append((Node(name, int(words[1]), int(words[2]), gpus, minutes), words[0].endswith("*")))
    return found


def _limit(text: str) -> int | None:
    """Parses a time limit of sinfo to minutes: `2-00:00:00`, `1:00:00`, `30:00` (minutes and seconds)."""
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)", text)
    if found is None:  # infinite
        return None
    days, hours, minutes, _ = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes


def check_nodes(spec: JobSpec, site: Site, there: list[tuple[Node, bool]]) -> None:
    """Compares a job with the nodes of a partition.

    Raises:
        BadInputError: For the first resource that they lack.
    """
    if not there:
        return
    names = sorted({node.partition for node, _ in there})
    wanted = (site.partition or "").split(",")
    if site.partition and not set(wanted) <= set(names):
        raise BadInputError(f"--partition {site.partition}: this cluster has {', '.join(names)}")
    nodes = [node for node, default in there if (node.partition in wanted if site.partition else default)]
    if not nodes:  # there is no default one: sbatch will say so
        return
    where = f"partition {nodes[0].partition}"
    asked: list[tuple[str, int, Callable[[Node], int], str]] = [
        ("gpus-per-node", spec.gpus_per_node, lambda node: node.gpus, "GPUs"),
        ("cpus-per-node", spec.cpus_per_node, lambda node: node.cpus, "CPUs"),
        ("memory", spec.memory_gib, lambda node: node.memory // 1024, "GiB"),
    ]
    for option, number, has, unit in asked:
        if number > max(map(has, nodes)):
            most = max(map(has, nodes))
            raise BadInputError(f"--{option} {number}: no node of {where} has more than {most} {unit}")
    suited = sum(all(has(node) >= number for _, number, has, _ in asked) for node in nodes)
    if spec.nnodes > suited:
        raise BadInputError(f"--nnodes {spec.nnodes}: {where} has {suited} nodes with what this job asks for")
    limits = [node.minutes for node in nodes]
    if all(limit is not None and spec.minutes > limit for limit in limits):
        most = max(filter(None, limits))
        raise BadInputError(f"--time {spec.minutes}: {where} lets a job run for {most} minutes")
