"""A job for Kubeflow's Trainer: a TrainJob, and the runtime that it refers to."""

from trainer.commands.submit import container, pods
from trainer.commands.submit.spec import JobSpec, Site
from trainer.errors import BadInputError

# TrainJob's torch plugin gives this one, whatever a job asks for (pkg/constants/constants.go).
_PORT = 29500


def render(spec: JobSpec, site: Site) -> str:
    """Formats the objects, one YAML document each.

    Raises:
        BadInputError: For a folder of this machine, root, no image, or an option that a TrainJob lacks.
    """
    return container.to_yaml(*pods.beside(spec, site), *_train_job(spec, site))


def _train_job(spec: JobSpec, site: Site) -> list[pods.KubernetesObject]:
    """Makes a TrainJob and a runtime of its own, because a TrainJob alone lacks most fields of a pod.

    The plugin sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT in the
    container `node` of the replicated job that has the label.
    """
    if spec.min_nnodes is not None:
        raise BadInputError(
            f"--nnodes {spec.nnodes_text}: a TrainJob has a fixed number of nodes; use --on kubernetes"
        )
    if spec.port != _PORT:
        raise BadInputError(f"--port {spec.port}: a TrainJob's nodes meet at {_PORT}; leave --port out")
    # By this label the plugin knows the job.
    ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    sets = pods.job_set(spec, pods.pod(spec, site, "node"), labels=ancestor)
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": pods.metadata(spec, site),
            "spec": {"mlPolicy": {"numNodes": spec.nnodes, "torch": {}}, "template": {"spec": sets}},
        },
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": pods.job_metadata(spec, site),
            "spec": {
                "runtimeRef": {
                    "apiGroup": "trainer.kubeflow.org",
                    "kind": "TrainingRuntime",
                    "name": spec.name,
                },
                "trainer": {
                    "numNodes": spec.nnodes,
                    "numProcPerNode": spec.ranks,
                    "resourcesPerNode": pods.resources(spec, site),
                },
            },
        },
    ]
