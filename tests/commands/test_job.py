"""Promise: what `trainer job` prints means at its place what was asked for, whatever the values are."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings as hypothesis_settings, strategies as st

from tests.helpers.commands import refuse
from tests.helpers.job_files import (
    HEX,
    IMAGE,
    IN_IMAGE,
    documents,
    pod_of,
    printed,
    read,
    run_script,
    words_of,
)
from tests.helpers.programs import ran

PLACES = ("slurm", "kubernetes", "kubeflow", "docker")
NOT: Any = {"exclude_categories": ("Cc", "Cs", "Zl", "Zp"), "exclude_characters": "\ufeff\ufffe\uffff"}
TEXT = st.text(st.characters(codec="utf-8", **NOT), max_size=12)
PATH = TEXT.filter(lambda name: name not in ("", ".", "..") and not set(name) & set('%:,"/'))
ODD = ["$(HOME) $x 'it\"s' \\", "$$ `id` ;#", "a\N{NO-BREAK SPACE}\N{GRINNING FACE}"]
ODD += ["- x: {{ y }} {% z %} *&!"]
VALUE = st.one_of(TEXT, st.sampled_from(ODD))
NAME = st.from_regex("[A-Z][B-Z]{3,8}", fullmatch=True).filter(lambda n: "KEY" not in n and "TOKEN" not in n)


@hypothesis_settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(PLACES),
    st.lists(VALUE, max_size=3),
    st.dictionaries(NAME, VALUE, max_size=3),
    PATH,
    PATH,
)
@example("slurm", ODD, {"ODD": ODD[0]}, "of it's", "a b")
@example("docker", ODD, {"ODD": ODD[0]}, "of it's", "a b")
@example("kubernetes", ODD, {"ODD": ODD[0]}, "claim", "a b")
@example("kubeflow", ODD, {"ODD": ODD[1]}, "claim", "a b")
def test_any_value_reaches_its_place(
    tmp_path_factory: pytest.TempPathFactory,
    place: str,
    values: list[str],
    environment: dict[str, str],
    source: str,
    name: str,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    given = [f"about={value!r}" for value in values]
    words = [word for key, value in environment.items() for word in ("--env", f"{key}={value}")]
    source = f"{folder}/{source}" if place in ("slurm", "docker") else source
    words += ["--image", IMAGE, "--volume", f"{source}:/workspace/runs/{name}", "--out", f"runs/{name}/x"]
    command, found, mounts = read(place, printed(place, *words, *given, recipe="/r.yaml"), folder)
    settings = [word for one in given for word in ("--set", one)]
    out = ["--out", f"runs/{name}/x", "--grace", "90"]
    assert command == ["trainer", "train", "/r.yaml", "--nproc-per-node", "1", *out, *settings]
    assert {key: found.get(key) for key in environment} == environment
    assert mounts == [f"{source}:/workspace/runs/{name}"]


@pytest.mark.parametrize("place", PLACES)
def test_each_option_has_its_line(place: str, tmp_path: Path) -> None:
    words = [*IN_IMAGE, "--volume", "data:/data:ro", "--cpus-per-task", "7", "--mem", "33G", "--time", "1:30"]
    words += ["--grace", "200", "--gpus-per-node", "4", "--env", "NCCL_DEBUG=INFO", "--out", "runs/Mine_1"]
    text = printed(place, *words, "data.micro_batch_size=16")
    command, environment, mounts = read(place, text, tmp_path)
    assert command[3:7] == ["--gpus", "4", "--out", "runs/Mine_1"]
    assert (environment["TRAINER_IMAGE_DIGEST"], environment["NCCL_DEBUG"]) == (f"sha256:{HEX}", "INFO")
    assert "NVIDIA_VISIBLE_DEVICES" not in environment
    assert [mount.rpartition("/")[2] for mount in mounts] == ["runs", "data:ro"]
    if place == "slurm":
        wanted = "job-name=mine-1 cpus-per-task=7 mem=33G time=90 signal=USR1@230 gpus-per-node=4"
        assert {f"#SBATCH --{one}" for one in wanted.split()} < set(text.splitlines())
        (step,) = [line for line in text.splitlines() if line.startswith("srun ")]
        assert "--export=ALL" in step and "--cpus-per-task=7" in step
    elif place == "docker":
        run = " ".join(words_of(run_script(text, tmp_path))[0])
        wanted = "--name mine-1, --cpus 7, --memory 33g, --gpus 4, --stop-timeout 230, --read-only"
        assert all(f" {one} " in run for one in wanted.split(", "))
        assert " --kill-after=230 5400 trainer train " in run
    else:
        pod = pod_of(documents(text))
        (node,) = pod["containers"]
        asked = {"cpu": "7", "memory": "33Gi", "nvidia.com/gpu": "4"}
        assert node["resources"] == {"requests": asked, "limits": asked}
        assert (pod["activeDeadlineSeconds"], pod["terminationGracePeriodSeconds"]) == (5400, 230)
        assert {one["metadata"]["name"] for one in documents(text).values()} == {"mine-1"}


def test_memory_may_be_left_to_the_place_and_gpus_have_types(tmp_path: Path) -> None:
    for place in PLACES:
        text = printed(place, *IN_IMAGE, "--mem", "none")
        assert "--mem" not in text and "memory:" not in text
        assert read(place, text, tmp_path)[1]["NVIDIA_VISIBLE_DEVICES"] == "void"
    typed = printed("slurm", "--gpus-per-node", "h100:8", "data.micro_batch_size=8")
    assert "#SBATCH --gpus-per-node=h100:8\n" in typed
    pod = pod_of(documents(printed("kubernetes", *IN_IMAGE, "--gpus-per-node", "NVIDIA-A100:1")))
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100"}


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.write_text(printed("slurm", "--print-template") + "# {{ about }}\n")
    # `about` is of a recipe, no value of a job; and a template gets at no class of Python's.
    refuse(["job", "slurm", "digits", "--template", own], own, "about")
    own.write_text("{{ ''.__class__.__mro__ }}{{ image }}{{ volumes }}")
    refuse(["job", "kubernetes", "digits", *IN_IMAGE, "--template", own], own, "__class__")
    own.write_text("{{ place }} {% for word in command %}{{ word }} {% endfor %}{{ run | safe }}\n")
    text = printed("slurm", "--template", str(own), "--out", "a b", "--venv", "/v", "about='x y'")
    out = Path("a b").absolute()
    assert text == (
        f"slurm /v/bin/trainer train digits --nproc-per-node 1 --out '{out}' --grace 90 "
        f"--set 'about='\"'\"'x y'\"'\"'' {out}\n"
    )


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


def limited(folder: Path, script: str, seconds: str, stop: str = "30") -> list[str]:
    """The time limit of docker's template in front of another command."""
    words, _ = words_of(run_script(printed("docker", *IN_IMAGE, "--time", "7", "--grace", "20"), folder))
    begin = words.index("timeout")
    assert words[begin + 4 : begin + 7] == ["--kill-after=50", "420", "trainer"]
    return [*words[begin : begin + 4], f"--kill-after={stop}", seconds, sys.executable, "-c", script]


def test_the_time_limit_ends_an_attempt_with_its_checkpoint(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # it waits until it can be taken
    try:
        ran(*limited(tmp_path, PEER, "0.3", "120"), code=75)
        assert ran(*limited(tmp_path, DEAF, "0.3", "0.3")).returncode in (137, -signal.SIGKILL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_signal_passes_the_time_limit(tmp_path: Path) -> None:
    with subprocess.Popen(limited(tmp_path, PEER, "60"), stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 76
