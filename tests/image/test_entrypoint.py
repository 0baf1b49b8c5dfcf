"""The image's entrypoint starts what it is told, and JupyterLab only with a token.

Without a container: as uid 1000, on programs that say what they were given.
"""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def entrypoint(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    tools = tmp_path / "tools"
    tools.mkdir()
    programs = {
        "id": "echo 1000",
        "jupyter-lab": 'echo jupyter-lab "$@"',
        "tensorboard": 'echo tensorboard "$@"',
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
    assert (
        entrypoint("tensorboard").stdout
        == "tensorboard --host 0.0.0.0 --port 6006 --logdir /workspace/runs\n"
    )
    assert entrypoint("tensorboard", "--version").stdout == "tensorboard --version\n"


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["jupyter"], {"JUPYTER_TOKEN": ""}),
        (["jupyter-lab"], {"JUPYTER_TOKEN": ""}),
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
    (tmp_path / "tensorboard").write_text("#!/bin/sh\necho done\n")  # Compose gives its service no GPU
    (tmp_path / "tensorboard").chmod(0o755)
    assert said("tensorboard", PATH=f"{tmp_path}:/usr/bin:/bin") == ""
    control.touch()
    assert said() == ""


def test_kernels_find_the_folder_of_packages_on_top(tmp_path: Path) -> None:
    """Python forgets a folder of its search path that wasn't there when it first looked."""
    env, top = tmp_path / "env", tmp_path / "on-top"
    (env / "lib/python3.12/site-packages").mkdir(parents=True)
    (env / "lib/python3.1").symlink_to("python3.12")  # as conda's
    program, lab = tmp_path / "entrypoint", tmp_path / "jupyter-lab"
    lab.write_text("#!/bin/sh\necho started\n")
    lab.chmod(0o755)
    text = (ROOT / "scripts/entrypoint").read_text().replace("/opt/env", str(env))
    program.write_text(text.replace('"$(id -u)" = 0', "1 = 0"))
    program.chmod(0o755)

    def start() -> str:
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.check_output([str(program), "jupyter"], env=path, text=True)

    assert start() == "started\n" and not top.exists()
    (env / "pip.conf").write_text(f"[install]\nprefix = {top}\n")
    assert start() == "started\n"
    assert [path.relative_to(top).as_posix() for path in top.glob("lib/*/*")] == [
        "lib/python3.12/site-packages"
    ]
    (env / "pip.conf").write_text("[install]\nprefix = /proc/cannot\n")  # a read-only root
    assert start() == "started\n"
