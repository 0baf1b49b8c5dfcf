"""A job as a file for Docker Compose: a service for each node, on one network, with no port published."""

from typing import Any

from trainer.commands.submit import container
from trainer.commands.submit.docker import mounts
from trainer.commands.submit.environment import from_files
from trainer.commands.submit.spec import JobSpec, Site
from trainer.host.engine import STACK_BYTES


def render(spec: JobSpec, site: Site) -> str:
    """The file.

    Raises:
        BadInputError: For a claim instead of a folder, or a file of variables that can't be used.
    """
    return container.dump(
        {
            "name": spec.name,
            "services": {_host(rank): _service(spec, site, rank) for rank in range(spec.nnodes)},
            "networks": {"nodes": {}},
        }
    )


def _host(rank: int) -> str:
    return f"node-{rank}"


def _service(spec: JobSpec, site: Site, rank: int) -> dict[str, Any]:
    files = [container.doubled(str(path)) for path in from_files(site)]
    environment = {**container.variables(spec), **_rendezvous(spec, rank)}
    service = {
        "image": container.check_image(spec),
        "command": [container.doubled(word) for word in container.timed(spec)],
        "hostname": _host(rank),
        "networks": ["nodes"],
        "user": container.fixed_user(spec),
        "read_only": True,
        "tmpfs": [f"{where}:exec" for where in container.scratch(spec)],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "cpus": spec.cpus_per_node,
        "mem_limit": f"{spec.memory_gib}g",
        "shm_size": f"{spec.shm_gib}g",
        "ulimits": {"stack": STACK_BYTES},
        "stop_grace_period": f"{spec.stop_seconds}s",
        # An engine restarts after every code or none: after 75 one says `up` again.
        "restart": "no",
        **({"env_file": files} if files else {}),
        "environment": {name: container.doubled(value) for name, value in environment.items()},
        "volumes": [
            {
                "type": "bind",
                "source": container.doubled(str(folder)),
                "target": where,
                **({} if written else {"read_only": True}),
                # A folder that isn't there is a mistake, not one to make as root.
                "bind": {"create_host_path": False},
            }
            for folder, where, written in mounts(spec, "compose")
        ],
    }
    if spec.gpus_per_node:
        service["deploy"] = {"resources": {"reservations": {"devices": [_gpus(spec, rank)]}}}
    return service


def _rendezvous(spec: JobSpec, rank: int) -> dict[str, str]:
    if spec.nnodes == 1:
        return {}
    node = {"NNODES": spec.nnodes_text, "NODE_RANK": str(rank)}
    return {**node, "MASTER_ADDR": _host(0), "MASTER_PORT": str(spec.port)}


def _gpus(spec: JobSpec, rank: int) -> dict[str, Any]:
    """Several nodes on one machine share its GPUs: each gets its own."""
    device: dict[str, Any] = {"driver": "nvidia", "capabilities": ["gpu"]}
    if spec.nnodes == 1:
        return {**device, "count": spec.gpus_per_node}
    first = rank * spec.gpus_per_node
    return {**device, "device_ids": [str(first + gpu) for gpu in range(spec.gpus_per_node)]}
