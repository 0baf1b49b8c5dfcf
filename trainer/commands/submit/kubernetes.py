"""A job for Kubernetes: an Indexed Job with a headless Service, or a JobSet."""

from typing import Any

from trainer.commands.submit import container, pods
from trainer.commands.submit.spec import JobSpec, Site

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
