"""A project whose engine is a small program: it answers as told, and notes the question."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from tests.helpers.programs import program, ran

LISTED = "".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\n" for n in range(2))
NO_RUNTIME = (
    'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].'
)

# In sh, which starts ten times as fast as Python: 037 ends a word in the log, 036 all of them.
FAKE = r"""#!/bin/sh
{{ printf '%s\037' "$@"; printf '\036'; }} >>{log}
case "$*" in
{answers}
esac
echo "{name}: not in this test: $*" >&2
exit 1
"""


@dataclass
class Machine:
    """A project with the scripts, and a PATH with an engine that answers what it is told."""

    root: Path
    tools: Path
    env: dict[str, str] = field(default_factory=dict)

    def fake(self, name: str, answers: dict[str, tuple[int, str, str]]) -> None:
        """Puts a program on PATH; the first answer whose words begin the request counts."""
        cases = "\n".join(
            f"{quote(start)}*) printf %s {quote(out)}; printf %s {quote(err)} >&2; exit {code} ;;"
            for start, (code, out, err) in answers.items()
        )
        log = quote(str(self.tools / f"{name}.log"))
        program(self.tools / name, FAKE.format(log=log, answers=cases, name=name))

    def engine(self, **changes: tuple[int, str, str]) -> None:
        """An engine with every image, without GPUs; other answers by the words that a request begins with."""
        compose = "compose -f docker-compose.yml"
        answers = {"version": "26.1\n", "buildx version": "v0.13\n", "compose version": "2.26\n"}
        answers |= {"image inspect": "sha256:11aa", "info": '["name=seccomp"]\n', "run": "trained\n"}
        answers |= {f"{compose} ps": "", f"{compose} config": self.services()}
        answers |= {"compose logs": "", "compose": ""}
        known = {"run --rm --pull=never": (125, "", NO_RUNTIME)}
        known |= {key: (0, out, "") for key, out in answers.items()}
        given = {key.replace("_", " ").strip(): value for key, value in changes.items()}
        self.fake("docker", {**given, **{key: value for key, value in known.items() if key not in given}})

    def services(self, **environment: str) -> str:
        """What Compose says of its file."""
        stack, names = self.env.get("STACK") or "torch2.9-cu128", {"jupyter": "dev", "tensorboard": "train"}
        ports = {name: self.env.get(f"{name.upper()}_PORT", "8888") for name in names}
        services = {}
        for name, target in names.items():
            about = {"image": f"trainer:{stack}-{target}", "environment": environment}
            services[name] = {**about, "ports": [{"published": ports[name]}]}
        return json.dumps({"services": services})

    def asked(self, name: str = "docker") -> list[list[str]]:
        """Returns the recorded calls of a program."""
        log = self.tools / f"{name}.log"
        requests = log.read_text().split("\x1e")[:-1] if log.exists() else []
        return [request.split("\x1f")[:-1] for request in requests]

    def run(self, *words: str, code: int = 0, **env: str) -> tuple[str, str]:
        """Runs scripts/runtime.py; returns what it said on stdout and stderr."""
        words = (sys.executable, "scripts/runtime.py", *words)
        more = {**self.env, **env}
        done = ran(*words, code=code, cwd=self.root, env=more, stdin=subprocess.DEVNULL)
        return done.stdout, done.stderr

    def refused(self, *words: str, **env: str) -> str:
        """The one line that it ends with."""
        out, err = self.run(*words, code=2, **env)
        assert err.startswith("runtime: error: ")
        assert err.count("\n") == 1, err
        assert "docker run" not in out
        return err
