"""Prints the file of a job, and reads it back as its place does."""

import csv
import itertools
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.commands import command

HEX = 64 * "a"
IMAGE = f"registry.example/trainer@sha256:{HEX}"
IN_IMAGE = ("--image", IMAGE, "--volume", "runs:/workspace/runs")
# A docker, a Slurm, that write down the words they are given. `-` in front of words is of srun's own.
_STAND_INS = """
said() { printf '%s\\0' "$@"; printf '\\n\\0'; }
docker() { said "$@"; }
srun() { said "$@"; env -0; return ${CODE:-0}; }
apptainer() { said "$@"; }
"""


def printed(place: str, *words: str, recipe: str = "digits") -> str:
    """What `trainer job PLACE RECIPE WORDS` prints."""
    return command("job", place, recipe, *words).out


def run_script(
    text: str, folder: Path, before: str = "", **environment: str
) -> "subprocess.CompletedProcess[bytes]":
    """Runs a script in bash; `before` defines more stand-ins."""
    own = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "LC_ALL": "C.UTF-8"}
    given = f"{_STAND_INS}{before}\n{text}".encode()
    env, words = {**own, **environment}, ["/bin/bash"]
    return subprocess.run(words, input=given, env=env, cwd=folder, capture_output=True, check=False)


def words_of(done: "subprocess.CompletedProcess[bytes]") -> tuple[list[str], dict[str, str]]:
    """The words of a script's one call, and the variables that it had."""
    words, _, rest = done.stdout.decode().partition("\n\0")
    return words.split("\0")[:-1], dict(one.partition("=")[::2] for one in rest.split("\0") if one)


def documents(text: str) -> dict[str, Any]:
    """The objects of a file for Kubernetes by their kinds."""
    found = {}
    for document in yaml.safe_load_all(text):
        assert document["kind"] not in found
        found[document["kind"]] = document
    return found


def indexed_job(objects: dict[str, Any]) -> Any:
    """The spec of the Job."""
    if "Job" in objects:
        return objects["Job"]["spec"]
    (replicated,) = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]


def pod_of(objects: dict[str, Any]) -> Any:
    """The spec of a node's pod."""
    return indexed_job(objects)["template"]["spec"]


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


def single(text: str) -> str:
    """Expands variables in a text as a kubelet does; none may be left."""
    assert "$" not in text.replace("$$", ""), text
    return text.replace("$$", "$")


def read(place: str, text: str, folder: Path) -> tuple[list[str], dict[str, str], list[str]]:
    """The trainer's words, the variables and the mounts (SOURCE:TARGET[:ro]) of a job, as its place reads."""
    if place in ("kubernetes", "kubeflow"):
        pod = pod_of(documents(text))
        (node,) = pod["containers"]
        volumes = {one["name"]: one.get("persistentVolumeClaim", {}) for one in pod["volumes"]}
        assert {one["name"] for one in node["volumeMounts"]} == set(volumes)
        claimed = [(one, volumes[one["name"]].get("claimName")) for one in node["volumeMounts"]]
        mounts = [f"{claim}:{one['mountPath']}" + ":ro" * one["readOnly"] for one, claim in claimed if claim]
        environment = {one["name"]: single(one["value"]) for one in node["env"] if "value" in one}
        return [single(word) for word in node["args"]], environment, mounts
    words, environment = words_of(run_script(text, folder))
    if place == "docker":
        options = list(itertools.pairwise(words))
        fields = [next(csv.reader([value])) for name, value in options if name == "--mount"]
        assert all(field[0] == "type=bind" for field in fields)
        mounts = [":".join(one.partition("=")[2] or "ro" for one in field[1:]) for field in fields]
        environment = dict(value.partition("=")[::2] for name, value in options if name == "--env")
        return words[words.index("trainer") :], environment, mounts
    given = dict(word.partition("=")[::2] for word in words[: words.index("trainer")])
    mounts = given["--container-mounts"].split(",") if "--container-mounts" in given else []
    return words[words.index("trainer") :], environment, mounts
