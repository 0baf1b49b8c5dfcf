"""Parts that Kubernetes and Kubeflow have in common: a node's pod, and the objects beside a job."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from trainer.commands.submit import container
from trainer.commands.submit.environment import from_secrets
from trainer.commands.submit.spec import NO_USER, JobSpec, Site, claim_of
from trainer.errors import EXIT_BAD_INPUT, EXIT_REQUEUE, BadInputError

KubernetesObject = dict[str, Any]

# Of a launcher that failed (code 1 or 76): all nodes may do so that often before the job has failed.
RETRIES = 2
_NAME = {"fieldPath": "metadata.name"}
_HIGHEST_ID = 2**31 - 1


def labels(spec: JobSpec) -> dict[str, str]:
    """Labels that the job's pods have in common."""
    return {"app.kubernetes.io/name": "trainer", "app.kubernetes.io/instance": spec.name}


def metadata(spec: JobSpec, site: Site) -> KubernetesObject:
    """Returns name, namespace and labels of an object of the job."""
    return {"name": spec.name, "namespace": site.namespace, "labels": labels(spec)}


def job_metadata(spec: JobSpec, site: Site) -> KubernetesObject:
    """Returns name, namespace and labels of the job itself, its queue of Kueue included."""
    found = metadata(spec, site)
    if site.queue:
        found["labels"]["kueue.x-k8s.io/queue-name"] = site.queue
    return found


def pod(
    spec: JobSpec,
    site: Site,
    name: str,
    environment: Sequence[KubernetesObject] = (),
    ports: Sequence[KubernetesObject] = (),
) -> KubernetesObject:
    """Returns the template of a node's pod.

    Args:
        spec: The job.
        site: The cluster's settings.
        name: Name of the container.
        environment: Variables by which the launcher finds its peers.
        ports: Ports of the container.

    Raises:
        BadInputError: For root, or a folder of this machine.
    """
    for file in spec.files.values():
        raise BadInputError(
            f"{file}: pods don't see this machine's files; put it on the volume of --data or --runs, and "
            "give its path there"
        )
    volumes, mounts = _volumes(spec)
    fixed = [
        {"name": key, "value": container.doubled(value)} for key, value in container.variables(spec).items()
    ]
    sources = [{"secretRef": {"name": secret}} for secret in from_secrets(site)]
    node = {
        "name": name,
        "image": container.check_image(spec),
        # Not `command`: that would put itself in the place of dumb-init, which passes signals and codes on.
        "args": [container.doubled(word) for word in container.words(spec)],
        # For the run's manifest: which pod it was.
        "env": [*fixed, {"name": "POD_NAME", "valueFrom": {"fieldRef": _NAME}}, *environment],
        **({"ports": list(ports)} if ports else {}),
        **({"envFrom": sources} if sources else {}),
        "resources": resources(spec, site),
        # The launcher writes one (`trainer.launch.exit_record`); of other ends it is the log's last lines.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    fields = {
        # Of one attempt: its end is a SIGTERM, so that the job goes on from the checkpoint in another pod.
        "activeDeadlineSeconds": spec.minutes * 60,
        "terminationGracePeriodSeconds": spec.stop_seconds,
        **({"serviceAccountName": site.service_account} if site.service_account else {}),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **_user(spec),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                # A wish: hosts without a free GPU count as well, and mustn't keep the last node waiting.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(spec)},
            }
        ],
        "containers": [node],
        "volumes": volumes,
    }
    return {"metadata": {"labels": labels(spec)}, "spec": fields}


def _user(spec: JobSpec) -> KubernetesObject:
    """Returns UID, GID and the volumes' group; nothing where the namespace sets them, as OpenShift's do.

    Raises:
        BadInputError: For root, or a number that no pod may have.
    """
    if spec.user == NO_USER:
        return {}
    user, group = (int(number) for number in spec.user.split(":"))
    if user == 0:
        raise BadInputError(f"--user {spec.user}: these pods never run as root; give another")
    if max(user, group) > _HIGHEST_ID:
        raise BadInputError(f"--user {spec.user}: the highest number of Kubernetes is {_HIGHEST_ID}")
    return {"runAsUser": user, "runAsGroup": group, "fsGroup": group}


def resources(spec: JobSpec, site: Site) -> KubernetesObject:
    """Returns requests that equal the limits, so that the pod isn't evicted for others' use."""
    wanted = {"cpu": str(spec.cpus_per_node), "memory": f"{spec.memory_gib}Gi"}
    if spec.gpus_per_node:
        wanted["nvidia.com/gpu"] = str(spec.gpus_per_node)
    if site.rdma:
        resource, _, count = site.rdma.partition("=")
        wanted[resource] = count or "1"
    return {"requests": wanted, "limits": wanted}


def job_spec(spec: JobSpec, template: KubernetesObject, retries: int) -> KubernetesObject:
    """Returns the spec of an Indexed Job with a pod for each node."""
    name = template["spec"]["containers"][0]["name"]

    def on_code(action: str, code: int) -> KubernetesObject:
        codes = {"containerName": name, "operator": "In", "values": [code]}
        return {"action": action, "onExitCodes": codes}

    return {
        "completionMode": "Indexed",
        "completions": spec.nnodes,
        "parallelism": spec.nnodes,
        "backoffLimit": retries,
        "podFailurePolicy": {
            "rules": [
                # Drained, preempted, evicted: another pod goes on, and it doesn't count.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                on_code("FailJob", EXIT_BAD_INPUT),
                on_code("Ignore", EXIT_REQUEUE),
            ]
        },
        "template": {**template, "spec": {"restartPolicy": "Never", **template["spec"]}},
    }


def job_set(spec: JobSpec, template: KubernetesObject, **metadata: Any) -> KubernetesObject:
    """Returns the spec of a JobSet, in which all nodes restart together when one fails.

    Args:
        spec: The job.
        template: Template of a node's pod.
        **metadata: Metadata of the Job in it.
    """
    job = {**({"metadata": metadata} if metadata else {}), "spec": job_spec(spec, template, retries=0)}
    bad_input = {"name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": RETRIES, "rules": [bad_input]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": job}],
    }


def ports(spec: JobSpec) -> list[KubernetesObject]:
    """Returns the fixed port of node 0; gloo and NCCL take any that the system gives."""
    return [{"name": "store", "containerPort": spec.port}]


def beside(spec: JobSpec, site: Site) -> list[KubernetesObject]:
    """Returns the objects beside a job: the recipe's text; a NetworkPolicy for the rendezvous."""
    documents = []
    if spec.recipe_text is not None:
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": metadata(spec, site),
                "data": {PurePosixPath(spec.recipe).name: spec.recipe_text},
            }
        )
    own = {"matchLabels": labels(spec)}
    documents.append(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(spec, site),
            # Egress stays open: names, and data in buckets.
            "spec": {
                "podSelector": own,
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": own}]}],
            },
        }
    )
    return documents


def _volumes(spec: JobSpec) -> tuple[list[KubernetesObject], list[KubernetesObject]]:
    """Returns volumes and their mounts."""
    volumes: list[KubernetesObject] = []
    mounts: list[KubernetesObject] = []

    def add(name: str, where: str, source: KubernetesObject, **more: Any) -> None:
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": where, **more})

    def claim(what: str, where: str, **more: Any) -> KubernetesObject:
        return {"persistentVolumeClaim": {"claimName": claim_of("Kubernetes", what, where), **more}}

    shm = {"medium": "Memory", "sizeLimit": f"{spec.shm_gib}Gi"}
    add("shm", "/dev/shm", {"emptyDir": shm})
    for name, where in container.SCRATCH.items():
        add(name, where, {"emptyDir": {}})
    if spec.cache:
        add("cache", container.CACHE, claim("cache", spec.cache))
    else:
        add("cache", container.CACHE, {"emptyDir": {}})
    add("runs", container.RUNS_MOUNT, claim("runs", spec.runs))
    if spec.data:
        add("data", container.DATA, claim("data", spec.data, readOnly=True), readOnly=True)
    if spec.recipe_text is not None:
        add("recipe", container.RECIPE_MOUNT, {"configMap": {"name": spec.name}}, readOnly=True)
    return volumes, mounts
