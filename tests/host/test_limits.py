"""P7, fits the box: the limits are the container's, under cgroup v1, v2 and both."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.helpers.planted import GIB, plant
from trainer.host import limits as module
from trainer.host.limits import Limits, read_limits, threads_per_rank, workers_per_rank

CGROUP = "/sys/fs/cgroup"
V1_UNLIMITED = "9223372036854771712"
V1_MEMORY = f"35 31 0:32 / {CGROUP}/memory rw - cgroup cgroup rw,memory"
V2_MOUNT = f"30 23 0:26 / {CGROUP} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def limits(cpus: float, pids: int | None = None) -> Limits:
    return Limits(cpus=cpus, memory_bytes=GIB, shm_bytes=0, pids=pids)


def test_v2(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "0::/",
        "/proc/self/mountinfo": V2_MOUNT,
        f"{CGROUP}/cpu.max": "150000 100000",
        f"{CGROUP}/cpuset.cpus.effective": "0-3,8",
        f"{CGROUP}/memory.max": str(8 * GIB),
        f"{CGROUP}/memory.high": str(6 * GIB),
        f"{CGROUP}/pids.max": "4096",
    }
    wanted = {"cpus": f"{CGROUP}/cpu.max", "memory_bytes": f"{CGROUP}/memory.high", "shm_bytes": "/dev/shm"}
    wanted["pids"] = f"{CGROUP}/pids.max"
    assert read_limits(plant(tmp_path, files)) == Limits(1.5, 6 * GIB, 0, 4096, wanted)


def test_v2_stricter_ancestors_win(tmp_path: Path) -> None:
    pods = f"{CGROUP}/kubepods"
    pod = f"{pods}/pod1"
    files = {
        "/proc/self/cgroup": "0::/kubepods/pod1/train",
        "/proc/self/mountinfo": V2_MOUNT,
        f"{pod}/train/cpu.max": "1600000 100000",
        f"{pod}/cpu.max": "400000 100000",
        f"{pods}/cpu.max": "max 100000",
        f"{pod}/train/memory.max": str(64 * GIB),
        f"{pods}/memory.max": str(32 * GIB),
        f"{pod}/train/pids.max": "max",
        f"{pod}/pids.max": "300",
        # A neighbor's limits are not ours.
        f"{pods}/pod2/cpu.max": "100000 100000",
        f"{pod}/train/child/memory.max": str(GIB),
    }
    found = read_limits(plant(tmp_path, files))
    assert (found.cpus, found.memory_bytes, found.pids) == (4.0, 32 * GIB, 300)
    assert found.sources["cpus"] == f"{pod}/cpu.max"


def test_v1(tmp_path: Path) -> None:
    both = f"{CGROUP}/cpu,cpuacct"
    mounts = f"32 31 0:29 / {both} rw shared:9 master:2 - cgroup cgroup rw,cpu,cpuacct\n{V1_MEMORY}\n"
    mounts += f"36 31 0:33 / {CGROUP}/cpuset rw - cgroup cgroup rw,cpuset\n"
    files = {
        "/proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n3:cpuset:/job\n2:pids:/job\n1:name=x:/y",
        "/proc/self/mountinfo": f"{mounts}37 31 0:34 / {CGROUP}/pids rw - cgroup cgroup rw,pids",
        f"{both}/cpu.cfs_quota_us": "-1",
        f"{both}/cpu.cfs_period_us": "100000",
        f"{both}/job/cpu.cfs_quota_us": "125000",
        f"{both}/job/cpu.cfs_period_us": "50000",
        f"{CGROUP}/memory/memory.limit_in_bytes": V1_UNLIMITED,
        f"{CGROUP}/memory/job/memory.limit_in_bytes": str(16 * GIB),
        f"{CGROUP}/cpuset/job/cpuset.cpus": "",
        f"{CGROUP}/cpuset/job/cpuset.effective_cpus": "0-2",
        f"{CGROUP}/pids/job/pids.max": "100",
    }
    found = read_limits(plant(tmp_path, files))
    assert (found.cpus, found.memory_bytes, found.pids) == (2.5, 16 * GIB, 100)
    assert found.sources["cpus"] == f"{both}/job/cpu.cfs_quota_us"


V1 = f"{CGROUP}/memory"
KILLS: dict[str, tuple[dict[str, str], int]] = {
    "v1": (
        {
            "/proc/self/cgroup": "4:memory:/job\n0::/",
            "/proc/self/mountinfo": V1_MEMORY,
            f"{V1}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7",
            f"{V1}/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
        },
        2,
    ),
    "v1, a container's mount": (
        {
            "/proc/self/cgroup": "4:memory:/docker/0123\n0::/",
            "/proc/self/mountinfo": V1_MEMORY,
            f"{V1}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1",
        },
        1,
    ),
    "v2, a neighbor's": (
        {
            "/proc/self/cgroup": "0::/pod/train",
            "/proc/self/mountinfo": V2_MOUNT,
            f"{CGROUP}/pod/memory.events": "max 5\noom 4\noom_kill 4\noom_group_kill 0",
            f"{CGROUP}/pod/train/memory.events": "low 0\nhigh 0\nmax 3\noom 2\noom_kill 0",
        },
        0,
    ),
    "an old kernel": ({f"{V1}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0"}, 0),
}


@pytest.mark.parametrize(("files", "kills"), KILLS.values(), ids=KILLS)
def test_kills_for_memory_are_counted(tmp_path: Path, files: dict[str, str], kills: int) -> None:
    assert module.out_of_memory_kills(plant(tmp_path, files)) == kills


@pytest.mark.parametrize(
    ("path", "mountinfo"), [("/docker/0123abcd", V2_MOUNT), ("/../../other", ""), ("/\0", "")]
)
def test_path_that_is_not_under_the_mount(tmp_path: Path, path: str, mountinfo: str) -> None:
    files = {
        "/proc/self/cgroup": f"4:cpu:{path}\n0::{path}",
        "/proc/self/mountinfo": mountinfo,
        f"{CGROUP}/cpu/cpu.cfs_quota_us": "600000",
        f"{CGROUP}/cpu/cpu.cfs_period_us": "100000",
        f"{CGROUP}/memory.max": str(2 * GIB),
        "/sys/fs/memory.max": str(GIB),  # what ".." would lead to
    }
    found = read_limits(plant(tmp_path, files))
    assert (found.cpus, found.memory_bytes) == (6.0, 2 * GIB)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpuset.cpus.effective": "0-3,8"}, 5),
        ({"cpuset.cpus.effective": "4-7", "cpuset.cpus": "0"}, 4),  # v2 could not grant what was asked
        ({"cpuset/cpuset.effective_cpus": "9", "cpuset/cpuset.cpus": ""}, 1),
        ({"cpuset/cpuset.cpus": "0-1,4"}, 3),  # Linux before 3.17
        ({"cpuset/cpuset.cpus": ""}, 64),
    ],
)
def test_cpuset(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    root = plant(tmp_path, {f"{CGROUP}/{name}": text for name, text in files.items()})
    assert read_limits(root).cpus == cpus


def test_quota_above_the_machine_affinity_below(tmp_path: Path) -> None:
    root = plant(tmp_path, {"/sys/fs/cgroup/cpu.max": "12800000 100000"})
    assert read_limits(root).cpus == 64.0
    found = read_limits(root, affinity=5)
    assert (found.cpus, found.sources["cpus"]) == (5.0, "sched_getaffinity")


@pytest.mark.parametrize("content", ["0 100000", "-1 100000", "150000", "a b"])
def test_malformed_quota_is_no_limit(tmp_path: Path, content: str) -> None:
    assert read_limits(plant(tmp_path, {"/sys/fs/cgroup/cpu.max": content})).cpus == 64.0


@pytest.mark.parametrize("text", ["", "3-1", "0-", "0,,2", "0-3-5"])
def test_malformed_cpu_list(text: str) -> None:
    assert module.count_cpus(text) is None


@pytest.mark.parametrize(
    ("cpus", "ranks", "threads", "workers"),
    [(0.5, 1, 1, 0), (1.5, 1, 1, 1), (4.0, 8, 1, 0), (16.0, 3, 5, 4), (224.0, 8, 28, 21)],
)
def test_share_of_a_rank(cpus: float, ranks: int, threads: int, workers: int) -> None:
    assert threads_per_rank(limits(cpus), ranks) == threads
    assert workers_per_rank(limits(cpus), ranks) == workers


@pytest.mark.parametrize(
    ("pids", "ranks", "compilers"), [(None, 2, 8), (200, 2, 8), (160, 2, 4), (100, 2, 1)]
)
def test_few_pids_allow_few_compilers(pids: int | None, ranks: int, compilers: int) -> None:
    assert module.compilers_per_rank(limits(16.0, pids), ranks) == compilers
    assert module.compilers_per_rank(limits(0.5), ranks) == 1


@given(st.floats(0.01, 1024), st.integers(1, 64), st.none() | st.integers(0, 100_000))
def test_ranks_together_stay_within_the_limits(cpus: float, ranks: int, pids: int | None) -> None:
    workers = workers_per_rank(limits(cpus, pids), ranks)
    assert 0 <= workers * ranks <= cpus
    assert pids is None or workers * ranks <= pids
