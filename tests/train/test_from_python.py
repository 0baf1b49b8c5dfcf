"""Promise: `fit` in somebody's process: one at a time, and whatever it took or set there is given back."""

import fcntl
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.refusals import named, refused
from tests.helpers.small_task import SETTINGS, Small
from trainer import fit
from trainer.checkpoint import CHECKPOINTS
from trainer.errors import BadInputError
from trainer.host.latest import MANIFEST
from trainer.host.limits import allowed_cpus
from trainer.runs.manifest import read_stored
from trainer.runs.report.write import report_failure

pytestmark = pytest.mark.usefixtures("here")


def quick(task: Any = Small, out: Any = "run", hooks: Any = (), **settings: Any) -> Any:
    return fit(task, {**SETTINGS, **settings}, out=out, hooks=hooks)


class At2:
    """A hook that does something after step 2."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def after_step(self, row: dict[str, Any]) -> None:
        if row["step"] == 2:
            self.act()


class Meddler(Small):
    """Sets what the training sets, too."""

    def data(self) -> Any:
        torch.manual_seed(3)
        return super().data()


def others_work() -> None:
    """What another thread of a server, or a cell's own code, may do while a training runs."""
    os.environ["FROM_A_REQUEST"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/nowhere"
    os.environ.pop("TO_BE_KEPT", None)
    sys.path.insert(0, "/nowhere")
    logging.root.addHandler(logging.NullHandler())
    logging.root.setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning, lineno=7)
    torch.set_default_dtype(torch.float64)
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    torch.backends.cudnn.benchmark_limit = 3
    torch.backends.cudnn.deterministic = True
    torch.set_float32_matmul_precision("medium")
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cuda.enable_cudnn_sdp(True)
    random.random(), np.random.rand()


def process_state() -> dict[str, Any]:
    """What a process has that a run might change."""
    backends, numbers = torch.backends, np.random.get_state(legacy=False)
    cudnn = backends.cudnn
    parts = (backends.cuda.matmul, cudnn, getattr(cudnn, "conv", None))
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": (torch.get_num_threads(), threading.active_count()),
        "random": [random.getstate(), numbers["state"]["key"].tolist(), torch.get_rng_state().tolist()],
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009
        "cudnn": [cudnn.benchmark, cudnn.deterministic, cudnn.enabled, cudnn.benchmark_limit],
        "attention": backends.cuda.cudnn_sdp_enabled(),
        "tf32": (torch.get_float32_matmul_precision(), cudnn.allow_tf32),
        "precisions": [getattr(part, "fp32_precision", None) for part in parts],
        "default": (torch.get_default_dtype(), torch.get_default_device()),
        "modes": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_inference_mode_enabled()),
        "numpy": np.geterr(),
        "folder": Path.cwd(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "modules": {name for name in sys.modules if name.partition(".")[0] in ("beside_it", "lay", "task")},
        # But for SIGCHLD, which torch's first loader takes for good.
        "signals": {n: signal.getsignal(n) for n in signal.valid_signals() - {signal.SIGCHLD}},
        "warnings": list(warnings.filters),
        "logging": (list(logging.root.handlers), logging.root.level),
        "cpus and umask": (allowed_cpus(), os.umask(os.umask(0o22))),
        "compile": torch.compile,
    }


def free(folder: Path) -> bool:
    """Whether another process can lock a run folder."""
    if not (child := os.fork()):
        with suppress(BaseException), (folder / ".lock").open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def odd_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switches that the user has set, other than torch's defaults."""
    monkeypatch.setenv("TO_BE_KEPT", "1")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(False)


FORKSERVER = pytest.mark.xdist_group("forkserver")  # which imports torch, once for all tests of the group
ENDS: dict[str, tuple[type[BaseException] | None, Any, dict[str, Any]]] = {
    "finished": (None, (), {"deterministic": True}),
    "failed": (KeyError, (At2(lambda: os.environ["NONE"]),), {}),
    "refused": (BadInputError, (), {"model.freeze": ["nothing"]}),
    "with workers": (None, (), {"data.workers": 1, "data.resident": False}),
}


@pytest.mark.usefixtures("odd_switches")
@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=FORKSERVER if "workers" in end else ()) for end in ENDS]
)
def test_a_process_has_back_what_it_had(here: Path, end: str) -> None:
    error, hooks, settings = ENDS[end]
    for number in range(2):  # the first may import, and open, what stays for good
        run = here / f"run-{number}"
        gc.collect()
        before = process_state()
        with nullcontext() if error is None else pytest.raises(error):
            quick(Meddler, run, hooks, **settings)
        gc.collect()
        after = process_state()
        if not number:
            del before["descriptors"], after["descriptors"]
        for name, value in before.items():
            assert after[name] == value, (end, name)
        assert not (run / ".lock").exists() or free(run)


@pytest.fixture
def undone() -> Iterator[None]:
    """Undoes what `others_work` did."""
    handlers, level, variables = list(logging.root.handlers), logging.root.level, dict(os.environ)
    path, filters, limit = list(sys.path), list(warnings.filters), torch.backends.cudnn.benchmark_limit
    yield
    torch.set_default_dtype(torch.float32)
    torch.autograd.set_detect_anomaly(False)
    torch.backends.cudnn.benchmark_limit, torch.backends.cudnn.deterministic = limit, False
    logging.root.handlers[:], logging.root.level = handlers, level
    sys.path[:], warnings.filters[:] = path, filters  # type: ignore[index]
    os.environ.clear()
    os.environ.update(variables)


@pytest.mark.usefixtures("odd_switches", "undone")
def test_what_others_set_meanwhile_stays(here: Path) -> None:
    """Also numbers that they drew: they don't come twice."""
    quick(out="first")  # may import what stays
    wanted = dict[str, Any]()

    def work() -> None:
        thread = threading.Thread(target=others_work)
        thread.start()
        thread.join()
        wanted.update(process_state())

    quick(out="run", hooks=[At2(work)])
    after, same = process_state(), ("environment", "path", "logging", "attention", "deterministic")
    assert {name: after[name] for name in same} == {name: wanted[name] for name in same}
    assert after["cudnn"][1:] == wanted["cudnn"][1:]  # the first one is what the training has set
    assert after["random"][:2] == wanted["random"][:2]
    assert after["tf32"][0] == "medium" and after["default"][0] is torch.float64
    assert after["modes"][1] and after["warnings"][0][4] == 7
    assert after["folder"] == here


@pytest.mark.usefixtures("undone")
def test_a_default_dtype_that_is_not_ours_is_refused(here: Path) -> None:
    torch.set_default_dtype(torch.float64)
    with refused("torch.float64 torch.set_default_dtype(torch.float32)"):
        quick()
    assert torch.get_default_dtype() is torch.float64 and not (here / "run").exists()


def test_precisions_that_are_set_by_part_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("torch 2.9")
    parts: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    for part in parts:
        monkeypatch.setattr(part, "fp32_precision", "tf32")
    quick()
    assert [part.fp32_precision for part in parts] == ["tf32", "tf32"]


def test_what_surrounds_the_call_changes_nothing(here: Path) -> None:
    mixed = {"precision.mode": "bf16"}
    wanted = quick(**mixed).metrics
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert quick(out="around", **mixed).metrics == wanted
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
        assert torch.zeros(()).is_meta
    with torch.no_grad():
        assert quick(out="off", **mixed).metrics == wanted
        assert not torch.is_grad_enabled()
    assert {path.name for path in here.iterdir()} >= {"run", "around", "off"}


def test_a_second_one_at_once_is_refused() -> None:
    """In a hook, and in a thread beside it."""
    said = []

    def second() -> None:
        with refused() as found:
            quick(out="other")
        said.append(found.value)

    def both_ways() -> None:
        second()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    quick(hooks=[At2(both_ways)])
    assert len(said) == 2
    assert not Path("other").exists()
    quick(out="after")


@pytest.fixture
def pythons_own_interrupt() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(times: int) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("pythons_own_interrupt")
def test_the_first_interrupt_saves_and_a_second_does_not_wait(here: Path) -> None:
    whole = quick(out="whole", epochs=4)
    for out, times, status in (("once", 1, "stopped"), ("twice", 2, "failed")):
        with pytest.raises(KeyboardInterrupt):
            quick(out=out, epochs=4, hooks=[At2(partial(interrupt, times))])
        stored = read_stored(here / out)
        assert stored is not None and stored.status == status
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert any((here / out / CHECKPOINTS).glob("step-*")) == (times == 1)
        again = quick(out=out, epochs=4)
        assert all(map(torch.equal, again.model().parameters(), whole.model().parameters()))


def test_a_folder_that_is_no_run_stays_as_it_is(here: Path) -> None:
    for file, text in (("full/config.yaml", "precious"), ("file", "precious"), (f"odd/{MANIFEST}", "{}")):
        (here / file).parent.mkdir(exist_ok=True)
        (here / file).write_text(text)
    (here / "link").symlink_to("full")
    (here / "dangling").symlink_to("nowhere")
    before = {path.name for path in here.rglob("*")}
    for out in ("full", "link", "file", "dangling"):
        with refused(f"run folder {out}"):
            quick(out=out)
    for odd, line in (("odd", "manifest.json"), (".", here), (3, "out=3")):
        with refused(line):
            quick(out=odd)
    assert {path.name for path in here.rglob("*")} == before
    assert (here / "full" / "config.yaml").read_text() == (here / "file").read_text() == "precious"


def test_a_task_that_changes_the_folder(here: Path) -> None:
    """Its run, hooks, sinks and what it begins from are where they were meant."""
    (here / "sub" / "sub" / "sub").mkdir(parents=True)
    task = "import os\nfrom tests.helpers.small_task import Small\nclass Mine(Small): pass\n"
    (here / "plain.py").write_text(task)
    (here / "task.py").write_text(f"{task}os.chdir('sub' if os.path.isdir('sub') else '.')\n")
    (here / "own.py").write_text(
        "def send(row): pass\nclass Watch:\n    def after_step(self, row): SEEN.append(row)\nSEEN = []"
    )
    (here / "mod.py").write_text("class Watch:\n    def after_step(self, row): pass\n")
    plain = fit("plain.py", {**SETTINGS, "checkpoint.every": 1}, out="plain")
    own = {"hooks.use": ["own.py:Watch", "mod:Watch"], "log.to": ["jsonl", "own.py:send"]}
    for out in ("run", None):
        run = fit("task.py", {**SETTINGS, **own}, out=out, from_run="plain@1")
        os.chdir(here)  # it was the task that left it
        assert run.folder.is_absolute()
        assert run.folder.parent == (here if out else here / "runs")
    assert (here / "runs" / "latest").readlink() == Path(run.folder.name)
    assert not list((here / "sub").rglob("*.json"))
    again = fit("task.py", {**SETTINGS, **own, "epochs": 2}, out="run")
    assert plain.folder == here / "plain"
    os.chdir("/")
    assert [row["step"] for row in again.rows()] == [1, 2, 3, 4]
    assert again.model() is not None


def test_a_failed_run_has_its_report(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And its messages speak of `fit`."""
    report, settings = here / "run" / "report.html", {"data.samples": 9}
    with pytest.raises(ZeroDivisionError):
        quick(hooks=[At2(lambda: 1 // 0)], **settings)
    assert "failed" in report.read_text()
    assert named(capsys.readouterr().err, "run/report.html data.samples data.name=own")
    report.unlink()
    assert (
        report_failure(report.parent, 75) == 75
        and report_failure(report.parent, 2) == 2
        and not report.exists()
    )
    assert report_failure(report.parent, 1) == 1 and report.exists()
    with refused("seed 0 1 run"):
        quick(seed=1, **settings)


FAILS = """
import torch, trainer
from tests.helpers.small_task import SETTINGS, Small
class Mine(Small):
    def model(self):
        made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        made[1].weight.register_hook(lambda _: 1 / 0)
        return made
trainer.fit(Mine, SETTINGS)"""


def test_a_process_ends_after_a_failed_backward() -> None:
    """What torch's engine then keeps waits for Python, which has ended."""
    how: Any = {"env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, "timeout": 300}
    assert subprocess.run([sys.executable, "-c", FAILS], check=False, **how).returncode == 1
