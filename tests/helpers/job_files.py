"""Reads what was rendered for a place back to what it means there, by each place's own rules."""

import csv
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from trainer.commands.submit.spec import JobPlace, JobSpec, Site

GIB = {"g": 1, "Gi": 1}
VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def expected(spec: JobSpec, port: int | None = None) -> dict[str, Any]:
    """Returns the expected meaning of every place's file for a job; `port`: the file's field of the port."""
    digest = spec.image.partition("@")[2]
    return {
        "name": spec.name,
        "image": spec.image,
        "nnodes": spec.nnodes,
        "gpus": spec.gpus_per_node,
        "cpus": spec.cpus_per_node,
        "memory": spec.memory_gib,
        "shm": spec.shm_gib,
        "seconds": spec.minutes * 60,
        "stop": spec.stop_seconds,
        "user": spec.user,
        "environment": {
            **({"TRAINER_IMAGE_DIGEST": digest} if digest else {}),
            **({} if spec.gpus_per_node else {"NVIDIA_VISIBLE_DEVICES": "void"}),
            **spec.environment,
        },
        "mounts": {
            target: where
            for target, where in (
                ("/workspace/runs", spec.runs),
                ("/data", spec.data),
                ("/cache", spec.cache),
            )
            if where
        }
        | {f"/recipe/{name}": file for name, file in spec.files.items()},
        "command": spec.command(),
        "port": port,
    }


def read_docker(text: str) -> dict[str, Any]:
    """Parses as a shell and the engine do."""
    shell = "docker() { printf '%s\\0' \"$@\"; }\n" + text
    done = subprocess.run(["/bin/sh"], input=shell.encode(), capture_output=True, check=True)
    words = done.stdout.decode().split("\0")[:-1]
    assert words.pop(0) == "run"
    found: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        name = words.pop(0)[2:]
        flag = name in ("detach", "read-only")
        found.setdefault(name, []).append("" if flag else words.pop(0))
    mounts = {}
    for mount in found["mount"]:
        fields = dict(field.partition("=")[::2] for field in next(csv.reader([mount])))
        assert fields["type"] == "bind"
        assert ("readonly" in fields) == fields["target"].startswith(("/data", "/recipe/"))
        mounts[fields["target"]] = fields["source"]
    assert found["cap-drop"] == ["ALL"]
    assert found["security-opt"] == ["no-new-privileges"]
    assert "read-only" in found
    assert _writable({*(one.partition(":")[0] for one in found["tmpfs"]), *mounts})
    assert all(one.endswith(":exec") for one in found["tmpfs"])
    seconds, command = _untimed(words[1:], found["stop-timeout"][0])
    return {
        "name": found["name"][0],
        "image": words[0],
        "nnodes": 1,
        "gpus": int(found.get("gpus", ["0"])[0]),
        "cpus": int(found["cpus"][0]),
        "memory": _gib(found["memory"][0]),
        "shm": _gib(found["shm-size"][0]),
        "seconds": seconds,
        "stop": int(found["stop-timeout"][0]),
        "user": found["user"][0],
        "environment": dict(one.partition("=")[::2] for one in found.get("env", [])),
        "mounts": mounts,
        "command": command,
        "port": None,
    }


def read_slurm(text: str) -> dict[str, Any]:
    """Parses as sbatch, the shell and Pyxis do; Slurm has no user option, and no limit for /dev/shm."""
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.M))
    shell = "export() { printf 'E%s\\0' \"$@\"; }\nset() { printf 'S%s\\0' \"$@\"; }\n"
    shell += "df() { echo 0; }; mkdir() { :; }; scontrol() { :; }; SLURM_JOB_ID=0\n"
    shell += "srun() { printf 'R%s\\0' \"$@\"; }\n" + text
    done = subprocess.run(["/bin/bash"], input=shell.encode(), capture_output=True, check=False)
    said = [word for word in done.stdout.decode().split("\0") if word]
    environment = dict(word[1:].partition("=")[::2] for word in said if word.startswith("E"))
    command = [word[1:] for word in said if word.startswith("S")]
    assert command[:3] == ["-u", "--", "trainer"]
    (mounted,) = [word for word in said if word.startswith("R--container-mounts=")]
    mounts = [mount.split(":") for mount in mounted.partition("=")[2].split(",")]
    (image,) = [word.partition("=")[2] for word in said if word.startswith("R--container-image=")]
    shm = re.search(r"smaller than (\d+) GiB", text)
    assert shm
    # A step takes them from its job only below Slurm 22.05.
    assert f"R--cpus-per-task={options['cpus-per-task']}" in said
    return {
        "name": options["job-name"],
        "image": image.replace("#", "/"),
        "nnodes": int(options["nodes"]),
        "gpus": int(options.get("gpus-per-node", 0)),
        "cpus": int(options["cpus-per-task"]),
        "memory": int(options["mem"].removesuffix("G")),
        "shm": int(shm[1]),
        "seconds": int(options["time"]) * 60,
        "stop": int(options["signal"].removeprefix("USR1@")),
        "environment": {name: value for name, value in environment.items() if name not in VARIABLES},
        "mounts": {mount[1]: mount[0] for mount in mounts},
        "command": command[2:],
        "port": int(environment["MASTER_PORT"]),
    }


def documents(text: str) -> dict[str, Any]:
    """The objects of a file for Kubernetes by their kinds."""
    found = {}
    for document in yaml.load_all(text, yaml.CSafeLoader):
        assert document["kind"] not in found
        found[document["kind"]] = document
    return found


def templates(objects: dict[str, Any]) -> list[tuple[int, Any]]:
    """Pod templates and how many pods each has, of a Job, a JobSet or a TrainJob."""
    job = indexed_job(objects)
    assert job["completions"] == job["parallelism"]
    return [(job["completions"], job["template"])]


def indexed_job(objects: dict[str, Any]) -> Any:
    """The spec of the Job."""
    if "Job" in objects:
        return objects["Job"]["spec"]
    if "JobSet" in objects:
        sets = objects["JobSet"]["spec"]
    else:
        sets = objects["TrainingRuntime"]["spec"]["template"]["spec"]
    (replicated,) = sets["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]


def fate(rules: list[dict[str, Any]], code: int, disrupted: bool = False) -> str:
    """What becomes of a Job one of whose pods ended so: the first rule that fits, as the API says."""
    for rule in rules:
        conditions = rule.get("onPodConditions", [])
        if disrupted and {"type": "DisruptionTarget", "status": "True"} in conditions:
            return str(rule["action"])
        codes = rule.get("onExitCodes")
        if codes and codes["operator"] == "In" and code in codes["values"] and code != 0:
            return str(rule["action"])
    return "Count"


def read_kubernetes(text: str) -> dict[str, Any]:
    """Parses as Kubernetes and Kubeflow's operators do; all pods must be the same."""
    objects = documents(text)
    names = {document["metadata"]["name"] for document in objects.values()}
    assert len(names) == 1
    pods = templates(objects)
    node = _pod(pods[0][1])
    assert all(_pod(template) == node for _, template in pods)
    nodes = sum(count for count, _ in pods)
    if "TrainJob" in objects:
        asked = objects["TrainJob"]["spec"]["trainer"]
        runtime = objects["TrainingRuntime"]["spec"]
        assert asked["numNodes"] == runtime["mlPolicy"]["numNodes"] == nodes
        container = indexed_job(objects)["template"]["spec"]["containers"][0]
        assert asked["resourcesPerNode"] == container["resources"]
    return {**node, "name": names.pop(), "nnodes": nodes}


def _pod(template: Any) -> dict[str, Any]:
    spec = template["spec"]
    (container,) = spec["containers"]
    assert "command" not in container  # the entrypoint stays the first process
    assert container["resources"]["requests"] == container["resources"]["limits"]
    limits = container["resources"]["limits"]
    environment = {one["name"]: single(one["value"]) for one in container["env"] if "value" in one}
    for name in VARIABLES:
        environment.pop(name, None)
    volumes = {one["name"]: one for one in spec["volumes"]}
    mounts = {}
    for mount in container["volumeMounts"]:
        volume = volumes.pop(mount["name"])
        mounts[mount["mountPath"]] = (volume, mount.get("readOnly", False))
    assert not volumes
    assert _writable(set(mounts))
    claims = {}
    for where, (volume, read_only) in mounts.items():
        assert read_only == (where in ("/data", "/recipe"))
        if claim := volume.get("persistentVolumeClaim"):
            claims[where] = f"pvc:{claim['claimName']}"
            assert claim.get("readOnly", False) == read_only
    shm = mounts["/dev/shm"][0]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert _gib(shm["sizeLimit"]) < _gib(limits["memory"])
    security = spec["securityContext"]
    ports = [one["containerPort"] for one in container.get("ports", [])]
    assert len(ports) <= 1
    return {
        "image": container["image"],
        "gpus": int(limits.get("nvidia.com/gpu", 0)),
        "cpus": int(limits["cpu"]),
        "memory": _gib(limits["memory"]),
        "shm": _gib(shm["sizeLimit"]),
        "seconds": spec["activeDeadlineSeconds"],
        "stop": spec["terminationGracePeriodSeconds"],
        "user": f"{security['runAsUser']}:{security['runAsGroup']}",
        "environment": environment,
        "mounts": claims,
        "command": [single(word) for word in container["args"]],
        "port": ports[0] if ports else None,
    }


def single(text: str) -> str:
    """Expands variables in a text; none may be left."""
    assert not re.search(r"\$", text.replace("$$", "")), text
    return text.replace("$$", "$")


def _untimed(words: Sequence[str], stop: str) -> tuple[int, list[str]]:
    fixed = ["timeout", "--foreground", "--preserve-status", "--signal=USR1", f"--kill-after={stop}"]
    assert list(words[:5]) == fixed
    return int(words[5]), list(words[6:])


def _gib(text: str) -> int:
    found = re.fullmatch(r"(\d+)(g|Gi)", text)
    assert found, text
    return int(found[1]) * GIB[found[2]]


def _writable(mounted: set[str]) -> bool:
    """Whether all is mounted that the image writes to, as its root is read-only."""
    return {"/tmp", "/home/trainer", "/cache", "/workspace/runs"} <= mounted


IMAGE = f"registry.example/trainer@sha256:{64 * 'a'}"
# Several nodes on claims, and what an engine gets instead.
FIELDS: dict[str, Any] = {
    "recipe": "digits",
    "image": IMAGE,
    "nnodes": 2,
    "gpus_per_node": 2,
    "runs": "pvc:runs",
    "data": "pvc:data",
    "cache": "pvc:cache",
}
ENGINE = {"runs": "/srv/runs", "data": "/srv/data", "cache": "/srv/cache"}
Read = Callable[[str], dict[str, Any]]
PLACES: dict[str, tuple[JobPlace, Site, Read]] = {
    "docker": ("docker", Site(), read_docker),
    "job": ("kubernetes", Site(), read_kubernetes),
    "jobset": ("kubernetes", Site(jobset=True), read_kubernetes),
    "trainjob": ("kubeflow", Site(), read_kubernetes),
}


def job(where: str, **changes: Any) -> JobSpec:
    """A job for a place: hosts have folders, and docker one node."""
    fields = {**FIELDS, **changes}
    if where in ("docker", "slurm"):
        fields |= {name: folder for name, folder in ENGINE.items() if name not in changes}
    if where == "docker" and "nnodes" not in changes and "min_nnodes" not in changes:
        fields["nnodes"] = 1
    return JobSpec(**fields)
