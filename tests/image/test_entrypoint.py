"""The image's entrypoint starts what it is told, and JupyterLab only with a token.

Without a container: as uid 1000, on programs that say what they were given.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from packages_on_top import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def entrypoint(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    tools = tmp_path / "tools"
    tools.mkdir()
    programs = {
        "id": "echo 1000",
        "jupyter-lab": 'echo jupyter-lab "$@"',
        "tensorboard": 'echo tensorboard "$@"',
        "python": 'echo python "$@"',
    }
    for name, text in {**programs, "jupyter": 'echo jupyter "$@"'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)

    def start(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "scripts/entrypoint", *words],
            env={"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), **env},
            capture_output=True,
            text=True,
            check=False,
        )

    return start


def test_the_entrypoints_words(entrypoint: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert entrypoint("sh", "-c", "echo $0 $1; exit 75", "a b", "c").returncode == 75
    assert entrypoint("echo", "a  b").stdout == "a  b\n"
    lab = entrypoint("jupyter", JUPYTER_PORT="9000").stdout
    assert lab.startswith("jupyter-lab --no-browser --ip=0.0.0.0 --port=8888")
    assert "http://127.0.0.1:9000/lab" in lab
    assert "--allow-root" not in lab
    assert "token" not in lab  # JupyterLab makes a random one
    assert entrypoint("jupyter", "kernelspec").stdout == "jupyter kernelspec\n"
    board = "python /opt/image/tensorboard_once.py"
    assert (
        entrypoint("tensorboard").stdout == f"{board} --host 0.0.0.0 --port 6006 --logdir /workspace/runs\n"
    )
    assert entrypoint("tensorboard", "--version").stdout == "tensorboard --version\n"


OURS = (
    *("--ip=0.0.0.0", "--port=8888", "--ServerApp.port_retries=0", "--ServerApp.root_dir=/workspace"),
    "--ServerApp.custom_display_url=http://127.0.0.1:8888/lab",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    *("--LabApp.news_url=None", "--LabApp.extension_manager=readonly"),
)


@pytest.mark.parametrize(
    ("words", "gone", "new"),
    [
        ([], [], []),
        (["--ServerApp.base_url=/x/y/"], [OURS[4]], ["http://127.0.0.1:8888/x/y/lab"]),
        (["--ServerApp.base_url=/x", "--debug"], [OURS[4]], ["http://127.0.0.1:8888/x/lab"]),
        (["--ServerApp.base_url", "x"], [OURS[4]], ["http://127.0.0.1:8888/x/lab"]),
        (["--ServerApp.base_url=/"], [], []),
        (["--port=9999"], [OURS[1]], []),
        (["--ServerApp.port", "9999", "--ip=::"], OURS[:2], []),
        (["--ServerApp.root_dir=/data", "--debug"], [OURS[3]], []),
        (["--notebook-dir=/a b"], [OURS[3]], []),
        (["--ServerApp.custom_display_url=https://hub/me"], [OURS[4]], []),
        (["--LabApp.extension_manager=pypi"], [OURS[7]], []),
    ],
)
def test_jupyter_takes_options_and_none_twice(
    entrypoint: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str], gone: Sequence[str], new: list[str],
) -> None:  # fmt: skip
    """JupyterLab ends with an error where it is given one twice."""
    said = entrypoint("jupyter", *words).stdout
    assert said.startswith("jupyter-lab --no-browser ") and said.endswith(" ".join(["", *words]) + "\n")
    assert [one for one in OURS if one not in said.split()] == list(gone)
    assert all(f"--ServerApp.custom_display_url={url}" in said.split() for url in new)


@pytest.mark.parametrize(
    "words", ["--version", "--paths", "--runtime-dir", "-h", "lab --port=1", "kernelspec list"]
)
def test_what_jupyter_says_of_itself(
    entrypoint: Callable[..., subprocess.CompletedProcess[str]], words: str
) -> None:
    assert entrypoint("jupyter", *words.split()).stdout == f"jupyter {words}\n"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--path_prefix=/tb", "--host 0.0.0.0 --port 6006 --logdir /workspace/runs --path_prefix=/tb"),
        ("--logdir a --port 1", "--host 0.0.0.0 --logdir a --port 1"),
        ("--logdir_spec a:b --bind_all", "--port 6006 --logdir_spec a:b --bind_all"),
        ("--host=::1", "--port 6006 --logdir /workspace/runs --host=::1"),
    ],
)
def test_tensorboard_takes_options(
    entrypoint: Callable[..., subprocess.CompletedProcess[str]], words: str, wanted: str
) -> None:
    said = entrypoint("tensorboard", *words.split()).stdout
    assert said == f"python /opt/image/tensorboard_once.py {wanted}\n"
    assert entrypoint("tensorboard", "serve", "--port=1").stdout == "tensorboard serve --port=1\n"


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["jupyter"], {"JUPYTER_TOKEN": ""}),
        (["jupyter-lab"], {"JUPYTER_TOKEN": ""}),
        (["jupyter", "--ServerApp.base_url=/x/"], {"JUPYTER_TOKEN": ""}),
        (["jupyter", "--IdentityProvider.token="], {}),
        (["jupyter", "--IdentityProvider.token", ""], {}),
        (["jupyter", "lab", "--ServerApp.token="], {}),
        (["jupyter", "lab", "--IdentityProvider.token=''"], {}),
        (["jupyter", "lab", "--IdentityProvider.token", ""], {}),
    ],
)
def test_jupyterlab_never_starts_without_a_token(
    entrypoint: Callable[..., subprocess.CompletedProcess[str]], words: Sequence[str], env: dict[str, str]
) -> None:
    done = entrypoint(*words, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "JupyterLab needs a token: leave JUPYTER_TOKEN unset" in done.stderr
    assert done.stderr.count("\n") == 1
    assert entrypoint("jupyter", "lab", "--IdentityProvider.token=x").stdout.startswith("jupyter lab")


def test_a_driver_without_a_gpu_is_told(tmp_path: Path) -> None:
    """The host's driver shows in a container that was given none of its GPUs."""
    driver, control = tmp_path / "version", tmp_path / "nvidiactl"
    text = (ROOT / "scripts/entrypoint").read_text()
    text = text.replace("/proc/driver/nvidia/version", str(driver)).replace("/dev/nvidiactl", str(control))
    program = tmp_path / "entrypoint"
    program.write_text(text.replace('"$(id -u)" = 0', "1 = 0"))
    program.chmod(0o755)

    def said(*given: str, **env: str) -> str:
        words = [str(program), *(given or ("echo", "done"))]
        path = {"PATH": "/usr/bin:/bin", "NVIDIA_VISIBLE_DEVICES": "all"}
        done = subprocess.run(words, env={**path, **env}, capture_output=True, text=True, check=True)
        assert done.stdout == "done\n"
        return done.stderr

    assert said() == ""
    driver.touch()
    assert said().count("\n") == 1 and "docker run --gpus all" in said() and "make up" in said()
    for hidden in ({"NVIDIA_VISIBLE_DEVICES": "void"}, {"CUDA_VISIBLE_DEVICES": ""}):
        assert said(**hidden) == ""
    (tmp_path / "python").write_text("#!/bin/sh\necho done\n")  # Compose gives TensorBoard's service no GPU
    (tmp_path / "python").chmod(0o755)
    assert said("tensorboard", PATH=f"{tmp_path}:/usr/bin:/bin") == ""
    control.touch()
    assert said() == ""


def test_kernels_find_the_folder_of_packages_on_top(tmp_path: Path) -> None:
    """Python forgets a folder of its search path that wasn't there when it first looked."""
    program, lab, on_top = tmp_path / "entrypoint", tmp_path / "jupyter-lab", tmp_path / "on-top"
    lab.write_text("#!/bin/sh\necho started\n")
    text = (ROOT / "scripts/entrypoint").read_text().replace("/opt/image/on-top", str(on_top))
    program.write_text(text.replace('"$(id -u)" = 0', "1 = 0"))
    for code in (0, 1):  # 1: a read-only root
        on_top.write_text(f"#!/bin/sh\necho $# >>{tmp_path}/made\nexit {code}\n")
        for path in (lab, program, on_top):
            path.chmod(0o755)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        assert subprocess.check_output([str(program), "jupyter"], env=env, text=True) == "started\n"
    assert (tmp_path / "made").read_text() == "2\n2\n"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_login_shell_has_the_images_variables(tmp_path: Path, shell: str) -> None:
    """What is set stays, but the PATH, which /etc/profile has set."""
    variables = {"PATH": "/opt/a b/bin:$HOME", "LANG": "C.UTF-8", "PYTHONNOUSERSITE": "1", "HOME": "/h"}
    lines = tmp_path / "environment"
    lines.write_text(environment({**variables, "SECRET": "x", "STACK": "x", "XDG_CACHE_HOME": "/it's `x`"}))
    text = (ROOT / "scripts/profile.sh").read_text().replace("/opt/image/environment", str(lines))
    (tmp_path / "profile").write_text(text)
    command = [shutil.which(shell) or shell, "-c", f". {tmp_path}/profile && /usr/bin/env"]
    own = {"PATH": "/usr/bin:/bin", "LANG": "de_DE", "HOME": str(tmp_path), "PYTHONNOUSERSITE": ""}
    said = dict(
        line.split("=", 1) for line in subprocess.check_output(command, env=own, text=True).splitlines()
    )
    wanted = {**own, "PATH": variables["PATH"], "XDG_CACHE_HOME": "/it's `x`"}
    assert {name: said.get(name) for name in (*wanted, "SECRET", "STACK")} == {
        **wanted,
        "SECRET": None,
        "STACK": None,
    }


@pytest.mark.parametrize(
    ("capabilities", "owner", "wanted"),
    [(0xE0, 1234, 1234), (0xA80425FB, 1234, 0), (0, 1234, 0), (0xE0, 0, 0)],
)
def test_a_python_that_entered_as_root_becomes_the_owner(
    tmp_path: Path, capabilities: int, owner: int, wanted: int
) -> None:
    """Only where root may not write what others own; without the right to change users nothing happens."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    os.chown(tmp_path, owner, owner)
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities:016x}\n")
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import as_owner, pathlib
os.setgroups([0, 777])
if not {capabilities}:
    os.setgroups = lambda groups: (_ for _ in ()).throw(PermissionError())
try:
    as_owner.become_owner(pathlib.Path({str(tmp_path)!r}), pathlib.Path({str(status)!r}))
except OSError:
    pass
print(os.getuid(), os.getgid(), os.getgroups())
"""
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said == f"{wanted} {wanted} {[777] if wanted else [0, 777]}\n"
