"""Promise: the micro-batch that is chosen is the largest that fits, and the global batch stays.

The search is a pure function. Real probes are few: each starts ranks.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tests.helpers import preloaded
from tests.helpers.forked import small
from tests.helpers.planted import write
from tests.helpers.probe_job import job
from tests.helpers.waiting import until
from trainer.config.recipe import Recipe
from trainer.data.sampling.plan import Plan
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.host.limits import read_limits
from trainer.host.memory_room import HEADROOM, MemoryGuard, Room, cap_own, read_room
from trainer.host.processes import children, is_running, peak_bytes
from trainer.host.reading import text_of
from trainer.launch.launcher import LocalRanks
from trainer.launch.signals import SignalReceiver
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.start.tune.job import Interrupted, Job, choice_line, choose, run_probe
from trainer.train.start.tune.search import (
    MOST_PROBES,
    Probe,
    ProbeFailed,
    SizeSearchResult,
    micro_batch_sizes,
    search,
)
from trainer.train.start.tune.trial import probe_recipe
from trainer.train.step import train_step

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).parents[2]
LIMIT = 1000 * MIB
SIZES = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=1023, unique=True).map(sorted)


class Box:
    """A machine on which a micro-batch takes what `needs` says."""

    def __init__(self, needs: Any, others: int = 0) -> None:
        self.asked: list[int] = []
        self._needs, self._others = needs, others

    def __call__(self, size: int) -> Probe:
        self.asked.append(size)
        one = Probe(size, True, int(self._needs(size)), LIMIT, self._others, "box", 1.0, 1.0)
        return replace(one, fits=one.peak_bytes <= one.allowed_bytes)


@given(SIZES, st.integers(0, 1 << 20), st.floats(0, 3), st.floats(0.2, 3), st.integers(0, LIMIT // 3))
def test_the_largest_is_found_in_ten_probes(
    sizes: list[int], base: int, factor: float, power: float, others: int
) -> None:
    def needs(size: int) -> float:
        return float(min(base + factor * MIB / 100 * size**power, 1e18))

    box = Box(needs, others)
    found = search(sizes, box)
    fitting = [size for size in sizes if needs(size) // 1 <= (1 - HEADROOM) * LIMIT - others]
    assert len(found.probes) == len(box.asked) == len(set(box.asked)) <= MOST_PROBES
    assert (found.chosen.micro_batch_size if found.chosen else None) == max(fitting, default=None)
    assert found.chosen is None or found.chosen.fits


@given(SIZES, st.integers(0, 1 << 32))
def test_what_did_not_fit_is_never_chosen_whatever_the_others_did(sizes: list[int], seed: int) -> None:
    luck = np.random.default_rng(seed)
    found = search(sizes, lambda size: Probe(size, bool(luck.integers(2)), int(luck.integers(LIMIT)), LIMIT))
    assert len(found.probes) <= MOST_PROBES
    assert found.chosen is None or (found.chosen.fits and found.chosen in found.probes)
    larger = [one for one in found.probes if one.fits]
    assert found.chosen == max(larger, key=lambda one: one.micro_batch_size, default=None)


def test_growth_that_is_known_leaves_few_probes() -> None:
    box = Box(lambda size: 300 * MIB + size * MIB)
    assert search([1 << n for n in range(15)], box).chosen == Probe(
        512, True, 812 * MIB, LIMIT, 0, "box", 1.0, 1.0
    )
    assert box.asked == [1, 8, 512, 1024]
    box = Box(lambda _: 100 * MIB)
    assert search([1, 2, 4, 8, 16, 32], box).chosen is not None
    assert box.asked == [1, 8, 32]  # all of it fits: no more to learn


@pytest.mark.parametrize("count", [7, 63, 504, 1023])  # no global batch has more than 504 divisors
@pytest.mark.parametrize("flat", [0, 900 * MIB])
def test_growth_that_misleads_costs_no_more_than_ten(flat: int, count: int) -> None:
    for largest in range(1, count + 1):  # nothing grows, or only at first, until it does

        def needs(size: int, largest: int = largest) -> int:
            return (MIB if size < 8 else max(flat, MIB)) if size <= largest else 2 * LIMIT

        box = Box(needs)
        found = search(list(range(1, count + 1)), box)
        assert found.chosen is not None
        assert found.chosen.micro_batch_size == largest
        assert len(box.asked) <= MOST_PROBES


def test_there_are_never_more_probes_than_ten() -> None:
    box = Box(lambda size: MIB if size <= 700 else 2 * LIMIT)
    found = search(list(range(1, 20_000)), box)
    assert len(box.asked) == MOST_PROBES
    assert found.chosen is not None
    assert found.chosen.fits


def test_a_failure_that_is_not_memory_ends_the_search() -> None:
    def fails(_: int) -> Probe:
        raise ProbeFailed("a bug")

    with pytest.raises(ProbeFailed, match="a bug"):
        search([2, 4], fails)

    def fails_alone(size: int) -> Probe:
        if size == 1:
            raise ProbeFailed("BatchNorm")
        return Probe(size, size < 8, size * MIB, LIMIT)

    found = search([1, 2, 4, 8], fails_alone)
    assert found.chosen is not None
    assert found.chosen.micro_batch_size == 4
    assert "BatchNorm" in found.probes[0].note
    with pytest.raises(ProbeFailed, match="BatchNorm"):
        search([1], fails_alone)


def test_what_would_take_too_long_is_left_out_and_said() -> None:
    def within(size: int, _: Sequence[Probe]) -> bool:
        return size <= 16

    found = search([1, 2, 4, 8, 16, 32, 64], Box(lambda size: size * MIB), within)
    assert found.chosen is not None
    assert found.chosen.micro_batch_size == 16
    assert found.untried == [32, 64]


def test_sizes_keep_the_global_batch() -> None:
    def sizes(ranks: int = 1, **sections: Any) -> list[int]:
        return micro_batch_sizes(small(**sections), ranks)

    assert sizes(data={"global_batch_size": 60}) == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]
    assert sizes(3, data={"global_batch_size": 60}) == [1, 2, 4, 5, 10, 20]
    assert sizes(data={"global_batch_size": 60}, regularization={"mixup": 0.2})[0] == 2
    assert sizes(2, data={"global_batch_size": 48}, parallel={"reduction": "tree"}) == [3, 6, 12, 24]
    with pytest.raises(BadInputError, match="can't be shared by 7 ranks"):
        sizes(7, data={"global_batch_size": 60})
    assert len(sizes(data={"global_batch_size": 14_414_400})) < 2**MOST_PROBES


@given(st.integers(1, 96), st.sampled_from([1, 2, 3]), st.integers(1, 200))
def test_every_size_trains_the_same_samples_in_the_same_steps(each: int, ranks: int, samples: int) -> None:
    recipe = small(data={"global_batch_size": each * ranks})

    def steps(size: int) -> list[list[int]]:
        plan = Plan(samples, each * ranks, size, 2, "cross", seed=3)
        order = plan.read(np.arange(plan.steps * plan.micro_batches))
        return order.sample.reshape(plan.steps, -1).tolist()

    first, *others = (steps(size) for size in micro_batch_sizes(recipe, ranks))
    assert all(other == first for other in others)


def test_every_size_has_the_same_loss_curve() -> None:
    def curve(size: int) -> list[float]:
        recipe = small(
            max_steps=4,
            data={"global_batch_size": 16, "micro_batch_size": size},
            model={"norm": "group"},
            optim={"lr": 0.01},
        )
        run = build(recipe, make_task(recipe), World(0, 1, 0, torch.device("cpu"), None), 0)
        batches = run.loader(run.share.batches())
        losses = []
        for step in range(4):
            train_step(run, batches, step)
            losses.append(float(run.state.loss))
        return losses

    sizes = micro_batch_sizes(small(data={"global_batch_size": 16}), 1)
    curves = [curve(size) for size in sizes]
    assert len(curves) == 5
    for other in curves[1:]:
        assert other == pytest.approx(curves[0], rel=1e-5)


def test_a_probe_has_the_steps_that_show_the_peak() -> None:
    def shape(size: int, **sections: Any) -> tuple[int, int, int]:
        recipe = Recipe.model_validate(probe_recipe(small(**sections), size, 2))
        data = recipe.data
        assert recipe.max_steps is not None
        return data.micro_batch_size, data.global_batch_size, recipe.max_steps

    whole = {"global_batch_size": 64}
    assert shape(4, data=whole)[:2] == (4, 16)  # two micro-batches on each of two ranks
    assert shape(32, data=whole)[:2] == (32, 64)  # which accumulates nothing
    assert shape(4, data=whole, parallel={"reduction": "tree"})[:2] == (4, 64)  # whose sums need the step
    assert shape(4, data=whole)[2] >= 2
    assert shape(4, data=whole, compile={"mode": "max-autotune"})[2] >= 4
    values = probe_recipe(small(data={"last_batch": "drop"}), 8, 1)
    assert values["data"]["last_batch"] == "cross"  # a probe's step may be larger than the data


MEMINFO = "MemTotal: 4096 kB\nMemFree: 1024 kB\nMemAvailable: 3072 kB\n"


def test_room_of_each_kind_of_box(tmp_path: Path) -> None:
    write(tmp_path / "host", {"proc/meminfo": MEMINFO})
    assert read_room(tmp_path / "host") == Room(4 * MIB, MIB, "/proc/meminfo")
    folder = "sys/fs/cgroup"
    stat = "anon 1000\nfile 500000\nshmem 200\nslab_unreclaimable 30"
    limits = {f"{folder}/memory.max": str(2 * MIB), f"{folder}/memory.stat": stat}
    v2 = write(tmp_path / "v2", {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/", **limits})
    assert read_room(v2) == Room(2 * MIB, 1230, "/sys/fs/cgroup/memory.max")
    folder += "/memory"
    # The keys of v1 without total_ leave out what is below.
    stat = "rss 5\nshmem 6\ntotal_rss 1000\ntotal_shmem 200\ntotal_cache 9999"
    limits = {f"{folder}/memory.limit_in_bytes": str(MIB), f"{folder}/memory.stat": stat}
    v1 = write(tmp_path / "v1", {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/", **limits})
    assert read_room(v1) == Room(MIB, 1200, "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    assert read_room(tmp_path / "nothing").others_bytes == 0


HOLDER = """
import mmap, os, signal, sys
held = bytearray(os.urandom(1)) * (60 << 20)
shared = mmap.mmap(-1, 30 << 20)
shared.write(b"x" * (30 << 20))
ready, tell = os.pipe()
if os.fork() == 0:
    own = b"y" * (20 << 20)
    os.write(tell, b".")
else:
    os.read(ready, 1)
    print("there", flush=True)
signal.pause()
"""


def holder(name: str = "") -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", HOLDER, name]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_what_processes_share_counts_once(tmp_path: Path) -> None:
    def ranks() -> list[int]:
        return [pid for pid in children(os.getpid()) if str(tmp_path) in text_of(f"/proc/{pid}/cmdline")]

    with MemoryGuard(ranks, float("inf")) as watch:
        process = holder(str(tmp_path))
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        # 60 its own, 30 shared, 20 of the child alone; and Python itself, twice a few MiB.
        until(lambda: watch.peak_bytes > 110 * MIB and watch.rest_bytes > 20 * MIB, lambda: vars(watch))
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert watch.peak_bytes < 150 * MIB
    assert watch.rest_bytes < 40 * MIB
    assert not watch.killed


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("allowed", "seconds", "why"), [(110 * MIB, 600.0, "more than"), (GIB, 0.1, "longer than")]
)
def test_a_job_beyond_its_bound_is_killed_whole(
    allowed: int, seconds: float, why: str, tmp_path: Path
) -> None:
    ranks: list[int] = []
    with MemoryGuard(lambda: ranks, allowed, seconds) as watch:
        process = holder(str(tmp_path))
        ranks.append(process.pid)
        assert process.wait(300) == -9
        until(lambda: watch.killed)  # which is said before the first of them is
    assert why in watch.killed
    until(lambda: not list(named(tmp_path)), lambda: list(named(tmp_path)))


FORKS_WHEN_ASKED = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: os.fork())
print("there", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_what_is_forked_while_a_job_is_killed_is_killed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = MemoryGuard(list, float("inf"))
    words = [sys.executable, "-c", FORKS_WHEN_ASKED, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        job, looks = watch._job, list[list[int]]()

        def late() -> list[int]:
            """While it runs, it has one child more as soon as it was looked at."""
            looks.append(job())
            if is_running(process.pid):
                before = children(process.pid)
                process.send_signal(signal.SIGUSR1)
                until(lambda: children(process.pid) > before or not is_running(process.pid))
            return looks[-1]

        monkeypatch.setattr(watch, "_job", late)
        try:
            watch._kill("it was enough")
            assert process.wait(300) == -9
            assert looks[0] == [process.pid]
            until(lambda: not list(named(tmp_path)), lambda: list(named(tmp_path)))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def named(folder: Path) -> Iterator[Path]:
    """The processes with a folder in their command line."""
    return (file for file in Path("/proc").glob("[0-9]*/cmdline") if str(folder) in text_of(file))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_an_allocation_beyond_the_room_fails_in_the_process_itself() -> None:
    preloaded.call(_allocate)


def _allocate() -> None:
    room = peak_bytes() + 64 * MIB
    cap_own(room)
    held = bytearray(32 * MIB)
    with pytest.raises(MemoryError):
        bytearray(256 * MIB)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(256 * MIB, dtype=torch.uint8)
    assert len(held) == 32 * MIB


def test_two_ranks_fit_together_or_not_at_all(tmp_path: Path) -> None:
    preloaded.call(_two_ranks, timeout=300, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def _two_ranks() -> None:
    with SignalReceiver() as receiver:
        one = run_probe(job(Room(64 * GIB, GIB, "planted"), ranks=2, workers=0), 1, receiver)
        assert one.fits, one
        assert one.samples_per_s > 0
        assert (one.others_bytes, one.limit_bytes, one.where) == (GIB, 64 * GIB, "memory (planted)")
        # Both ranks, each with torch: more than one could have.
        assert 2 * 250 * MIB < one.peak_bytes < 8 * GIB
        # 128 samples on each rank take gigabytes more; what is left for that is 200 MiB.
        tight = Room(int((one.peak_bytes + 200 * MIB) / (1 - HEADROOM)), 0, "planted")
        other = run_probe(job(tight, ranks=2, workers=0), 128, receiver)
    assert not other.fits, other
    assert other.note


@pytest.mark.slow
def test_the_micro_batch_of_a_sharded_run_is_found() -> None:
    preloaded.call(_sharded, timeout=300)


def _sharded() -> None:
    room, sharded = Room(64 * GIB, GIB, "planted"), {"strategy": "fsdp"}
    found = choose(job(room, ranks=2, workers=0, data={"global_batch_size": 8}, parallel=sharded), id)
    assert found.chosen is not None and found.chosen.micro_batch_size == 4
    assert [probe.fits for probe in found.probes] == [True] * len(found.probes)


def test_a_recipe_that_cannot_be_trained_is_no_matter_of_memory() -> None:
    preloaded.call(_broken)


def _broken() -> None:
    broken = job(memory={"checkpointing": "names", "names": ["nothing.here"]})
    with pytest.raises(BadInputError, match=r"memory\.names"):
        choose(broken, lambda _: None)


class Told:
    """A launch that starts nothing: what its ranks would have left."""

    def __init__(self, *ranks: dict[str, Any], code: int = 0, said: str = "") -> None:
        self._ranks, self._code, self._said = ranks, code, said

    def __call__(self, _: str, request: dict[str, Any], local: LocalRanks, **__: Any) -> int:
        assert local.ranks == len(self._ranks)
        for rank, figures in enumerate(self._ranks):
            Path(request["folder"], f"rank-{rank}.json").write_text(json.dumps({"ran_out": "", **figures}))
        print(self._said, file=sys.stderr)
        return self._code


def gpu(peak: int, **more: Any) -> dict[str, Any]:
    return {
        "resident": GIB,
        "files": 0,
        "device": peak,
        "device_total": 16 * GIB,
        "samples_per_s": 5.0,
        **more,
    }


ROOM = Room(64 * GIB, 2 * GIB, "planted")


def probed(told: Told, room: Room = ROOM) -> Probe:
    ranks = len(told._ranks)
    with pytest.MonkeyPatch.context() as patch, SignalReceiver() as receiver:
        patch.setattr("trainer.train.start.tune.job.launch", told)
        return run_probe(job(room, ranks), 8, receiver)


def test_the_fullest_memory_of_any_rank_decides() -> None:
    both = probed(Told(gpu(12 * GIB), gpu(15 * GIB)))
    assert both.fits
    assert (both.where, both.peak_bytes, both.limit_bytes) == ("GPU of rank 1", 15 * GIB, 16 * GIB)
    # Above 95 % on one of them.
    other = probed(Told(gpu(int(15.3 * GIB)), gpu(8 * GIB)))
    assert (other.fits, other.where) == (False, "GPU of rank 0")
    # Room on the GPUs, but none on the host for their two processes.
    host = probed(Told(gpu(GIB), gpu(GIB)), Room(4 * GIB, 2 * GIB, "planted"))
    assert (host.fits, host.where) == (False, "memory (planted)")
    assert host.peak_bytes == 2 * GIB
    assert probed(Told(gpu(GIB), gpu(GIB)), Room(0, 0, "unknown")).fits


def test_how_a_probe_ended_is_told_apart() -> None:
    out = probed(
        Told(gpu(GIB, ran_out="out of memory on cuda:0 of 16.0 GiB"), gpu(GIB), code=1, said="rank 0")
    )
    assert (out.fits, out.note) == (False, "out of memory on cuda:0 of 16.0 GiB")
    killed = probed(
        Told(gpu(GIB), code=1, said="trainer: rank 0 of 1: was killed by SIGKILL (out of memory?)")
    )
    assert not killed.fits
    with pytest.raises(ProbeFailed, match="ZeroDivisionError"):
        probed(Told(gpu(GIB), code=1, said="Traceback\nZeroDivisionError"))
    with pytest.raises(ProbeFailed):  # it hung
        probed(Told(gpu(GIB), code=76, said="no progress"))
    with pytest.raises(BadInputError, match=r"^memory\.names: nothing"):
        probed(Told(gpu(GIB), code=2, said="trainer: memory.names: nothing"))


def test_no_larger_size_is_tried_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: Job, size: int, *_more: Any) -> Probe:
        return Probe(size, True, MIB, GIB, samples_per_s=size / 4, seconds=4.0 + size)

    monkeypatch.setattr("trainer.train.start.tune.job.run_probe", slow)
    found = choose(replace(job(), budget_seconds=50.0), lambda _: None)
    assert found.chosen is not None
    assert 1 < found.chosen.micro_batch_size < 256
    assert found.untried == [
        size for size in micro_batch_sizes(job().recipe, 1) if size > found.chosen.micro_batch_size
    ]
    assert choose(job(), lambda _: None).untried == []


@pytest.mark.parametrize(
    ("untried", "said"),
    [
        ([], "s)"),
        ([32], "; 32 was not tried: it would have taken too long"),
        ([32, 64], "; 32 and more were not tried: they would have taken too long"),
    ],
)
def test_sizes_that_were_not_tried_are_named(untried: list[int], said: str) -> None:
    chosen = Probe(16, True, MIB, GIB)
    line = choice_line(chosen, SizeSearchResult(chosen, [chosen], untried), job())
    assert line.endswith(said)


@pytest.fixture
def cgroup() -> Any:
    """Makes a memory cgroup with a limit in bytes; tells its folder."""
    made: list[Path] = []

    def make(limit: int) -> Path:
        for mount, name in (
            ("memory", "memory.limit_in_bytes"),
            ("", "memory.max"),
            ("unified", "memory.max"),
        ):
            folder = Path("/sys/fs/cgroup", mount, f"trainer-tune-{os.getpid()}")
            with suppress(OSError):
                folder.mkdir()
                made.append(folder)
                with (folder / name).open("r+") as file:
                    file.write(str(limit))
                return folder
        pytest.skip("no memory cgroup can be made here")

    yield make
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


INSIDE = """
import sys; from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from tests.helpers.probe_job import job
from trainer.launch.signals import SignalReceiver
from trainer.host.memory_room import read_room
from trainer.train.start.tune.job import run_probe
room = read_room()
assert room.source.startswith(sys.argv[1]), room
assert room.others_bytes > 50 << 20, room  # this process, with torch
with SignalReceiver() as receiver:
    small, large = (run_probe(job(), size, receiver) for size in (1, 256))
print(int(small.fits), int(large.fits), small.limit_bytes, large.note)
"""


@pytest.mark.slow
def test_under_a_real_limit_nothing_is_killed_by_the_kernel(cgroup: Any) -> None:
    limit = int(1.75 * GIB)
    folder = cgroup(limit)
    child = subprocess.run(
        [sys.executable, "-c", INSIDE, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith(f"1 0 {min(limit, read_limits().memory_bytes)} "), child.stdout
    counts = [folder / "memory.oom_control", folder / "memory.events"]
    words = [line.split() for file in counts if file.exists() for line in file.read_text().splitlines()]
    assert [int(word[1]) for word in words if word[0] == "oom_kill"] == [0]


def test_a_signal_ends_the_search_and_leaves_nothing() -> None:
    with SignalReceiver() as receiver:
        receiver._note(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            run_probe(job(), 8, receiver)
