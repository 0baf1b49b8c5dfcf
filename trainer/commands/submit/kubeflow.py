"""A job for Kubeflow: TrainJob of its Trainer (v2), or PyTorchJob of its Training Operator (v1)."""

from trainer.commands.submit import container, pods
from trainer.commands.submit.patch import with_site
from trainer.commands.submit.spec import JobSpec, Site
from trainer.errors import EXIT_REQUEUE, BadInputError

# TrainJob's torch plugin gives this one, whatever a job asks for (pkg/constants/constants.go).
_PORT = 29500
# PyTorchJob starts a pod again after the codes from 128 on, and only after these. The shell waits for the
# launcher through the signals, which dumb-init gives to both.
_AGAIN = 128 + EXIT_REQUEUE
_RETRIED = (
    f'trap : TERM INT HUP USR1; "$@"; code=$?; [ "$code" -ne {EXIT_REQUEUE} ] || exit {_AGAIN}; exit "$code"'
)


def render(spec: JobSpec, site: Site) -> str:
    """The objects, one YAML document each.

    Raises:
        BadInputError: For a folder of this machine, root, no image, a patch that matches nothing, or what
            TrainJob has no field for.
    """
    documents = _pytorch_job(spec, site) if site.kubeflow == "v1" else _train_job(spec, site)
    return container.dump(*with_site([*pods.beside(spec, site), *documents], site))


def _train_job(spec: JobSpec, site: Site) -> list[pods.Document]:
    """A runtime of the job's own, because a TrainJob alone can't say most of what a pod needs.

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
    sets = pods.job_set(spec, pods.pod(spec, "node"), labels=ancestor)
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
            "metadata": pods.metadata(spec, site),
            "spec": {
                "runtimeRef": {
                    "apiGroup": "trainer.kubeflow.org",
                    "kind": "TrainingRuntime",
                    "name": spec.name,
                },
                "trainer": {
                    "numNodes": spec.nnodes,
                    "numProcPerNode": spec.ranks,
                    "resourcesPerNode": pods.resources(spec),
                },
            },
        },
    ]


def _pytorch_job(spec: JobSpec, site: Site) -> list[pods.Document]:
    """A master and its workers.

    The operator (from 1.7) sets MASTER_ADDR, MASTER_PORT, PET_MASTER_ADDR, PET_MASTER_PORT, PET_NNODES,
    PET_NPROC_PER_NODE, PET_NODE_RANK, and RANK and WORLD_SIZE, of which RANK counts pods.
    """
    words = ["sh", "-c", _RETRIED, "sh", *container.words(spec)]
    # By its name the operator knows which port is the rendezvous.
    found = [{"name": "pytorchjob-port", "containerPort": spec.port}, pods.ports(spec)[1]]
    replicas = {
        "restartPolicy": "ExitCode",
        "template": pods.pod(spec, "pytorch", ports=found, words=words),
    }
    roles = {"Master": {"replicas": 1, **replicas}}
    if spec.nnodes > 1:
        roles["Worker"] = {"replicas": spec.nnodes - 1, **replicas}
    job = {
        "nprocPerNode": str(spec.ranks),
        # When the master is done, so is the job; what still runs then would run on.
        "runPolicy": {"cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": roles,
    }
    if spec.min_nnodes is not None:
        job["elasticPolicy"] = {
            "minReplicas": spec.min_nnodes,
            "maxReplicas": spec.nnodes,
            "rdzvHost": f"{spec.name}-master-0",
            "rdzvPort": spec.port,
        }
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": pods.metadata(spec, site),
            "spec": job,
        }
    ]
