"""A job for Kubernetes: an Indexed Job with a headless Service, a JobSet, or a TrainJob of Kubeflow."""

from typing import Any

from trainer.commands.submit import container, pods
from trainer.commands.submit.spec import JobSpec, Site
from trainer.errors import BadInputError

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def render(spec: JobSpec, site: Site) -> str:
    """Formats the objects, one YAML document each.

    Raises:
        BadInputError: For a folder of this machine, root, or no image.
    """
    return container.to_yaml(*pods.beside(spec, site), *(_job_set if site.jobset else _job)(spec, site))


def _job(spec: JobSpec, site: Site) -> list[pods.KubernetesObject]:
    job: pods.KubernetesObject = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pods.job_metadata(spec, site),
        "spec": pods.job_spec(
            spec, _pod(spec, site, f"{spec.name}-0.{spec.name}"), pods.RETRIES * spec.nnodes
        ),
    }
    if spec.nnodes == 1:
        return [job]
    job["spec"]["template"]["spec"]["subdomain"] = spec.name
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(spec, site),
        "spec": {
            "clusterIP": "None",
            # The nodes look for node 0 before anything is ready.
            "publishNotReadyAddresses": True,
            "selector": pods.labels(spec),
            "ports": [{"name": port["name"], "port": port["containerPort"]} for port in pods.ports(spec)],
        },
    }
    return [service, job]


def _job_set(spec: JobSpec, site: Site) -> list[pods.KubernetesObject]:
    """Makes a JobSet; after a checkpoint each node resumes as in a Job."""
    # JobSet names pods <set>-<replicated job>-<job's index>-<pod's index>, in a domain of the set's name.
    template = _pod(spec, site, f"{spec.name}-node-0-0.{spec.name}")
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": pods.job_metadata(spec, site),
            "spec": pods.job_set(spec, template),
        }
    ]


def _pod(spec: JobSpec, site: Site, master: str) -> pods.KubernetesObject:
    if spec.nnodes == 1:
        return pods.pod(spec, site, "trainer")
    rendezvous: list[dict[str, Any]] = [
        {"name": "NNODES", "value": spec.nnodes_text},
        {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "MASTER_ADDR", "value": master},
        {"name": "MASTER_PORT", "value": str(spec.port)},
    ]
    return pods.pod(spec, site, "trainer", rendezvous, pods.ports(spec))


# TrainJob's torch plugin gives this one, whatever a job asks for (pkg/constants/constants.go).
_PORT = 29500


def render_train_job(spec: JobSpec, site: Site) -> str:
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
