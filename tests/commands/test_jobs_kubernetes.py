"""Promise: manifests that a cluster accepts, and that do what the exit codes of a run mean."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import job_files
from tests.helpers.job_files import PLACES, job
from trainer.commands.submit import container, pods
from trainer.commands.submit.submit import JOB_PLACES as HOW
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_HANG, EXIT_REQUEUE

# The schemas of Kubernetes build parsers for seconds, once in a process.
pytestmark = pytest.mark.xdist_group("json schema")

PODS = ("job", "jobset", "trainjob")
# Before 1.29 the schema asked for pod conditions in a rule on exit codes, which was a mistake of its.
VERSIONS = ("1.29", "1.37")

# The fields that the custom resources have, as their definitions say them (in the repositories
# kubernetes-sigs/jobset, config/components/crd, v1alpha2; kubeflow/trainer, manifests/base/crds: v2.0.0 to
# v2.3.0). A type, or what lies below; JOB is Kubernetes' own.
JOB = "a Job's template"
META = {"name": str, "namespace": str, "labels": dict}
SETS: dict[str, Any] = {
    "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
    "failurePolicy": {
        "maxRestarts": int,
        "restartStrategy": str,
        "rules": [{"name": str, "action": str, "onJobFailureReasons": list, "targetReplicatedJobs": list}],
    },
    "successPolicy": {"operator": str, "targetReplicatedJobs": list},
    "replicatedJobs": [{"name": str, "replicas": int, "template": JOB}],
    "suspend": bool,
    "ttlSecondsAfterFinished": int,
}
CUSTOM: dict[str, dict[str, Any]] = {
    "JobSet": {"apiVersion": "jobset.x-k8s.io/v1alpha2", "metadata": META, "spec": SETS},
    "TrainingRuntime": {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "metadata": META,
        "spec": {"mlPolicy": {"numNodes": int, "torch": {}}, "template": {"metadata": META, "spec": SETS}},
    },
    "TrainJob": {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "metadata": META,
        "spec": {
            "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
            "trainer": {
                "image": str,
                "command": list,
                "args": list,
                "env": list,
                "numNodes": int,
                "numProcPerNode": int,
                "resourcesPerNode": {"requests": dict, "limits": dict},
            },
            "suspend": bool,
        },
    },
}


def check(shape: Any, value: Any, where: str = "") -> None:
    """Fails on a field that isn't in the shape, or has another type."""
    if shape == JOB:
        fixed = {"apiVersion": "batch/v1", "kind": "Job"}
        check_builtin(
            {**fixed, "metadata": {"name": "x", **value.get("metadata", {})}, "spec": value["spec"]}
        )
    elif isinstance(shape, dict):
        assert isinstance(value, dict), where
        for name, inside in value.items():
            assert name in shape, f"{where}.{name}"
            check(shape[name], inside, f"{where}.{name}")
    elif isinstance(shape, list):
        for index, inside in enumerate(value):
            check(shape[0], inside, f"{where}[{index}]")
    elif isinstance(shape, str):
        assert value == shape, where
    else:
        assert type(value) is shape, where


def check_builtin(document: dict[str, Any]) -> None:
    import kubernetes_validate  # here: the import builds parsers for seconds

    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def check_all(text: str) -> None:
    for document in yaml.load_all(text, yaml.CSafeLoader):
        kind = document["kind"]
        if kind in CUSTOM:
            check({**CUSTOM[kind], "kind": kind}, document, kind)
        elif kind != "Kustomization":
            check_builtin(document)


def rendered(where: str, **changes: Any) -> dict[str, Any]:
    place, site, _ = PLACES[where]
    return job_files.documents(HOW[place].render(job(where, **changes), site))


def each_pod(where: str, **changes: Any) -> Iterator[dict[str, Any]]:
    for _, template in job_files.templates(rendered(where, **changes)):
        yield template["spec"]


@pytest.mark.parametrize(
    "changes", [{}, {"nnodes": 1}, {"gpus_per_node": 0}, {"min_nnodes": 1}, {"cache": None}]
)
@pytest.mark.parametrize("where", PODS)
def test_manifests_are_valid(where: str, changes: dict[str, Any]) -> None:
    if where == "trainjob" and "min_nnodes" in changes:
        return  # refused
    place, site, _ = PLACES[where]
    check_all(HOW[place].render(job(where, recipe_text="epochs: 1\n", recipe="mine.yaml", **changes), site))


def test_the_check_finds_what_is_no_field() -> None:
    import kubernetes_validate

    place, site, _ = PLACES["job"]
    with pytest.raises(kubernetes_validate.ValidationError):
        check_all(HOW[place].render(job("job"), site).replace("restartPolicy:", "restartPolice:"))
    with pytest.raises(AssertionError, match=r"failurePolicy\.maxRestart\n"):
        check_all(HOW[place].render(job("job"), PLACES["jobset"][1]).replace("maxRestarts:", "maxRestart:"))
    with pytest.raises(kubernetes_validate.ValidationError):
        check_all(
            HOW["kubeflow"].render(job("trainjob"), PLACES["trainjob"][1]).replace("emptyDir", "emptyDire")
        )


@pytest.mark.parametrize("where", ["job", "jobset", "trainjob"])
def test_exit_codes_decide_what_becomes_of_a_job(where: str) -> None:
    spec = job_files.indexed_job(rendered(where, nnodes=3))
    rules = spec["podFailurePolicy"]["rules"]
    names = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert names == {one["name"] for one in spec["template"]["spec"]["containers"]}
    # With a checkpoint another pod goes on, as often as need be; bad input stays bad.
    assert job_files.fate(rules, EXIT_REQUEUE) == "Ignore"
    assert job_files.fate(rules, EXIT_BAD_INPUT) == "FailJob"
    assert (
        job_files.fate(rules, EXIT_FAILED)
        == job_files.fate(rules, EXIT_HANG)
        == job_files.fate(rules, EXIT_DONE)
        == "Count"
    )
    for code in (EXIT_REQUEUE, EXIT_FAILED, EXIT_BAD_INPUT, 137, 143):
        assert job_files.fate(rules, code, disrupted=True) == "Ignore"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 3
    # What failed is tried twice more by all: pod by pod in a Job, together in a JobSet.
    assert spec["backoffLimit"] == (2 * 3 if where == "job" else 0)


@pytest.mark.parametrize("where", ["jobset", "trainjob"])
def test_a_job_set_starts_again_together_but_not_with_bad_input(where: str) -> None:
    objects = rendered(where)
    sets = objects["JobSet"] if where == "jobset" else objects["TrainingRuntime"]["spec"]["template"]
    policy = sets["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == pods.RETRIES
    (rule,) = policy["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize("where", PODS)
def test_pods_are_shut_in(where: str) -> None:
    for pod in each_pod(where, user="1234:99"):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(pod)
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 1234,
            "runAsGroup": 99,
            "fsGroup": 99,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert pod["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("hostPath" in volume for volume in pod["volumes"])


@pytest.mark.parametrize("where", PODS)
def test_only_pods_of_the_job_reach_its_pods(where: str) -> None:
    objects = rendered(where, name="mine")
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    selected = policy["podSelector"]["matchLabels"]
    assert selected["app.kubernetes.io/instance"] == "mine"
    for _, template in job_files.templates(objects):
        assert selected.items() <= template["metadata"]["labels"].items()
    assert objects["NetworkPolicy"]["metadata"]["namespace"] == "default"


@pytest.mark.parametrize("where", PODS)
def test_nodes_are_spread_over_hosts(where: str) -> None:
    objects = rendered(where)
    for _, template in job_files.templates(objects):
        (spread,) = template["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
        assert spread["labelSelector"]["matchLabels"] == template["metadata"]["labels"]


@pytest.mark.parametrize("where", PODS)
def test_the_namespace_is_everywhere(where: str) -> None:
    place, site, _ = PLACES[where]
    text = HOW[place].render(
        job(where, recipe_text="x: 1", recipe="a.yaml"), site.model_copy(update={"namespace": "lab"})
    )
    assert {one["metadata"]["namespace"] for one in yaml.safe_load_all(text)} == {"lab"}


@pytest.mark.parametrize("where", PODS)
def test_a_stop_leaves_more_time_than_the_ranks_take(where: str) -> None:
    for pod in each_pod(where, grace_seconds=77):
        args = pod["containers"][0]["args"]
        assert args[args.index("--grace") + 1] == "77"
        assert pod["terminationGracePeriodSeconds"] > 77


def test_the_patches_of_the_page_fit_the_job() -> None:
    """docs/clusters.md shows how Kustomize changes what --dry-run prints."""
    page = (Path(__file__).parents[2] / "docs/clusters.md").read_text()
    kustomization = yaml.safe_load(page.partition("# kustomization.yaml\n")[2].partition("```")[0])
    documents = job_files.documents(HOW["kubernetes"].render(job("job"), PLACES["job"][1]))
    for patch in kustomization["patches"]:
        for operation in yaml.safe_load(patch["patch"]):
            inside = documents[patch["target"]["kind"]]
            *way, last = operation["path"].removeprefix("/").split("/")
            for part in way:
                inside = inside[part]
            assert operation["op"] == "add" and last not in inside
            inside[last] = operation["value"]
    check_all(container.to_yaml(*documents.values()))
