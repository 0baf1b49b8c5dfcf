"""Promise: figures of the machine are right in any container, and measuring them disturbs nothing."""

import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.helpers.clock import Clock
from tests.helpers.planted import GIB, write
from tests.helpers.waiting import SECONDS, until
from trainer.host.affinity import gpu_nodes
from trainer.host.counters import JobCounters, rates
from trainer.host.limits import read_limits
from trainer.host.nvml import Nvml, bus_ids
from trainer.observe import machine as machine_module
from trainer.observe.machine import Machine

TICKS, PAGE = os.sysconf("SC_CLK_TCK"), resource.getpagesize()


def process(pid: int, seconds: float, below: str = "", **metrics: int) -> dict[str, str]:
    """The files of a process; half of its seconds were of children that it waited for."""
    quarter = int(seconds * TICKS / 4)
    ticks = f"{quarter} {quarter} {quarter} {quarter}"
    io = f"rchar: 9\nwchar: 9\nread_bytes: {metrics.get('read', 0)}\nwrite_bytes: {metrics.get('written', 0)}"
    return {
        f"proc/{pid}/stat": f"{pid} (a) b) (c) S 1 1 1 0 -1 4194560 9 0 0 0 {ticks} 20 0 5 0 1 1 1",
        f"proc/{pid}/io": f"{io}\ncancelled_write_bytes: 0",
        f"proc/{pid}/statm": f"99999 {metrics.get('resident', 100)} {metrics.get('shared', 10)} 1 0 1 0",
        f"proc/{pid}/task/{pid}/children": below,
        f"proc/{pid}/schedstat": f"5 {int(seconds * 1e8)} 7",
    }


def box(root: Path, scale: float, files: dict[str, str] | None = None) -> Path:
    """A host after `scale` seconds: torchrun, a rank (10) with two workers (20, 21), another rank (11)."""
    busy = f"{int(20 * scale * TICKS)} 0 {int(2 * scale * TICKS)} 99 50 0 0 {int(scale * TICKS)} 0 0"
    net = "Inter-|   Receive  |  Transmit\n face |bytes packets"
    for name, received, sent in (("lo", 7, 7), ("eth0", 1000, 500), ("docker0", 4000, 4000)):
        net += f"\n{name:>6}: {int(received * scale)} 1 0 0 0 0 0 0 {int(sent * scale)} 1 0 0 0 0 0 0"
    host = {
        "sys/devices/system/cpu/online": "0-63",
        "proc/stat": f"cpu  {busy}\ncpu0 {busy}",
        "proc/net/dev": net,
        "sys/class/net/eth0/device/vendor": "x",
        **process(1, 2 + 0.0 * scale, "10 11"),
        **process(10, 2 + 1.0 * scale, "20 21", resident=1000),
        **process(11, 2 + 2.0 * scale, read=10),
        **process(20, 2 + 3.0 * scale, read=int(100 * scale), resident=int(300 + 50 * scale)),
        **process(21, 2 + 4.0 * scale, written=int(30 * scale), resident=300),
    }
    return write(root, host | (files or {}))


def seen(root: Path, *files: dict[str, str]) -> dict[str, Any]:
    """Metrics of two seconds."""
    looks = JobCounters(read_limits(box(root, 1.0, *files[:1])), root, pid=10)
    before, _ = looks.counters(), looks.resident()
    box(root, 3.0, *files[1:])
    return {**rates(before, looks.counters(), 2.0), "rss": looks.resident()}


def test_a_rank_with_its_workers(tmp_path: Path) -> None:
    found = seen(tmp_path)
    assert found["cpu/used"] == pytest.approx(8.0)
    assert found["cpu/others"] == pytest.approx(23 - 8)  # steal is others', iowait is nobody's
    assert found["cpu/starved"] == pytest.approx(0.1)
    assert (found["disk/read_bytes_per_s"], found["disk/written_bytes_per_s"]) == (100, 30)
    assert (found["network/received_bytes_per_s"], found["network/sent_bytes_per_s"]) == (1000, 500)
    assert found["network/loopback_bytes_per_s"] == 7  # and a bridge doesn't count twice
    assert "cpu/throttled" not in found
    # The rank's own, and what the workers took since the fork; what they shared with it then is its.
    assert found["rss"] == (1000 + 100) * PAGE


def test_a_worker_that_ended_is_not_lost(tmp_path: Path) -> None:
    """It counts for the process that waited for it, and processes that come are found."""
    looks = JobCounters(read_limits(box(tmp_path, 1.0)), tmp_path, pid=10)
    before = looks.counters()
    for file in (tmp_path / "proc/20").rglob("*"):
        if file.is_file():
            file.unlink()
    write(tmp_path, process(10, 3 + 5, "21 22") | process(22, 4))
    looks.counters()  # notices that one is gone
    assert looks.counters()["used"] - before["used"] == pytest.approx(5 - 5 + 4)


def test_v2_with_a_quota(tmp_path: Path) -> None:
    def at(used: float, stops: int, stopped: float) -> dict[str, str]:
        stat = f"usage_usec {int(used * 1e6)}\nuser_usec 1\nnr_periods 100\nnr_throttled {stops}\n"
        return {
            "proc/self/cgroup": "0::/job",
            "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
            "sys/fs/cgroup/cpu.stat": "usage_usec 99000000",
            "sys/fs/cgroup/job/cpu.max": "200000 100000",
            "sys/fs/cgroup/job/cpu.stat": f"{stat}throttled_usec {int(stopped * 1e6)}",
        }

    # Eight threads with a quota of two CPUs, all the time: three quarters of it they stand still.
    found = seen(tmp_path, at(1, 0, 0), at(1 + 4, 20, 12))
    assert (found["cpu/used"], found["cpu/throttled"]) == pytest.approx((2.0, 0.75))
    # The same for a tenth of the time.
    found = seen(tmp_path, at(5, 20, 12), at(5 + 1, 22, 12 + 1.2))
    assert found["cpu/throttled"] == pytest.approx(0.075)
    assert seen(tmp_path, at(5, 20, 12), at(6, 20, 12))["cpu/throttled"] == 0


def test_v1_with_a_quota(tmp_path: Path) -> None:
    """Quota and usage are of hierarchies of their own."""

    def at(used: float, stops: int, stopped: float) -> dict[str, str]:
        return {
            "proc/self/cgroup": "2:cpuacct:/job\n1:cpu:/job\n0::/",
            "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "50000",
            "sys/fs/cgroup/cpu/job/cpu.stat": f"nr_throttled {stops}\nthrottled_time {int(stopped * 1e9)}",
            "sys/fs/cgroup/cpuacct/job/cpuacct.usage": str(int(used * 1e9)),
        }

    found = seen(tmp_path, at(1, 0, 0), at(3, 40, 2))
    assert (found["cpu/used"], found["cpu/throttled"]) == pytest.approx((1.0, 0.5))


def test_nothing_there(tmp_path: Path) -> None:
    looks = JobCounters(read_limits(tmp_path), tmp_path, pid=10)
    assert (looks.counters(), looks.resident()) == ({}, None)
    write(tmp_path, {"proc/stat": "cpu 0 0 0 0 0 0 0 0 0 0"})  # gVisor
    assert looks.counters() == {}


class Lost(Exception):  # noqa: N818
    """An error of NVML."""


class FakeNvml:
    """Two GPUs; what isn't told raises."""

    NVMLError = Lost
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    TOLD: ClassVar[dict[str, Callable[[dict[str, Any]], Any]]] = {
        "GetUUID": lambda gpu: str(gpu["uuid"]).encode(),
        "GetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu["busy"]),
        "GetMemoryInfo": lambda gpu: SimpleNamespace(used=gpu["used"], total=80 * GIB),
        "GetClockInfo": lambda gpu: gpu["clock"],
        "GetPowerUsage": lambda gpu: gpu["power"],
        "GetEnforcedPowerLimit": lambda gpu: 7 * gpu["clock"] * 100,
        "GetTemperature": lambda gpu: gpu["power"] // 5000,
        "GetCurrentClocksThrottleReasons": lambda gpu: gpu["reasons"],
        "GetTotalEnergyConsumption": lambda gpu: gpu["energy"],
    }

    def __init__(self, *untold: str) -> None:
        names = ("clock", "uuid", "power", "energy", "reasons", "busy", "used")
        first = (1000, "GPU-aaaa-1", 100_000, 5_000_000, 0x4, 40, 10 * GIB)
        second = (1000, "GPU-bbbb-2", 300_000, 9_000_000, 0x1, 60, 30 * GIB)
        told: list[dict[str, Any]] = [dict(zip(names, gpu, strict=True)) for gpu in (first, second)]
        self.gpus = [{name: one for name, one in gpu.items() if name not in untold} for gpu in told]
        self.closed = 0

    def __getattr__(self, name: str) -> Any:
        if (kind := name.removeprefix("nvmlDevice")) not in self.TOLD:
            raise AttributeError(name)

        def call(gpu: dict[str, Any], *_: Any) -> Any:
            try:
                return self.TOLD[kind](gpu)
            except KeyError:
                raise Lost from None

        return call

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:  # noqa: N802
        return {"uuid": uuid, "used": GIB}


def test_figures_of_two_gpus() -> None:
    metrics, reasons = Nvml({}, 2, FakeNvml()).sample(0.5)
    assert metrics == {
        "gpu/utilization": 0.5,
        "gpu/power_w": 200.0,
        "gpu/power_limit_w": 700.0,
        "gpu/clock_mhz": 1000.0,
        "gpu/memory_bytes": 30 * GIB,
        "gpu/memory_total_bytes": 80 * GIB,
        "gpu/temperature_c": 60.0,
        "gpu/throttled": 0.5,  # the other is idle
        "energy/joules": 14_000.0,
    }
    assert reasons == ["power"]


@pytest.mark.parametrize(
    ("visible", "ranks", "uuids"),
    [
        (None, 2, ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("1", 2, ["GPU-bbbb-2"]),
        ("GPU-bbbb-2, 0", 2, ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("GPU-", 1, []),  # could be either
        ("0,7,1", 3, ["GPU-aaaa-1"]),
        ("", 1, []),
        ("MIG-x", 1, ["MIG-x"]),
    ],
)
def test_the_gpus_are_those_of_the_ranks(visible: str | None, ranks: int, uuids: list[str]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [handle["uuid"] for handle in Nvml(environ, ranks, FakeNvml()).gpus] == uuids


def test_energy_from_power_where_there_is_no_counter() -> None:
    gpus = Nvml({}, 2, FakeNvml("energy"))
    first = gpus.sample(0.5)[0]["energy/joules"]
    assert gpus.sample(2.0)[0]["energy/joules"] - first == pytest.approx(800.0)


def test_what_is_not_told_is_absent() -> None:
    silent = FakeNvml("busy", "used", "clock", "power", "reasons", "energy")
    assert Nvml({}, 2, silent).sample(0.5) == ({}, [])
    mig, _ = Nvml({"CUDA_VISIBLE_DEVICES": "MIG-x"}, 1, FakeNvml()).sample(0.5)
    assert mig == {"gpu/memory_bytes": GIB, "gpu/memory_total_bytes": 80 * GIB}


def test_a_gpu_that_does_not_tell_its_place_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the ranks after it would be bound to the CPUs of another GPU."""

    class Silent(FakeNvml):
        def nvmlDeviceGetPciInfo(self, handle: dict[str, Any]) -> Any:  # noqa: N802
            if handle["uuid"] != "GPU-bbbb-2":
                raise Lost
            return SimpleNamespace(busId=b"00000000:3B:00.0")

    monkeypatch.setitem(sys.modules, "pynvml", Silent())
    assert bus_ids({}, 2) == ["", "00000000:3B:00.0"]
    assert bus_ids({"CUDA_VISIBLE_DEVICES": "1,0"}, 2) == ["00000000:3B:00.0", ""]
    assert gpu_nodes(["", "nonsense"]) == [None, None]


def test_a_machine_hands_out_means_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_END_SECONDS", SECONDS)
    nvml = FakeNvml()
    machine = Machine(True, 2, interval=0.02, environ={}, nvml=nvml)
    try:
        found = until(machine.take, "no sample came")
        assert (found["gpu/power_w"], found["gpu/throttle_reason"]) == (200.0, "power")
        assert found["energy/joules"] == 0.0
        assert float(found["cpu/limit"]) == read_limits().cpus
        assert 50 << 20 < float(found["memory/rss_bytes"]) < 50 * GIB
        for gpu in nvml.gpus:
            gpu["energy"] += 7_000
    finally:
        machine.close()
    assert machine.take()["energy/joules"] == 14.0  # what came until the end is not lost
    assert machine.take() == {}
    assert nvml.closed == 1
    assert not any(thread.name == "machine" for thread in threading.enumerate())


def test_a_dear_look_is_taken_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all of them take at most 0.07 % of a CPU; but at least one in 10 s."""
    machine = Machine(False, interval=1000.0)
    machine.close()
    waits: list[float] = []
    costs = iter([0.00035, 0.0007, 0.005, 1.0, 0.0])

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            return len(waits) == 5

    machine._interval = 0.5
    monkeypatch.setattr(machine, "_stop", Stop())
    monkeypatch.setattr(machine, "_sample", lambda: next(costs))
    machine._watch()
    assert waits == pytest.approx([0.5, 0.5, 1.0, 0.005 / 0.0007, 10.0])
    assert next(costs, None) is None  # and a last look, at the end


def test_a_look_knows_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(False, interval=1000.0)
    machine.close()
    clock = Clock()
    monkeypatch.setattr(machine_module, "time", clock.time)
    monkeypatch.setattr(machine._host, "counters", lambda: {"used": clock.move(0.25)})
    assert machine._sample() == 0.25
