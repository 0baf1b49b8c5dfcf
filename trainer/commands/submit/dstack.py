"""A job as a task of dstack, on clouds or on a fleet of one's own."""

import shlex
from typing import Any

from trainer.commands.submit import container
from trainer.commands.submit.spec import JobSpec, Site
from trainer.errors import BadInputError

# What dstack sets in each node's container, by which the launcher hears of its peers.
_NODES = (
    ("NNODES", "DSTACK_NODES_NUM"),
    ("NODE_RANK", "DSTACK_NODE_RANK"),
    ("MASTER_ADDR", "DSTACK_MASTER_NODE_IP"),
)


def render(spec: JobSpec, _site: Site) -> str:
    """The task's file.

    Raises:
        BadInputError: For MIN:MAX nodes, no image, or a folder of this machine.
    """
    if spec.min_nnodes is not None:
        raise BadInputError(
            f"--nnodes {spec.nnodes_text}: a dstack task has a fixed number of nodes; use --on kubernetes"
        )
    # What is lost with its instance goes on in another. All codes but 0 are alike here: with one a run ends.
    retry = {"on_events": ["no-capacity", "interruption"], "duration": "7d"}
    return container.dump(
        {
            "type": "task",
            "name": spec.name,
            "image": container.check_image(spec),
            "user": container.fixed_user(spec),
            "nodes": spec.nnodes,
            "env": container.variables(spec),
            "commands": [_command(spec)],
            "resources": {
                "cpu": f"{spec.cpus_per_node}..",
                "memory": f"{spec.memory_gib}GB..",
                "shm_size": f"{spec.shm_gib}GB",
                "gpu": spec.gpus_per_node,
            },
            "volumes": _volumes(spec),
            **({"files": files} if (files := _files(spec)) else {}),
            # A run that is stopped gets SIGTERM, and so long to write a checkpoint.
            "max_duration": f"{spec.minutes}m",
            "stop_duration": f"{spec.stop_seconds}s",
            "retry": retry,
        }
    )


def _command(spec: JobSpec) -> str:
    """In place of the shell, so that the signal reaches the launcher."""
    peers = ""
    if spec.nnodes > 1:
        told = " ".join(f'{name}="${theirs}"' for name, theirs in _NODES)
        peers = f"export {told} MASTER_PORT={spec.port}; "
    return f"{peers}exec {shlex.join(container.words(spec))}"


def _volumes(spec: JobSpec) -> list[dict[str, Any]]:
    """Volumes of dstack by name (`pvc:NAME`), or folders of the instances."""
    found: list[dict[str, Any]] = []
    for what, path in (("runs", container.RUNS), ("data", container.DATA), ("cache", container.CACHE)):
        where: str | None = getattr(spec, what)
        if where is None:
            continue
        kind, _, name = where.partition(":")
        if kind == "pvc":
            found.append({"name": name, "path": path})
        elif where.startswith("/"):
            found.append({"instance_path": where, "path": path})
        else:
            raise BadInputError(
                f"--{what} {where}: dstack's instances don't see this machine's folders; give a volume, as "
                "pvc:NAME, or an absolute path on the instances"
            )
    return found


def _files(spec: JobSpec) -> list[dict[str, str]]:
    """What lies on this machine, and is uploaded."""
    return [{"local_path": str(file), "path": there} for file, there in container.files(spec)]
