"""Promise P7: what is wrong with the box is said before it hurts, with the line that mends it."""

import json
import re
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from stack_table import TABLE, table

from tests.helpers.commands import command
from tests.helpers.doctor_box import ABSENT, DISK, GIB, PROVOKED, healthy
from tests.helpers.refusals import named
from trainer.commands.doctor import doctor as examine
from trainer.commands.doctor.doctor import CHECKS, judge_facts, print_findings
from trainer.commands.doctor.facts import CheckResult, Gpus, fine
from trainer.host.disks import Data, read_data
from trainer.host.stacks import read_stacks, stack_fitting, unsupported
from trainer.train import provenance

REPOSITORY = Path(__file__).resolve().parents[2]
IDS = [name for name, _ in CHECKS]


def test_ids_are_stable() -> None:
    """Scripts rely on them: to rename one, or to take one away, breaks somebody's cluster."""
    assert {name for name, *_ in PROVOKED} == set(IDS)
    assert sorted(IDS) == [
        *("cache.writable", "data.path", "disk.run"),
        *("gpu.architecture", "gpu.driver", "gpu.nvml", "gpu.visible", "memory.limit", "net.nccl"),
        *("pids.limit", "shm.size", "software.cuda", "software.lock", "software.path"),
    ]


QUIET: list[tuple[str, dict[str, Any]]] = [
    *(("data.path", {"data": read_data(path)}) for path in ("s3://bucket/pets", "hub:org/talks@main")),
    *(("net.nccl", {"environ": {"NCCL_SOCKET_IFNAME": name}}) for name in ("eth", "=eth0", "^lxc", "en,ib")),
    ("software.cuda", {"gpus": Gpus("NVML Shared Library Not Found", 12), "software__cuda": ""}),
]


def test_each_check_is_quiet_where_nothing_is_wrong() -> None:
    assert {one.status for one in judge_facts(healthy()).values()} == {"ok"}
    for name, changes in QUIET:
        assert judge_facts(healthy(**changes))[name].status == "ok", changes


@pytest.mark.parametrize(
    ("name", "status", "changes", "says"), PROVOKED, ids=[f"{one[0]}-{n}" for n, one in enumerate(PROVOKED)]
)
def test_each_check_is_provoked(name: str, status: str, changes: dict[str, Any], says: str) -> None:
    found = judge_facts(healthy(**changes))[name]
    assert found.status == status, found
    assert named([found.finding, found.cause, found.remedy], says), found
    assert found.cause and found.remedy
    assert "\n" not in found.finding + found.cause + found.remedy


def image_environ() -> dict[str, str]:
    """What the image sets: all stands in ENV lines of the Dockerfile."""
    text = re.sub(r"^ *#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("ENV ")]
    return dict(re.findall(r"\b([A-Z][A-Z0-9_]*)=(\S+)", " ".join(lines)))


def test_no_remedy_is_in_force_in_our_own_image() -> None:
    """Neither a variable that the image sets so, nor an option that every container of it gets."""
    image = image_environ()
    assert image["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    (shm,) = re.findall(r"shm_size: \$\{SHM_SIZE:-(\w+)b\}", (REPOSITORY / "docker-compose.yml").read_text())
    for name, _, changes, _ in PROVOKED:
        box = healthy(**{**changes, "environ": {**image, **changes.get("environ", {})}})
        # What is missing although the image asked for it is missing for another reason.
        if "limits__shm_bytes" in changes:
            box = replace(box, system=replace(box.system, shm=2 * GIB))
        remedy = judge_facts(box)[name].remedy
        assert remedy
        values = dict(re.findall(r"\b([A-Z][A-Z0-9_]*)=(\S+)", remedy))
        assert not values.items() & image.items(), remedy
        assert f"--shm-size={shm}" not in remedy.split()


def test_a_driver_in_a_folder_that_is_searched_is_no_matter_of_the_folder() -> None:
    """Our own image searches GKE's."""
    gpus = Gpus("Not Found", 12, nodes=True, unsearched="/usr/local/nvidia/lib64")
    box = healthy(gpus=gpus, environ=image_environ())
    assert "LD_LIBRARY_PATH" not in judge_facts(box)["gpu.nvml"].remedy


@pytest.mark.parametrize(("name", "changes"), ABSENT, ids=[f"{one[0]}-{n}" for n, one in enumerate(ABSENT)])
def test_what_is_not_available_says_why(name: str, changes: dict[str, Any]) -> None:
    found = judge_facts(healthy(**changes))[name]
    assert (found.status, found.cause, found.remedy) == ("not available", "", ""), found
    assert len(found.finding) > 5


def test_a_check_that_fails_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> CheckResult:
        raise ValueError("what?")

    monkeypatch.setattr(examine, "CHECKS", (("a.b", broken), ("c.d", lambda _: fine("well"))))
    found = judge_facts(healthy())
    assert found["a.b"].status == "not available" and named(found["a.b"].finding, "ValueError")
    assert found["c.d"].status == "ok"


def test_the_table_of_stacks_is_that_of_the_checkout() -> None:
    assert json.loads(TABLE.read_text()) == table(), "run scripts/stack_table.py"


@pytest.mark.parametrize(
    ("driver", "architecture", "name"),
    [
        ("580.65.06", "sm_120", "torch2.14-cu130"),
        ("570.26", "sm_120", "torch2.9-cu128"),
        ("535.10", "sm_61", "torch2.6-cu124"),
        ("450.80.02", "sm_70", "pytorch-cuda-11.8"),
        ("450.80.01", "sm_70", None),
        ("525.60.13", "sm_30", None),
    ],
)
def test_the_stack_that_fits(driver: str, architecture: str, name: str | None) -> None:
    assert stack_fitting(driver, [architecture], read_stacks()) == (name or "")


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = judge_facts(healthy(data=Data("/data/x?token=hunter2secret", "No such file", DISK)))
    print_findings(found, 1.0)
    assert "hunter2secret" not in capsys.readouterr().out
    assert "hunter2secret" not in json.dumps([examine._for_machines(*one) for one in found.items()])


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "read_box", lambda *_: healthy(limits__pids=50))
    rows = json.loads(command("doctor", "--json", code=1).out)
    monkeypatch.setattr(examine, "read_box", lambda *_: healthy(data__reads=80.0))
    command("doctor")
    assert [row["id"] for row in rows] == IDS
    assert all(set(row) == {"id", "status", "finding", "cause", "remedy"} for row in rows)
    (bad,) = [row for row in rows if row["status"] == "bad"]
    assert bad["remedy"] == judge_facts(healthy(limits__pids=50))["pids.limit"].remedy


def test_a_stack_past_its_support_is_told_by_doctor_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = read_stacks()["torch2.9-cu128"]
    last = date.fromisoformat(stack.supported_until)
    assert not unsupported(stack, last)
    assert named(unsupported(stack, last + timedelta(days=1)), stack.supported_until)
    assert provenance._support(stack.lock) == []
    old = {name: replace(one, supported_until="2020-01-01") for name, one in read_stacks().items()}
    monkeypatch.setattr("trainer.commands.doctor.facts.read_stacks", lambda: old)
    monkeypatch.setattr("trainer.train.provenance.read_stacks", lambda: old)
    found = judge_facts(healthy())["software.lock"]
    assert (found.status, named(found.finding, "2020-01-01")) == ("warn", True)
    (said,) = provenance._support(stack.lock)
    assert said == found.finding
