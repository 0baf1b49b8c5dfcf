"""Promise: one specification; a change of it changes every place's file, and each says the same."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from tests.helpers import job_files
from tests.helpers.job_files import IMAGE, PLACES, job
from trainer.commands.submit import carried, container, docker, kubernetes, slurm
from trainer.commands.submit.spec import JobSpec, Site
from trainer.commands.submit.submit import JOB_PLACES as HOW
from trainer.errors import BadInputError
from trainer.launch.nodes import find_nodes, is_rank

# Another value for each field of the specification.
CHANGES: dict[str, Any] = {
    "recipe": "dtmf",
    "settings": ("optim.lr=0.1", "about=$(HOME) $x 'it\"s'"),
    "name": "another",
    "image": "registry.example/trainer:tag",
    "nnodes": 3,
    "min_nnodes": 1,
    "gpus_per_node": 4,
    "nproc_per_node": 3,
    "cpus_per_node": 7,
    "memory_gib": 33,
    "shm_gib": 5,
    "minutes": 90,
    "grace_seconds": 200,
    "data": "other-data",
    "runs": "other-runs",
    "cache": None,
    "port": 30000,
    "user": "1234:99",
    "environment": {"NCCL_DEBUG": "INFO", "ODD": "$(x) $$ $"},
    "recipe_text": "epochs: 3\n",
    "files": {"mine.py": "/srv/mine.py"},
}
# What a place can't do; it must say so.
REFUSED = {("docker", "nnodes"), ("docker", "min_nnodes"), ("trainjob", "min_nnodes"), ("trainjob", "port")}
REFUSED |= {(where, "files") for where in ("job", "jobset", "trainjob")}


def change(where: str, field: str) -> dict[str, Any]:
    value = CHANGES[field]
    if field in ("data", "runs"):
        value = f"/srv/{value}" if where in ("docker", "slurm") else f"pvc:{value}"
    if field == "recipe_text":
        return {"recipe": "mine.yaml", field: value}
    return {"gpus_per_node": 0, field: value} if field == "nproc_per_node" else {field: value}


def read(where: str, spec: JobSpec) -> dict[str, Any]:
    place, site, reader = PLACES[where]
    return reader(HOW[place].render(spec, site))


def port(where: str, spec: JobSpec) -> int | None:
    return spec.port if spec.nnodes > 1 and where not in ("docker", "trainjob") else None


def test_every_field_is_changed() -> None:
    assert set(CHANGES) == set(JobSpec.model_fields)


@pytest.mark.parametrize("where", PLACES)
def test_a_file_says_the_job(where: str) -> None:
    assert read(where, job(where)) == job_files.expected(job(where), port(where, job(where)))


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.parametrize("where", PLACES)
def test_a_changed_field_changes_the_file(where: str, field: str) -> None:
    before, after = job(where), job(where, **change(where, field))
    if (where, field) in REFUSED:
        with pytest.raises(BadInputError):
            read(where, after)
        return
    if field != "recipe_text":
        assert read(where, after) == job_files.expected(after, port(where, after))
    if (where, field) != ("docker", "port"):
        place, site, _ = PLACES[where]
        assert HOW[place].render(before, site) != HOW[place].render(after, site)


@pytest.mark.parametrize("field", sorted(set(CHANGES) - {"recipe_text", "user", "min_nnodes"}))
def test_a_changed_field_changes_the_batch_script(field: str) -> None:
    for changes in ({}, change("slurm", field)):
        spec = job("slurm", **changes)
        wanted = {**job_files.expected(spec, spec.port), "environment": spec.environment}
        del wanted["user"]  # the one who submits it
        assert job_files.read_slurm(slurm.render(spec, Site())) == wanted


@pytest.mark.parametrize("container", ["pyxis", "apptainer", "venv"])
@pytest.mark.parametrize("elastic", [{}, {"min_nnodes": 1}])
def test_a_step_has_the_cpus_of_its_job(container: str, elastic: dict[str, int]) -> None:
    """From Slurm 22.05 on srun doesn't inherit them from sbatch."""
    spec = job("slurm", nnodes=2, cpus_per_node=7, runs="/srv/srun", **elastic)
    text = slurm.render(spec, Site.model_validate({"container": container}))
    (step,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert " --cpus-per-task=7 " in step
    assert "#SBATCH --cpus-per-task=7" in text.splitlines()


def test_what_is_rendered_is_what_nodes_find() -> None:
    """The launcher's own discovery reads what Kubeflow sets."""
    # What the operators set (kubeflow/trainer: pkg/runtime/framework/plugins/torch/torch.go of v2.0.0 to
    # v2.3.0; pkg/controller.v1/pytorch/{envvar,master}.go of v1.7.0 to v1.9.4).
    v2 = {
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "mine-node-0-0.mine",
        "PET_MASTER_PORT": "29500",
    }
    found = find_nodes(v2, None, None, None, None)
    assert found
    assert found[:4] == (3, 1, "mine-node-0-0.mine", 29500)
    v1 = v2 | {
        "PET_NNODES": "3",
        "PET_MASTER_ADDR": "mine-master-0",
        "PET_MASTER_PORT": "30000",
        "PET_RDZV_ENDPOINT": "mine-master-0:30000",
        "PET_RDZV_BACKEND": "c10d",
        "MASTER_ADDR": "mine-master-0",
        "MASTER_PORT": "30000",
        "RANK": "1",
        "WORLD_SIZE": "6",
        "PYTHONUNBUFFERED": "1",
    }
    found = find_nodes(v1, None, None, None, None)
    assert found
    assert found[:4] == (3, 1, "mine-master-0", 30000)
    assert not is_rank(v1)
    assert find_nodes(v2 | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, None, None, None, None) is None


@pytest.mark.parametrize("where", PLACES)
def test_a_recipe_that_is_a_file_comes_along(where: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    spec = job(where, recipe=str(file), recipe_text="epochs: 3\nabout: '# ä'\n")
    place, site, _ = PLACES[where]
    text = HOW[place].render(spec, site)
    if place == "docker":
        assert f"{file}" in text
        assert "/recipe/mine.yaml" in text
        return
    objects = job_files.documents(text)
    assert objects["ConfigMap"]["data"] == {"mine.yaml": spec.recipe_text}
    for _, template in job_files.templates(objects):
        pod = template["spec"]
        (volume,) = (one for one in pod["volumes"] if one["name"] == "recipe")
        assert volume["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
        assert "/recipe/mine.yaml" in pod["containers"][0]["args"]
        assert {"name": "recipe", "mountPath": "/recipe", "readOnly": True} in pod["containers"][0][
            "volumeMounts"
        ]


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)
NAMES = st.from_regex(r"[A-Z][A-Z_]{3,8}", fullmatch=True).filter(lambda name: not name.startswith("MASTER"))


@given(
    values=st.lists(WORDS, max_size=3),
    environment=st.dictionaries(NAMES, WORDS, max_size=3),
    folder=WORDS.filter(lambda name: name not in (".", "..") and "/" not in name and not name.isspace()),
    gpus=st.integers(0, 8),
    shm=st.integers(1, 20),
    minutes=st.integers(62, 10000),
    grace=st.integers(1, 3600),
    where=st.sampled_from(sorted(PLACES)),
)
def test_whatever_a_job_says_every_place_says(
    values: list[str],
    environment: dict[str, str],
    folder: str,
    gpus: int,
    shm: int,
    minutes: int,
    grace: int,
    where: str,
) -> None:
    changes: dict[str, Any] = {
        "settings": tuple(f"about={value}" for value in values),
        "environment": environment,
        "gpus_per_node": gpus,
        "shm_gib": shm,
        "memory_gib": shm + 1,
        "minutes": minutes,
        "grace_seconds": grace,
    }
    if where == "docker" and folder:
        changes["data"] = f"/srv/{folder}"
    spec = job(where, **changes)
    assert read(where, spec) == job_files.expected(spec, port(where, spec))


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("where", ["job", "jobset"])
def test_pods_find_node_0(where: str, nodes: int) -> None:
    spec = job(where, nnodes=nodes, name="mine", min_nnodes=1 if nodes == 3 else None)
    place, site, _ = PLACES[where]
    objects = job_files.documents(HOW[place].render(spec, site))
    pod = job_files.indexed_job(objects)["template"]["spec"]
    variables = {
        one["name"]: one for one in pod["containers"][0]["env"] if one["name"] in job_files.VARIABLES
    }
    if nodes == 1:
        assert not variables
        assert "Service" not in objects
        return
    assert variables["NNODES"]["value"] == "1:3"
    field = variables["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert variables["MASTER_PORT"]["value"] == "29500"
    if where == "job":  # a pod of an Indexed Job is HOST-INDEX.SUBDOMAIN, where a Service has that name
        service = objects["Service"]
        assert variables["MASTER_ADDR"]["value"] == "mine-0.mine"
        assert pod["subdomain"] == service["metadata"]["name"] == "mine"
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        selector = service["spec"]["selector"].items()
        assert selector <= job_files.indexed_job(objects)["template"]["metadata"]["labels"].items()
        assert [one["port"] for one in service["spec"]["ports"]] == [29500]
    else:  # of a JobSet SET-REPLICATED-JOB-POD.SET
        assert variables["MASTER_ADDR"]["value"] == "mine-node-0-0.mine"
        network = objects["JobSet"]["spec"]["network"]
        assert network == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_kubeflow_sets_what_nodes_find_each_other_by() -> None:
    objects = job_files.documents(HOW["kubeflow"].render(job("trainjob"), Site()))
    for _, template in job_files.templates(objects):
        names = {one["name"] for one in template["spec"]["containers"][0]["env"]}
        assert not names & {*job_files.VARIABLES, "RANK", "WORLD_SIZE"}
        assert not any(name.startswith("PET_") for name in names)


def test_a_train_job_says_how_many_ranks_and_which_runtime() -> None:
    objects = job_files.documents(HOW["kubeflow"].render(job("trainjob"), Site()))
    train_job, runtime = objects["TrainJob"]["spec"], objects["TrainingRuntime"]
    assert train_job["trainer"]["numProcPerNode"] == 2
    assert train_job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train_job["runtimeRef"]["kind"] == runtime["kind"]
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # By these two the plugin finds where to set the variables.
    assert replicated["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert replicated["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"


def test_folders_and_claims_have_their_places() -> None:
    with pytest.raises(BadInputError, match="--runs runs: pods on Kubernetes don't see"):
        kubernetes.render(JobSpec(recipe="digits", image=IMAGE), Site())
    with pytest.raises(BadInputError, match="--data pvc:x: docker has no claims"):
        docker.render(JobSpec(recipe="digits", image=IMAGE, data="pvc:x"), Site())


@pytest.mark.parametrize("where", PLACES)
def test_an_image_is_needed(where: str) -> None:
    for image in ("", "trainer.sqsh"):
        with pytest.raises(BadInputError, match="--image"):
            read(where, job(where, image=image))


@pytest.mark.parametrize("where", ["job", "jobset", "trainjob"])
def test_pods_never_run_as_root(where: str) -> None:
    with pytest.raises(BadInputError, match="--user 0:0: these pods never run as root"):
        read(where, job(where, user="0:0"))


@pytest.mark.parametrize("where", ["job", "jobset", "trainjob"])
def test_a_namespace_may_give_pods_their_user(where: str) -> None:
    """As OpenShift's do: a number of ours outside the namespace's range would be refused."""
    place, site, _ = PLACES[where]
    for user, wanted in (("none", {}), ("1234:99", {"runAsUser": 1234, "runAsGroup": 99, "fsGroup": 99})):
        objects = job_files.documents(HOW[place].render(job(where, user=user), site))
        for _, template in job_files.templates(objects):
            found = template["spec"]["securityContext"]
            named = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")
            assert {name: found[name] for name in named if name in found} == wanted
            assert found["runAsNonRoot"] is True
    with pytest.raises(BadInputError, match="--user 1:2147483648: the highest number of Kubernetes is"):
        read(where, job(where, user="1:2147483648"))


def test_only_a_namespace_gives_a_user() -> None:
    with pytest.raises(BadInputError, match="--user none: only Kubernetes gives a container a user"):
        read("docker", job("docker", user="none"))


@pytest.mark.parametrize(
    "environment", [{"RANK": "0"}, {"PET_NNODES": "2"}, {"MASTER_ADDR": "x"}, {"a-b": "1"}, {"": "1"}]
)
def test_variables_of_ours_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        JobSpec(recipe="digits", environment=environment)


@pytest.mark.parametrize("name", ["1st", "-a", "a-", "A", "a_b", "a" * 47, "a.b"])
def test_names_that_no_service_can_have_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="name: "):
        JobSpec(recipe="digits", name=name)


@pytest.mark.parametrize("recipe", ["2d.yaml", "x/-Ä-.yaml", "a" * 90 + ".yaml", "A B.py", "digits"])
def test_default_names_are_names(recipe: str) -> None:
    assert JobSpec(recipe=recipe).name == JobSpec(recipe=recipe).name
    assert JobSpec(recipe=recipe).name != JobSpec(recipe=recipe, settings=("seed=1",)).name


# A launcher that ends with 75 after USR1, with 76 after TERM, and says when it is ready.
PEER = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(76))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
print("ready", flush=True)
while True:  # a signal just before one long sleep would be handled after it
    time.sleep(0.1)
"""
DEAF = PEER.replace("sys.exit(75)", "None")


def limited(script: str, seconds: str, stop: str = "30") -> list[str]:
    """The engine's time limit in front of another command."""
    words = container.timed(JobSpec(recipe="digits", minutes=7, grace_seconds=20))
    assert words[4:6] == ["--kill-after=50", "420"]
    return [*words[:4], f"--kill-after={stop}", seconds, sys.executable, "-c", script]


def when_the_time_is_up(script: str, stop: str) -> int:
    """The exit code of a command; a signal that comes before the command can take it waits until it can."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        return subprocess.run(limited(script, "0.3", stop), stdout=subprocess.DEVNULL, check=False).returncode
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_the_time_limit_ends_an_attempt_with_its_checkpoint() -> None:
    assert when_the_time_is_up(PEER, "120") == 75


def test_what_ignores_the_time_limit_is_killed() -> None:
    assert when_the_time_is_up(DEAF, "0.3") in (137, -signal.SIGKILL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 76), (signal.SIGUSR1, 75)])
def test_a_signal_passes_the_time_limit(number: int, code: int) -> None:
    with subprocess.Popen(limited(PEER, "60"), stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(300) == code


def test_a_folder_that_compute_nodes_may_not_see_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"/home/runs": "nfs4", "/tmp/data": "xfs", "/shared/venv": "lustre"}
    monkeypatch.setattr(carried, "read_mount", lambda path: SimpleNamespace(kind=kinds[str(path)]))
    spec = JobSpec(recipe="digits", runs="/home/runs", data="/tmp/data")
    (line,) = carried.unseen_folders(spec, Site(container="venv", venv="/shared/venv"), {})
    assert line.startswith(
        "--data /tmp/data lies on a disk of this machine (xfs): every node of the job must"
    )


def test_a_signal_must_not_be_due_before_there_is_progress() -> None:
    """Otherwise the job would come back for ever."""
    with pytest.raises(ValueError, match="stop comes 120 s before the end, so 2 minutes are too"):
        JobSpec(recipe="digits", minutes=2)
    assert JobSpec(recipe="digits", minutes=4).stop_seconds == 120


def test_a_port_that_job_numbers_push_too_far_is_refused() -> None:
    with pytest.raises(BadInputError, match="--port 65000: on Slurm up to 999 are added"):
        slurm.render(JobSpec(recipe="digits", port=65000, image="x"), Site())
