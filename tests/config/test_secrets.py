"""Promise: a secret that reaches a run is in nothing that it leaves or prints."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.few_pictures import write_pictures
from tests.helpers.forked import attempt, small
from tests.helpers.refusals import refusal
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.section import config_hash
from trainer.launch import exit_record, launcher as launch
from trainer.launch.worker import Worker
from trainer.observe.console import ProgressBar, warn
from trainer.train.request import typed

SECRET = "hunter2hunter2"
UNKNOWN = "letmein4ever"  # in no variable
TOKEN = f"hf_{SECRET}{'aB3' * 10}"  # as the hub's are: it holds the word that is looked for
# Fails at the end, when all else has been written; a rank imports it at its start.
FAULT = f"""
import os
if "RANK" in os.environ:
    from trainer.train.start import rank as trainer
    def finish(*_):
        api_key = "{SECRET}"
        shapes = [dict(api_key=api_key), dict(credentials=dict(id=[api_key])), dict(DB_PASS=api_key.encode())]
        lines = f"Cookie: session={{api_key}}\\nAuthorization: token {{api_key}}\\npassword: one {{api_key}}"
        lines += f"\\nsecrets:\\n  - {{api_key}}\\ncurl -u me:{{api_key}} https://host\\nuse {TOKEN}"
        raise RuntimeError(f"can't push to https://me:{{api_key}}@host/x with {{shapes}}\\n{{lines}}")
    trainer.finish = finish
"""


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_API_KEY", SECRET)


def leaks(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


def test_a_real_run_leaks_nothing(tmp_path: Path) -> None:
    data = tmp_path / f"data?X-Amz-Signature={SECRET}"
    write_pictures(data)
    next((data / "train").glob("*/*")).write_bytes(b"no image")
    here = tmp_path / "here"
    (here / "code").mkdir(parents=True)
    (here / "code" / "sitecustomize.py").write_text(FAULT)
    settings = ["data.name=folder", f"data.path={data}", "data.image_size=8", "data.workers=0", "epochs=1"]
    settings += ["data.on_corrupt=quarantine", "data.corrupt_budget=0.5", "model.width=4", "max_steps=2"]
    about = f"AWS_SECRET_ACCESS_KEY={SECRET} {TOKEN} AccountKey={SECRET}== curl -u me:{SECRET} h"
    settings += [f"about={about}", "log.to=[jsonl, tensorboard]"]
    settings += ["log.every=1", "checkpoint.every=1", "parallel.threads=1", "data.global_batch_size=8"]
    settings += ["data.micro_batch_size=8", "data.eval_batch_size=8"]
    words = [word for one in settings for word in ("--set", one)]
    paths = f"{here / 'code'}:{Path(__file__).parents[2]}"
    command = [sys.executable, "-m", "trainer", "train", "digits", *words, "--out", "run"]
    done = preloaded.run(command, cwd=here, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 1
    assert "https://***@host/x" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    run = here / "run"
    (here / "code" / "sitecustomize.py").unlink()
    assert leaks(here) == []
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["config"]["data"]["path"].endswith("data?X-Amz-Signature=***")
    assert manifest["redacted"].keys() == {"about", "data.path"}
    assert "AWS_SECRET_ACCESS_KEY=*** *** AccountKey=***== curl -u me:*** h" in manifest["command"]
    assert "https://***@host/x" in manifest["reason"]
    assert "X-Amz-Signature=***" in (run / "quarantine.jsonl").read_text()
    there = {path.name for path in run.iterdir()}
    assert {"config.yaml", "checksums.jsonl", "metrics.jsonl", "tensorboard"} <= there


def test_a_run_needs_neither_variable_nor_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"

    def about(text: str) -> Recipe:
        return small(data={"name": "folder", "path": str(tmp_path / text)})

    for name in (f"a {SECRET}", "a renewed hunter2x", "b"):
        write_pictures(tmp_path / name)
    assert attempt(folder, about(f"a {SECRET}"), stop_after=1).code == 75
    monkeypatch.delenv("TRACKER_API_KEY")
    assert attempt(folder, about(f"a {SECRET}"), stop_after=2).code == 75, "the variable isn't set"
    assert leaks(folder) == []
    monkeypatch.setenv("TRACKER_API_KEY", "renewed hunter2x")
    assert attempt(folder, about("a renewed hunter2x"), stop_after=3).code == 75, "the token was renewed"


@pytest.mark.parametrize(
    "words",
    [
        ["--set", f"data.path=https://{'u' * 60}:{SECRET}@host/x", "--set", "data.name=pack"],
        ["--set", f"optim.api_token={SECRET}"],
        [
            "--set",
            f"optim.lr=https://{'u' * 20}:{UNKNOWN}{'x' * 40}@host/x",
        ],  # cut before the @ that shows it
        ["--token", SECRET],
        ["--set", f"data.path=/nowhere/password={SECRET}", "--set", "data.name=folder"],
    ],
)
def test_bad_input_repeats_no_secret(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["train", "digits", *words])
    except SystemExit as error:
        code = int(str(error.code))
    told = capsys.readouterr()
    refusal(code, told.err)
    assert SECRET not in told.out + told.err and UNKNOWN not in told.out + told.err


def test_what_is_said_and_hashed(capfd: pytest.CaptureFixture[str]) -> None:
    text = f"password={SECRET}"
    ProgressBar(1).say(text)
    warn(text)
    launch.say_on_stderr(f"{text}\n")
    Worker().write_exit_record(exit_record.ExitRecord(0, 1, line=text))
    Worker().write_exit_record(exit_record.ExitRecord(0, 1, traceback=f"Error: {text}\n"))
    told = capfd.readouterr()
    assert SECRET not in told.out + told.err
    assert (told.out + told.err).count("password=***") == 5
    assert SECRET not in typed(["x", "train", "--token", SECRET, "a b"])
    one, other = (Recipe(epochs=1, about=f"https://me:{secret}@host/") for secret in "ab")
    assert config_hash(one) == config_hash(other) != config_hash(Recipe(epochs=1))
