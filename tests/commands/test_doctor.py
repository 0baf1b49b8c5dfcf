"""Promise P7: what is wrong with the box is said before it hurts, with the line that mends it."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from stack_table import TABLE, table

from tests.helpers.doctor_box import ABSENT, DISK, GIB, PROVOKED, folder, healthy
from tests.helpers.refusals import named
from trainer.cli import main
from trainer.commands.doctor import doctor as examine
from trainer.commands.doctor.doctor import CHECKS, judge_facts, print_findings
from trainer.commands.doctor.facts import CheckResult, Gpus, Software, fine
from trainer.host.disks import Data, read_data
from trainer.host.engine import run_words
from trainer.host.stacks import read_stacks, stack_fitting, unsupported
from trainer.train import provenance

REPOSITORY = Path(__file__).resolve().parents[2]
IDS = [name for name, _ in CHECKS]


def all_of(found: CheckResult) -> str:
    return "\n".join([found.finding, found.cause, found.remedy])


def test_ids_are_stable() -> None:
    """Scripts rely on them: to rename one, or to take one away, breaks somebody's cluster."""
    assert sorted(IDS) == [
        *("cache.writable", "cpu.quota", "data.path", "disk.run"),
        *("gpu.architecture", "gpu.driver", "gpu.nvml", "gpu.visible", "memory.limit", "net.nccl"),
        *("pids.limit", "shm.size", "software.cuda", "software.lock", "software.path", "ulimit.nofile"),
    ]


@pytest.mark.parametrize("name", IDS)
def test_each_check_is_quiet_on_a_healthy_box(name: str) -> None:
    assert judge_facts(healthy())[name].status == "ok", judge_facts(healthy())[name]


@pytest.mark.parametrize(
    ("name", "status", "changes", "says"), PROVOKED, ids=[f"{one[0]}-{n}" for n, one in enumerate(PROVOKED)]
)
def test_each_check_is_provoked(name: str, status: str, changes: dict[str, Any], says: str) -> None:
    found = judge_facts(healthy(**changes))[name]
    assert found.status == status, found
    assert named(all_of(found), says), found
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
    words = " ".join(run_words("1:1", 2, 40, [], {}))
    given = [word.replace(" ", "=") for word in re.findall(r"--\S+ \S+", words)]
    assert "--shm-size=2g" in given
    for name, _, changes, _ in PROVOKED:
        box = healthy(**{**changes, "environ": {**image, **changes.get("environ", {})}})
        # What is missing although the image asked for it is missing for another reason.
        if "limits__shm_bytes" in changes:
            box = replace(box, system=replace(box.system, shm=2 * GIB))
        remedy = judge_facts(box)[name].remedy
        assert remedy
        values = dict(re.findall(r"\b([A-Z][A-Z0-9_]*)=(\S+)", remedy))
        assert not values.items() & image.items(), remedy
        assert not set(given) & set(remedy.split()), remedy


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


def test_every_check_is_provoked_by_a_test() -> None:
    assert {name for name, *_ in PROVOKED} == set(IDS)


def test_a_check_that_fails_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> CheckResult:
        raise ValueError("what?")

    monkeypatch.setattr(examine, "CHECKS", (("a.b", broken), ("c.d", lambda _: fine("well"))))
    found = judge_facts(healthy())
    assert found["a.b"].status == "not available"
    assert "ValueError: what?" in found["a.b"].finding
    assert found["c.d"].status == "ok"


# Options of `docker run`, as its reference lists them; the value says whether it takes a value of its own.
DOCKER = {
    *("--cpus", "--cpuset-cpus", "--cpuset-mems", "--device", "--gpus", "--group-add", "--hostname", "--ipc"),
    *("--memory", "--memory-swap", "--network", "--pids-limit", "--rm", "--shm-size", "--tmpfs", "--ulimit"),
    *("-e", "-p", "-u", "-v", "-w"),
}


def test_docker_lines_have_options_that_docker_has() -> None:
    lines = {judge_facts(healthy(**changes))[name].remedy for name, _, changes, _ in PROVOKED}
    lines = {line.partition("   (")[0] for line in lines if line.startswith("docker run")}
    assert len(lines) > 8
    for line in lines:
        words = [word for word in shlex.split(line) if word.startswith("-")]
        assert {word.partition("=")[0] for word in words} <= DOCKER, line


def test_the_table_of_stacks_is_that_of_the_checkout() -> None:
    assert json.loads(TABLE.read_text()) == table(), "run scripts/stack_table.py"


@pytest.mark.parametrize(
    ("driver", "architecture", "name"),
    [
        ("580.65.06", "sm_120", "torch2.14-cu130"),
        ("570.26", "sm_120", "torch2.9-cu128"),
        ("525.60.13", "sm_90", "torch2.9-cu128"),
        ("580.65.06", "sm_70", "torch2.9-cu128"),
        ("535.10", "sm_61", "torch2.6-cu124"),
        ("450.80.02", "sm_70", "pytorch-cuda-11.8"),
        ("470.10", "sm_37", "pytorch-cuda-11.8"),
        ("535.10", "sm_37", "pytorch-cuda-11.8"),
        ("450.80.01", "sm_70", None),
        ("525.60.13", "sm_30", None),
    ],
)
def test_the_stack_that_fits(driver: str, architecture: str, name: str | None) -> None:
    assert stack_fitting(driver, [architecture], read_stacks()) == (name or "")


def test_minor_version_compatibility_is_told() -> None:
    found = judge_facts(healthy(gpus__driver="535.10"))["gpu.driver"]
    assert found.status == "ok"
    assert "without JIT of PTX" in found.finding


def test_a_torch_without_a_stack_is_judged_by_its_cuda() -> None:
    own = Software(torch="2.4.0", cuda="12.1")
    assert judge_facts(healthy(software=own, gpus__driver="470.1"))["gpu.driver"].status == "bad"
    assert judge_facts(healthy(software=own))["gpu.driver"].status == "ok"


def test_a_stack_without_its_lock_is_told() -> None:
    own = judge_facts(healthy(software__lock="", software__installed__pyyaml="5.0"))["software.lock"]
    assert (own.status, own.finding[-29:]) == ("ok", "(installed not from its lock)")
    assert "make venv" in judge_facts(healthy(software__lock="an older one"))["software.lock"].finding
    assert (
        judge_facts(healthy())["software.lock"].finding == "the packages are those of torch2.9-cu128's lock"
    )


def test_on_a_cpu_nothing_is_said_of_gpus() -> None:
    box = healthy(gpus=Gpus("NVML Shared Library Not Found", 12), software__cuda="")
    found = judge_facts(box)
    assert found["software.cuda"].status == "ok"
    assert not {name for name, one in found.items() if one.status in ("warn", "bad")}


def test_no_line_asks_for_more_than_the_machine_has() -> None:
    box = healthy(limits__cpus=4.0, system__machine_cpus=4)
    assert "--cpus" not in judge_facts(box)["cpu.quota"].remedy


def test_data_behind_a_url_is_fine() -> None:
    for path in ("s3://bucket/pets", "hub:org/talks@main"):
        assert judge_facts(healthy(data=read_data(path)))["data.path"].status == "ok"


def test_interfaces_by_their_first_letters() -> None:
    for words, status in (("eth", "ok"), ("=eth", "bad"), ("=eth0", "ok"), ("^lxc", "ok"), ("en,ib", "ok")):
        box = healthy(environ={"NCCL_SOCKET_IFNAME": words})
        assert judge_facts(box)["net.nccl"].status == status, words


# What people see


def shown(capsys: pytest.CaptureFixture[str], **changes: Any) -> list[str]:
    print_findings(judge_facts(healthy(**changes)), 1.25)
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


def test_problems_come_first_with_cause_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"limits__pids": 50, "data__reads": 80.0, "limits__cpus": 0.5}
    lines = shown(capsys, **changes)
    found = judge_facts(healthy(**changes))
    assert lines[0] == f"bad   pids.limit: {found['pids.limit'].finding}"
    assert lines[1] == f"      cause: {found['pids.limit'].cause}"
    assert lines[2] == f"      {found['pids.limit'].remedy}"
    assert lines[3].startswith("warn  cpu.quota: ")
    assert lines[6].startswith("warn  data.path: ")
    assert lines[9] == f"{len(IDS) - 3} checks fine, 1 bad, 2 to know; 1.2 s"


def test_a_healthy_box_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys) == [f"{len(IDS)} checks fine; 1.2 s"]


def test_a_remedy_is_one_line_also_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    whole = judge_facts(healthy(data__error="gone"))["data.path"]
    assert f"      {whole.remedy}" in shown(capsys, data__error="gone")


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = judge_facts(healthy(data=Data("/data/x?token=hunter2secret", "No such file", DISK)))
    print_findings(found, 1.0)
    assert "hunter2secret" not in capsys.readouterr().out
    assert "hunter2secret" not in json.dumps([examine._for_machines(*one) for one in found.items()])


def test_any_variable_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, environ={"NCCL_SOCKET_IFNAME": "eno1\nrm -rf /"})
    assert not any(line.startswith("rm") for line in lines)
    print_findings(judge_facts(healthy(environ={"NCCL_SOCKET_IFNAME": "e\x1b]0;x\x07\u202e"})), 1.0)
    assert not set("\x1b\x07\u202e") & set(capsys.readouterr().out)


def test_a_terminal_that_knows_ascii_only(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"}
    (tmp_path / "file").touch()
    command_ = [sys.executable, "-m", "trainer", "doctor", "--out", str(tmp_path / "file/below")]
    done = subprocess.run(
        command_, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "bad   disk.run" in done.stdout


def test_a_folder_that_was_deleted_under_its_feet(tmp_path: Path) -> None:
    script = f"mkdir d && cd d && rmdir ../d && exec {sys.executable} -m trainer doctor --json"
    (tmp_path / "sitecustomize.py").write_text("from trainer.host import disks\ndisks._LONGEST = 300.0\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = subprocess.run(
        ["sh", "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    rows = {row["id"]: row for row in json.loads(done.stdout)}
    assert rows["disk.run"]["status"] == "bad"
    assert "No such file or directory" in rows["disk.run"]["finding"]


# The command


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["doctor", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "read_box", lambda *_: healthy(limits__pids=50))
    code, out, _ = doctor(capsys, "--json")
    rows = json.loads(out)
    assert code == 1
    assert [row["id"] for row in rows] == IDS
    assert all(set(row) == {"id", "status", "finding", "cause", "remedy"} for row in rows)
    (bad,) = [row for row in rows if row["status"] == "bad"]
    assert bad["remedy"] == judge_facts(healthy(limits__pids=50))["pids.limit"].remedy


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"data__reads": 80.0}, 0), ({"limits__pids": 1}, 1)])
def test_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: int
) -> None:
    monkeypatch.setattr(examine, "read_box", lambda *_: healthy(**changes))
    assert doctor(capsys)[0] == code


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["digitz"], "no recipe 'digitz'; did you mean 'digits'?"),
        (["no.yaml"], "no.yaml: can't be read"),
        (["--set", "data.workers=2"], "--set data.workers=2: name a recipe"),
        (["digits", "--set", "data.workers=many"], "data.workers=many: "),
        (["digits", "--set", "data.prefetch=0"], "data.prefetch=0: "),
        (["digits", "--set", "data.workrs=1"], "unknown key 'data.workrs'; did you mean 'data.workers'?"),
        (["digits", "--set", "optim.lr=-1"], "optim.lr=-1: "),
        (["digits", "--set", "data.workers"], "give KEY=VALUE"),
        (["digits", "--out", "pyproject.toml"], "--out pyproject.toml: is no folder"),
        (["--jsonn"], "unrecognized arguments: --jsonn"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    monkeypatch.chdir(REPOSITORY)
    try:
        code, out, err = doctor(capsys, *words)
    except SystemExit as error:
        code, out, err = int(str(error.code)), "", capsys.readouterr().err
    assert (code, out) == (2, "")
    assert err.startswith("trainer: error: ")
    assert line in err
    assert err.count("\n") == 1


def test_it_never_imports_torch(tmp_path: Path) -> None:
    """It answers in a second or two: torch alone would take several."""
    code = (
        "import sys; from trainer.cli import main\n"
        "main(['doctor', 'digits', '--set', 'optim.lr=1', '--json'])\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stderr == "False\n"
    assert [row["id"] for row in json.loads(done.stdout)] == IDS
    assert not any(tmp_path.iterdir())


def test_a_folder_of_the_box_is_what_is_planted() -> None:
    """The helper of these tests changes what it says, and nothing else."""
    box = healthy(run__free=7)
    assert box.run == folder(free=7)
    assert box.caches == healthy().caches


def test_two_packages_of_one_import_are_told() -> None:
    both = {"trainer": "0.0.36", "reproducible-trainer": "0.1.0"}
    found = judge_facts(healthy(software__installed=both))["software.lock"]
    assert (found.status, "imported as trainer" in str(found)) == ("bad", True)


def test_a_stack_past_its_support_is_told_by_doctor_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = read_stacks()["torch2.9-cu128"]
    last = date.fromisoformat(stack.supported_until)
    assert not unsupported(stack, last)
    assert "had fixes until" in unsupported(stack, last + timedelta(days=1))
    assert provenance._support(stack.lock) == []
    old = {name: replace(one, supported_until="2020-01-01") for name, one in read_stacks().items()}
    monkeypatch.setattr("trainer.commands.doctor.facts.read_stacks", lambda: old)
    monkeypatch.setattr("trainer.train.provenance.read_stacks", lambda: old)
    found = judge_facts(healthy())["software.lock"]
    assert (found.status, "had fixes until 2020-01-01" in found.finding) == ("warn", True)
    (said,) = provenance._support(stack.lock)
    assert said == found.finding
