"""Pods of a printed job as containers of the local engine: what a kubelet and a Job's controller do."""

import os
from pathlib import Path
from typing import Any

from tests.container.run import engine, wait_for
from tests.helpers import job_files

_SECONDS = 900.0  # each start imports torch six times


class Job:
    """An Indexed Job of several pods on one bridge network; its claim is the folder `runs` of this host.

    `codes` are those with which its pods ended, by their index, in order.
    """

    def __init__(self, text: str, folder: Path) -> None:
        """Makes the network, the claim, and no pod yet, of what `trainer job kubernetes` printed."""
        job = job_files.documents(text)["Job"]
        self.name, self.runs, self.folder = job["metadata"]["name"], folder / "runs", folder
        self._spec = job["spec"]
        self.codes: list[list[int]] = [[] for _ in range(self._spec["completions"])]
        self._command, self._environment, self._mounts = job_files.read("kubernetes", text, folder)
        self._names: list[list[str]] = [[] for _ in self.codes]
        self.runs.mkdir(parents=True)
        os.chown(self.runs, 0, self._pod["securityContext"]["fsGroup"])
        self.runs.chmod(0o2775)
        engine("network", "create", self.name)

    def close(self) -> None:
        """Deletes all of it but the folder."""
        for names in self._names:
            engine("rm", "--force", *names, code=None)
        engine("network", "rm", self.name, code=None)

    @property
    def _pod(self) -> Any:
        return self._spec["template"]["spec"]

    def start(self, *indexes: int) -> None:
        """Starts a pod for each index: the first, or another in the place of one that ended."""
        (container,) = self._pod["containers"]
        limits, user = container["resources"]["limits"], self._pod["securityContext"]
        for index in indexes:
            name = f"{self.name}-{index}-{len(self._names[index])}"
            message = self.folder / name
            message.touch()
            message.chmod(0o666)
            # A kubelet sets the first in every pod, whatever enableServiceLinks says.
            environment = {"KUBERNETES_SERVICE_HOST": "192.0.2.1", **self._environment}
            for variable in container["env"]:
                if "valueFrom" in variable:
                    field = variable["valueFrom"]["fieldRef"]["fieldPath"]
                    environment[variable["name"]] = name if field == "metadata.name" else str(index)
                else:
                    environment[variable["name"]] = job_files.single(variable["value"])
            claims = {"runs": self.runs}
            empty = [one["name"] for one in self._pod["volumes"] if one.get("emptyDir") == {}]
            emptied = [one["mountPath"] for one in container["volumeMounts"] if one["name"] in empty]
            binds = {where: claims[claim] for claim, where in (one.split(":") for one in self._mounts)}
            binds |= {"/dev/termination-log": message}
            engine(
                *("run", "--detach", "--name", name, "--hostname", f"{self.name}-{index}"),
                # The headless Service's name of the pod.
                *("--network", self.name, "--network-alias", f"{self.name}-{index}.{self._pod['subdomain']}"),
                *("--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", user["fsGroup"]),
                *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
                *("--cpus", limits["cpu"], "--memory", limits["memory"].removesuffix("i")),
                *("--shm-size", "1g", "--stop-timeout", self._pod["terminationGracePeriodSeconds"]),
                *(f"--tmpfs={where}:exec,mode=1777" for where in emptied),
                *(f"--volume={source}:{where}" for where, source in binds.items()),
                *(f"--env={key}={value}" for key, value in environment.items()),
                *(container["image"], *self._command),
            )
            self._names[index].append(name)

    def log(self, index: int) -> str:
        """What the newest pod of an index has said."""
        return engine("logs", self._names[index][-1], expected=(".*",))

    def until(self, index: int, words: str) -> None:
        """Waits until the newest pod of an index says something."""
        wait_for(lambda: words in self.log(index), f"{words!r}", _SECONDS)

    def message(self, index: int) -> str:
        """The termination message of the newest pod of an index."""
        return (self.folder / self._names[index][-1]).read_text()

    def signal(self, index: int, name: str) -> None:
        """Sends the newest pod of an index a signal: TERM drains it, KILL is a host that goes down."""
        engine("kill", f"--signal={name}", self._names[index][-1])

    def end(self, *indexes: int) -> list[int]:
        """The exit codes of the newest pods, once they have ended."""
        ended = [int(engine("wait", self._names[index][-1])) for index in indexes]
        for index, code in zip(indexes, ended, strict=True):
            self.codes[index].append(code)
        return ended

    def replaced(self, *indexes: int) -> None:
        """Starts others in the place of pods that ended, as the Job's rules for their codes have it."""
        rules = self._spec["podFailurePolicy"]["rules"]
        for index in indexes:
            assert job_files.fate(rules, self.codes[index][-1]) in ("Ignore", "Count")
        self.start(*indexes)
