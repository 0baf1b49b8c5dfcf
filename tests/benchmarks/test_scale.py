"""Promise: predictions for thousands of GPUs follow from measured figures, by formula and by simulation."""

import ast
import functools
import heapq
import json
import math
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from matplotlib.figure import Figure

from benchmarks.__main__ import main
from benchmarks.charts import as_svg
from benchmarks.scale import document, draw, formulas, life, measure, messages, probes, simulate as simulation
from benchmarks.scale.figures import DEFAULT_S, Estimate, Figures, difference, read_job, read_link
from benchmarks.scale.life import best_interval, failure_times, live
from benchmarks.scale.messages import Fabric
from benchmarks.scale.simulate import simulate
from benchmarks.scale.strategies import held, sent
from benchmarks.scale.table import TARGET
from trainer import checkpoint
from trainer.config.training import CheckpointConfig
from trainer.errors import BadInputError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/results/scale-example.yaml"
Capsys = pytest.CaptureFixture[str]


def example(**changed: object) -> Figures:
    """The figures of the example, some of them others."""
    return Figures.model_validate({**read_job(EXAMPLE).figures.model_dump(), **changed})


def both(figures: Figures, gpus: int, seed: int = 0) -> tuple[Estimate, Estimate]:
    every = formulas.steps_between(figures, gpus)
    return formulas.estimate(figures, gpus), simulate(figures, gpus, every, seed)


# Figures in which each part of the model weighs something: a slow network, failures within the hour, a disk
# that is slower than the best interval, several micro-batches.
CASES: dict[str, dict[str, object]] = {
    "example": {},
    "slow network": {"network_bytes_per_s": 1e8, "node_bytes_per_s": 1e9, "network_alpha_s": 1e-4},
    "slow messages": {"network_alpha_s": 5e-4, "network_bytes_per_s": 1e12},
    "failing": {"node_mtbf_hours": 100.0, "gloo_groups": 0, "detect_s": 20.0, "host_copy_bytes_per_s": 1e8},
    "slow disk": {"node_mtbf_hours": 300.0, "gloo_groups": 0, "detect_s": 20.0, "disk_bytes_per_s": 2e6},
    "accumulating": {
        "micro_batches_per_step": 4,
        "row_s": 0.5,
        "loader_cpu_s_per_sample": 0.01,
        "update_s": 0.05,
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gpus", [8, 512])
def test_formula_and_simulation_agree(case: str, gpus: int) -> None:
    one, other = both(example(**CASES[case]), gpus, seed=1)
    apart = {name: difference(getattr(one, name), getattr(other, name)) for name in one._fields}
    assert max(apart.values()) <= TARGET, apart


MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "exposed_s": ("all_reduce_s", lambda f: lambda figures, gpus, size: f(figures, gpus, 2 * size)),
    "step_s": ("compute_s", lambda f: lambda figures: 2 * f(figures)),
    "stall_s": ("stall_s", lambda f: lambda figures: 2 * f(figures)),
    "mtbf_s": ("mtbf_s", lambda f: lambda figures, gpus: 2 * f(figures, gpus)),
    "interval_s": ("young_s", lambda f: lambda stall, mtbf: f(stall, mtbf) / math.sqrt(2)),
    "lost_share": ("lost_share", lambda f: lambda *values: f(*values) / 2),
    "lost_by_default": ("lost_share", lambda f: lambda *values: f(*values) / 2),
    "restart_s": ("restart_s", lambda f: lambda figures, gpus: 2 * f(figures, gpus)),
    "store_requests": ("store_requests", lambda f: lambda figures, gpus: f(figures, gpus) / 2),
    "rendezvous_s": ("store_requests", lambda f: lambda figures, gpus: f(figures, gpus) / 2),
    "goodput": ("compute_s", lambda f: lambda figures: f(figures) / 2),
}


@functools.cache
def _simulated_on_512() -> Estimate:
    figures = example(**CASES["slow network"])
    return simulate(figures, 512, formulas.steps_between(figures, 512))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_formula_that_is_off_by_a_factor_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = example(**CASES["slow network"])
    other = _simulated_on_512()
    function, mutant = MUTANTS[name]
    monkeypatch.setattr(formulas, function, mutant(getattr(formulas, function)))
    wrong = formulas.estimate(figures, 512)
    assert difference(getattr(wrong, name), getattr(other, name)) > TARGET


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("log_bytes_per_day", "row_bytes"),
        ("data_bytes_per_s", "stored_bytes_per_sample"),
        ("loader_cpus_per_gpu", "loader_cpu_s_per_sample"),
        ("sockets_per_node", "gloo_groups"),
    ],
)
def test_a_figure_taken_twice_is_noticed(name: str, figure: str) -> None:
    twice = example(**{figure: 2 * getattr(example(), figure)})
    other = simulate(example(), 64, 1, failures=50)
    assert difference(getattr(formulas.estimate(twice, 64), name), getattr(other, name)) > TARGET


def test_the_simulation_shares_no_formula() -> None:
    for module in (simulation, messages, life):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any("formulas" in str(one) for one in imported)
        assert not {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {
            "sqrt",
            "expm1",
        }


@dataclass(order=True)
class Message:
    at: float
    order: int
    rank: int = field(compare=False)
    step: int = field(compare=False)


def ring_by_events(
    ready: Sequence[float], steps: int, size: float, alpha: float, speed: float
) -> list[float]:
    """A ring with a heap of messages on their way, one at a time on each link."""
    ranks, free, order = len(ready), [0.0] * len(ready), 0
    heap, last = list[Message](), list(ready)

    def send(rank: int, now: float, step: int) -> None:
        nonlocal order
        free[rank] = max(free[rank], now) + size / speed
        order += 1
        heapq.heappush(heap, Message(free[rank] + alpha, order, (rank + 1) % ranks, step))

    for rank, now in enumerate(ready):
        send(rank, now, 1)
    while heap:
        message = heapq.heappop(heap)
        last[message.rank] = now = max(message.at, ready[message.rank])
        if message.step < steps:
            send(message.rank, now, message.step + 1)
    return last


@given(
    ready=st.lists(st.floats(0, 1), min_size=2, max_size=9),
    steps=st.integers(1, 12),
    alpha=st.floats(0, 0.1),
    size=st.floats(1, 100),
)
def test_rounds_of_messages_are_events(ready: list[float], steps: int, alpha: float, size: float) -> None:
    rings = messages.Rings(1, len(ready), alpha, 200.0)
    found = rings.go_round(np.array([ready]), steps, size)[0]
    assert found.tolist() == pytest.approx(ring_by_events(ready, steps, size, alpha, 200.0))


def test_an_all_reduce_by_hand() -> None:
    figures = example(gpus_per_node=1, network_alpha_s=0.5, network_bytes_per_s=10.0)
    # Two nodes: a message of half the bytes there and one back, each half a second late.
    assert formulas.all_reduce_s(figures, 2, 40.0) == pytest.approx(2 * (0.5 + 2.0))
    assert Fabric(figures, 2).all_reduce(np.zeros((2, 1)), 40.0).tolist() == [[5.0], [5.0]]
    assert formulas.all_reduce_s(figures, 1, 40.0) == 0
    late = Fabric(figures, 2).all_reduce(np.array([[0.0], [3.0]]), 40.0)
    # The late one's message takes from 3 to 5.5, the answer until 8; its own second one waits for the link.
    assert late.tolist() == [[7.5], [8.0]]


def test_a_slow_rank_holds_all_up() -> None:
    slow = simulation.simulate_stragglers(example(), 64, 0.05)
    assert 1.05 < slow / formulas.step_s(example(), 64) < 1.3


@given(
    stall=st.floats(0.01, 30),
    mtbf=st.floats(600, 1e6),
    write=st.floats(0.01, 10),
    restart=st.floats(0, 1000),
)
def test_daly_is_the_least_of_what_is_lost(stall: float, mtbf: float, write: float, restart: float) -> None:
    best = formulas.best_interval_s(stall, write, mtbf)
    least = formulas.lost_share(best, stall, write, restart, mtbf)
    for factor in (0.25, 0.5, 0.8, 1.25, 2, 4):
        assert least <= formulas.lost_share(best * factor, stall, write, restart, mtbf) * (1 + 1e-3)
    assert 0 < least <= 1


def test_young_and_daly_by_hand() -> None:
    assert formulas.young_s(2.0, 900.0) == 60.0
    assert formulas.daly_s(2.0, 900.0) == pytest.approx(60 * (1 + 1 / 90 + 1 / 8100) - 2)
    assert formulas.daly_s(10.0, 5.0) == 5.0


@pytest.mark.parametrize(
    ("interval", "copy", "write", "restart"),
    [(50, 1, 3, 20), (5, 1, 9, 20), (200, 5, 50, 2), (7, 0.1, 7.5, 300)],
)
def test_leaping_over_quiet_checkpoints_changes_nothing(
    interval: float, copy: float, write: float, restart: float
) -> None:
    random = np.random.Generator(np.random.Philox(3))
    times = failure_times(4, 3000.0, 60, random)
    plain, leapt = (live(interval, copy, write, restart, times, leap) for leap in (False, True))
    assert leapt.lost_share == pytest.approx(plain.lost_share, rel=1e-9)
    assert leapt.held_up == plain.held_up == (interval + copy < write)
    assert leapt.stall_s == pytest.approx(plain.stall_s, rel=1e-9)


def test_a_life_by_hand() -> None:
    # Run 0-10, copy to 11, on the disk at 14; fails at 13, when nothing is kept yet.
    assert live(10, 1, 3, 5, [13.0]).lost_share == 1
    # Fails at 15: 10 s of training are kept. From 20 on again: copy at 30, on the disk at 34; fails at 40.
    assert live(10, 1, 3, 5, [15.0]).lost_share == pytest.approx(1 - 10 / 15)
    assert live(10, 1, 3, 5, [15.0, 40.0]).lost_share == pytest.approx(1 - 20 / 40)
    # It fails again while it starts: nothing more is kept by 36, only 16 s after the second failure's start.
    assert live(10, 1, 3, 5, [15.0, 18.0, 36.0]).lost_share == pytest.approx(1 - 10 / 36)
    # On the disk at 26; the next copy is whole at 22 and waits until then. Fails at 30: 10 s are kept.
    assert live(10, 1, 15, 5, [30.0]) == pytest.approx((1 - 10 / 30, (1 + 1 + 4) / 2, True))


def test_the_best_interval_of_a_slow_writer_is_its_own() -> None:
    times = failure_times(1, 2000.0, 3000, np.random.Generator(np.random.Philox(1)))
    assert formulas.daly_s(0.1, 2000.0) < 30
    assert best_interval(0.1, 60.0, 10.0, times) == pytest.approx(59.9, rel=0.02)


class CountingStore(dist.Store):  # type: ignore[misc,name-defined]
    """What ranks of one process meet at, and how often they asked."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes | str) -> None:
        with self.changed:
            self.asked["set"] += 1
            self.kept[key] = value.encode() if isinstance(value, str) else bytes(value)
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            self.asked["get"] += 1
            self.changed.wait_for(lambda: key in self.kept, 30)
            return self.kept[key]

    def wait(self, keys: list[str], _: timedelta | None = None) -> None:
        with self.changed:
            self.asked["wait"] += 1
            self.changed.wait_for(lambda: all(key in self.kept for key in keys), 30)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("ranks", [2, 5])
def test_gloo_asks_the_store_as_often_as_is_said(
    ranks: int, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1" if lazy else "0")
    store = CountingStore()
    groups: list[object] = []

    def join(rank: int) -> None:
        groups.append(dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=30)))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(groups) == ranks
    asked = sum(store.asked.values())
    assert asked == (ranks if lazy else formulas.store_requests(example(gloo_groups=1), ranks))


# Two of them simulate, the example and what was measured, on up to 4,096 GPUs: they end with code 1 where
# that and the formulas lie too far apart.
@pytest.mark.parametrize(
    "option", ["--sources", "--strategies", pytest.param("--simulate", marks=pytest.mark.slow)]
)
def test_the_document_shows_what_its_commands_print(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/scaling.md").read_text()
    assert text.count("<!-- python -m benchmarks scale") == text.count("<!-- end -->") == 5
    blocks = re.findall(rf"<!-- python -m benchmarks [^\n]* {option} -->\n.*?<!-- end -->", text, re.S)
    assert len(blocks) == (1 if option == "--strategies" else 2)
    for block in blocks:
        assert document.renewed(block) == block


@pytest.mark.parametrize("gpus", [8, 64, 4096])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_what_strategies_send_is_the_theory(gpus: int, micro_batches: int) -> None:
    figures = example(micro_batches_per_step=micro_batches)
    whole, node = sum(figures.bucket_bytes), figures.gpus_per_node
    ddp, fsdp, hsdp = (sent(figures, gpus, name) for name in ("ddp", "fsdp", "hsdp"))
    assert sum(ddp) == pytest.approx(2 * (gpus - 1) / gpus * whole)
    assert sum(fsdp) == pytest.approx((2 * micro_batches + 1) * (gpus - 1) / gpus * whole)
    # A model in each node: gathered there, and its rows are summed between nodes.
    assert hsdp.within == pytest.approx((2 * micro_batches + 1) * (node - 1) / node * whole)
    nodes = gpus // node
    assert hsdp.between == pytest.approx(2 * (nodes - 1) / nodes * whole / node)
    assert held(figures, gpus, "fsdp") * gpus == held(figures, gpus, "hsdp") * node
    assert held(figures, gpus, "ddp") == figures.checkpoint_bytes + whole


def test_the_drawing_is_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot, drawn = tmp_path / "scale.svg", list[Figure]()

    def kept(figure: Figure) -> str:
        drawn.append(figure)
        return as_svg(figure)

    monkeypatch.setattr(draw, "as_svg", kept)
    words = ["scale", "--figures", str(EXAMPLE), "--plot", str(plot)]
    assert main(words) == 0
    told, there = (
        [one.text for one in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
        for file in (plot, ROOT / "docs/results/scaling.svg")
    )
    assert told == there
    curves = [line for axes in drawn[0].axes for line in axes.lines if line.get_marker() == "o"]
    # Goodput; of each curve its dots and its least.
    assert sorted(len(np.asarray(line.get_xdata())) for line in curves) == [*(4 * [1]), 4, *(4 * [9])]


def test_the_answer_for_machines(capsys: Capsys) -> None:
    words = [
        "scale",
        "--figures",
        str(EXAMPLE),
        "--gpus",
        "64,8",
        "--json",
        "--set",
        "node_mtbf_hours=50",
    ]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == [8, 64] and len(told["computed"]) == 2
    assert told["sources"]["node_mtbf_hours"] == "given: --set node_mtbf_hours"
    figures = example(node_mtbf_hours=50)
    assert told["computed"][1] == formulas.estimate(figures, 64)._asdict()
    assert f"checkpoint.every={formulas.steps_between(figures, 64)} on 64" in told["advice"]


def test_code_1_where_they_part(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    right = formulas.lost_share
    monkeypatch.setattr(formulas, "lost_share", lambda *values: right(*values) / 2)
    assert main(["scale", "--figures", str(EXAMPLE), "--gpus", "8", "--simulate"]) == 1
    assert "apart at most, target 10 %" in capsys.readouterr().out


def test_the_link_of_whole_all_reduces(tmp_path: Path) -> None:
    comm = tmp_path / "comm.json"
    comm.write_text(json.dumps({"alpha_s": 0.003, "bytes_per_s": 6e8, "ranks": 4, "backend": "gloo"}))
    link = read_link(comm)
    # What the link gives must be the all-reduce that was measured.
    given_ = example(gpus_per_node=1, network_alpha_s=link.alpha_s, network_bytes_per_s=link.bytes_per_s)
    assert formulas.all_reduce_s(given_, 4, 3e8) == pytest.approx(0.003 + 0.5)
    job = read_job(EXAMPLE, comm=comm)
    assert job.figures.node_alpha_s == link.alpha_s and "comm.json" in job.sources["node_alpha_s"]
    comm.write_text(json.dumps({"alpha_s": 0.003, "bytes_per_s": 6e8, "ranks": 4, "hosts": 4}))
    assert read_job(EXAMPLE, comm=comm).figures.network_bytes_per_s == link.bytes_per_s


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--figures is missing"),
        (["--figures", "nowhere.yaml"], "can't be read"),
        (["--figures", str(EXAMPLE), "--gpus", "12"], "no whole number of nodes of 8"),
        (["--figures", str(EXAMPLE), "--gpus", "many"], "give numbers such as"),
        (["--figures", str(EXAMPLE), "--gpus", "0"], "give numbers from 1"),
        (["--figures", str(EXAMPLE), "--gpus", "16384", "--simulate"], "give numbers from 1 to 8,192"),
        (["--figures", str(EXAMPLE), "--set", "forward=1"], "did you mean 'forward_s'"),
        (["--figures", str(EXAMPLE), "--set", "forward_s=0"], "forward_s=0"),
        (["--figures", str(EXAMPLE), "--set", "forward_s=fast"], "forward_s=fast"),
        (["--figures", str(EXAMPLE), "--set", "bucket_bytes=[1]"], "two lists of one length"),
        (["--figures", str(EXAMPLE), "--plot", "scale.png"], "ends in .svg"),
        (["--figures", str(EXAMPLE), "--seed", "-1"], "--seed -1"),
        (
            ["--figures", str(EXAMPLE), "--comm", str(EXAMPLE)],
            "not what `benchmarks comm --json` prints",
        ),
        (["--measure", "nowhere"], "--comm comm.json"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: Capsys) -> None:
    assert main(["scale", *words]) == 2
    told = capsys.readouterr().err
    assert said in told and told.strip().count("\n") == 0


def test_a_figure_without_a_source_is_refused(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("assumed: no", "somewhere: no")
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(BadInputError, match="micro_batches_per_step is missing or says nothing"):
        read_job(tmp_path / "mine.yaml")


def test_figures_of_a_run_and_of_this_machine(
    digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    rows = [{"kind": "train", "step": 10 * n, **PHASES} for n in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint.store.write(run / checkpoint.CHECKPOINTS, 7, {"model": {"weight": torch.ones(1000)}}, {})
    comm = tmp_path / "comm.json"
    comm.write_text(json.dumps({"alpha_s": 0.002, "bytes_per_s": 6e8, "ranks": 2}))
    # It trains in a process of its own: see the test below.
    monkeypatch.setattr(measure, "of_start", lambda _: {"start_s": (3.0, "measured: elsewhere")})
    assert main(["scale", "--measure", str(run), "--comm", str(comm)]) == 0
    (tmp_path / "figures.yaml").write_text(capsys.readouterr().out)
    job = read_job(tmp_path / "figures.yaml")
    figures = job.figures
    assert figures.forward_s == pytest.approx(0.02 / figures.micro_batches_per_step)
    assert (figures.update_s, figures.row_s, figures.node_alpha_s) == pytest.approx((0.01, 0.5, 0.001))
    model = safetensors.torch.load_file(run / "model.safetensors")
    parameters = sum(
        one.numel() for name, one in model.items() if "running" not in name and "num_" not in name
    )
    assert sum(figures.bucket_bytes) == 4 * parameters
    assert 0 < figures.bucket_ready_share[-1] <= 1
    files = (run / checkpoint.CHECKPOINTS / "step-00000007").iterdir()
    assert figures.checkpoint_bytes == sum(one.stat().st_size for one in files)
    assert not dist.is_initialized()


PHASES = {
    "time/wall": 0.6,
    "time/forward": 0.2,
    "time/backward": 0.3,
    "time/update": 0.1,
    "time/logging": 0.5,
}


@pytest.mark.slow
def test_a_start_is_timed_until_its_first_row(digits_run: Path) -> None:
    seconds, source = probes.of_start(digits_run)["start_s"]
    assert seconds > 0 and source.startswith("measured:")


def test_the_default_is_the_recipes() -> None:
    assert CheckpointConfig().minutes * 60 == DEFAULT_S
