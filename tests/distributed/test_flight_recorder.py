"""Promise: for a job that hangs, the collective and the ranks that didn't enter it are named."""

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.helpers import preloaded
from trainer.distributed.flight_recorder import dump_recorder, parse_dumps, shortened

# As torch 2.5 to 2.14 write it; see "The contents of a Flight Recorder file" in PyTorch's tutorial.
ENTRY: dict[str, Any] = {
    "record_id": 0,
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "collective_seq_id": 1,
    "p2p_seq_id": 0,
    "op_id": 1,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1724779239936775119,
    "input_sizes": [[3, 4]],
    "input_dtypes": ["Float"],
    "output_sizes": [[3, 4]],
    "output_dtypes": ["Float"],
    "state": "completed",
    "time_discovered_started_ns": 0,
    "time_discovered_completed_ns": 1724779239975811724,
    "retired": True,
    "timeout_ms": 600000,
    "is_p2p": False,
}


def entry(number: int, state: str = "completed", **changed: Any) -> dict[str, Any]:
    return {**ENTRY, "collective_seq_id": number, "state": state, "retired": state == "completed", **changed}


def dumped(entries: Sequence[dict[str, Any]], ranks: str = "[0, 1, 2]") -> str:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    config["7"] = {"name": "7", "desc": "undefined", "ranks": "[0, 2]"}
    whole = {"version": "2.4", "pg_config": config, "pg_status": {}, "nccl_comm_state": {}}
    return json.dumps({**whole, "entries": list(entries)} if entries else whole)


def done(count: int) -> list[dict[str, Any]]:
    return [entry(number) for number in range(1, count + 1)]


def test_ranks_that_are_together_and_idle_say_nothing() -> None:
    assert parse_dumps({rank: dumped(done(5)) for rank in range(3)}) is None
    assert parse_dumps({rank: dumped([]) for rank in range(3)}) is None
    assert parse_dumps({0: None, 1: None}) is None
    assert parse_dumps({}) is None


def test_who_did_not_enter_is_named() -> None:
    waits = dumped([*done(6), entry(7, "scheduled", input_sizes=[[25, 2]]), entry(8, "scheduled")])
    verdict = parse_dumps({0: waits, 1: waits, 2: dumped(done(6))})
    assert verdict == "collective 7, all_reduce of 25 x 2 Float: ranks 0 and 1 entered it, rank 2 did not"


def test_who_never_entered_any_is_named() -> None:
    other = dumped([entry(1, "scheduled", process_group=["7", "undefined"])])
    waits = dumped([entry(1, "scheduled")], ranks="[0, 1]")
    assert parse_dumps({0: waits, 1: other.replace("[0, 2]", "[1, 2]").replace("[0, 1, 2]", "[0, 1]")}) == (
        "collective 1, all_reduce of 3 x 4 Float: rank 0 entered it, rank 1 did not; "
        "collective 1 of the group of ranks 1 and 2, all_reduce of 3 x 4 Float: rank 1 is in it; "
        "of rank 2 nothing is known"
    )


def test_another_operation_or_size_is_named() -> None:
    same = dumped([*done(2), entry(3, "scheduled")])
    larger = dumped([*done(2), entry(3, "scheduled", input_sizes=[[3, 5]])])
    assert parse_dumps({0: same, 1: same, 2: larger}) == (
        "collective 3 differs: all_reduce of 3 x 4 Float on ranks 0 and 1, all_reduce of 3 x 5 Float on "
        "rank 2"
    )
    other = dumped([*done(2), entry(3, "scheduled", profiling_name="nccl:broadcast")])
    assert "broadcast of 3 x 4 Float on rank 1" in str(parse_dumps({0: same, 1: other, 2: same}))
    half = dumped([*done(2), entry(3, "scheduled", input_dtypes=["BFloat16"])])
    assert "all_reduce of 3 x 4 BFloat16 on rank 1" in str(parse_dumps({0: same, 1: half, 2: same}))


def test_how_far_the_devices_are() -> None:
    told = {
        state: dumped([*done(2), entry(3, state), entry(4, "scheduled")])
        for state in ("completed", "started", "scheduled")
    }
    head = "collective 3, all_reduce of 3 x 4 Float: "
    assert parse_dumps({0: told["completed"], 1: told["started"], 2: told["started"]}) == (
        f"{head}done on rank 0, not on ranks 1 and 2"
    )
    assert parse_dumps({0: told["started"], 1: told["scheduled"], 2: told["started"]}) == (
        f"{head}it runs on ranks 0 and 2, the device of rank 1 has not come to it"
    )
    assert parse_dumps(dict.fromkeys(range(3), told["scheduled"])) == (
        f"{head}ranks 0, 1 and 2 are in it, and none is through"
    )


def test_a_rank_that_says_nothing_is_not_blamed() -> None:
    waits = dumped([*done(6), entry(7, "scheduled")])
    for silent in (None, "", "{", "[]", '{"entries": [{}]}', '{"entries": 3}'):
        verdict = parse_dumps({0: waits, 1: waits, 2: silent})
        assert verdict is not None
        assert verdict.endswith("ranks 0 and 1 are in it, and none is through; of rank 2 nothing is known")


def test_each_group_is_looked_at_by_itself() -> None:
    sub: dict[str, Any] = {"process_group": ["7", "undefined"], "pg_id": 1}
    waits = dumped([*done(4), entry(1, **sub), entry(2, "scheduled", **sub)])
    verdict = parse_dumps({0: waits, 1: dumped(done(4)), 2: dumped([*done(4), entry(1, **sub)])})
    assert verdict == (
        "collective 2 of the group of ranks 0 and 2, all_reduce of 3 x 4 Float: rank 0 entered it, "
        "rank 2 did not"
    )


def test_messages_between_two_ranks_are_no_collectives() -> None:
    send = entry(6, "scheduled", profiling_name="nccl:send 0->1", is_p2p=True)
    assert parse_dumps({0: dumped([*done(5), send]), 1: dumped(done(5)), 2: dumped(done(5))}) is None


def test_a_ring_that_lost_the_first() -> None:
    late = dumped([entry(number, "scheduled") for number in range(901, 904)])
    assert parse_dumps({0: late, 1: late, 2: dumped([*done(899), entry(900)])}) == (
        "collective 901, all_reduce of 3 x 4 Float: ranks 0 and 1 entered it, rank 2 did not"
    )


def test_the_watchdog_knows_what_gloo_does_not() -> None:
    # Gloo's stay "scheduled"; pg_config is empty.
    entries = [entry(number, "scheduled", profiling_name="gloo:all_reduce") for number in (1, 2, 3)]
    status = {"0": {"last_completed_collective": "2", "last_enqueued_collective": "3"}}
    whole = {"entries": entries, "pg_status": status, "pg_config": {"": {"ranks": "[]"}}}
    waits, lacks = json.dumps(whole), json.dumps({**whole, "entries": entries[:2]})
    assert parse_dumps({0: waits, 1: lacks}) == (
        "collective 3, all_reduce of 3 x 4 Float: rank 0 entered it, rank 1 did not"
    )
    finished = {**whole, "pg_status": {"0": {"last_completed_collective": "3"}}}
    assert parse_dumps({0: waits, 1: json.dumps(finished)}) == (
        "collective 3, all_reduce of 3 x 4 Float: done on rank 1, not on rank 0"
    )


def test_a_rank_held_up_before_the_next_is_named_though_its_count_lags() -> None:
    """Gloo counts what is done when somebody looks: a rank that hangs right after it may not have."""
    entries = [entry(number, "scheduled", profiling_name="gloo:all_reduce") for number in (1, 2, 3)]
    entries[2]["input_sizes"] = [[7]]
    whole = {"entries": entries, "pg_config": {"": {"ranks": "[]"}}}
    waits = json.dumps({**whole, "pg_status": {"0": {"last_completed_collective": "2"}}})
    lags = {"entries": entries[:2], "pg_status": {"0": {"last_completed_collective": "1"}}}
    assert parse_dumps({0: waits, 1: json.dumps({**whole, **lags})}) == (
        "collective 2, all_reduce of 3 x 4 Float: done on rank 0, not on rank 1; "
        "collective 3, all_reduce of 7 Float: rank 0 entered it, rank 1 did not"
    )
    # By more than one.
    more = [entry(number, "scheduled", profiling_name="gloo:all_reduce") for number in range(1, 8)]
    waits = json.dumps({**whole, "entries": more, "pg_status": {"0": {"last_completed_collective": "6"}}})
    lags = {"entries": more[:6], "pg_status": {"0": {"last_completed_collective": "1"}}}
    assert parse_dumps({0: waits, 1: json.dumps({**whole, **lags})}) == (
        "collective 2, all_reduce of 3 x 4 Float: done on rank 0, not on rank 1; "
        "collective 7, all_reduce of 3 x 4 Float: rank 0 entered it, rank 1 did not"
    )
    # On every rank.
    both = {**whole, "pg_status": {"0": {"last_completed_collective": "1"}}}
    dumps = {rank: json.dumps({**both, "entries": kept}) for rank, kept in enumerate((entries, entries[:2]))}
    assert parse_dumps(dumps) == (
        "collective 2, all_reduce of 3 x 4 Float: ranks 0 and 1 are in it, and none is through; "
        "collective 3, all_reduce of 7 Float: rank 0 entered it, rank 1 did not"
    )
    # Nobody has come to the next one.
    counted = {"entries": entries[:2], "pg_status": {"0": {"last_completed_collective": "1"}}}
    through = {**counted, "pg_status": {"0": {"last_completed_collective": "2"}}}
    assert parse_dumps({0: json.dumps({**whole, **through}), 1: json.dumps({**whole, **counted})}) == (
        "collective 2, all_reduce of 3 x 4 Float: done on rank 0, not on rank 1"
    )


STATES = st.sampled_from(["completed", "started", "scheduled"])


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(STATES, max_size=12)), min_size=1, max_size=4))
def test_a_shortened_dump_says_the_same(ranks: list[tuple[int, list[str]]]) -> None:
    texts = {}
    for rank, (count, after) in enumerate(ranks):
        # A device does them in order.
        ordered = sorted(after, key=["completed", "started", "scheduled"].index)
        later = [entry(count + 1 + n, state) for n, state in enumerate(ordered)]
        texts[rank] = dumped([*done(count), *later], ranks=str(list(range(len(ranks)))))
    short = {rank: shortened(text) for rank, text in texts.items()}
    whole, said = str(parse_dumps(texts)), str(parse_dumps(short))
    # What was done on some rank for longer isn't named any more; its number is, and who isn't there.
    assert re.findall(r"collective (\d+)", whole) == re.findall(r"collective (\d+)", said)
    assert whole.partition(" entered it")[1:] == said.partition(" entered it")[1:]
    assert all(len(text or "") < 2500 for text in short.values())


def test_no_recorder_no_dump() -> None:
    assert not torch.cuda.is_initialized()
    assert dump_recorder() is None or "entries" in str(dump_recorder())


_HANG = """
import os, sys
from datetime import timedelta
import torch
from torch import distributed as dist
from tests.helpers import preloaded
from trainer.distributed.flight_recorder import dump_recorder, parse_dumps

pipe, over = os.pipe(), os.pipe()
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
tensor = torch.ones(3, 4)
dist.all_reduce(tensor)
dist.barrier()
if rank == 0:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    print(parse_dumps({0: dump_recorder(), 1: os.read(pipe[0], 1 << 16).decode()}), flush=True)
else:
    os.write(pipe[1], dump_recorder().encode())
    os.close(over[1])
    os.read(over[0], 1)  # until rank 0 is gone: a peer that leaves first would end its all_reduce
os._exit(0)
"""


@pytest.mark.compat
@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="torch 2.8 and later record gloo's"
)
def test_what_torch_itself_writes(tmp_path: Any) -> None:
    variables = {"TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _HANG, str(tmp_path / "store")]
    ended = preloaded.run(command, env={**os.environ, **variables})
    # Which of the first two gloo has counted by then is a matter of its threads.
    *_, verdict = ended.stdout.splitlines() or [""]
    assert verdict.endswith("collective 3, all_reduce of 1000 Float: rank 0 entered it, rank 1 did not"), (
        verdict + ended.stderr
    )
