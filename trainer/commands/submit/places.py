"""The places that a job can run on."""

from collections.abc import Callable
from typing import NamedTuple

from trainer.commands.submit import docker, kubeflow, kubernetes, slurm
from trainer.commands.submit.spec import JobPlace, JobSpec, Site


class How(NamedTuple):
    """Rendering and submission of a job at one place.

    Attributes:
        tool: The program that submits it.
        ending: Suffix of the file's name.
        render: The text of the file; raises BadInputError if the place can't run such a job.
    """

    tool: str
    ending: str
    render: Callable[[JobSpec, Site], str]


JOB_PLACES: dict[JobPlace, How] = {
    "docker": How("docker", ".sh", docker.render),
    "slurm": How("sbatch", ".sbatch", slurm.render),
    "kubernetes": How("kubectl", ".yaml", kubernetes.render),
    "kubeflow": How("kubectl", ".yaml", kubeflow.render),
}
