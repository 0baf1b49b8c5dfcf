"""Promise: a sweep is checked whole before its first run, and submits one image."""

import json
from pathlib import Path

import pytest
import yaml

from tests.commands.test_jobs_launch import CLUSTER, DIGEST, ENGINE, refused
from tests.helpers.job_tools import Tools
from trainer.cli import main

SWEEP = "grid: {optim.lr: [0.1, 0.3], seed: [0, 1]}"


def test_a_sweep_submits_one_image_and_says_how_to_compare(
    tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.add("docker")
    Path("sweep.yaml").write_text(SWEEP)
    words = [
        "digits",
        "--on",
        "docker",
        *ENGINE,
        "--name",
        "lr",
        "--set",
        "epochs=1",
        "--sweep",
        "sweep.yaml",
    ]
    assert main(["submit", *words]) == 0
    ran = [call for call in tools.calls() if call[1] == "run"]
    assert [call[call.index("--name") + 1] for call in ran] == ["lr-0", "lr-1", "lr-2", "lr-3"]
    assert all(DIGEST in call for call in ran)
    assert [call[-6:] for call in ran] == [
        ["--set", "epochs=1", "--set", f"optim.lr={rate}", "--set", f"seed={seed}"]
        for rate in (0.1, 0.3)
        for seed in (0, 1)
    ]
    listed = json.loads(Path("runs/.jobs/lr-sweep.json").read_text())
    assert listed["image"] == DIGEST
    assert [run["folder"] for run in listed["runs"]] == [f"runs/lr-{number}" for number in range(4)]
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "compare    trainer report runs/lr-0 runs/lr-1 runs/lr-2 runs/lr-3"


def test_a_sweep_may_list_its_runs(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    del tools
    Path("sweep.yaml").write_text(
        'runs: [{optim.lr: 0.1}, {about: "it\'s: [x]", data: {micro_batch_size: 16}}]'
    )
    words = ["digits", "--on", "kubernetes", *CLUSTER, "--name", "x", "--sweep", "sweep.yaml", "--dry-run"]
    assert main(["submit", *words]) == 0
    jobs = [one for one in yaml.safe_load_all(capsys.readouterr().out) if one["kind"] == "Job"]
    args = [one["spec"]["template"]["spec"]["containers"][0]["args"] for one in jobs]
    assert [word[-4:] for word in args] == [
        ["--grace", "90", "--set", "optim.lr=0.1"],
        ["--set", 'about="it\'s: [x]"', "--set", 'data={"micro_batch_size": 16}'],
    ]


def test_a_sweep_on_slurm_is_one_array(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.add("sbatch", "echo Submitted batch job 7")
    Path("sweep.yaml").write_text(SWEEP)
    assert main(["submit", "digits", "--on", "slurm", *ENGINE, "--name", "lr", "--sweep", "sweep.yaml"]) == 0
    assert tools.calls() == [["sbatch", "runs/.jobs/lr.sbatch"]]
    text = Path("runs/.jobs/lr.sbatch").read_text()
    assert "#SBATCH --array=0-3" in text
    assert "#SBATCH --job-name=lr\n" in text  # of all tasks, so not the first run's
    assert "--out runs/lr-3" in text
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("follow     tail -F ")
    assert lines[1].endswith("runs/.jobs/lr-7_0.out")
    assert lines[-1] == "compare    trainer report runs/lr-0 runs/lr-1 runs/lr-2 runs/lr-3"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("grid: {optim.lr: [0.1, fast]}", "optim.lr=fast"),
        ("grid: {optm.lr: [0.1]}", "unknown key 'optm'"),
        ("runs: [{seed: 1}, {sed: 1}]", "unknown key 'sed'"),
        ("grid: {seed: 1}", "--sweep sweep.yaml: grid holds a list of values"),
        ("grid: {seed: []}", "--sweep sweep.yaml: 0 runs"),
        ("grid: {seed: [1, 1]}", "stands there twice"),
        ("runs: [1]", "--sweep sweep.yaml: runs holds a mapping"),
        ("runs: [{seed: 1}]\ngrid: {seed: [1]}", "--sweep sweep.yaml: give grid:"),
        ("[]", "--sweep sweep.yaml: give grid:"),
        ("grid: {a: [" + "1, " * 2000 + "], b: [" + "1, " * 2000 + "]}", "runs; give 1 to 1000"),
    ],
)
def test_a_sweep_is_checked_before_its_first_run(
    text: str, wanted: str, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.add("docker")
    Path("sweep.yaml").write_text(text)
    assert wanted in refused(["digits", "--on", "docker", *ENGINE, "--sweep", "sweep.yaml"], capsys)
    assert tools.calls() == []


def test_a_sweep_wants_a_digest(tools: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.add("docker")
    Path("sweep.yaml").write_text(SWEEP)
    line = refused(["digits", "--on", "docker", "--image", "trainer:x", "--sweep", "sweep.yaml"], capsys)
    assert line.startswith("--image trainer:x: the runs of a sweep must have the same image")
    line = refused(["digits", "--on", "docker", *ENGINE, "--sweep", "none.yaml"], capsys)
    assert line.startswith("--sweep none.yaml: can't be read")
