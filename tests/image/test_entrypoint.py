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
        (["--ServerApp.port", "9999", "--ip=::"], OURS[:2], []),
        (["--notebook-dir=/a b"], [OURS[3]], []),
    ],
)
def test_jupyter_takes_options_and_none_twice(
    entrypoint: Callable[..., subprocess.CompletedProcess[str]],
    words: list[str], gone: Sequence[str], new: list[str]
) -> None:  # fmt: skip
    """JupyterLab ends with an error where it is given one twice."""
    said = entrypoint("jupyter", *words).stdout
    assert said.startswith("jupyter-lab --no-browser ") and said.endswith(" ".join(["", *words]) + "\n")
    assert [one for one in OURS if one not in said.split()] == list(gone)
    assert all(f"--ServerApp.custom_display_url={url}" in said.split() for url in new)


@pytest.mark.parametrize(
    ("words", "prefix", "url"),
    [
        ([], "/notebook/team/me", "/notebook/team/me/lab"),
        (["--ServerApp.base_url=/x"], "/notebook/me", "/x/lab"),
    ],
)
def test_jupyterlab_below_the_prefix_of_kubeflow(
    entrypoint: Callable[..., subprocess.CompletedProcess[str]], words: list[str], prefix: str, url: str
) -> None:
    said = entrypoint("jupyter", *words, NB_PREFIX=prefix).stdout
    assert f"--ServerApp.custom_display_url=http://127.0.0.1:8888{url} " in said
    assert said.count("--ServerApp.base_url=") == 1


def test_a_hub_gets_its_single_user_server(
    entrypoint: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = entrypoint("jupyter", JUPYTERHUB_API_TOKEN="x")  # the conda stacks have none
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    (tmp_path / "tools/jupyterhub-singleuser").write_text('#!/bin/sh\necho single "$@"\n')
    (tmp_path / "tools/jupyterhub-singleuser").chmod(0o755)
    assert entrypoint("jupyter", "--debug", JUPYTERHUB_API_TOKEN="x").stdout == "single --debug\n"
    assert entrypoint("jupyterhub-singleuser", JUPYTERHUB_API_TOKEN="x").stdout == "single\n"


def test_hooks_run_in_order_and_one_that_fails_stops_nothing(tmp_path: Path) -> None:
    """As in docker-stacks: what is sourced may set variables; what isn't a program is passed over."""
    folder, program = tmp_path / "before-notebook.d", tmp_path / "entrypoint"
    folder.mkdir()
    hooks = {
        "10-fails.sh": "false",
        "20.sh": "export SET=by-a-hook; set -eu; list=(a b)",
        "30-syntax.sh": "if [",
        "40-program": "#!/bin/sh\necho $SET >&2; exit 3",
        "50-unset.sh": 'echo "$NOT_SET_ANYWHERE"; true',
        "60-text": "no program",
    }
    for name, text in hooks.items():
        (folder / name).write_text(f"{text}\n")
    (folder / "40-program").chmod(0o755)
    text = (ROOT / "scripts/entrypoint").read_text().replace("/usr/local/bin/", f"{tmp_path}/")
    program.write_text(text.replace('"$(id -u)" = 0', "1 = 0"))
    program.chmod(0o755)
    words = [str(program), "sh", "-c", "echo set: $SET; exit 75"]
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "\nset: by-a-hook\n")
    told = [line for line in done.stderr.splitlines() if line.startswith("entrypoint: ")]
    assert [name for line in told for name in hooks if name in line] == [
        "10-fails.sh",
        "30-syntax.sh",
        "40-program",
    ]
    assert "by-a-hook" in done.stderr
    again = subprocess.run(words, env={**env, "HOOKS_RAN": "1"}, capture_output=True, text=True, check=False)
    assert (again.stdout, again.stderr) == ("set:\n", "")


def test_an_owner_without_a_number_is_told(tmp_path: Path) -> None:
    """Where users are mapped, others' folders are nobody's; elsewhere nobody may be one."""
    if os.geteuid():
        pytest.skip("the entrypoint asks for an owner as root")
    place, uids, program = tmp_path / "workspace", tmp_path / "uid_map", tmp_path / "entrypoint"
    place.mkdir()
    os.chown(place, 65534, 65534)
    text = (ROOT / "scripts/entrypoint").read_text()
    text = text.replace("stat -c %u:%g /workspace", f"stat -c %u:%g {place}").replace(
        "/proc/self/uid_map", str(uids)
    )
    program.write_text(text.replace('become "$owner" "$0" "$@"', ":"))
    program.chmod(0o755)
    for row, told in (
        ("         0          0 4294967295", False),
        ("         0     100000      65536", True),
    ):
        uids.write_text(f"{row}\n")
        done = subprocess.run([program, "true"], capture_output=True, text=True, check=True)
        assert ("userns-remap" in done.stderr) == told


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--path_prefix=/tb", "--host 0.0.0.0 --port 6006 --logdir /workspace/runs --path_prefix=/tb"),
        ("--logdir a --port 1", "--host 0.0.0.0 --logdir a --port 1"),
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
        (["jupyter", "--IdentityProvider.token", ""], {}),
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


@pytest.mark.parametrize(("capabilities", "owner", "wanted"), [(0xE0, 1234, 1234), (0xA80425FB, 1234, 0)])
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
