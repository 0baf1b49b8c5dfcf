"""The places that a job can run on, and the file of each."""

import importlib
from typing import cast

from trainer.commands.submit.spec import JobSpec, Place, Site

# How the file's name ends.
ENDINGS: dict[Place, str] = {
    "docker": ".sh",
    "compose": ".yaml",
    "slurm": ".sbatch",
    "kubernetes": ".yaml",
    "kubeflow": ".yaml",
}


def render(place: Place, spec: JobSpec, site: Site) -> str:
    """The file that a place is given.

    Raises:
        BadInputError: If the place can't run such a job.
    """
    return cast(str, importlib.import_module(f"trainer.commands.submit.{place}").render(spec, site))
