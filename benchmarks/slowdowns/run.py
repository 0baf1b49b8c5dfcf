"""One run of the real command line, with something slow put around it, and what it said of itself."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.runs.folder import read_rows

MARK = "TRAINER_SLOWDOWN"
_LIMIT_SECONDS = 120.0


@dataclass
class Run:
    """A run to be started: an injection changes how.

    Attributes:
        work: Folder with recipes, data and whatever an injection keeps.
        folder: The run folder.
        settings: Further `--set` arguments.
        environment: Further variables.
        prefix: Command in front of the trainer's.
        process: The launcher, once it has been started.
    """

    work: Path
    folder: Path
    settings: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def metrics(self) -> Path:
        """The file of its metrics records."""
        return self.folder / "metrics.jsonl"

    def over(self) -> bool:
        """Whether it has ended."""
        return self.process is not None and self.process.poll() is not None

    def wait_for_rows(self) -> bool:
        """Waits until the first row of metrics is there; False if the run ended before."""
        while not self.over():
            if self.metrics.exists() and self.metrics.stat().st_size:
                return True
            time.sleep(0.05)
        return False

    def processes(self, rank: int | None = None) -> list[int]:
        """Ids of its ranks' processes (loader workers too), or of one rank's; the rank itself first."""
        wanted = f"{MARK}={self.folder.name}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdigit():
                    continue
                values = (entry / "environ").read_bytes().split(b"\0")
                own = next((value for value in values if value.startswith(b"RANK=")), b"")
                if wanted in values and own and (rank is None or own == b"RANK=%d" % rank):
                    found.append(int(entry.name))
        return sorted(found)


Injection = Callable[[Run], contextlib.AbstractContextManager[object]]


class Ending(NamedTuple):
    """End of a run.

    Attributes:
        code: Its exit code.
        rows: All that it wrote into metrics.jsonl and the files beside it.
        text: What it printed.
        seconds: From start to end.
    """

    code: int
    rows: list[dict[str, Any]]
    text: str
    seconds: float

    @property
    def verdict(self) -> dict[str, Any]:
        """The last word, {} if there was none."""
        found = [row for row in self.rows if row.get("kind") == "verdict" and row.get("final")]
        return found[-1] if found else {}

    @property
    def samples_per_s(self) -> float:
        """Throughput at the run's end; 0 if it didn't finish."""
        ends = [row for row in self.rows if row.get("kind") == "end"]
        return float(ends[-1].get("samples_per_s") or 0) if ends else 0.0


def execute(
    recipe: str,
    settings: Sequence[str],
    injections: Sequence[Injection],
    work: Path,
    name: str,
    ranks: int = 1,
    seconds: float = _LIMIT_SECONDS,
) -> Ending:
    """Runs `trainer train` to its end, or for so many seconds at most."""
    folder = work / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    run = Run(work, folder, list(settings))
    with contextlib.ExitStack() as stack:
        for inject in injections:
            stack.enter_context(inject(run))
        command = [*run.prefix, sys.executable, "-m", "trainer", "train", str(work / f"{recipe}.yaml")]
        command += ["--out", str(folder), "--nproc-per-node", str(ranks)]
        for setting in run.settings:
            command += ["--set", setting]
        environment = {**os.environ, MARK: name}
        # Where the packages were installed without bytecode, each start would compile them: 15 s.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(work / "bytecode")
        paths = [run.environment.pop("PYTHONPATH", ""), str(Path(__file__).parents[2])]
        environment |= {**run.environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        began = time.monotonic()
        with (folder.parent / f"{name}.txt").open("wb") as said:
            run.process = subprocess.Popen(
                command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                run.process.wait(seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(run)
            code = run.process.wait()
        took = time.monotonic() - began
    text = (folder.parent / f"{name}.txt").read_text(errors="replace")
    return Ending(code, list(read_rows(run.folder)), text, took)


def _end(run: Run) -> None:
    """Kills what is left of it."""
    assert run.process is not None
    if run.process.poll() is None:
        for pid in (*run.processes(), run.process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
