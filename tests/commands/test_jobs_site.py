"""Promise: a site's own words reach its jobs, said once in a file or typed, and no secret is written down."""

import itertools
import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands.test_jobs_kubernetes import PODS, check_all
from tests.commands.test_jobs_launch import CLUSTER, ENGINE, refused
from tests.helpers import job_files
from tests.helpers.job_files import PLACES, job
from trainer.cli import main
from trainer.commands.submit import patch as patches, slurm
from trainer.commands.submit.patch import with_site
from trainer.commands.submit.places import JOB_PLACES as HOW
from trainer.commands.submit.site_file import SiteFile
from trainer.commands.submit.spec import JobPlace, JobSpec, Site
from trainer.errors import BadInputError

# The schemas of Kubernetes build parsers for seconds, once in a process.
pytestmark = pytest.mark.xdist_group("json schema")

NAMES = {"job": "trainer", "jobset": "trainer", "trainjob": "node"}
KINDS = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, from which jobs are submitted, and no site file but what a test writes."""
    (tmp_path / "work").mkdir()
    (tmp_path / "config" / "trainer").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def rendered(where: str, **words: Any) -> dict[str, Any]:
    place, site, _ = PLACES[where]
    text = HOW[place].render(job(where), Site.model_validate({**site.model_dump(), **words}))
    check_all(text)
    return job_files.documents(text)


def pods(objects: dict[str, Any]) -> list[Any]:
    return [template for _, template in job_files.templates(objects)]


def patched(where: str, text: str) -> dict[str, Any]:
    Path("lab.yaml").write_text(text)
    return rendered(where, patch=(Path("lab.yaml"),))


@pytest.mark.parametrize("where", PODS)
def test_options_for_pods_reach_every_pod(where: str) -> None:
    words = {"queue": "team", "service_account": "reader", "rdma": "rdma/hca=2"}
    before, after = rendered(where), rendered(where, **words, env_from=("secret:wandb", "secret:hub"))
    assert len(pods(after)) == 1
    for template, old in zip(pods(after), pods(before), strict=True):
        spec, (container,) = template["spec"], template["spec"]["containers"]
        assert spec.pop("serviceAccountName") == "reader"
        assert spec["automountServiceAccountToken"] is False
        assert container.pop("envFrom") == [{"secretRef": {"name": name}} for name in ("wandb", "hub")]
        for amounts in container["resources"].values():
            assert amounts.pop("rdma/hca") == "2"
        assert template == old  # and nothing else of it
    labels = after[KINDS[where]]["metadata"]["labels"]
    assert labels.pop("kueue.x-k8s.io/queue-name") == "team"
    if where == "trainjob":  # it would put its own in the place of its runtime's
        amounts = after["TrainJob"]["spec"]["trainer"]["resourcesPerNode"]
        assert [one.pop("rdma/hca") for one in amounts.values()] == ["2", "2"]
    assert after == before


POD = """
kind: Pod
metadata: {{labels: {{team: a}}}}
spec:
  priorityClassName: low
  nodeSelector: {{gpu: h100}}
  tolerations: [{{key: gpu, operator: Exists, effect: NoSchedule}}]
  imagePullSecrets: [{{name: registry}}]
  containers:
  - name: {name}
    env: [{{name: NCCL_DEBUG, value: INFO}}, {{name: POD_NAME, value: mine, valueFrom: null}}]
    resources: {{requests: {{vpc.amazonaws.com/efa: 4}}, limits: {{vpc.amazonaws.com/efa: 4}}}}
    volumeMounts: [{{name: scratch, mountPath: /tmp}}]
  volumes: [{{name: scratch, hostPath: {{path: /scratch}}}}, {{name: tmp, emptyDir: {{sizeLimit: 1Gi}}}}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{annotations: {{owner: lab}}}}
spec: {{policyTypes: null}}
"""


@pytest.mark.parametrize("where", PODS)
def test_a_patch_is_merged_into_every_manifest(where: str) -> None:
    after, before = patched(where, POD.format(name=NAMES[where])), rendered(where)
    for template, old in zip(pods(after), pods(before), strict=True):
        spec, old_spec = template["spec"], old["spec"]
        assert template["metadata"]["labels"] == {**old["metadata"]["labels"], "team": "a"}
        assert spec["priorityClassName"] == "low"
        assert spec["nodeSelector"] == {"gpu": "h100"}
        assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        (container,), (old_container,) = spec["containers"], old_spec["containers"]
        assert container["args"] == old_container["args"]
        variables = {one["name"]: one for one in container["env"]}
        assert list(variables) == [*(one["name"] for one in old_container["env"]), "NCCL_DEBUG"]
        assert variables["POD_NAME"] == {"name": "POD_NAME", "value": "mine"}
        wanted = {**old_container["resources"]["limits"], "vpc.amazonaws.com/efa": 4}
        assert container["resources"] == {"requests": wanted, "limits": wanted}
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert mounts == {one["mountPath"]: one["name"] for one in old_container["volumeMounts"]} | {
            "/tmp": "scratch"
        }
        volumes = {one["name"]: one for one in spec["volumes"]}
        assert volumes["tmp"] == {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}
        assert volumes["scratch"] == {"name": "scratch", "hostPath": {"path": "/scratch"}}
        assert len(volumes) == len(old_spec["volumes"]) + 1
    assert after["NetworkPolicy"]["metadata"]["annotations"] == {"owner": "lab"}
    assert "policyTypes" not in after["NetworkPolicy"]["spec"]
    if where == "trainjob":
        limits = after["TrainJob"]["spec"]["trainer"]["resourcesPerNode"]["limits"]
        assert limits == pods(after)[0]["spec"]["containers"][0]["resources"]["limits"]


def sorted_lists(value: Any) -> Any:
    """Kubernetes gives no meaning to the order of lists with keys, which is all that may differ."""
    if isinstance(value, dict):
        return {key: sorted_lists(inside) for key, inside in value.items()}
    if isinstance(value, list):
        found = [sorted_lists(inside) for inside in value]
        mappings = any(isinstance(one, dict) for one in found)
        return sorted(found, key=partial(json.dumps, sort_keys=True)) if mappings else found
    return value


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here, whose merge is compared")
def test_the_merge_is_that_of_kubernetes(here: Path) -> None:
    """A patch of a Job gives what `kubectl kustomize` makes of the two."""
    place, site, _ = PLACES["job"]
    text = HOW[place].render(job("job", name="mine"), site)
    (template,) = [one for one in yaml.safe_load_all(POD.format(name="trainer")) if one["kind"] == "Pod"]
    change: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "mine"}}
    host = {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2}
    zone = {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}
    template["spec"]["topologySpreadConstraints"] = [host, zone]
    template["spec"]["containers"][0]["args"] = ["trainer", "--version"]
    template["spec"]["initContainers"] = [{"name": "first", "image": "busybox"}]
    change["spec"] = {
        "backoffLimit": 9,
        "template": {key: template[key] for key in ("metadata", "spec")},
        "podFailurePolicy": {"rules": []},
    }
    folder = here / "kustomize"
    folder.mkdir()
    (folder / "job.yaml").write_text(text)
    (folder / "patch.yaml").write_text(yaml.safe_dump(change))
    (folder / "kustomization.yaml").write_text("resources: [job.yaml]\npatches: [{path: patch.yaml}]\n")
    words = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "HOME": "/x"})
    ours = with_site(list(yaml.safe_load_all(text)), Site(patch=(folder / "patch.yaml",)))
    theirs = job_files.documents(done.stdout)
    assert sorted_lists({one["kind"]: one for one in ours}) == sorted_lists(theirs)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "kind: Deployment\nspec: {x: 1}",
            "document 1: no Deployment is rendered here; there are networking",
        ),
        ("kind: Job\nmetadata: {name: other}\nspec: {suspend: true}", "no Job other is rendered here"),
        ("apiVersion: batch/v2\nkind: Job\nspec: {x: 1}", "no batch/v2 Job is rendered here"),
        (
            "kind: Pod\nspec: {containers: [{name: main, tty: true}]}",
            "no container 'main' is rendered here; ",
        ),
        (
            "kind: Pod\nspec: {containers: [{tty: true}]}",
            "no container 'None' is rendered here; there is trainer",
        ),
        ("kind: Pod\nmetadata: {name: x}\nspec: {x: 1}", "metadata.name: it is for every pod; leave it out"),
        ("kind: Pod", "kind Pod and nothing to change"),
        ("kind: Job\nmetadata: {namespace: default}", "kind Job and nothing to change"),
        ("spec: {x: 1}", "each document says what it changes: kind: Pod"),
        ("[1]", "each document says what it changes"),
        ("", "it is empty"),
        (
            "kind: Pod\nspec: {containers: {}}",
            "Pod.spec.containers: a list is rendered there, and the patch has a m",
        ),
        ("kind: Pod\nspec: {securityContext: 1}", "Pod.spec.securityContext: a mapping is rendered there"),
        (
            "kind: Pod\nspec: {volumes: [{emptyDir: {}}]}",
            "Pod.spec.volumes: each entry needs its name, which",
        ),
        ("kind: Pod\nspec: {$patch: replace}", "Pod.spec.$patch: no directives here: null takes a key away"),
        (
            "kind: Pod\nspec: {containers: [{name: trainer, env: [{name: HF_TOKEN, value: abc}]}]}",
            "env HF_TOKEN",
        ),
        (
            "kind: Pod\nspec: {containers: [{name: trainer, env: [{name: HF_TOKEN, value: 12345}]}]}",
            "env HF_TOKEN",
        ),
        (
            "kind: Pod\nspec: {containers: [{name: trainer, args: [--password, abc]}]}",
            "a secret in plain text",
        ),
        ("kind: Pod\nmetadata: {annotations: {vault-token: abc}}", "annotations vault-token"),
        ("kind: Pod\n  spec: 1", "line 2 not valid YAML"),
    ],
)
def test_a_patch_that_does_nothing_or_harm_is_refused(
    text: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lab.yaml").write_text(text)
    words = ["digits", "--on", "kubernetes", *CLUSTER, "--patch", "lab.yaml", "--dry-run"]
    line = refused(words, capsys)
    assert line.startswith("--patch lab.yaml: ")
    assert wanted in line


def test_a_container_may_be_added_by_its_image() -> None:
    text = "kind: Pod\nspec: {containers: [{name: side, image: busybox}]}"
    (template,) = pods(patched("job", text))
    assert [one["name"] for one in template["spec"]["containers"]] == ["trainer", "side"]


WRONG_PLACE = [
    ("docker", ["--queue", "q"], "--queue: docker has none; Slurm's are --partition and --qos"),
    ("slurm", ["--queue", "q"], "--queue: slurm has none; Slurm's are --partition and --qos"),
    ("slurm", ["--service-account", "s"], "--service-account: slurm has none"),
    ("docker", ["--patch", "x.yaml"], "--patch: docker has none"),
    (
        "kubernetes",
        ["--sbatch-arg=--nice"],
        "--sbatch-arg: kubernetes has none; what else pods are to have, --patch",
    ),
    ("docker", ["--rdma", "host"], "--rdma: docker has none; its container is on this machine"),
    (
        "kubernetes",
        ["--rdma", "host"],
        "--rdma host: on kubernetes give RESOURCE=N, as rdma/hca_shared_devices",
    ),
    ("slurm", ["--rdma", "rdma/hca=1"], "--rdma rdma/hca=1: on slurm give host"),
    (
        "slurm",
        ["--rdma", "mlx5"],
        "--rdma mlx5: give host (Slurm), or a device plugin's resource and a number",
    ),
    ("slurm", ["--env-from", "secret:x"], "--env-from secret:x names no file: give --env-from file:PATH"),
    ("docker", ["--env-from", "x"], "--env-from x names no file: give --env-from file:PATH"),
    (
        "kubernetes",
        ["--env-from", "file:x"],
        "--env-from file:x names no Secret; give --env-from secret:NAME",
    ),
    (
        "kubeflow",
        ["--env-from", "secret:A_B"],
        "--env-from secret:A_B names no Secret; give --env-from secret:NAME",
    ),
    (
        "kubernetes",
        ["--queue", "Team A"],
        "--queue Team A: a name there has a-z, 0-9, '-' and '.', a letter or",
    ),
    ("kubernetes", ["--service-account", "A"], "--service-account A: a name there has"),
    ("kubernetes", ["--user", "me"], "--user me: give two numbers, UID:GID, as 1000:1000"),
    ("docker", ["--site", "none.yaml"], "--site none.yaml: can't be read (No such file or directory)"),
]


@pytest.mark.parametrize(("place", "words", "wanted"), WRONG_PLACE)
def test_a_word_that_a_place_lacks_is_refused(
    place: str, words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = CLUSTER if place in ("kubernetes", "kubeflow") else ENGINE
    assert refused(["digits", "--on", place, *where, *words, "--dry-run"], capsys).startswith(wanted)


SECRETS = [
    "HF_TOKEN=abc",
    "WANDB_API_KEY=abc",
    "AWS_SECRET_ACCESS_KEY=abc",
    "HTTPS_PROXY=http://me:pw@proxy:80",
]


@pytest.mark.parametrize(("word", "place"), [*itertools.product(SECRETS, HOW)])
def test_a_secret_is_never_written_down(
    word: str, place: JobPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    where = CLUSTER if place in ("kubernetes", "kubeflow") else ENGINE
    line = refused(["digits", "--on", place, *where, "--env", word, "--dry-run"], capsys)
    name, _, value = word.partition("=")
    assert line.startswith(f"--env {name} looks like a secret, which isn't written down in plain text: ")
    assert value not in line
    assert ("--env-from secret:mine" in line) == (where is CLUSTER)
    assert ("--env-from file:PATH" in line) == (where is ENGINE)


def test_what_only_sounds_like_a_secret_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env", "TOKENIZERS_PARALLELISM=false", "--env", "HF_TOKEN=", "--dry-run"]
    assert main(["submit", "digits", "--on", "docker", *ENGINE, *words]) == 0
    environment = job_files.read_docker(capsys.readouterr().out)["environment"]
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert environment["HF_TOKEN"] == ""


VARIABLES = "# of the lab\nWANDB_API_KEY=a-b_c.d/e+f=\n\nHF_TOKEN=x:y"


def secret_file() -> str:
    file = Path("secrets.env")
    file.write_text(VARIABLES)
    file.chmod(0o600)
    return f"file:{file}"


def test_a_file_of_variables_is_named_and_not_read_into_the_job(here: Path) -> None:
    site = Site(env_from=(secret_file(),))
    path = str(here / "work" / "secrets.env")
    docker = HOW["docker"].render(job("docker"), site)
    assert f"--env-file {path}" in docker
    spec = job("slurm")
    scripts = [
        slurm.render(spec, site.model_copy(update={"container": how})) for how in ("pyxis", "apptainer")
    ]
    # Apptainer empties the environment: what the file sets must come through.
    assert "CUDA_VISIBLE_DEVICES|WANDB_API_KEY|HF_TOKEN)" in scripts[1]
    for text in (docker, *scripts):
        assert "a-b_c" not in text


def test_the_shell_reads_the_file_as_the_engines_do() -> None:
    text = slurm.render(job("slurm"), Site(env_from=(secret_file(),)))
    lines = text[text.index("while IFS") : text.index("|| exit 2") + len("|| exit 2")]
    show = f'{lines}\nprintf \'%s\\n\' "$WANDB_API_KEY" "$HF_TOKEN"'
    done = subprocess.run(["/bin/bash", "-uc", show], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a-b_c.d/e+f=", "x:y"]
    Path("secrets.env").unlink()
    assert subprocess.run(["/bin/bash", "-uc", show], capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize(
    ("text", "mode", "wanted"),
    [
        (VARIABLES, 0o640, "others may read it: chmod 600 "),
        ("A=b\nexport C=d\n", 0o600, "line 2: give NAME=VALUE"),
        ('A="b"', 0o600, "line 1: give NAME=VALUE"),
        ("A=$HOME", 0o600, "line 1: give NAME=VALUE"),
        ("A", 0o600, "line 1: give NAME=VALUE"),
    ],
)
def test_a_file_that_is_read_otherwise_elsewhere_is_refused(
    text: str, mode: int, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s").write_text(text)
    Path("s").chmod(mode)
    line = refused(["digits", "--on", "docker", *ENGINE, "--env-from", "file:s", "--dry-run"], capsys)
    assert line.startswith(f"--env-from file:s: {wanted}")


def options_of(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_options_of_sbatch_are_given_on() -> None:
    words = ("constraint=h100", "--nice", "--comment=a b", "--constraint=a100")
    text = slurm.render(job("slurm"), Site(sbatch_arg=words))
    assert options_of(text)[-3:] == ["--constraint=a100", "--nice", "--comment='a b'"]


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("--nodes=3", "give --nnodes"),
        ("--part=gpu", "give --partition"),
        ("gpus=8", "give --gpus-per-node"),
        ("no-requeue", "the script requeues the job after its checkpoint"),
        ("-C h100", "give a long option of sbatch, as --sbatch-arg=--constraint=h100"),
        ("--comment=it's", "quotes, \\ and line breaks can't be given on"),
        ("--comment=a\n#SBATCH --nice", "quotes, \\ and line breaks can't be given on"),
    ],
)
def test_options_that_the_script_has_are_refused(word: str, wanted: str) -> None:
    with pytest.raises(BadInputError) as raised:
        slurm.render(job("slurm"), Site(sbatch_arg=(word,)))
    assert str(raised.value) == f"--sbatch-arg {word}: {wanted}"


def test_every_option_that_the_script_has_is_refused() -> None:
    spec = job("slurm", min_nnodes=1)
    text = slurm.render(spec, Site(partition="p", account="a", qos="q"))
    names = {option[2:].partition("=")[0] for option in options_of(text)}
    assert names | {"array"} <= set(slurm._OURS)


@pytest.mark.parametrize("how", ["pyxis", "apptainer", "venv"])
def test_rdma_on_slurm_brings_the_devices_and_the_limit(how: str) -> None:
    text = slurm.render(job("slurm"), Site.model_validate({"container": how, "rdma": "host"}))
    assert ("/dev/infiniband:/dev/infiniband" in text) == (how != "venv")
    assert "ulimit -l unlimited" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--rdma", "rdma/hca=1"], "IB"),
        (["--rdma", "rdma/hca=1", "--env", "NCCL_NET=Socket"], "Socket"),
        (["--rdma", "vpc.amazonaws.com/efa=4"], None),  # the plugin has another name
        ([], None),
    ],
)
def test_with_rdma_nccl_never_takes_tcp_without_a_word(
    words: list[str], wanted: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "digits", "--on", "kubernetes", *CLUSTER, *words, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert job_files.read_kubernetes(said.out)["environment"].get("NCCL_NET") == wanted
    assert ("aws-ofi-nccl" in said.err) == ("vpc.amazonaws.com/efa=4" in words)


SITE = """
kubernetes:
  image: {image}
  namespace: lab
  queue: team-a
  runs: pvc:lab-runs
  memory: 64
  time: 2:00:00
  env: {{NCCL_DEBUG: INFO, A: file, N: 8}}
  env_from: [secret:wandb]
  patch: [{folder}/lab.yaml]
slurm: {{partition: gpu, sbatch_arg: [constraint=h100], container: venv, venv: ~/env}}
"""


def write_site(here: Path) -> Path:
    file = here / "config" / "trainer" / "site.yaml"
    file.write_text(SITE.format(image=job_files.IMAGE, folder=here / "work"))
    Path("lab.yaml").write_text("kind: Pod\nspec: {priorityClassName: low}")
    return file


def test_the_site_file_is_taken_and_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_site(here)
    assert main(["submit", "digits", "--on", "kubernetes", "--dry-run"]) == 0
    said = capsys.readouterr()
    check_all(said.out)
    objects, read = job_files.documents(said.out), job_files.read_kubernetes(said.out)
    assert (read["image"], read["memory"], read["seconds"]) == (job_files.IMAGE, 64, 7200)
    assert read["environment"].items() >= {"NCCL_DEBUG": "INFO", "A": "file", "N": "8"}.items()
    assert read["mounts"]["/workspace/runs"] == "pvc:lab-runs"
    assert objects["Job"]["metadata"]["namespace"] == "lab"
    assert objects["Job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    (template,) = pods(objects)
    assert template["spec"]["priorityClassName"] == "low"
    assert template["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert said.err == (
        f"site       {file}: kubernetes: image={job_files.IMAGE} memory=64 time=2:00:00 runs=pvc:lab-runs "
        "env={A: file, N: 8, NCCL_DEBUG: INFO} env_from=['secret:wandb'] namespace=lab queue=team-a "
        f"patch=[{here}/work/lab.yaml]\n"
    )


def test_the_command_line_wins(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_site(here)
    Path("mine.yaml").write_text("kind: Pod\nspec: {priorityClassName: high}")
    words = ["--namespace", "other", "--memory", "8", "--env", "A=typed", "--patch", "mine.yaml"]
    assert main(["submit", "digits", "--on", "kubernetes", *words, "--dry-run"]) == 0
    said = capsys.readouterr()
    objects, read = job_files.documents(said.out), job_files.read_kubernetes(said.out)
    assert objects["Job"]["metadata"]["namespace"] == "other"
    assert read["memory"] == 8
    assert read["environment"].items() >= {"NCCL_DEBUG": "INFO", "A": "typed"}.items()
    assert pods(objects)[0]["spec"]["priorityClassName"] == "high"
    (line,) = said.err.splitlines()
    assert line.startswith(f"site       {file}: kubernetes: image=")
    assert " namespace=" not in line
    assert " memory=" not in line


def test_each_place_has_its_own_defaults_and_no_file_means_none(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_site(here)
    assert main(["submit", "digits", "--on", "slurm", "--dry-run", "--partition", "debug"]) == 0
    said = capsys.readouterr()
    assert {"--partition=debug", "--constraint=h100"} <= set(options_of(said.out))
    assert f"{Path.home()}/env/bin/trainer train" in said.out
    assert main(["submit", "digits", "--on", "docker", *ENGINE, "--dry-run"]) == 0
    assert capsys.readouterr().err == ""
    # It lies in ~/.config where XDG_CONFIG_HOME says nothing; --site names another.
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(here))
    (here / ".config").symlink_to(here / "config")
    assert main(["submit", "digits", "--on", "kubernetes", "--dry-run"]) == 0
    assert f"site       {here}/.config/trainer/site.yaml: " in capsys.readouterr().err
    line = refused(["digits", "--on", "kubernetes", "--dry-run", "--site", "/dev/null"], capsys)
    assert line.startswith("--runs runs: pods on Kubernetes don't see")
    assert file.exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("slurm: {partitoin: x}", "unknown key 'slurm.partitoin'; did you mean 'slurm.partition'?"),
        ("slrum: {partition: x}", "unknown key 'slrum'"),
        ("docker: {queue: x}", "unknown key 'docker.queue'; did you mean 'kubernetes.queue'?"),
        (
            "docker: {recipe: x}",
            "unknown key 'docker.recipe'; it has sections docker, slurm, kubernetes, kubeflow",
        ),
        ("slurm: {memory: many}", "slurm.memory=many: "),
        ("slurm: {container: podman}", "slurm.container=podman: not among them"),
        ("slurm: {runs: runs}", "slurm.runs=runs: give an absolute path or ~/…"),
        ("kubernetes: {patch: [lab.yaml]}", "kubernetes.patch"),
        ("docker: {memory: 4, memory: 5}", "key 'memory' stands there twice"),
        ("[1]", "give a section for each place, as slurm: {partition: gpu}"),
    ],
)
def test_a_wrong_site_file_is_one_line(
    text: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here / "config" / "trainer" / "site.yaml"
    file.write_text(text)
    line = refused(["digits", "--on", "docker", *ENGINE, "--dry-run"], capsys)
    assert line.startswith(f"{file}: ")
    assert wanted in line


def test_a_secret_in_the_site_file_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "config" / "trainer" / "site.yaml").write_text("docker: {env: {HF_TOKEN: abc}}")
    assert main(["submit", "digits", "--on", "docker", *ENGINE, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert "--env HF_TOKEN looks like a secret" in said.err
    assert "abc" not in said.err + said.out


def test_the_site_file_knows_every_place_and_option() -> None:
    assert set(SiteFile.model_fields) == set(HOW)
    known = {name for place in HOW for name in type(getattr(SiteFile(), place)).model_fields}
    assert set(Site.model_fields) <= known
    # What a job is, and not where it runs, stands in its command.
    common = {name.removesuffix("_gib").removesuffix("_seconds") for name in JobSpec.model_fields}
    missing = {"recipe", "settings", "name", "nnodes", "min_nnodes", "nproc_per_node", "recipe_text", "files"}
    assert common - known - {"minutes", "environment"} == missing


def test_lists_with_keys_are_those_of_kubernetes() -> None:
    """As the types of its API say (patchMergeKey); of JobSet: listMapKey."""
    keys = {name: found[0] for name, found in patches._KEYS.items()}
    assert keys["containers"] == keys["env"] == keys["volumes"] == keys["imagePullSecrets"] == "name"
    assert keys["volumeMounts"] == "mountPath"
    assert not {"tolerations", "args", "envFrom", "rules"} & set(keys)


@pytest.mark.parametrize("option", ["account", "partition", "qos"])
@pytest.mark.parametrize(
    "value",
    ["a\n#SBATCH --uid=0", "a\r#SBATCH --uid=0", "a --uid=0", "a\x0bb", "a\x1b[2J", "a\u2028b", "a'b", "#"],
)
def test_no_value_adds_a_directive(option: str, value: str) -> None:
    with pytest.raises(BadInputError, match=f"^--{option} .* can't stand in a line of #SBATCH") as raised:
        slurm.render(job("slurm"), Site(**{option: value}))
    assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


@pytest.mark.parametrize("where", ["runs", "a\x1bb", "comment=a\n#SBATCH --uid=0", "mail-user=a\u2028b"])
def test_paths_and_further_options_add_none_either(where: str) -> None:
    spec, site = job("slurm"), Site()
    if "=" in where:
        site = Site(sbatch_arg=(where,))
    else:
        spec = spec.model_copy(update={"runs": f"/x\x0b/{where}"})
    with pytest.raises(BadInputError, match=r"^--(runs|sbatch-arg) "):
        slurm.render(spec, site)
