"""Ranks keep to CPUs near their GPU, or to some of their own; what they start keeps to them too."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.planted import plant
from tests.helpers.programs import ran
from trainer.host import affinity
from trainer.host.affinity import Cpus, CpuShares, Topology, cpus_text, gpu_nodes, read_topology
from trainer.host.limits import Limits, listed_cpus, read_limits, threads_per_rank

REPOSITORY = Path(__file__).parents[2]


def cpus(text: str) -> Cpus:
    return frozenset(listed_cpus(text) or ())


def shares(*each: str, pinned: bool = False) -> CpuShares:
    return CpuShares(tuple(cpus(text) for text in each), pinned)


def topology(nodes: int, cores: int, siblings: int) -> Topology:
    """CPUs numbered as Linux does: first one of each core, then the second of each."""
    total = nodes * cores
    core = {cpu: frozenset(range(cpu % total, total * siblings, total)) for cpu in range(total * siblings)}
    near = {n: frozenset(cpu for cpu in core if cpu % total // cores == n) for n in range(nodes)}
    return Topology(near, core)


TWO = topology(nodes=2, cores=4, siblings=2)  # node 0: 0-3,8-11; node 1: 4-7,12-15


@pytest.mark.parametrize(
    ("binding", "places", "wanted"),
    [
        ("none", [0, 1], []),
        ("auto", [None], []),  # one rank without a GPU may use all
        ("auto", [1], ["4-7,12-15"]),
        ("auto", [0, 0, 1, 1], ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]),
        ("auto", [None, None], ["0-3,8-11", "4-7,12-15"]),
        ("node", [None, 1, 0], ["0-3,8-11", "4-7,12-15", "0-3,8-11"]),
        ("node", [7], ["0-3,8-11"]),  # a node that this container has no CPUs of
        ("cores", [None], ["0-3,8-11"]),
        ("cores", [0, 0, 1, 1], ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        ("cores", [0, 0, 0], ["0,8", "1,9", "2-3,10-11"]),
        ("cores", [1, 1, 1, 1, 1], ["4-7,12-15"] * 5),  # fewer cores than ranks
    ],
)
def test_who_gets_which_cpus(binding: str, places: list[int | None], wanted: list[str]) -> None:
    found = affinity.share_cpus(binding, TWO, places)  # type: ignore[arg-type]
    assert found == shares(*wanted, pinned=binding == "cores")


def test_the_topology_of_a_container(tmp_path: Path) -> None:
    near, lists = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", ("0-1,4-5", "2-3,6-7", "")
    files = {near.format(cpu): f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    files |= {f"sys/devices/system/node/node{n}/cpulist": text for n, text in enumerate(lists)}
    found = read_topology(plant(tmp_path, files), cpus("0-2,4"))  # node 2 has memory only
    assert found.nodes == {0: cpus("0-1,4"), 1: cpus("2")}
    assert found.cores == {0: cpus("0,4"), 1: cpus("1"), 2: cpus("2"), 4: cpus("0,4")}
    nothing = read_topology(tmp_path / "none", cpus("0-2"))
    assert nothing == Topology({0: cpus("0-2")}, {0: cpus("0"), 1: cpus("1"), 2: cpus("2")})


def test_where_gpus_are(tmp_path: Path) -> None:
    places = {"3b": "1", "5e": "-1"}  # -1: a virtual machine
    root = plant(tmp_path, {f"sys/bus/pci/devices/0000:{n}:00.0/numa_node": at for n, at in places.items()})
    assert gpu_nodes(["00000000:3B:00.0", "00000000:5E:00.0", "00000000:AF:00.0"], root) == [1, None, None]


@pytest.mark.parametrize(
    ("quota", "each_share", "each"),
    [
        (64.0, [], 16),
        (64.0, ["0-15", "16-31", "32-47", "48-63"], 16),
        (8.0, ["0-15", "16-31", "32-47", "48-63"], 2),  # the quota is less than the CPUs
        (64.0, ["0-31", "0-31", "32-63", "32-63"], 16),
        (64.0, ["0-31", "0-31", "0-31", "32-63"], 10),  # three share a node: all compute with as many threads
    ],
)
def test_threads_are_those_of_the_poorest_rank(quota: float, each_share: list[str], each: int) -> None:
    limits = Limits(cpus=quota, memory_bytes=0, shm_bytes=0, pids=None)
    assert threads_per_rank(affinity.limits_within(limits, shares(*each_share)), 4) == each


@pytest.mark.parametrize("given_by_user", [{}, {"OMP_PROC_BIND": "false"}, {"KMP_AFFINITY": "none"}])
def test_what_the_user_said_about_threads_stays(given_by_user: dict[str, str]) -> None:
    here = cpus_text(frozenset(os.sched_getaffinity(0)))
    environ = {"LOCAL_RANK": "0", **given_by_user}
    affinity.bind(shares(here, pinned=True), environ)
    ours = {"GOMP_CPU_AFFINITY": here, "KMP_AFFINITY": f"granularity=fine,proclist=[{here}],explicit"}
    assert environ == {"LOCAL_RANK": "0", **(given_by_user or ours)}


BOUND = """
import json, os, sys
from pathlib import Path
from trainer.host.affinity import CpuShares, unpin_main_thread
from trainer.host.limits import listed_cpus
from trainer.launch.folder import Launch, write_launch
from trainer.launch.worker import Worker, cpu_shares
folder, cpus = sys.argv[1:]
shares = CpuShares((frozenset(listed_cpus(cpus)),), True)
write_launch(Path(folder), Launch(sys.path, os.getppid(), shares, None))
worker = Worker(folder).__enter__()
"""
IN_A_RANK = """
import torch
unpin_main_thread(cpu_shares())
from trainer.host.limits import read_limits
torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)
(torch.ones(1 << 22) + 1).sum()
threads = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
child = os.fork()
if not child:
    os._exit(len(os.sched_getaffinity(0)))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps([sorted(os.sched_getaffinity(0)), threads, read_limits().cpus, code]))
"""


ENVIRONMENT = {"LOCAL_RANK": "0", "OMP_NUM_THREADS": "2"}
needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


@needs_two
def test_a_rank_and_what_it_starts_keep_to_its_cpus(tmp_path: Path) -> None:
    there = sorted(os.sched_getaffinity(0))[:2]
    # libgomp reads its variables when it is loaded.
    words = (sys.executable, "-c", BOUND + IN_A_RANK, tmp_path, cpus_text(frozenset(there)))
    done = ran(*words, code=0, cwd=REPOSITORY, env={**os.environ, **ENVIRONMENT})
    main, threads, counted, child = json.loads(done.stdout)
    assert main == there
    assert child == 2  # libgomp would have left the main thread, and so a loader worker, on one CPU
    assert counted == read_limits().cpus  # the container's, for who looks at the machine
    assert all(set(one) <= set(there) for one in threads) and any(len(one) == 1 for one in threads)


START_OF_A_RANK = """
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # as libgomp does, when torch loads it
import trainer.train.start.rank
from trainer.config.recipe_file import load_recipe
from trainer.train.request import Request

def looked_at(_):
    print(len(os.sched_getaffinity(0)))
    raise SystemExit

trainer.train.start.rank.open_store = looked_at
trainer.train.start.rank.train_rank(Request(load_recipe("digits", []), "digits"))
"""


@needs_two
def test_a_rank_frees_its_main_thread_before_it_starts_workers(tmp_path: Path) -> None:
    there = cpus_text(frozenset(sorted(os.sched_getaffinity(0))[:2]))
    words = [sys.executable, "-c", BOUND + START_OF_A_RANK, str(tmp_path), there]
    done = preloaded.run(words, cwd=REPOSITORY, env={**os.environ, **ENVIRONMENT})
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
