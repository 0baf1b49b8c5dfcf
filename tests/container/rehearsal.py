"""A small project for `make first-build`: all is real but uv and the Dockerfile's tail.

Both bases are a small Debian, pushed under their real names to a registry that the engine asks first; each
conda package of the locks is a file of its name, served on this machine over http. What comes after the conda
environment is stood in for: no wheels, and a `trainer` that only counts steps.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from locks import digest_of, read_conda, read_toml

from tests.container.run import engine
from tests.helpers.packages import pack
from trainer.version import __version__

ROOT = Path(__file__).resolve().parents[2]
# Stacks of the project, and what they are copies of: the first is built, of both the locks are installed.
# Its own name keeps its images apart from this machine's, which other tests use meanwhile.
COPIES = {"rehearsal": "torch2.9-cu128", "torch2.6-cu124": "torch2.6-cu124"}
STACKS = tuple(COPIES)
PYTHON3 = "/usr/bin/python3"
BASE = """
FROM {stand_in} AS full
RUN cd /usr && rm -rf lib/gcc lib/git-core lib/python3 libexec include bin/*-linux-gnu-* \\
    lib/*-linux-gnu/perl* lib/*-linux-gnu/*.a lib/*-linux-gnu/lib*san.so* \\
    share/doc share/locale share/man share/perl* /opt/stand-in
FROM scratch
COPY --from=full / /
"""
# In place of the stages from wheels on.
TAIL = """
FROM debian-base AS train
ARG SOURCE_DATE_EPOCH
COPY --link --from=env /opt/env /opt/env
COPY --chmod=755 scripts/rehearsal/ /opt/env/bin/
COPY --chmod=755 scripts/healthy /opt/image/healthy
RUN ls /opt/env/share/small | wc -l > /opt/env/packages
ENV PATH=/opt/env/bin:/usr/bin:/bin
WORKDIR /workspace
ENTRYPOINT ["/opt/env/bin/dumb-init", "--", "/opt/image/entrypoint"]
FROM train AS dev
ARG SOURCE_DATE_EPOCH
RUN echo dev > /opt/env/dev
CMD ["jupyter"]
"""
MAKEFILE = """\
image-test:
\tdocker run --rm --network=none trainer:$(STACK)-train trainer --help
"""
INIT = """\
#!/bin/sh
shift 2  # -- /opt/image/entrypoint
"$@" &
trap "kill $!" TERM
wait $!
"""
SERVER = """\
#!/opt/env/bin/python
import http.server, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "small"}')
port = 8888 if sys.argv[0].endswith("jupyter") else 6006
http.server.ThreadingHTTPServer(("", port), Answers).serve_forever()
"""
TRAINER = """\
#!/opt/env/bin/python
import pathlib, sys
if "--out" not in sys.argv:
    sys.exit("usage: trainer train" if "--help" not in sys.argv else 0)
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "checkpoints")
begin = max([int(path.name[5:]) for path in out.glob("step-*")], default=0)
assert bool(begin) == ("--resume" in sys.argv)
end = 15 if "--stop-after" in sys.argv else 40
(out / f"step-{end:08}").mkdir(parents=True)
(out / f"step-{end:08}" / "model.safetensors").write_text(str(end))
sys.exit(75 if end == 15 else 0)
"""


def small_locks(project: Path, channel: Path, address: str) -> None:
    """Makes a package for each line of the locks, and locks with their hashes and this machine's address."""
    for stack, original in COPIES.items():
        folder = project / "stacks" / stack
        shutil.copytree(ROOT / "stacks" / original, folder)
        for lock in folder.glob("conda*.lock"):
            lines = []
            for one in read_conda(lock.read_text()):
                files: dict[str, bytes | str] = {f"share/small/{one.name}": one.record.encode()}
                if one.name == "python":
                    # An environment of the base's own Python.
                    made_of = "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n"
                    files |= {"pyvenv.cfg": made_of.encode(), "bin/python": PYTHON3, "bin/python3": PYTHON3}
                made = channel / one.path  # locks of several stacks have it in common: zip keeps the time
                digest = digest_of(made) if made.exists() else pack(made, files)
                lines.append(f"{address}/{one.path}#{digest}")
            lock.write_text("\n".join(["@EXPLICIT", *lines, ""]))


def push_bases(stand_in: str, registry: str, folder: Path) -> dict[str, str]:
    """Pushes the small Debian under the names of the Dockerfile's bases; returns the digest of each."""
    folder.mkdir()
    (folder / "Dockerfile").write_text(BASE.format(stand_in=stand_in))
    digests = {}
    for name in re.findall(r"^FROM --platform=\S+ (\S+)@sha256:", (ROOT / "Dockerfile").read_text(), re.M):
        remote = f"{registry}/{name if '/' in name else f'library/{name}'}"
        given = f"type=image,name={remote},push=true,compression=gzip"
        engine("buildx", "build", "--quiet", "--provenance=false", "--output", given, folder)
        asked = ("buildx", "imagetools", "inspect", remote, "--format", "{{json .Manifest.Digest}}")
        digests[name] = json.loads(engine(*asked))
    return digests


def make_project(folder: Path, digests: Mapping[str, str], channel: Path, address: str) -> Path:
    """Writes the project, a git repository of one commit."""
    for name in ("scripts", "trainer"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("docker-compose.yml", "pyproject.toml", ".dockerignore"):
        shutil.copy(ROOT / name, folder)
    small_locks(folder, channel, address)
    for name in ("scripts/image.py", "trainer/host/stacks.json", f"stacks/{STACKS[0]}/stack.toml"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(f'"{COPIES[STACKS[0]]}"', f'"{STACKS[0]}"'))
    head = (ROOT / "Dockerfile").read_text().partition("# PyTorch and what the trainer needs")[0]
    uv = '/opt/conda/bin/python -B /tools/locks.py "/stacks/$STACK/wheels.lock" /tools'
    head = head.replace(uv, "true")
    for name, digest in digests.items():
        head = re.sub(rf"(?<= {re.escape(name)}@)sha256:\w+", digest, head)
    (folder / "Dockerfile").write_text(head + TAIL)
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / ".gitignore").write_text("build/\n__pycache__/\n")
    stack = read_toml(folder / "stacks" / STACKS[0] / "stack.toml")
    facts = {**stack["pins"], **stack["brings"], "python": stack["python"], "trainer": __version__}
    facts |= {"architectures": stack["gpu"]["architectures"], "compiler": "none"}
    small = folder / "scripts" / "rehearsal"
    small.mkdir()
    (folder / "scripts/image_facts.py").write_text(f"print({json.dumps(facts)!r})\n")
    programs = {"dumb-init": INIT, "trainer": TRAINER, "jupyter": SERVER, "tensorboard": SERVER}
    for name, text in programs.items():
        (small / name).write_text(text)
    commit(folder, "init", "--quiet")
    return folder


def commit(project: Path, *first: str) -> None:
    """Commits all of it; after another git command."""
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid")
    for words in (first or ("status",), ("add", "--all"), (*who, "commit", "--quiet", "--message", "small")):
        subprocess.run(["git", "-C", project, *words], check=True, capture_output=True)


def gateway() -> str:
    """This machine's address for containers of the default network."""
    found = engine("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    return found.strip()
