"""Promise: all-reduces are timed, and a line is fitted to them."""

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from benchmarks.__main__ import main
from benchmarks.comm import all_reduces, as_json, as_text
from benchmarks.comm_fit import SIZES, CommResult, Timed, bus_factor, fitted, parsed_sizes
from tests.helpers.world import Ranks
from trainer.config.sizes import MIB
from trainer.distributed.parallel import World
from trainer.errors import BadInputError

Capfd = pytest.CaptureFixture[str]
GIGABIT = 1e9 / 8


# --- what an all-reduce takes ---


def timed(size: int, seconds: float) -> Timed:
    return Timed(size, seconds, seconds, seconds)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [bus_factor(ranks) for ranks in (2, 4, 8)] == [1.0, 1.5, 1.75]


@given(st.floats(1e-7, 1e-1), st.floats(1e6, 1e12), st.integers(2, len(SIZES)))
def test_the_fit_finds_the_line(alpha: float, speed: float, count: int) -> None:
    found = fitted([timed(size, alpha + size / speed) for size in SIZES[-count:]])
    assert found is not None
    # Each of the two is only as well known as it matters: at the smallest size, and at the largest.
    seconds = [alpha + size / speed for size in (SIZES[-count], SIZES[-1])]
    assert found.alpha_s == pytest.approx(alpha, rel=1e-6, abs=1e-6 * seconds[0])
    assert 1 / found.bytes_per_s == pytest.approx(1 / speed, rel=1e-6, abs=1e-6 * seconds[1] / SIZES[-1])
    assert found.worst_error < 1e-6


def test_small_messages_count_as_much_as_large_ones() -> None:
    exact = [timed(size, 50e-6 + size / 1e9) for size in SIZES]
    off = [*exact[:-1], timed(SIZES[-1], 1.2 * exact[-1].seconds)]
    found = fitted(off)
    assert found is not None
    # The last one's 20 % are 54 ms: plain squares would put alpha far below 0.
    assert found.alpha_s == pytest.approx(50e-6, rel=0.1)
    assert found.worst_bytes == SIZES[-1] and 0.05 < found.worst_error < 0.2
    assert found.median_error < 0.06


def test_no_line_below_zero() -> None:
    found = fitted([timed(1000, 1e-6), timed(2000, 4e-6)])
    assert found is not None and found.alpha_s == 0 and found.bytes_per_s > 0
    assert fitted([timed(4096, 1e-3), timed(4096, 2e-3)]) is None
    assert fitted([timed(4096, 2e-3), timed(8192, 1e-3)]) is None


def test_sizes_are_read() -> None:
    assert parsed_sizes("1M, 4K,64kib,12", cpu=True) == [12, 4096, 65536, MIB]
    assert parsed_sizes("", cpu=False) == list(SIZES) and SIZES[0] == 4096 and SIZES[-1] == 256 * MIB
    assert max(parsed_sizes("", cpu=True)) == 64 * MIB
    for wrong in ("4x", "", "-4", "6", "2", "32G", "1.5M"):
        with pytest.raises(BadInputError, match="--sizes"):
            parsed_sizes(f"4K,{wrong}", cpu=True)


def found(limit: float | None = None) -> CommResult:
    series = [Timed(4096, 100e-6, 90e-6, 120e-6), Timed(MIB, 1.1e-3, 1e-3, 1.2e-3)]
    fit = fitted(series)
    return CommResult(4, 2, "gloo", "here and now", {"fp32": series}, fit, limit)


def test_what_a_plan_reads() -> None:
    told = as_json(found(2 * GIGABIT * 10))
    assert told["ranks"] == 4 and told["backend"] == "gloo"
    assert told["alpha_s"] == pytest.approx(96.1e-6, rel=1e-3)
    assert told["bytes_per_s"] == pytest.approx(1.0445e9, rel=1e-3)
    row = told["sizes"][1]
    assert row["algorithm_bytes_per_s"] == MIB / 1.1e-3
    assert row["bus_bytes_per_s"] == 1.5 * MIB / 1.1e-3
    assert told["share_of_limit"] == pytest.approx(1.5 * MIB / 1.1e-3 / 2.5e9)
    assert as_json(found())["share_of_limit"] is None


def test_the_table() -> None:
    text = as_text(found(1.25e9), rounds=7)
    assert "| 1 MiB | fp32 | 1.1 ms | 1 ms to 1.2 ms | 0.953 | 1.43 |" in text
    assert "limit: 1.25 GB/s; the best bus bandwidth is 114% of it" in text
    assert "limit" not in as_text(found(), 7)


def _timed(world: World) -> dict[str, list[Timed]]:
    world = dataclasses.replace(world, control=world.group)
    return all_reduces(world, [4096, 65536, MIB], ["fp32", "bf16"], rounds=2)


@pytest.mark.compat
def test_two_ranks_of_this_host(ranks: Ranks) -> None:
    told, same = ranks.run(2, _timed)
    assert told == same and list(told) == ["fp32", "bf16"]
    for series in told.values():
        assert [one.bytes for one in series] == [4096, 65536, MIB]
        assert all(0 < one.low <= one.seconds <= one.high for one in series)


@pytest.mark.slow  # torchrun and two ranks, which import torch
def test_the_command_starts_its_ranks() -> None:
    words = ["--sizes", "4K,64K", "--rounds", "2", "--backend", "gloo", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "comm", *words], capture_output=True, check=True
    )
    told = json.loads(done.stdout)
    assert (told["ranks"], told["hosts"], told["backend"]) == (2, 1, "gloo")
    assert told["limit_bytes_per_s"] is None
    assert told["latency_s"] == told["sizes"][0]["seconds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "4q"], "--sizes 4q: give sizes"),
        (["--dtypes", "fp64"], "--dtypes fp64"),
        (["--limit", "-1"], "--limit -1"),
    ],
)
def test_bad_options(capfd: Capfd, words: list[str], said: str) -> None:
    assert main(["comm", *words]) == 2
    assert said in capfd.readouterr().err


def test_one_rank_measures_nothing(capfd: Capfd) -> None:
    assert main(["comm", "--backend", "gloo", "--nproc-per-node", "1"]) == 3
    assert capfd.readouterr().out == "nothing measured: one rank has nobody to talk to\n"
