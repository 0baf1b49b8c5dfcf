"""Which nodes a job has is found in every kind of environment."""

import json
import os
import pty
import sys
from functools import partial

import pytest

from tests.helpers.programs import ran
from tests.helpers.refusals import refused
from trainer.host.interfaces import gloo_interface
from trainer.launch.launcher import WorkerGroup
from trainer.launch.meeting import Meeting
from trainer.launch.nodes import (
    Nodes,
    expand,
    find_nodes,
    is_launcher_task,
    is_rank,
    mark_of_rank,
    rank_variables,
)
from trainer.launch.signals import SignalReceiver

# As `env` printed them in a step of a real Slurm (22.05.8), srun with a task on each of two nodes.
PRINTED = """
SLURM_JOB_ID=1234 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=n[1-2]
SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n[1-2]
SLURM_NODEID=1 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2
"""
STEP = dict(word.split("=") for word in PRINTED.split())
PLAIN = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
PET = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1234"}


find = partial(find_nodes, nnodes=None, node_rank=None, master_addr=None, master_port=None)


def four(found: Nodes | None) -> tuple[object, ...]:
    """How many nodes there are, which one this is, and where they meet."""
    assert found is not None
    return found[:4]


@pytest.mark.parametrize("environ", [PLAIN, PET], ids=["plain", "kubeflow"])
def test_variables_say_it(environ: dict[str, str]) -> None:
    assert four(find(environ)) == (4, 3, "a", 1234)
    assert four(find(environ, node_rank=1, master_addr="b", master_port=99)) == (4, 1, "b", 99)
    assert four(find({}, nnodes="2", node_rank=0, master_addr="[fe80::1]")) == (2, 0, "fe80::1", 29500)
    assert find(environ, nnodes="1") is None
    first = next(iter(environ))
    assert find({**environ, first: "1"}) is None
    with refused(first, "2:4"):
        find({**environ, first: "2:4"})
    # A shell that has a MASTER_ADDR by chance is a single node.
    assert find({name: value for name, value in environ.items() if name != first}) is None


def test_kubeflow_may_give_an_endpoint() -> None:
    job = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "job-worker-0:29400"}
    assert four(find(job)) == (2, 1, "job-worker-0", 29400)
    assert four(find({**job, "PET_RDZV_ENDPOINT": "[fd00::1]:29400"})) == (2, 1, "fd00::1", 29400)
    assert four(find({**job, "PET_RDZV_ENDPOINT": "job-worker-0"})) == (2, 1, "job-worker-0", 29500)


def test_a_step_of_slurm_says_it() -> None:
    nodes = Nodes(2, 1, "n1", 29500 + 234, ("n1", "n2"), "SLURM_STEP_NUM_NODES")
    assert (find(STEP), nodes.name(1)) == (nodes, "node 1 (n2)")
    # What the script says itself comes first, such as another interface's name.
    assert four(find({**STEP, "MASTER_ADDR": "ib1"})) == (2, 1, "ib1", 29734)
    assert find({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert rank_variables(STEP) == {}
    wanted = ["n1", "gpu-08", "gpu-09", "gpu-10", "gpu-3", "rack1-n2"]
    assert expand("n1,gpu-[08-10,3],rack1-n[2]") == wanted


def test_the_script_of_a_slurm_job_of_two_nodes_must_use_srun() -> None:
    script = {name: value for name, value in STEP.items() if "STEP" not in name}
    with refused("srun --ntasks-per-node=1"):
        find(script)
    assert find(script, nnodes="1") is None
    with refused(2):  # salloc's, a step of its own
        find({**script, "SLURM_STEP_ID": "4294967290"})


def test_a_task_for_each_rank_needs_no_launcher() -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    told = rank_variables(step)
    wanted = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29734"
    assert told == dict(word.split("=") for word in wanted.split())
    assert is_rank({**step, **told})
    # A script that sets some of them for all tasks, or below another job, doesn't make each task train alone.
    assert rank_variables({**step, "RANK": "0", "WORLD_SIZE": "9"}) == told
    assert rank_variables({**step, "RANK": "0", "TORCHELASTIC_RUN_ID": "1"}) == {}  # a rank of torchrun's
    assert rank_variables({**step, **told, **mark_of_rank({**step, **told})}) == {}  # started by that rank
    # The node with most tasks has three of five.
    assert rank_variables({**step, "SLURM_STEP_NUM_TASKS": "5"})["LOCAL_WORLD_SIZE"] == "3"
    unknown = {name: value for name, value in step.items() if name != "SLURM_PROCID"}
    with refused("RANK WORLD_SIZE 4"):
        is_rank({**unknown, **rank_variables(unknown)})


_FORGETS = """
import fcntl, json, os, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
program = (
    "import json, os; from trainer.launch.nodes import forget_step_of_shell as f;"
    "e = dict(os.environ); f(e); print(json.dumps(e))"
)
group = None if sys.argv[1] == "task" else 0
subprocess.run([sys.executable, "-c", program], process_group=group, check=True)
"""


@pytest.mark.parametrize("typed", ["task", "shell"])
def test_what_is_typed_in_a_shell_of_srun_is_no_task(typed: str) -> None:
    """`srun --ntasks=4 --pty bash`, as a real Slurm (22.05) sets it; a task there leads the session."""
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_PTY_PORT": "35719"}
    step |= {"SLURM_JOB_NUM_NODES": "1", "PMI_SIZE": "4", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    master, slave = pty.openpty()
    try:
        own = {"env": {**os.environ, **step}, "stdin": slave, "start_new_session": True}
        environ = json.loads(ran(sys.executable, "-c", _FORGETS, typed, code=0, **own).stdout)
    finally:
        os.close(master)
        os.close(slave)
    assert bool(rank_variables(environ)) == is_rank(environ) == (typed == "task")
    if typed == "shell":
        assert find(environ) is None
        with refused("2 nodes"):
            find({**environ, "SLURM_JOB_NUM_NODES": "2"})


@pytest.mark.parametrize(
    "sizes",
    [
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},  # Vertex AI, Kubeflow 1.5
        {"NNODES": "1", "PMI_SIZE": "2", "PMI_RANK": "1"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "4", "TORCHELASTIC_RUN_ID": "1"},  # left over from another job
    ],
)
def test_one_of_several_processes_does_not_train_by_itself(sizes: dict[str, str]) -> None:
    with refused():
        find(sizes)
    assert find(sizes, nnodes="1") is find({**sizes, **mark_of_rank(sizes)}) is None
    alone = {name: "1" if "SIZE" in name or "NUM" in name else value for name, value in sizes.items()}
    assert find(alone) is None


ODD = ("RANK=abc", "RANK=2", f"RANK={'9' * 5000}", "WORLD_SIZE=1", "LOCAL_RANK=٣", "MASTER_PORT=65536")


@pytest.mark.parametrize("odd", ODD)
def test_numbers_that_no_rank_has_are_one_line(odd: str) -> None:
    name, _, value = odd.partition("=")
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with refused(name) as raised:
        is_rank({**rank, name: value})
    assert len(str(raised.value)) < 300
    # One rank alone meets nobody.
    assert is_rank({**rank, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": ""})


def test_a_hook_that_calls_a_nodes_only_task_a_rank_is_not_believed() -> None:
    hooked = {**STEP, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert is_launcher_task(hooked) and not is_rank(hooked)
    assert is_rank({**hooked, "TORCHELASTIC_RUN_ID": "1"})
    assert is_rank({**hooked, "SLURM_STEP_NUM_TASKS": "4", "WORLD_SIZE": "4"})


def test_who_has_a_ranks_variables_from_that_rank_is_none() -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "1234"}
    inherited = {**rank, **mark_of_rank(rank)}
    assert (is_rank(rank), is_rank(inherited)) == (True, False)
    assert is_rank({**inherited, "MASTER_PORT": "4321"})  # a torchrun in between has ranks of its own
    step = {**STEP, **rank, "NNODES": "2"}
    assert find({**step, **mark_of_rank(step)}) is None


@pytest.mark.parametrize(
    ("environ", "arguments", "names"),
    [
        ({}, ("x", None, None, None), "--nnodes x"),
        ({}, ("4:2", None, None, None), "--nnodes 4:2"),
        ({}, ("2", None, "a", 1), "2"),
        ({}, (None, None, "a", None), "--master-addr --nnodes"),
        ({}, ("2", 2, "a", 1), "2 --node-rank"),
        ({}, ("2", 0, None, None), "29500"),
        ({}, ("2", 0, "a:29500", None), "a:29500 29500"),
        ({}, ("2", 0, "a", 65536), "65536"),
        ({**PLAIN, "NODE_RANK": "9" * 5000}, (None,) * 4, "NNODES 4"),
        ({**PLAIN, "NODE_RANK": "٢"}, (None,) * 4, "NNODES 4 ٢"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[a-b]"}, (None,) * 4, ""),
    ],
)
def test_what_is_missing_or_impossible_is_one_line(
    environ: dict[str, str], arguments: tuple[str | None, int | None, str | None, int | None], names: str
) -> None:
    with refused(names) as raised:
        find_nodes(environ, *arguments)
    assert len(str(raised.value)) < 500


def test_ranks_are_numbered_through_the_nodes() -> None:
    meetings = [Meeting(Nodes(3, number, "a", 1), 2, {}, 1.0) for number in range(3)]
    groups = [WorkerGroup(SignalReceiver(), 2, 1.0, meeting) for meeting in meetings]
    assert [list(one.ranks) for one in groups] == [[0, 1], [2, 3], [4, 5]]
    assert {one.world for one in groups} == {6}


def test_gloo_is_given_the_loopback_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_interface("127.0.0.1") == gloo_interface("::ffff:127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert gloo_interface("203.0.113.1") == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert gloo_interface("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert gloo_interface("203.0.113.1") == {}
    for odd in ("^lo", "lo,no-such0"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", odd)
        with refused(odd):
            gloo_interface("127.0.0.1")
