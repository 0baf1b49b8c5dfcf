"""Promise: manifests that a cluster accepts, and that do what the exit codes of a run mean."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.job_files import IN_IMAGE, documents, fate, indexed_job, pod_of, printed
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_HANG, EXIT_REQUEUE

# The schemas of Kubernetes build parsers for seconds, once in a process.
pytestmark = pytest.mark.xdist_group("json schema")
PLACES = ("kubernetes", "kubeflow")
SEVERAL = ("--nodes", "3", "data.micro_batch_size=1", "data.global_batch_size=24")
FULL = "--gpus-per-node TYPE:4 --volume data:/data:ro --volume cache:/cache --env-from wandb --namespace lab"

# The fields that the custom resources have, as their definitions say them (in the repositories
# kubernetes-sigs/jobset, config/components/crd, v1alpha2; kubeflow/trainer, manifests/base/crds: v2.0.0 to
# v2.3.0), of those that we write; `job` is Kubernetes' own.
FIELDS = """
apiVersion kind metadata.name metadata.namespace metadata.labels
spec.mlPolicy.numNodes spec.mlPolicy.torch spec.template.metadata.labels
spec.template.spec.network.publishNotReadyAddresses spec.template.spec.network.enableDNSHostnames
spec.template.spec.failurePolicy.maxRestarts spec.template.spec.failurePolicy.restartStrategy
spec.template.spec.failurePolicy.rules.name spec.template.spec.failurePolicy.rules.action
spec.template.spec.failurePolicy.rules.onJobFailureReasons
spec.template.spec.failurePolicy.rules.targetReplicatedJobs
spec.template.spec.successPolicy.operator spec.template.spec.successPolicy.targetReplicatedJobs
spec.template.spec.replicatedJobs.name spec.template.spec.replicatedJobs.replicas
spec.template.spec.replicatedJobs.job
spec.runtimeRef.apiGroup spec.runtimeRef.kind spec.runtimeRef.name
spec.trainer.image spec.trainer.command spec.trainer.args spec.trainer.env
spec.trainer.numNodes spec.trainer.numProcPerNode
spec.trainer.resourcesPerNode.requests spec.trainer.resourcesPerNode.limits
"""


def fields(value: Any, where: str = "") -> set[str]:
    """The fields of a custom resource down to those of `FIELDS`; checks a Job's template in it."""
    several = value if isinstance(value, list) else [value]
    if where in FIELDS.split() or not all(isinstance(one, dict) for one in several):
        return {where}
    found = set[str]()
    for one in several:
        if where.endswith(".replicatedJobs"):
            job = one.pop("template")
            name = {"name": "x", **job.get("metadata", {})}
            check_builtin({"apiVersion": "batch/v1", "kind": "Job", "metadata": name, "spec": job["spec"]})
            found.add(f"{where}.job")
        for name, inside in one.items():
            found |= fields(inside, f"{where}.{name}".removeprefix("."))
    return found


def check_builtin(document: dict[str, Any]) -> None:
    import kubernetes_validate  # here: the import builds parsers for seconds

    kubernetes_validate.validate(document, "1.37", strict=True)


def check_all(text: str) -> None:
    for kind, document in documents(text).items():
        if kind in ("TrainingRuntime", "TrainJob"):
            assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
            assert fields(document) <= set(FIELDS.split())
        else:
            check_builtin(document)


def rendered(place: str, *words: str) -> dict[str, Any]:
    return documents(printed(place, *IN_IMAGE, *words))


@pytest.mark.parametrize("place", PLACES)
def test_manifests_are_valid(place: str) -> None:
    check_all(printed(place, *IN_IMAGE, *SEVERAL, *FULL.split()))
    least = printed(place, *IN_IMAGE, "--user", "none", "--mem", "none", "--shm-size", "8G")
    check_all(least)
    # A namespace may give pods their user, as OpenShift's do: a number outside its range would be refused.
    found = pod_of(documents(least))["securityContext"]
    assert not {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"} & set(found)
    assert found["runAsNonRoot"] is True


@pytest.mark.parametrize("place", PLACES)
def test_exit_codes_decide_what_becomes_of_a_job(place: str) -> None:
    objects = rendered(place, *SEVERAL)
    spec = indexed_job(objects)
    rules = spec["podFailurePolicy"]["rules"]
    names = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert names == {one["name"] for one in pod_of(objects)["containers"]}
    # With a checkpoint another pod goes on, as often as need be; what failed by itself would fail again.
    assert fate(rules, EXIT_REQUEUE) == "Ignore"
    assert fate(rules, EXIT_BAD_INPUT) == fate(rules, EXIT_FAILED) == "FailJob"
    assert fate(rules, EXIT_HANG) == fate(rules, EXIT_DONE) == fate(rules, 137) == "Count"
    for code in (EXIT_REQUEUE, EXIT_FAILED, EXIT_BAD_INPUT, 137, 143):
        assert fate(rules, code, disrupted=True) == "Ignore"
    assert pod_of(objects)["restartPolicy"] == "Never"
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    if place == "kubernetes":  # three hangs: each node's pod ends with the job's code
        assert spec["backoffLimit"] == 3 * 3
        return
    assert spec["backoffLimit"] == 0  # all start again together
    policy = objects["TrainingRuntime"]["spec"]["template"]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


@pytest.mark.parametrize("place", PLACES)
def test_pods_are_shut_in(place: str) -> None:
    pod = pod_of(rendered(place, "--user", "1234:99"))
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(pod)
    user = {"runAsNonRoot": True, "runAsUser": 1234, "runAsGroup": 99, "fsGroup": 99}
    more = {"fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["securityContext"] == {**user, **more}
    (node,) = pod["containers"]
    shut = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    assert node["securityContext"] == {**shut, "capabilities": {"drop": ["ALL"]}}
    assert "command" not in node  # the entrypoint stays the first process
    assert not any("hostPath" in volume for volume in pod["volumes"])
    mounted = {one["mountPath"] for one in node["volumeMounts"]}
    assert {"/tmp", "/home/trainer", "/cache", "/dev/shm", "/workspace/runs"} == mounted


@pytest.mark.parametrize("place", PLACES)
def test_only_pods_of_the_job_reach_its_pods(place: str) -> None:
    objects = rendered(place, "--out", "runs/mine", *SEVERAL, *FULL.split())
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    selected = policy["podSelector"]["matchLabels"]
    assert selected["app.kubernetes.io/instance"] == "mine"
    assert selected == indexed_job(objects)["template"]["metadata"]["labels"]
    (spread,) = pod_of(objects)["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert spread["labelSelector"] == {"matchLabels": selected}
    assert {one["metadata"]["namespace"] for one in objects.values()} == {"lab"}


def test_pods_of_a_job_find_node_0() -> None:
    objects = rendered("kubernetes", "--out", "runs/mine", *SEVERAL, "--master-port", "3000")
    variables = {one["name"]: one for one in pod_of(objects)["containers"][0]["env"]}
    assert variables["NNODES"]["value"] == "3"
    field = variables["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    # A pod of an Indexed Job is HOST-INDEX.SUBDOMAIN, where a Service has that name.
    service = objects["Service"]
    assert (variables["MASTER_ADDR"]["value"], variables["MASTER_PORT"]["value"]) == ("mine-0.mine", "3000")
    assert pod_of(objects)["subdomain"] == service["metadata"]["name"] == "mine"
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == indexed_job(objects)["template"]["metadata"]["labels"]
    assert [one["port"] for one in service["spec"]["ports"]] == [3000]
    assert "Service" not in rendered("kubernetes")


def test_a_train_job_says_how_many_ranks_and_which_runtime() -> None:
    objects = rendered("kubeflow", *SEVERAL, "--gpus-per-node", "2")
    train_job, runtime = objects["TrainJob"]["spec"], objects["TrainingRuntime"]
    assert (train_job["trainer"]["numNodes"], train_job["trainer"]["numProcPerNode"]) == (3, 2)
    assert train_job["trainer"]["resourcesPerNode"] == pod_of(objects)["containers"][0]["resources"]
    assert train_job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train_job["runtimeRef"]["kind"] == runtime["kind"]
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3, "torch": {}}
    # By these two the plugin finds where to set its variables, which nobody else sets.
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["template"]["metadata"]["labels"] == ancestor
    (node,) = pod_of(objects)["containers"]
    assert node["name"] == "node"
    assert {one["name"] for one in node["env"]} == {"TRAINER_IMAGE_DIGEST", "POD_NAME"}


def test_the_patches_of_the_page_fit_the_job() -> None:
    """docs/clusters.md shows how Kustomize changes what is printed."""
    page = (Path(__file__).parents[2] / "docs/clusters.md").read_text()
    kustomization = yaml.safe_load(page.partition("# kustomization.yaml\n")[2].partition("```")[0])
    objects = rendered("kubernetes")
    for patch in kustomization["patches"]:
        for operation in yaml.safe_load(patch["patch"]):
            inside = objects[patch["target"]["kind"]]
            *way, last = operation["path"].removeprefix("/").split("/")
            for part in way:
                inside = inside[part]
            assert operation["op"] == "add" and last not in inside
            inside[last] = operation["value"]
    check_all(yaml.safe_dump_all(objects.values()))
