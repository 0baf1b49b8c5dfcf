"""A job is compared with a Slurm partition by what sinfo prints."""

from types import SimpleNamespace

import pytest

from trainer.commands.submit import partition, slurm
from trainer.commands.submit.partition import Node, check_nodes, parsed
from trainer.commands.submit.spec import JobSpec, Site
from trainer.errors import BadInputError

# As sinfo --Node --format=%P|%c|%m|%G|%l prints it.
TEXT = """\
main*|96|1030000|gpu:h100:8(S:0-1)|2-00:00:00
main*|64|515000|gpu:4|2-00:00:00
cpu|64|256000|(null)|infinite
debug|64|256000|(null)|30:00
odd line
cpu|64+|256000|(null)|infinite
"""


def test_what_sinfo_prints_is_read() -> None:
    assert parsed(TEXT) == [
        (Node("main", 96, 1030000, 8, 2880), True),
        (Node("main", 64, 515000, 4, 2880), True),
        (Node("cpu", 64, 256000, 0, None), False),
        (Node("debug", 64, 256000, 0, 30), False),
    ]
    assert parsed("") == []


@pytest.mark.parametrize(
    ("asked", "partition", "words"),
    [
        ({"gpus_per_node": 8}, None, ""),
        ({"gpus_per_node": 4, "nnodes": 2}, None, ""),
        ({"gpus_per_node": 8, "nnodes": 2}, None, "--nnodes 2: partition main has 1 nodes"),
        ({"gpus_per_node": 9}, None, "--gpus-per-node 9: no node of partition main has more than 8 GPUs"),
        ({"minutes": "2-00:01"}, None, "--time 2881: partition main lets a job run for 2880 minutes"),
        ({"minutes": "2-00:01"}, "cpu", ""),
        ({"minutes": "2-00:01"}, "main,cpu", ""),
        ({"gpus_per_node": 1}, "cpu", "--gpus-per-node 1: no node of partition cpu has more than 0 GPUs"),
        ({"minutes": 31}, "debug", "--time 31: partition debug lets a job run for 30 minutes"),
        ({}, "none", "--partition none: this cluster has cpu, debug, main"),
    ],
)
def test_a_job_fits_or_is_told_why_not(asked: dict[str, object], partition: str | None, words: str) -> None:
    spec, site = JobSpec.model_validate({"recipe": "digits", **asked}), Site(partition=partition)
    if not words:
        check_nodes(spec, site, parsed(TEXT))
        return
    with pytest.raises(BadInputError) as raised:
        check_nodes(spec, site, parsed(TEXT))
    assert words in str(raised.value)


def test_a_folder_that_compute_nodes_may_not_see_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"/home/runs": "nfs4", "/tmp/data": "xfs", "/shared/venv": "lustre"}
    monkeypatch.setattr(partition, "read_mount", lambda path: SimpleNamespace(kind=kinds[str(path)]))
    spec = JobSpec(recipe="digits", runs="/home/runs", data="/tmp/data")
    (line,) = partition.unseen_folders(spec, Site(container="venv", venv="/shared/venv"), {})
    assert line.startswith(
        "--data /tmp/data lies on a disk of this machine (xfs): every node of the job must"
    )


def test_where_nothing_is_known_nothing_is_refused() -> None:
    check_nodes(JobSpec(recipe="digits", nnodes=99), Site(partition="x"), [])


def test_a_signal_must_not_be_due_before_there_is_progress() -> None:
    """Otherwise the job would come back for ever."""
    with pytest.raises(ValueError, match="stop comes 120 s before the end, so 2 minutes are too"):
        JobSpec(recipe="digits", minutes=2)
    assert JobSpec(recipe="digits", minutes=4).stop_seconds == 120


def test_a_port_that_job_numbers_push_too_far_is_refused() -> None:
    with pytest.raises(BadInputError, match="--port 65000: on Slurm up to 999 are added"):
        slurm.render(JobSpec(recipe="digits", port=65000, image="x"), Site())
