"""Promise: `fit` in somebody's process: one at a time, and whatever it took or set there is given back."""

import fcntl
import gc
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers import preloaded
from tests.helpers.refusals import named, refused
from trainer import fit
from trainer.checkpoint import CHECKPOINTS
from trainer.errors import BadInputError
from trainer.host.latest import MANIFEST
from trainer.host.limits import allowed_cpus
from trainer.runs.manifest import read_stored
from trainer.train.request import typed

SETTINGS = {
    "epochs": 1,
    "data.global_batch_size": 8,
    "data.micro_batch_size": 8,
    "log.to": ["jsonl"],
    "log.every": 1,
    "parallel.threads": 1,
}


class Points:
    """A task that takes a moment."""

    def data(self) -> Any:
        label = np.arange(16) % 2
        both = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32), "y": label}
        return both, both

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch.fields["x"]), batch.fields["y"], reduction="none")

    def measure(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, batch)}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quick(task: Any = Points, out: Any = "run", hooks: Any = (), **settings: Any) -> Any:
    return fit(task, {**SETTINGS, **settings}, out=out, hooks=hooks)


class At2:
    """A hook that does something after step 2."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def after_step(self, row: dict[str, Any]) -> None:
        if row["step"] == 2:
            self.act()


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


# --- what is given back ---


class Meddler(Points):
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
    backends = torch.backends
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": torch.get_num_threads(),
        "python's threads": threading.active_count(),
        "random": (
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
            torch.get_rng_state().tolist(),
        ),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009
        "cudnn": [
            getattr(backends.cudnn, n) for n in ("benchmark", "deterministic", "enabled", "benchmark_limit")
        ],
        "attention": backends.cuda.cudnn_sdp_enabled(),
        "tf32": (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32),
        "precisions": [
            getattr(part, "fp32_precision", None)
            for part in (backends.cuda.matmul, backends.cudnn, getattr(backends.cudnn, "conv", None))
        ],
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
        "cpus": allowed_cpus(),
        "umask": os.umask(os.umask(0o22)),
        "compile": torch.compile,
    }


def free(folder: Path) -> bool:
    """Whether another process can lock a run folder."""
    if not (child := os.fork()):
        code = 1
        try:
            with (folder / ".lock").open("r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def odd_switches() -> Iterator[None]:
    """Switches that the user has set, other than torch's defaults."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ["TO_BE_KEPT"] = "1"
    yield
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(False)
    del os.environ["TO_BE_KEPT"]


FORKSERVER = pytest.mark.xdist_group("forkserver")  # which imports torch, once for all tests of the group
ENDS: dict[str, tuple[type[BaseException] | None, Any, dict[str, Any]]] = {
    "finished": (None, (), {"deterministic": True}),
    "failed": (KeyError, (At2(raises(KeyError("x"))),), {}),
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
        if error is None:
            quick(Meddler, run, hooks, **settings)
        else:
            with pytest.raises(error):
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


def test_a_default_dtype_that_is_not_ours_is_refused(here: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with refused("torch.float64 torch.set_default_dtype(torch.float32)"):
            quick()
        assert torch.get_default_dtype() is torch.float64 and not (here / "run").exists()
    finally:
        torch.set_default_dtype(torch.float32)


def test_precisions_that_are_set_by_part_come_back() -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("torch 2.9")
    parts = [attrgetter(place)(torch.backends) for place in ("cuda.matmul", "mkldnn.matmul")]
    before = [part.fp32_precision for part in parts]
    try:
        for part in parts:
            part.fp32_precision = "tf32"
        quick()
        assert [part.fp32_precision for part in parts] == ["tf32", "tf32"]
    finally:
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


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


# --- one at a time ---


def test_a_second_one_at_once_is_refused() -> None:
    """In a hook, in a thread, in a task's method."""
    said = []

    def second() -> None:
        try:
            quick(out="other")
        except BadInputError as error:
            said.append(str(error))

    def all_ways() -> None:
        second()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    class Nested(Points):
        def data(self) -> Any:
            second()
            return super().data()

    quick(Nested, hooks=[At2(all_ways)])
    assert len(said) == 3
    assert not Path("other").exists()
    quick(out="after")


# --- hooks ---


class Pruned(Exception):  # noqa: N818
    """As optuna's."""

    def __init__(self, trial: int, step: int) -> None:
        super().__init__(f"trial {trial}")
        self.step = step


@pytest.fixture
def pythons_own_interrupt() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupts(times: int) -> Any:
    def interrupt() -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    return interrupt


@pytest.mark.usefixtures("pythons_own_interrupt")
def test_the_first_interrupt_saves_and_a_second_does_not_wait(here: Path) -> None:
    whole = quick(out="whole", epochs=4)
    for out, times, status in (("once", 1, "stopped"), ("twice", 2, "failed")):
        with pytest.raises(KeyboardInterrupt):
            quick(out=out, epochs=4, hooks=[At2(interrupts(times))])
        stored = read_stored(here / out)
        assert stored is not None and stored.status == status
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert any((here / out / CHECKPOINTS).glob("step-*")) == (times == 1)
        again = quick(out=out, epochs=4)
        for one, other in zip(again.model().parameters(), whole.model().parameters(), strict=True):
            assert torch.equal(one, other)


def test_settings_are_arrays_and_numbers_of_any_library() -> None:
    run = quick(**{"optim.betas": torch.tensor([0.5, 0.75]), "epochs": np.int64(1)})
    assert json.loads((run.folder / MANIFEST).read_text())["config"]["optim"]["betas"] == [0.5, 0.75]


def test_an_error_of_a_hook_keeps_its_type() -> None:
    hooks = [At2(raises(Pruned(1, 2)))]
    with pytest.raises(Pruned) as raised:
        quick(hooks=hooks)
    assert raised.value.step == 2
    assert json.loads(Path("run", MANIFEST).read_text())["status"] == "failed"
    quick(hooks=hooks, **{"hooks.on_error": "warn"})


# --- the run folder ---


def test_a_folder_that_is_no_run_stays_as_it_is(here: Path) -> None:
    (here / "full").mkdir()
    (here / "full" / "config.yaml").write_text("precious")
    (here / "link").symlink_to("full")
    (here / "file").write_text("precious")
    (here / "dangling").symlink_to("nowhere")
    (here / "odd").mkdir()
    (here / "odd" / MANIFEST).write_text("{}")
    for out, line in {
        "full": "run folder full",
        "link": "run folder link",
        "file": "run folder file",
        "dangling": "run folder dangling",
        "odd": "manifest.json",
        ".": str(here),
        3: "out=3",
    }.items():
        with pytest.raises(BadInputError) as refused:
            quick(out=out)
        assert named(str(refused.value).replace(f"{here}/", ""), line), out
    assert {path.name for path in here.rglob("*")} == {
        *("full", "config.yaml", "link", "file", "dangling", "odd", MANIFEST)
    }
    assert (here / "full" / "config.yaml").read_text() == (here / "file").read_text() == "precious"


# --- the current folder ---


TASK = dedent("""
    import os
    import numpy as np
    from torch import nn
    {top}

    class Line:
        def data(self):
            x = np.linspace(0, 1, 16, dtype=np.float32)[:, None]
            return {{"x": x}}, {{"x": x}}

        def model(self):
            return nn.Linear(1, 1)

        def loss(self, model, batch):
            return (model(batch.fields["x"]) - batch.fields["x"]).square().sum(1)

        def measure(self, model, batch):
            return {{"loss": self.loss(model, batch)}}
""")


def line_task(path: Path, top: str = "") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(TASK.format(top=top))
    return path


def test_a_task_that_changes_the_folder(here: Path) -> None:
    """Its run, hooks, sinks and what it begins from are where they were meant."""
    (here / "sub" / "sub" / "sub").mkdir(parents=True)
    line_task(here / "plain.py")
    line_task(here / "task.py", "os.chdir('sub' if os.path.isdir('sub') else '.')")
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


# --- helpers ---


def helped(folder: Path, name: str) -> Path:
    task = line_task(folder / "task.py", top="from net import Net, NAME")
    text = task.read_text().replace(
        "return nn.Linear(1, 1)", "from late import LATE\n        return Net(LATE)"
    )
    task.write_text(
        text.replace(
            "    def data",
            "    def describe(self):\n        from late import LATE\n"
            "        return {'net': NAME, 'late': LATE}\n\n    def data",
        )
    )
    (folder / "net.py").write_text(
        f"from torch import nn\nNAME = {name!r}\nclass Net(nn.Linear):\n"
        "    def __init__(self, late):\n        super().__init__(1, 1)\n        self.late = late\n"
    )
    (folder / "late.py").write_text(f"LATE = {name!r}\n")
    return task


def test_two_tasks_with_helpers_of_the_same_name(here: Path) -> None:
    tasks = {name: helped(here / name, name) for name in "ab"}
    runs = {name: quick(str(tasks[name]), f"run-{name}") for name in "ab"}
    for name, run in runs.items():
        data = json.loads((run.folder / MANIFEST).read_text())["data"]
        assert data["net"] == data["late"] == name
    assert not {"net", "late", "task"} & {*sys.modules}


def test_workers_that_are_not_forked_read_a_data_set_of_a_helper(here: Path) -> None:
    (here / "a").mkdir()
    (here / "a" / "sets.py").write_text(
        dedent("""
        import torch
        from scale import SCALE

        class Line(torch.utils.data.Dataset):
            def __len__(self):
                return 16

            def __getitem__(self, at):
                from late import ONE
                return {"x": torch.full((1,), at * SCALE * ONE)}
    """)
    )
    (here / "a" / "scale.py").write_text("SCALE = 0.1\n")
    (here / "a" / "late.py").write_text("ONE = 1\n")
    task = line_task(here / "a" / "task.py", top="from sets import Line as Items")
    task.write_text(
        re.sub(r"            x = .*\n.*", "            return Items(), Items()", task.read_text())
    )
    losses = []
    for workers in (0, 1):
        run = quick(
            str(task), f"run-{workers}", **{"data.workers": workers, "data.start_method": "forkserver"}
        )
        losses.append([row["loss"] for row in run.rows()])
    assert losses[0] == losses[1]


# --- odd processes ---


def _in_a_pool(workers: int) -> str:
    try:
        return str(len(quick(out=None, **{"data.workers": workers, "data.resident": False}).rows()))
    except BadInputError as error:
        return str(error)


@pytest.mark.usefixtures("here")
def test_in_a_daemonic_process() -> None:
    """As multiprocessing.Pool has them: they may start no workers."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        without, with_one = pool.map(_in_a_pool, [0, 1])
    assert without == "2" and named(with_one, "data.workers=1 data.workers=0")


FORKS = """
import multiprocessing, tempfile
import torch
from trainer import BadInputError, fit
from tests.train.test_from_python import Points, SETTINGS

def one(threads):
    settings = {**SETTINGS, "parallel.threads": threads}
    try:
        return f"{fit(Points, settings, out=tempfile.mkdtemp()).metrics['loss']:.4f}"
    except BadInputError:
        return "refused"

def forked(threads):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(one, (threads,))

torch.set_num_threads(2)
before = forked(2)
(torch.ones(1 << 22) + 1).sum()
print("told", before, forked(2), forked(1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP's threads of other systems aren't GNU's")
def test_a_fork_in_which_torch_would_hang_is_refused(here: Path) -> None:
    """OpenMP's threads don't come through a fork, and its library waits for them."""
    wanted = f"{quick(out='wanted').metrics['loss']:.4f}"
    (here / "script.py").write_text(FORKS)
    environment = {**os.environ, "PYTHONPATH": str(preloaded.ROOT), "OMP_NUM_THREADS": "2"}
    done = preloaded.run([sys.executable, "script.py"], cwd=here, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    assert told.split()[1:] == [wanted, "refused", wanted]


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/env/bin/trainer", "train", "digits"], "trainer train digits"),
        (["/x/trainer/__main__.py", "runs"], "trainer runs"),
        (["mine.py", "a b"], "python mine.py 'a b'"),
        (["/x/ipykernel_launcher.py", "-f", "k.json"], "fit(...) in a notebook"),
    ],
)
def test_the_command_of_a_run_is_what_was_started(argv: list[str], command: str) -> None:
    assert typed(argv) == command
