"""Promise: predictions for thousands of GPUs follow from measured figures, by formula."""

import json
import shutil
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from benchmarks.__main__ import main
from benchmarks.scale import formulas, measure, probes
from benchmarks.scale.figures import DEFAULT_S, Figures, read_job, read_link
from benchmarks.scale.strategies import held, sent
from trainer import checkpoint
from trainer.config.training import CheckpointConfig
from trainer.errors import BadInputError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/results/scale-example.yaml"
Capsys = pytest.CaptureFixture[str]


def example(**changed: object) -> Figures:
    """The figures of the example, some of them others."""
    return Figures.model_validate({**read_job(EXAMPLE).figures.model_dump(), **changed})


def test_an_all_reduce_by_hand() -> None:
    figures = example(gpus_per_node=1, network_alpha_s=0.5, network_bytes_per_s=10.0)
    # Two nodes: a message of half the bytes there and one back, each half a second late.
    assert formulas.all_reduce_s(figures, 2, 40.0) == pytest.approx(2 * (0.5 + 2.0))
    assert formulas.all_reduce_s(figures, 1, 40.0) == 0


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
    assert told["computed"][1] == formulas.estimate(figures, 64)
    assert f"checkpoint.every={formulas.steps_between(figures, 64)} on 64" in told["advice"]


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
        (["--figures", str(EXAMPLE), "--set", "forward=1"], "did you mean 'forward_s'"),
        (["--figures", str(EXAMPLE), "--set", "forward_s=0"], "forward_s=0"),
        (["--figures", str(EXAMPLE), "--set", "forward_s=fast"], "forward_s=fast"),
        (["--figures", str(EXAMPLE), "--set", "bucket_bytes=[1]"], "two lists of one length"),
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
