"""Finds the nodes of a job and this node's number: from flags, plain variables, Kubeflow's, or Slurm's.

Functions of the environment, apart from training. Sources (read 2026-11): torchrun's `PET_` variables,
which Kubeflow's operators set (torch.distributed.argparse_util); the output environment of srun(1) and
sbatch(1); enroot's hook 50-slurm-pytorch.sh, which sets RANK and its like for every task.
"""

import math
import os
import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import NamedTuple

from trainer.errors import BadInputError
from trainer.host.environment import RANK_MARK

# In the run folder: what ranks but the first write to the terminal.
LOGS = "logs"
PORT = 29500
# Two jobs can share a node: on Slurm each has a port of its own.
_SLURM_PORTS = 1000
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MORE_OF_RANK = {
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_PORT": str(PORT),
}  # with what stands for each that isn't set
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID")
_SHELL = "4294967290"  # SLURM_STEP_ID in the shell of salloc, with LaunchParameters=use_interactive_step
# What says that a process is one task of several, in Slurm's words, PMI's, and those of enroot's hook.
_OF_TASK = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "PMI_SIZE", *_RANK)
# The number of processes of a launch: PyTorch's, Open MPI's, MPICH's and Intel MPI's, Slurm's.
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class Nodes(NamedTuple):
    """The nodes of a job.

    Attributes:
        total: Number of nodes.
        number: This node's number, from 0.
        host: Name or address of node 0.
        port: Port of the ranks' store on node 0.
        names: Names of the nodes, as far as they are known beforehand.
        source: Source of these values: flags, variables, Kubeflow or Slurm.
    """

    total: int
    number: int
    host: str
    port: int
    names: tuple[str, ...] = ()
    source: str = ""

    def name(self, number: int) -> str:
        """Returns `node 2 (n3)`, or `node 2` if its name is unknown."""
        return f"node {number}" + (f" ({self.names[number]})" if number < len(self.names) else "")


def find_nodes(
    environ: Mapping[str, str],
    nnodes: str | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
) -> Nodes | None:
    """Finds the nodes of this launcher's job; None for a single node.

    Args:
        environ: The process's environment.
        nnodes: Value of --nnodes.
        node_rank: Value of --node-rank.
        master_addr: Value of --master-addr.
        master_port: Value of --master-port.

    Raises:
        BadInputError: If a value is missing or impossible.
    """
    values = {} if started_by_rank(environ) else _slurm(environ) | _kubeflow(environ) | _named(environ)
    if nnodes is not None:
        values |= {"nodes": nnodes, "source": "--nnodes"}
    if "nodes" not in values:
        if not started_by_rank(environ):
            _not_by_srun(environ)
            _not_one_of_several(environ, _SIZES)
        given = {"--node-rank": node_rank, "--master-addr": master_addr, "--master-port": master_port}
        if flags := [flag for flag, value in given.items() if value is not None]:
            raise BadInputError(f"{flags[0]} is for several nodes: say how many by --nnodes, or leave it out")
        return None
    source = values["source"]
    count = _count(values["nodes"].strip(), source)
    if count == 1:
        if nnodes is None:  # Kubeflow's WORLD_SIZE counts the ranks of one node, too
            _not_one_of_several(environ, _SIZES[1:])
        return None
    number = str(node_rank) if node_rank is not None else values.get("number")
    if number is None or not 0 <= _whole(number) < count:
        stated = "nothing" if number is None else f"'{number[:20]}'"
        raise BadInputError(
            f"{source} says {count} nodes, and {stated} which one this is: give --node-rank (or NODE_RANK), "
            f"from 0 to {count - 1}, another on each"
        )
    stated_port = values.get("port", str(PORT)) if master_port is None else str(master_port)
    host, port = _meeting_point(master_addr or values.get("master", ""), stated_port, source)
    return Nodes(count, int(number), host, port, tuple(values.get("names", "").split()), source)


def forget_step_of_shell(environ: MutableMapping[str, str]) -> None:
    """Removes what makes a command of an interactive shell look like a task of Slurm's step.

    `srun --ntasks=4 --pty bash` starts one shell, as task 0 of 4; what is typed there would wait for tasks
    that never train. A task that Slurm gives the terminal leads the terminal's session, and a command of a
    shell with job control is in a process group of its own. Tasks of another srun in that shell inherit
    its variables, but have no terminal.
    """
    if "SLURM_PTY_PORT" in environ and "TORCHELASTIC_RUN_ID" not in environ and _typed_in_a_shell():
        environ["SLURM_STEP_ID"] = _SHELL
        for name in _OF_TASK:
            environ.pop(name, None)


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that torchrun would set for a rank, where srun started a task for each rank; else
    {}.

    With one task on each node, the task is a launcher.
    """
    tasks, nodes = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_STEP_NUM_NODES")
    # A script may have set RANK or WORLD_SIZE for all tasks, so Slurm's numbers count; not below torchrun.
    if tasks <= max(1, nodes) or "TORCHELASTIC_RUN_ID" in environ or started_by_rank(environ):
        return {}
    values = _slurm_place(environ)
    return {
        "RANK": environ.get("SLURM_PROCID", ""),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", ""),
        "LOCAL_WORLD_SIZE": str(math.ceil(tasks / max(1, nodes))),
        "MASTER_ADDR": environ.get("MASTER_ADDR", values["master"]),
        "MASTER_PORT": environ.get("MASTER_PORT", values["port"]),
    }


def is_rank(environ: Mapping[str, str]) -> bool:
    """Returns True if this process is a rank of torchrun or Slurm. (Ranks of our launcher don't ask.)

    Raises:
        BadInputError: If it is one, with a number that no rank can have.
    """
    ranked = all(name in environ for name in _RANK) and not started_by_rank(environ)
    if not ranked or is_launcher_task(environ):
        return False
    values = {name: environ[name] for name in (*_RANK, *_MORE_OF_RANK) if name in environ}
    rank, size, local = (_whole(values[name]) for name in _RANK)
    here, port = (_whole(values.get(name, usual)) for name, usual in _MORE_OF_RANK.items())
    meets = size == 1 or 0 < port < 1 << 16  # one rank alone meets nobody
    if here < 1 or not meets or not 0 <= local <= rank < size:
        stated = ", ".join(f"{name}='{value[:20]}'" for name, value in values.items())
        raise BadInputError(
            f"{stated}: no rank of a launch has these numbers (0 to WORLD_SIZE - 1; ports to 65535); start "
            "it by torchrun or srun, or unset these variables if they are left over from another job"
        )
    return True


def mark_of_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that mark a rank's environment, so that its children know that they aren't the
    rank.

    The mark holds the launch's variables, so that ranks of a torchrun that a rank starts are ranks again.
    """
    return {RANK_MARK: " ".join(environ.get(name, "-") for name in (*_RANK, *_LAUNCH))}


def started_by_rank(environ: Mapping[str, str]) -> bool:
    """Returns True if a rank started this process, which inherited its variables and so is no rank."""
    return mark_of_rank(environ).items() <= environ.items()


def is_launcher_task(environ: Mapping[str, str]) -> bool:
    """Returns True if this is a Slurm node's only task: the launcher, though enroot's hook marks a rank."""
    tasks, nodes = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_STEP_NUM_NODES")
    return (
        0 < tasks == nodes
        and environ.get("RANK") == environ.get("SLURM_PROCID")
        and environ.get("WORLD_SIZE") == str(tasks)
        and "TORCHELASTIC_RUN_ID" not in environ
    )


def job_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the cluster's identifiers of this job, for the manifest; empty without a cluster."""
    names = {
        "slurm_job": "SLURM_JOB_ID",
        "slurm_restarts": "SLURM_RESTART_COUNT",
        "slurm_nodes": "SLURM_JOB_NODELIST",
        "slurm_array_task": "SLURM_ARRAY_TASK_ID",
        "kubernetes_pod": "POD_NAME",
        "kubernetes_index": "JOB_COMPLETION_INDEX",
    }
    return {key: environ[name] for key, name in names.items() if environ.get(name)}


def expand(nodelist: str) -> list[str]:
    """Expands a Slurm node list: `n[1-3,07],m4` is n1 n2 n3 n07 m4.

    Raises:
        ValueError: If it is malformed.
    """
    names = []
    for part in re.findall(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*(?=,|$)", nodelist):
        names += _expand_one(part) if part else []
    if not names:
        raise ValueError(f"'{nodelist}' names no node")
    return names


def _expand_one(part: str) -> list[str]:
    found = re.fullmatch(r"([^\[\]]*)\[([^\]]*)\](.*)", part)
    if found is None:
        return [part]
    before, ranges, after = found.groups()
    middles = []
    for span in ranges.split(","):
        first, dash, last = span.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"'{span}' in '{part}' is no range of numbers")
        middles += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return [before + middle + end for middle in middles for end in _expand_one(after)]


def _named(environ: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Reads NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, which our own jobs and many scripts set."""
    names = {"nodes": "NNODES", "number": "NODE_RANK", "master": "MASTER_ADDR", "port": "MASTER_PORT"}
    values = {key: text for key, name in names.items() if (text := environ.get(prefix + name))}
    return values | ({"source": f"{prefix}NNODES"} if "nodes" in values else {})


def _kubeflow(environ: Mapping[str, str]) -> dict[str, str]:
    values = _named(environ, "PET_")
    found = re.fullmatch(r"(\[.*\]|[^:]+):?(.*)", environ.get("PET_RDZV_ENDPOINT", ""))
    if "master" not in values and found:
        values |= {"master": found[1]} | ({"port": found[2]} if found[2] else {})
    return values


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Reads Slurm's variables of a step with one task on each of several nodes."""
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    if nodes < 2 or _number(environ, "SLURM_STEP_NUM_TASKS") != nodes or "SLURM_STEP_ID" not in environ:
        return {}
    return {"nodes": str(nodes), "source": "SLURM_STEP_NUM_NODES", **_slurm_place(environ)}


def _slurm_place(environ: Mapping[str, str]) -> dict[str, str]:
    listed, names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST"), list[str]()
    with suppress(ValueError):  # then the ranks don't know where to meet, which is said later
        names = expand(listed or "localhost")
    number = environ.get("SLURM_NODEID", "0")
    port = PORT + _number(environ, "SLURM_JOB_ID") % _SLURM_PORTS
    return {"number": number, "master": next(iter(names), ""), "port": str(port), "names": " ".join(names)}


def _not_by_srun(environ: Mapping[str, str]) -> None:
    nodes = _number(environ, "SLURM_JOB_NUM_NODES")
    if nodes > 1 and environ.get("SLURM_STEP_ID", _SHELL) == _SHELL:
        raise BadInputError(
            f"this Slurm job has {nodes} nodes, and this is its script or shell on one of them: start it by "
            "`srun --ntasks-per-node=1 trainer train …`, or give --nnodes 1 to use this node alone"
        )


def _not_one_of_several(environ: Mapping[str, str], sizes: tuple[str, ...]) -> None:
    """Refuses to train alone in each process of a launcher whose variables don't say which rank this is."""
    for name in sizes:
        if (size := _number(environ, name)) > 1:
            raise BadInputError(
                f"{name}={size}: this is one of {size} processes, of which each would train by itself; start "
                f"it by srun, by torchrun (which sets {', '.join(_RANK)}), or once on each node with "
                "--nnodes, --node-rank and --master-addr; if the variable is left over, give --nnodes 1"
            )


def _count(text: str, source: str) -> int:
    if re.fullmatch(r"\d{1,6}:\d{1,6}", text):
        raise BadInputError(
            f"{source} {text}: a job has one number of nodes; when it has lost a node it ends, and the same "
            "command with fewer or more nodes resumes it (to the same bits with parallel.reduction=tree)"
        )
    if (count := int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0) < 1:
        raise BadInputError(f"{source} {text}: give a number of nodes, such as 4")
    return count


def _meeting_point(address: str, port: str, source: str) -> tuple[str, int]:
    """Returns host and port of node 0."""
    bracketed = re.fullmatch(r"\[(.+)\]", address)  # as an IPv6 address can be written
    host = bracketed[1] if bracketed else address
    # One colon is a host with a port, more are an IPv6 address.
    if not host or host.count(":") == 1 or not 0 < _whole(port) < 1 << 16:
        raise BadInputError(
            f"{source} says several nodes, and host '{address}', port '{port}' isn't where the ranks meet: "
            "give --master-addr HOST and --master-port PORT (or MASTER_ADDR and MASTER_PORT) of node 0"
        )
    return host, int(port)


def _typed_in_a_shell() -> bool:
    """Returns True if this process has a terminal and doesn't belong to the group that leads its session."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return os.getpgrp() != os.getsid(0)


def _number(environ: Mapping[str, str], name: str) -> int:
    return max(0, _whole(environ.get(name, "")))


def _whole(text: str) -> int:
    """Returns a whole number from 0 on; -1 for any other text."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
