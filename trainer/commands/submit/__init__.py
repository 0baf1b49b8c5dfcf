"""`trainer submit RECIPE`: a job for a container engine or a cluster.

- `launching`: turns the options into jobs, each a `spec`, checked before anything is submitted
- `docker`, `slurm`, `kubernetes` (and Kubeflow): render the job's file (`container`, `pods`)
- `environment`: variables that may be secrets; `carried`: files to mount; `sweep`: several runs
- `submit`: calls the engine or the cluster
"""

import argparse
from pathlib import Path
from typing import Any

# What `trainer.commands.submit.spec` allows, without its imports.
PLACES = ("docker", "slurm", "kubernetes", "kubeflow")
CONTAINERS = ("pyxis", "apptainer", "venv")


def add_parser(commands: Any) -> None:
    """Adds `submit` to the commands."""
    launch = commands.add_parser(
        "submit",
        help="Run a recipe on Docker, Slurm or Kubernetes. Exit code 1: not submitted.",
        description="@FILE in place of an option: options from a file, those that a site needs, say.",
        allow_abbrev=False,
    )
    launch.takes_files = True
    add = launch.add_argument
    add("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file, or of a .py file's task")
    add("--on", required=True, choices=PLACES, dest="place", help="what runs it")
    add("--dry-run", action="store_true", help="print the file instead of submitting it")
    add(
        "--set",
        action="append",
        dest="settings",
        default=[],
        metavar="KEY=VALUE",
        help="override a key; repeatable",
    )
    add("--name", default="", help="of the job and its run folder; the same name goes on with the same run")
    add("--image", default="", metavar="REF", help="best by digest: HOST/NAME@sha256:… (make push prints it)")
    add("--nnodes", default="1", metavar="N|MIN:MAX", help="hosts or pods; MIN: it goes on with so few")
    add("--gpus-per-node", type=int, metavar="N", help="a rank each (default: 0, on CPUs)")
    add("--nproc-per-node", type=int, metavar="N", help="without GPUs (default: 1)")
    add("--cpus-per-node", type=int, metavar="N", help="cores (default: 4)")
    add("--memory", type=int, dest="memory_gib", metavar="GIB", help="of a node (default: 16)")
    add(
        "--shm",
        type=int,
        dest="shm_gib",
        metavar="GIB",
        help="of /dev/shm, counted in the memory (default: 2)",
    )
    add(
        "--time",
        dest="minutes",
        metavar="TIME",
        help="of one attempt: minutes, HH:MM, HH:MM:SS, D-HH:MM (default: 1-00:00)",
    )
    add(
        "--grace",
        type=int,
        dest="grace_seconds",
        metavar="S",
        help="for the checkpoint after a signal (default: 90)",
    )
    add("--data", metavar="DIR|pvc:CLAIM", help="shown as /data, read-only")
    add("--runs", metavar="DIR|pvc:CLAIM", help="where run folders are made (default: runs)")
    add("--cache", metavar="DIR|pvc:CLAIM", help="kept from job to job: compiled kernels, copies of data")
    add("--port", type=int, metavar="P", help="of the rendezvous on node 0, and the next (default: 29500)")
    add(
        "--user",
        metavar="UID:GID",
        help="(default: 1000:1000; on docker the caller); none: as the namespace says",
    )
    add("--env", action="append", default=[], metavar="K=V", help="a variable, no secret; repeatable")
    add(
        "--env-from",
        action="append",
        default=[],
        metavar="secret:NAME|file:PATH",
        help="variables that may be secrets: of a Secret of Kubernetes; elsewhere of a file of NAME=VALUE",
    )
    add("--rdma", metavar="RESOURCE=N|host", help="Kubernetes: a device plugin's resource; Slurm: host")
    add("--sweep", type=Path, metavar="FILE", help="several runs: grid: {KEY: [A, B]}, or runs: [{KEY: A}]")
    for name in ("partition", "account", "qos"):
        add(f"--{name}", help="of Slurm")
    add(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="Slurm: a further option, as --sbatch-arg=--constraint=h100; repeatable",
    )
    add("--container", choices=CONTAINERS, help="Slurm: how it enters the image (default: pyxis)")
    add("--venv", metavar="DIR", help="Slurm: the environment of --container venv (default: .venv)")
    add("--namespace", help="of Kubernetes (default: default)")
    add(
        "--jobset",
        action=argparse.BooleanOptionalAction,
        help="Kubernetes: a JobSet instead of an Indexed Job",
    )
    add("--queue", metavar="NAME", help="Kubernetes, Kubeflow: a queue of Kueue")
    add("--service-account", metavar="NAME", help="Kubernetes, Kubeflow: of the pods")
    launch.told = {
        "--from": "a job begins a new run, or resumes the run of its --name; for the weights of "
        "another run give --set model.pretrained=runs/RUN/model.safetensors (--env-from is about variables)",
        "--resume": "a job resumes the run of its --name by itself",
        "--out": "--name says the run folder, below --runs",
    }
    launch.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.commands.submit.launching import launch_job

    return launch_job(options)
