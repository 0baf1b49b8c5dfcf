"""P9: JupyterLab and sshd attacked from the network. docs/install.md has the table of what was tried."""

import os
import re
from collections.abc import Iterator

import pytest

from tests.container.run import Answer, ask, engine, running, wait_for
from tests.helpers.ports import free_port

# Nightly: make image-test ARGS="-m slow".
pytestmark = [pytest.mark.container, pytest.mark.slow, pytest.mark.xdist_group("attacks")]


class Lab:
    """A JupyterLab in a container, whose port is open to everybody."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.port = name, port
        wait_for(lambda: self.ask("/api").code == 200, "JupyterLab")
        self.token = re.findall(r"token=([0-9a-f]{48})", engine("logs", name))[-1]

    def ask(self, path: str, method: str = "GET", body: str = "", **headers: str) -> Answer:
        return ask(self.port, path, method, body, **headers)


@pytest.fixture(scope="module")
def lab(dev_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder, port = tmp_path_factory.mktemp("attacked"), free_port()
    (folder / "notes.txt").write_text("inside")
    for path in (folder, folder / "notes.txt"):
        os.chown(path, 1000, 1000)
    limits = ("--cap-drop=ALL", "--security-opt=no-new-privileges")
    mount = ("--volume", f"{folder}:/workspace", "--publish", f"127.0.0.1:{port}:8888")
    with running(f"trainer-test-{port}", *limits, *mount, dev_image, "jupyter") as name:
        yield Lab(name, port)


def test_nothing_is_told_without_the_token(lab: Lab) -> None:
    """Nor by a browser that has a login, for a page of another site."""
    key = {"Authorization": f"token {lab.token}"}
    assert lab.ask("/files/notes.txt", **key).body == b"inside"
    for path in ("/lab", "/api/contents", "/api/terminals", "/files/notes.txt", "/terminals/websocket/1"):
        for asked in (path, f"{path}?token=", f"{path}?token={'0' * 48}"):
            code, body, _ = lab.ask(asked)
            assert code in (302, 403, 404, 405) and b"inside" not in body, (asked, code, body[:200])
    given = lab.ask(f"/lab?token={lab.token}").cookies
    (cookie,) = [one.partition(";")[0] for one in given if one.startswith("username-")]
    assert lab.ask("/api/contents", Cookie=cookie).code == 200
    elsewhere = {"Cookie": cookie, "Origin": "http://evil.example"}
    assert lab.ask("/api/terminals", "POST", "{}", **elsewhere).code in (403, 404)


def test_the_token_is_where_it_was_printed_and_nowhere_else(lab: Lab) -> None:
    """Once at the start; not in the lines of requests, the process list or a file that others read."""
    before = engine("logs", lab.name, expected=(".*",)).count(lab.token)
    for path in ("/api/nothing", "/files/nothing", "/nothing"):
        lab.ask(f"{path}?token={lab.token}")
    lab.ask("/nothing", Authorization=f"token {lab.token}")
    assert engine("logs", lab.name, expected=(".*",)).count(lab.token) == before
    listed = engine("exec", lab.name, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "jupyter-lab" in listed and lab.token not in listed
    grep = f"grep -rl {lab.token} /home /tmp /cache /workspace /run"
    files = engine("exec", "--user=0", "--privileged", lab.name, "sh", "-c", grep).split()
    assert files
    for file in files:
        engine("exec", "--user=4321", lab.name, "cat", file, code=1)


def test_a_token_of_the_users_own_is_no_option_of_a_process(dev_image: str) -> None:
    given = ("--env", "JUPYTER_TOKEN=mine-0123456789")
    with running(f"trainer-test-{free_port()}", *given, dev_image, "jupyter") as name:
        wait_for(lambda: "is running at" in engine("logs", name), "JupyterLab")
        assert "mine-0123456789" not in engine("logs", name)
        listed = engine("exec", name, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "jupyter-lab" in listed and "mine-0123456789" not in listed
        other = ("exec", "--user=4321", name, "cat", "/proc/7/environ")
        assert "mine-0123456789" not in engine(*other, code=None, expected=(".*",))


SSH = """
keygen() { ssh-keygen -q -t ed25519 -N '' -f "$1"; }
keygen /tmp/good && keygen /tmp/bad && mkdir -p /tmp/keys
export SSH_AUTHORIZED_KEYS="$(cat /tmp/good.pub)" MY_TOKEN=planted
/opt/image/entrypoint sshd >/tmp/log 2>&1 &
until grep -q listening /tmp/log; do sleep 0.1; done
to() { identity=$1; shift; ssh -p 2222 -i "/tmp/$identity" -o IdentitiesOnly=yes -o BatchMode=yes \
    -o LogLevel=ERROR -o StrictHostKeyChecking=no -o UserKnownHostsFile=/tmp/known "$@" 2>&1; }
echo "good $(to good trainer@127.0.0.1 id -un)"
echo "bad $(to bad trainer@127.0.0.1 id -un)"
echo "root $(to good root@127.0.0.1 id -un)"
other=PreferredAuthentications=password,keyboard-interactive,hostbased
echo "password $(to good -o $other trainer@127.0.0.1 id)"
echo "token $(to good trainer@127.0.0.1 'echo $MY_TOKEN$LD_PRELOAD')"
export PYTHONSTARTUP=/x
echo "sent $(to good -o SendEnv=PYTHONSTARTUP trainer@127.0.0.1 'echo $PYTHONSTARTUP')"
mkdir -p ~/.ssh && echo 'PYTHONSTARTUP=/x' >~/.ssh/environment
echo "file $(to good trainer@127.0.0.1 'echo $PYTHONSTARTUP')"
cp /tmp/bad.pub ~/.ssh/authorized_keys
echo "home $(to bad trainer@127.0.0.1 id -un)"
stat -c '%a %U %n' /cache/ssh /cache/ssh/host_ed25519 /tmp/tmp.*/keys /tmp/tmp.*
cat /cache/ssh/host_ed25519.pub
"""


def test_sshd(dev_image: str) -> None:
    """Keys alone open it, to which neither client nor home folder adds; each cache has its own host key."""
    hosts = set()
    for _ in range(2):
        limits = ("--rm", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none")
        said = engine("run", *limits, dev_image, "bash", "-c", SSH, expected=("denied",)).splitlines()
        told = dict(line.partition(" ")[::2] for line in said)
        assert told["good"] == "trainer"
        assert all("denied (publickey)" in told[name] for name in ("bad", "root", "password", "home")), told
        assert told["token"] == told["sent"] == told["file"] == ""
        assert any(line.startswith("700 trainer /cache/ssh") for line in said)
        assert any(line.startswith("600 trainer /cache/ssh/host_ed25519") for line in said)
        assert all(line.startswith("700") for line in said if re.search(r" /tmp/tmp\.\w+$", line))
        hosts.add(said[-1])
    assert len(hosts) == 2
    look = "ls /etc/ssh/ssh_host_* /cache/ssh ~/.ssh /root/.ssh 2>/dev/null; true"
    assert engine("run", "--rm", "--user=0", dev_image, "sh", "-c", look) == ""


def test_only_the_ports_of_the_services_are_open(lab: Lab) -> None:
    """Kernels' sockets listen inside the container's loopback alone."""
    listening = engine("exec", lab.name, "sh", "-c", "cat /proc/net/tcp /proc/net/tcp6")
    addresses = {line.split()[1] for line in listening.splitlines() if " 0A " in line}
    beyond = {int(one.rpartition(":")[2], 16) for one in addresses if not one.startswith("0100007F")}
    resolver = {one for one in addresses if one.startswith("0B00007F")}  # the engine's own, 127.0.0.11
    assert beyond - {int(one.rpartition(":")[2], 16) for one in resolver} == {8888}
