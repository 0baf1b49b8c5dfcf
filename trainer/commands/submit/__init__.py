"""`trainer submit RECIPE`: a job for an engine or a cluster.

- `launching`: from the options to jobs, each a `spec`, checked before anything is submitted (`partition`)
- `docker`, `compose`, `slurm`, `kubernetes`, `kubeflow`: the file for each place, of `container` and `pods`
- `submit`: gives it to the engine or the cluster; `sweep`: several runs; `carried`: files that go along
"""

import argparse
from pathlib import Path
from typing import Any

# What `trainer.commands.submit.spec` allows, without its imports.
PLACES = ("docker", "compose", "slurm", "kubernetes", "kubeflow")
CONTAINERS = ("pyxis", "apptainer", "venv")
KUBEFLOW = ("v2", "v1")


def add_parser(commands: Any) -> None:
    """Adds `launch` to the commands."""
    launch = commands.add_parser(
        "submit",
        help="run a recipe on an engine or a cluster, or print the file for it; exit code 1: not submitted",
        allow_abbrev=False,
    )
    add = launch.add_argument
    add("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file, or of a .py file's task")
    add("--on", required=True, choices=PLACES, dest="place", help="what runs it")
    add("--dry-run", action="store_true", help="print the file instead of submitting it")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    add("--name", default="", help="of the job and its run folder; the same name goes on with the same run")
    add("--image", default="", metavar="REF", help="best by digest: HOST/NAME@sha256:… (make push prints it)")
    add("--nodes", default="1", metavar="N|MIN:MAX", help="hosts or pods; MIN: it goes on with so few")
    add("--gpus-per-node", type=int, metavar="N", help="a rank each (default: 0, on CPUs)")
    add("--ranks-per-node", type=int, metavar="N", help="without GPUs (default: 1)")
    add("--cpus-per-node", type=int, metavar="N", help="cores (default: 4)")
    add("--memory", type=int, metavar="GIB", help="of a node (default: 16)")
    add("--shm", type=int, metavar="GIB", help="of /dev/shm, counted in the memory (default: 2)")
    add("--time", metavar="TIME", help="of one attempt: minutes, HH:MM, HH:MM:SS, D-HH:MM (default: 1-00:00)")
    add("--grace", type=int, metavar="S", help="for the checkpoint after a signal (default: 90)")
    add("--data", metavar="DIR|pvc:CLAIM", help="shown as /data, read-only")
    add("--runs", metavar="DIR|pvc:CLAIM", help="where run folders are made (default: runs)")
    add("--cache", metavar="DIR|pvc:CLAIM", help="kept from job to job: compiled kernels, copies of data")
    add("--port", type=int, metavar="P", help="of the rendezvous on node 0, and the next (default: 29500)")
    add("--user", metavar="UID:GID", help="(default: 1000:1000; on docker and compose the caller)")
    add("--env", action="append", default=[], metavar="K=V", help="a variable; repeatable")
    add("--sweep", type=Path, metavar="FILE", help="several runs: grid: {KEY: [A, B]}, or runs: [{KEY: A}]")
    for name in ("partition", "account", "qos"):
        add(f"--{name}", help="of Slurm")
    add("--container", choices=CONTAINERS, help="Slurm: how it enters the image (default: pyxis)")
    add("--venv", metavar="DIR", help="Slurm: the environment of --container venv (default: .venv)")
    add("--namespace", help="of Kubernetes (default: default)")
    add("--jobset", action="store_true", default=None, help="Kubernetes: a JobSet instead of an Indexed Job")
    add("--kubeflow", choices=KUBEFLOW, help="v2: TrainJob; v1: PyTorchJob (default: v2)")
    launch.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.commands.submit.launching import launch_job

    return launch_job(options)
