"""`trainer job PLACE RECIPE`: prints the file of a job; `sbatch`, `kubectl` or `sh` sends it.

The files are jinja2 templates in `templates/`; `render` makes the values and fills them in.
"""

import argparse
from typing import Any

TEMPLATES = {
    "slurm": "slurm.sbatch.j2",
    "kubernetes": "kubernetes.yaml.j2",
    "kubeflow": "kubeflow.yaml.j2",
    "docker": "docker.sh.j2",
}


def add_parser(commands: Any) -> None:
    """Adds `job` to the commands."""
    job = commands.add_parser(
        "job",
        help="Print a job file for Slurm, Kubernetes, Kubeflow or docker.",
        description="Prints a job file, as `trainer job slurm digits | sbatch`. An option that the template "
        "doesn't use is refused.",
        allow_abbrev=False,
    )
    add = job.add_argument
    add("place", metavar="PLACE", choices=TEMPLATES, help="slurm, kubernetes, kubeflow or docker")
    add("recipe", metavar="RECIPE", help="recipe of trainer train, as the job sees it")
    add("--template", metavar="FILE", help="jinja2 template that replaces the package's")
    add("--print-template", action="store_true", help="print the template, to be changed")
    add("--set", action="append", dest="settings", metavar="KEY=VALUE", help="override a key; repeatable")
    add("--out", metavar="DIR", help="run folder, as the job sees it; the same folder resumes its run")
    add("--nodes", metavar="N|MIN-MAX", help="nodes (default: 1); a range: Slurm only")
    add("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of a node, with a rank each (default: 0)")
    add("--nproc-per-node", type=int, metavar="N", help="ranks of a node without GPUs (default: 1)")
    add("--cpus-per-task", type=int, metavar="N", help="cores of a node (default: 4 for each GPU)")
    add(
        "--mem",
        metavar="SIZE|none",
        help="memory of a node, as 64G (default: 16G for each GPU); none: the place's",
    )
    add("--shm-size", metavar="SIZE", help="size of a container's /dev/shm, part of its memory (default: 2G)")
    add(
        "--time",
        metavar="TIME",
        help="limit of an attempt: minutes, HH:MM, HH:MM:SS, D-HH:MM (default: 1-00:00)",
    )
    add("--grace", type=int, metavar="S", help="seconds for the checkpoint after a signal (default: 90)")
    add(
        "--image",
        metavar="REF",
        help="image, best by digest; on Slurm of Pyxis, or Apptainer: docker://REF, *.sif",
    )
    add("--venv", metavar="DIR", help="environment on all nodes, for Slurm without an image (default: .venv)")
    add(
        "--volume",
        action="append",
        metavar="SOURCE:TARGET[:ro]",
        help="folder (on Kubernetes a claim) and its path in the container; repeatable",
    )
    add("--env", action="append", metavar="NAME=VALUE", help="variable that is no secret; repeatable")
    add(
        "--env-from",
        action="append",
        metavar="SOURCE",
        help="variables: a Secret of Kubernetes; elsewhere a file of NAME=VALUE; repeatable",
    )
    add(
        "--master-port",
        type=int,
        metavar="PORT",
        help="port on node 0 (default: 29500; on Slurm + job %% 1000)",
    )
    add("--user", metavar="UID:GID", help="user (default: 1000:1000; docker: the caller); none: the image's")
    for name in ("partition", "account", "qos"):
        add(f"--{name}", help=f"{name} on Slurm")
    add("--namespace", help="namespace on Kubernetes")
    job.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.commands.job.render import print_job

    return print_job(options)
