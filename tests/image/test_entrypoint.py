"""The image's entrypoint starts what it is told, and JupyterLab only with a token.

Without a container: as uid 1000, on programs that say what they were given.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packages_on_top import environment

from tests.helpers.programs import program, ran
from tests.helpers.refusals import refusal

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., subprocess.CompletedProcess[str]]


def run(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return ran(*words, env={"PATH": "/usr/bin:/bin", **env})


@pytest.fixture
def entrypoint(tmp_path: Path) -> Start:
    tools = tmp_path / "tools"
    for name in ("id", "jupyter-lab", "tensorboard", "python", "jupyter"):
        said = "1000" if name == "id" else f'{name} "$@"'
        program(tools / name, f"#!/bin/sh\necho {said}\n")

    def start(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        paths = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path)}
        return run(ROOT / "scripts/entrypoint", *words, **paths, **env)

    return start


def copied(folder: Path, *changes: tuple[str, str]) -> Path:
    """An entrypoint that isn't root's, and finds what it reads elsewhere."""
    text = (ROOT / "scripts/entrypoint").read_text()
    for old, new in (('"$(id -u)" = 0', "1 = 0"), *changes):
        assert old in text
        text = text.replace(old, new)
    return program(folder / "entrypoint", text)


LAB = "jupyter-lab --no-browser --ip=0.0.0.0 --port=8888 "
BOARD = "python /opt/image/tensorboard_once.py "


@pytest.mark.parametrize(
    ("words", "start", "inside"),
    [
        (["echo", "a  b"], "a  b\n", ""),
        (["jupyter"], LAB, "http://127.0.0.1:8888/lab "),
        (["jupyter", "--ServerApp.base_url=/x/y/"], LAB, "http://127.0.0.1:8888/x/y/lab "),
        (["jupyter", "--notebook-dir=/a b"], LAB, " --notebook-dir=/a b\n"),
        (["jupyter", "kernelspec"], "jupyter kernelspec\n", ""),
        (["tensorboard"], f"{BOARD}--host 0.0.0.0 --port 6006 --logdir /workspace/runs\n", ""),
        (["tensorboard", "--logdir", "a"], f"{BOARD}--host 0.0.0.0 --port 6006 --logdir a\n", ""),
    ],
)
def test_what_is_started(entrypoint: Start, words: list[str], start: str, inside: str) -> None:
    said = entrypoint(*words).stdout
    assert said.startswith(start) and inside in said
    assert "token" not in said  # JupyterLab makes a random one
    # JupyterLab ends with an error where it is given an option twice.
    assert ("--ServerApp.root_dir=" in said) == (start == LAB and "--notebook-dir" not in said)


@pytest.mark.parametrize(
    ("words", "env"),
    [("", {"JUPYTER_TOKEN": ""}), ("--IdentityProvider.token=", {}), ("lab --ServerApp.token=", {})],
)
def test_jupyterlab_never_starts_without_a_token(entrypoint: Start, words: str, env: dict[str, str]) -> None:
    done = entrypoint("jupyter", *words.split(), **env)
    assert done.stdout == ""
    refusal(done.returncode, done.stderr, "JUPYTER_TOKEN")


@pytest.mark.parametrize(
    ("words", "url"), [([], "/notebook/me/lab"), (["--ServerApp.base_url=/x"], "/x/lab")]
)
def test_jupyterlab_below_the_prefix_of_kubeflow(entrypoint: Start, words: list[str], url: str) -> None:
    said = entrypoint("jupyter", *words, NB_PREFIX="/notebook/me").stdout
    assert f"--ServerApp.custom_display_url=http://127.0.0.1:8888{url} " in said
    assert said.count("--ServerApp.base_url=") == 1


def test_a_hub_gets_its_single_user_server(entrypoint: Start, tmp_path: Path) -> None:
    done = entrypoint("jupyter", JUPYTERHUB_API_TOKEN="x")  # the conda stacks have none
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    program(tmp_path / "tools/jupyterhub-singleuser", '#!/bin/sh\necho single "$@"\n')
    assert entrypoint("jupyter", "--debug", JUPYTERHUB_API_TOKEN="x").stdout == "single --debug\n"
    assert entrypoint("jupyterhub-singleuser", JUPYTERHUB_API_TOKEN="x").stdout == "single\n"


def test_hooks_run_in_order_and_one_that_fails_stops_nothing(tmp_path: Path) -> None:
    """As in docker-stacks: what is sourced may set variables; what isn't a program is passed over."""
    folder = tmp_path / "before-notebook.d"
    hooks = {"10-fails.sh": "false", "20.sh": "export SET=by-a-hook; set -eu; list=(a b)", "30.sh": "if ["}
    hooks |= {"40-program": "#!/bin/sh\necho $SET >&2; exit 3", "60-text": "no program"}
    hooks["50-unset.sh"] = 'echo "$NOT_SET_ANYWHERE"; true'
    for name, text in hooks.items():
        program(folder / name, f"{text}\n").chmod(0o755 if name == "40-program" else 0o644)
    starts = copied(tmp_path, ("/usr/local/bin/", f"{tmp_path}/"))
    done = run(starts, "sh", "-c", "echo set: $SET; exit 75")
    assert (done.returncode, done.stdout) == (75, "\nset: by-a-hook\n")
    told = [line for line in done.stderr.splitlines() if line.startswith("entrypoint: ")]
    assert [name[:2] for line in told for name in hooks if name in line] == ["10", "30", "40"]


def test_a_driver_without_a_gpu_is_told(tmp_path: Path) -> None:
    """The host's driver shows in a container that was given none of its GPUs."""
    driver, control = tmp_path / "version", tmp_path / "nvidiactl"
    changes = ("/proc/driver/nvidia/version", str(driver)), ("/dev/nvidiactl", str(control))
    starts = copied(tmp_path, *changes)

    def said(**env: str) -> str:
        return run(starts, "true", NVIDIA_VISIBLE_DEVICES="all", **env).stderr

    assert said() == ""
    driver.touch()
    assert said().count("\n") == 1 and "docker run --gpus all" in said()
    assert said(CUDA_VISIBLE_DEVICES="") == ""
    control.touch()
    assert said() == ""


def test_a_login_shell_has_the_images_variables(tmp_path: Path) -> None:
    """What is set stays, but the PATH, which /etc/profile has set."""
    variables = {"PATH": "/opt/a b/bin:$HOME", "LANG": "C.UTF-8", "PYTHONNOUSERSITE": "1", "HOME": "/h"}
    lines = tmp_path / "environment"
    lines.write_text(environment({**variables, "SECRET": "x", "STACK": "x", "XDG_CACHE_HOME": "/it's `x`"}))
    text = (ROOT / "scripts/profile.sh").read_text().replace("/opt/image/environment", str(lines))
    (tmp_path / "profile").write_text(text)
    own = {"LANG": "de_DE", "HOME": str(tmp_path), "PYTHONNOUSERSITE": ""}
    said = run("sh", "-c", f". {tmp_path}/profile && /usr/bin/env", **own).stdout
    found = dict(line.split("=", 1) for line in said.splitlines())
    wanted = {**own, "PATH": variables["PATH"], "XDG_CACHE_HOME": "/it's `x`"}
    assert wanted.items() <= found.items() and not {"SECRET", "STACK"} & found.keys()


@pytest.mark.parametrize(("capabilities", "wanted"), [(0xE0, 1234), (0xA80425FB, 0)])
def test_a_python_that_entered_as_root_becomes_the_owner(
    tmp_path: Path, capabilities: int, wanted: int
) -> None:
    """Only where root may not write what others own; without the right to change users nothing happens."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    os.chown(tmp_path, 1234, 1234)
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities:016x}\n")
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import as_owner, pathlib
os.setgroups([0, 777])
try:
    as_owner.become_owner(pathlib.Path({str(tmp_path)!r}), pathlib.Path({str(status)!r}))
except OSError:
    pass
print(os.getuid(), os.getgid(), os.getgroups())
"""
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == f"{wanted} {wanted} {[777] if wanted else [0, 777]}\n"
