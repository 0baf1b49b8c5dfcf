"""Promise: nothing phones home. Containers get a network that leads nowhere; what they send is counted."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from textwrap import dedent

import pytest

from tests.container.kernel import KERNEL
from tests.container.run import engine, running, wait_for

pytestmark = pytest.mark.container

# Documentation addresses (RFC 5737): nobody has them. Names are asked for there, too.
_OWN, _NAMES, _ELSEWHERE = "192.0.2.2/24", "203.0.113.53", "198.51.100.7"


@contextlib.contextmanager
def watched(image: str, *command: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """A container whose only way out is the end of a cable; its name, and what counts the packets sent."""
    if os.geteuid() or not (shutil.which("nsenter") and shutil.which("ip")):
        assert "TRAINER_REQUIRE_IMAGES" not in os.environ, "root, nsenter or ip is missing"
        pytest.skip("laying a cable in a container's network needs root, nsenter and ip")
    name = f"trainer-watched-{os.getpid()}"
    # Of a name that nobody answers for, a second is enough.
    names = (f"--dns={_NAMES}", "--dns-option=timeout:1", "--dns-option=attempts:1")
    with running(name, "--network=none", *names, image, *command):
        process = engine("inspect", "--format", "{{.State.Pid}}", name).strip()

        def ip(words: str) -> None:
            subprocess.run(["nsenter", "-t", process, "-n", "ip", *words.split()], check=True)

        ip("link add out type veth peer name sink")
        for end in ("out", "sink"):  # nothing of their own accord: neither ARP nor IPv6's greetings
            ip(f"link set {end} arp off addrgenmode none up")
        ip(f"addr add {_OWN} dev out")
        ip("route add default dev out")
        counter = "/sys/class/net/out/statistics/tx_packets"
        yield name, lambda: int(engine("exec", name, "cat", counter))


def test_an_attempt_would_be_seen(train_image: str) -> None:
    with watched(train_image, "sleep", "600") as (name, sent):
        assert sent() == 0
        ask = "import socket; socket.create_connection(({!r}, 80), 1)"
        counts = []
        for target in (_ELSEWHERE, "example.org"):
            engine("exec", name, "python", "-c", ask.format(target), code=1, expected=[""])
            counts.append(sent())
        assert 0 < counts[0] < counts[1]


def test_training_on_two_ranks_asks_nobody(train_image: str) -> None:
    script = """
        set -e
        short="--set parallel.threads=1 --set max_steps=4 --set checkpoint.every=2"
        compiled="--set data.micro_batch_size=32 --set compile.mode=default"
        trainer train digits --nproc-per-node 2 $short $compiled --out /tmp/r
        trainer report /tmp/r
        trainer runs /tmp/r
        python -c 'import tensorboard, tokenizers, s3fs, torchaudio, torchvision'
    """
    with watched(train_image, "sleep", "900") as (name, sent):
        said = engine("exec", name, "bash", "-c", dedent(script))
        assert "newest good" in said
        assert sent() == 0


def test_jupyterlab_and_tensorboard_ask_nobody(dev_image: str) -> None:
    token = "0123456789abcdef"
    asked = f"""
        import urllib.request
        for path in ("lab", "api/contents", "api/kernelspecs", *("lab/api/" + x for x in ("update", "news"))):
            urllib.request.urlopen(f"http://127.0.0.1:8888/{{path}}?token={token}").read()
        urllib.request.urlopen("http://127.0.0.1:6006").read()
    """
    both = f"tensorboard --logdir /tmp --port 6006 & JUPYTER_TOKEN={token} exec /opt/image/entrypoint jupyter"
    with watched(dev_image, "bash", "-c", both) as (name, sent):
        answers = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8888/api')"

        def up() -> bool:
            said = engine("exec", name, "python", "-c", answers, code=None, expected=[""])
            return "Traceback" not in said

        wait_for(up, "JupyterLab")
        wait_for(lambda: "6006" in engine("logs", name, expected=[""]), "TensorBoard")
        engine("exec", name, "python", "-c", dedent(asked))
        said = engine("exec", name, "python", "-c", KERNEL, token, "import torch, trainer; print(6 * 7)")
        assert said == "42\n"
        assert sent() == 0
