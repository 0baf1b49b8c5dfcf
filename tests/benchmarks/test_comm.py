"""Promise: all-reduces are timed, and held against the speed of the link."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from benchmarks.__main__ import main
from benchmarks.comm import all_reduces, as_json, as_text, least_limit
from benchmarks.comm_fit import SIZES, CommResult, Timed, bus_factor, fitted, parsed_sizes
from benchmarks.link_limit import host_limit, interface_speed, interface_to, local_limit
from tests.helpers.world import Ranks
from trainer.config.sizes import MIB
from trainer.distributed.parallel import World
from trainer.errors import BadInputError
from trainer.host.interfaces import addresses

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


def found(limit: tuple[float | None, str] = (None, "loopback: no link, memory is the limit")) -> CommResult:
    series = [Timed(4096, 100e-6, 90e-6, 120e-6), Timed(MIB, 1.1e-3, 1e-3, 1.2e-3)]
    fit = fitted(series)
    return CommResult(4, 2, "gloo", "here and now", {"fp32": series}, fit, limit)


def test_what_a_plan_reads() -> None:
    told = as_json(found((2 * GIGABIT * 10, "eth0 20 Gbit/s")))
    assert told["ranks"] == 4 and told["backend"] == "gloo"
    assert told["alpha_s"] == pytest.approx(96.1e-6, rel=1e-3)
    assert told["bytes_per_s"] == pytest.approx(1.0445e9, rel=1e-3)
    row = told["sizes"][1]
    assert row["algorithm_bytes_per_s"] == MIB / 1.1e-3
    assert row["bus_bytes_per_s"] == 1.5 * MIB / 1.1e-3
    assert told["share_of_limit"] == pytest.approx(1.5 * MIB / 1.1e-3 / 2.5e9)
    assert as_json(found())["share_of_limit"] is None


def test_the_table() -> None:
    text = as_text(found((1.25e9, "eth0 10 Gbit/s")), rounds=7)
    assert "| 1 MiB | fp32 | 1.1 ms | 1 ms to 1.2 ms | 0.953 | 1.43 |" in text
    assert "limit: 1.25 GB/s (eth0 10 Gbit/s); the best bus bandwidth is 114% of it" in text
    assert as_text(found(), 7).endswith("limit: loopback: no link, memory is the limit")


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
    assert told["limit_bytes_per_s"] is None and told["limit"] == "loopback: no link, memory is the limit"
    assert told["latency_s"] == told["sizes"][0]["seconds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "4q"], "--sizes 4q: give sizes"),
        (["--dtypes", "fp64"], "--dtypes fp64"),
        (["--rounds", "0"], "--rounds 0"),
        (["--limit", "-1"], "--limit -1"),
        (["--backend", "gloo", "--nproc-per-node", "0"], "--nproc-per-node 0"),
    ],
)
def test_bad_options(capfd: Capfd, words: list[str], said: str) -> None:
    assert main(["comm", *words]) == 2
    assert said in capfd.readouterr().err


def test_one_rank_measures_nothing(capfd: Capfd) -> None:
    assert main(["comm", "--backend", "gloo", "--nproc-per-node", "1"]) == 3
    assert capfd.readouterr().out == "nothing measured: one rank has nobody to talk to\n"


# --- the link's limit ---


def test_speed_of_an_interface(tmp_path: Path) -> None:
    for name, said in {"eth0": "10000\n", "veth1": "-1\n", "ib0": "", "down0": "0\n"}.items():
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "speed").write_text(said)
    assert interface_speed("eth0", tmp_path) == (1.25e9, "eth0 10 Gbit/s")
    assert interface_speed("lo", tmp_path) == (None, "loopback: no link, memory is the limit")
    for name in ("veth1", "ib0", "down0", "absent"):
        limit, why = interface_speed(name, tmp_path)
        assert limit is None and why.startswith(f"unknown, because {name} ")


def test_the_interface_of_the_route() -> None:
    assert interface_to("127.0.0.1", {}) == ("lo", "")
    assert interface_to("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"}) == ("eth7", "")
    assert interface_to("name.invalid", {}) == ("", "there is no route to name.invalid")
    assert addresses()["lo"][0] == "127.0.0.1"
    assert host_limit("gloo", "name.invalid")[1] == "unknown, because there is no route to name.invalid"


def test_infiniband_comes_before_the_interface(tmp_path: Path) -> None:
    for port, state, speed in (("1", "4: ACTIVE", "100 Gb/sec (4X EDR)"), ("2", "1: DOWN", "10 Gb/sec")):
        folder = tmp_path / "sys/class/infiniband/mlx5_0/ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
        (folder / "rate").write_text(speed)
    assert host_limit("nccl", "127.0.0.1", tmp_path, {}) == (12.5e9, "InfiniBand mlx5_0:1 100 Gbit/s")
    for backend, environ in (("nccl", {"NCCL_IB_DISABLE": "1"}), ("gloo", {})):
        assert host_limit(backend, "127.0.0.1", tmp_path, environ)[0] is None


class Nvml:
    """A GPU with so many NVLinks, and PCIe; what is None isn't told."""

    NVMLError = RuntimeError
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, nvlinks: int = 0, speed: int | None = None, pcie: tuple[int, int] | None = None):
        self.nvlinks, self.speed, self.pcie = nvlinks, speed, pcie

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetNvLinkState(self, _: int, link: int) -> int:  # noqa: N802
        if link >= 12:
            raise RuntimeError("not supported")
        return int(link < self.nvlinks)

    def nvmlDeviceGetFieldValues(self, _: int, fields: list[int]) -> list[Any]:  # noqa: N802
        assert fields == [90]
        value = SimpleNamespace(uiVal=self.speed or 0)
        return [SimpleNamespace(nvmlReturn=int(self.speed is None), value=value)]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, _: int) -> int:  # noqa: N802
        return self._pcie()[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, _: int) -> int:  # noqa: N802
        return self._pcie()[1]

    def _pcie(self) -> tuple[int, int]:
        if self.pcie is None:
            raise RuntimeError("not supported")
        return self.pcie


def test_nvlink_pcie_or_unknown() -> None:
    def limit(*values: Any, gpu: int = 0) -> tuple[float | None, str]:
        return local_limit("nccl", gpu, Nvml(*values), {})

    assert limit(12, 25000, (4, 16)) == (300e9, "12 NVLinks of 25 GB/s")
    assert limit(12, None, (4, 16)) == (
        None,
        "unknown, because NVML doesn't tell the speed of the 12 NVLinks",
    )
    speed, what = limit(0, None, (4, 16))
    assert speed == pytest.approx(31.5e9, rel=1e-3) and what == "PCIe 4.0 x16"
    assert limit(0, None, (3, 8))[0] == pytest.approx(7.88e9, rel=1e-3)
    assert limit(0, None, (1, 16))[0] == pytest.approx(4e9)
    for why in (limit(), limit(0, None, (9, 16)), limit(12, 25000, gpu=3)):
        assert why[0] is None and why[1].startswith("unknown, because ")
    assert local_limit("gloo", 0) == (None, "loopback: no link, memory is the limit")


def test_the_slowest_ranks_limit_counts() -> None:
    assert least_limit((2.0, "eth0"), [2.0, 2.0, 3.0]) == (2.0, "eth0")
    assert least_limit((2.0, "eth0"), [2.0, 1.0]) == (
        1.0,
        "the link of rank 1, which is slower than rank 0's (eth0)",
    )
    assert least_limit((2.0, "eth0"), [2.0, 0.0]) == (None, "unknown, because rank 1 doesn't know its own")
    assert least_limit((None, "unknown, because …"), [0.0, 1.0]) == (None, "unknown, because …")
