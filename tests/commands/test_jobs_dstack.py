"""Promise: a job on dstack is one task that its own models take, and its nodes find each other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.job_files import IMAGE, job
from trainer.cli import main
from trainer.commands.submit.dstack import render
from trainer.commands.submit.spec import Site
from trainer.errors import BadInputError
from trainer.launch.nodes.discover import find_nodes

DIGEST = IMAGE.partition("@")[2]


def task(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(render(job("dstack", **changes), Site()))
    return found


def test_the_whole_task() -> None:
    found = task(name="a", nnodes=1, cache=None, environment={"NCCL_DEBUG": "WARN"}, settings=("seed=1",))
    assert found == {
        "type": "task",
        "name": "a",
        "image": IMAGE,
        "user": "1000:1000",
        "nodes": 1,
        "env": {"TRAINER_IMAGE_DIGEST": DIGEST, "NCCL_DEBUG": "WARN"},
        "commands": [
            "exec trainer train digits --gpus 2 --out runs/a --grace 90 --set seed=1 --set data.path=/data"
        ],
        "resources": {"cpu": "4..", "memory": "16GB..", "shm_size": "2GB", "gpu": 2},
        "volumes": [{"name": "runs", "path": "/workspace/runs"}, {"name": "data", "path": "/data"}],
        "max_duration": "1440m",
        "stop_duration": "120s",
        "retry": {"on_events": ["no-capacity", "interruption"], "duration": "7d"},
    }
    assert task(runs="/srv/runs")["volumes"][0] == {"instance_path": "/srv/runs", "path": "/workspace/runs"}


def test_dstack_takes_it() -> None:
    models = pytest.importorskip("dstack.api", reason="dstack is not installed")
    models.Task.model_validate(task())
    models.Task.model_validate(task(gpus_per_node=0, cache="/srv/cache", recipe_text="a", recipe="a.yaml"))
    with pytest.raises(ValueError, match="nodez"):
        models.Task.model_validate({**task(), "nodez": 2})


def test_a_shell_runs_the_launcher_in_its_place_and_says_where_the_others_are(tmp_path: Path) -> None:
    trainer = tmp_path / "trainer"
    trainer.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([os.getpid(), sys.argv[1:], dict(os.environ)]))\n"
    )
    trainer.chmod(0o700)
    spec = job("dstack", settings=("about=it's $HOME; `x`",))
    (command,) = task(settings=spec.settings)["commands"]
    there = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2"}
    with subprocess.Popen(
        ["sh", "-c", command], env={**there, "DSTACK_MASTER_NODE_IP": "10.0.0.7"}, stdout=subprocess.PIPE
    ) as shell:
        process, words, variables = json.loads(shell.communicate()[0])
    assert process == shell.pid, "signals reach it"
    assert words == spec.command[1:]
    nodes = find_nodes(variables, None, None, None, None)
    assert nodes is not None
    assert (nodes.number, nodes.most, nodes.host, nodes.port) == (1, 2, "10.0.0.7", 29500)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"min_nnodes": 1}, r"--nnodes 1:2: a dstack task has a fixed number of nodes"),
        ({"runs": "runs"}, r"--runs runs: dstack's instances don't see .* as pvc:NAME"),
        ({"data": "./data"}, r"--data ./data: dstack's"),
        ({"image": ""}, r"--image is missing"),
    ],
)
def test_what_it_has_no_word_for(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInputError, match=line):
        render(job("dstack", **changes), Site())


def test_the_command_prints_it_and_refuses_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "digits", "--on", "dstack", "--image", IMAGE, "--runs", "pvc:runs"]
    words += ["--site", "/dev/null"]
    assert main([*words, "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["type"] == "task"
    for more, line in (
        (["--env-from", "secret:a"], "--env-from: dstack has none; keep it in dstack's secrets"),
        (["--set", "data.path=/somewhere/here"], "data.path=/somewhere/here: instances don't see this"),
        (["--queue", "a"], "--queue: dstack has none"),
        (["--rdma", "host"], "--rdma: dstack has none; its fleets decide that"),
        (
            ["--env", "HF_TOKEN=abc"],
            "plain text: keep it in dstack's secrets",
        ),
    ):
        assert main([*words, *more]) == 2
        assert line in capsys.readouterr().err
