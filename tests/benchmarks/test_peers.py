"""Promise: whole runs of others' scripts and ours do the same work, take turns, and are measured alike."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.__main__ import main
from benchmarks.peers import PEERS, Peer, Run, measured
from trainer.errors import BadInputError

PRINTED = {
    "nanogpt": "step 0: train loss 4.1, val loss 4.2\nstep 200: train loss 1.8, val loss 1.9000\n",
    "timm": "Test: [   0/2]  Time: 0.1 (0.1)  Loss:   9.000 ( 9.000)  Acc@1: 5\n"
    "Test: [   2/2]  Time: 0.1 (0.1)  Loss:   3.000 ( 1.900)  Acc@1: 5\n",
    "imagenet": "Test: [ 1/3]\tTime  0.1 ( 0.1)\tLoss 2.5e+00 (1.9e+00)\tAcc@1   0.00\n",
    "transformers": "{'eval_loss': '2.0'}\nloss on all held-out text 1.9000\n",
}


@pytest.mark.parametrize("name", PEERS)
def test_the_last_loss_of_what_it_prints(name: str) -> None:
    assert float(re.findall(PEERS[name].loss, PRINTED[name])[-1]) == 1.9


def test_a_process_is_measured_with_its_children() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(3 * 10**6))'])"
    run, printed = measured(["-c", f"print('said'); {child}"], Path.cwd())
    alone, _ = measured(["-c", "pass"], Path.cwd())
    assert printed == "said\n" and run.cpu_seconds > alone.cpu_seconds
    with pytest.raises(BadInputError, match="ended with code 3: torn"):
        measured(["-c", "print('torn', flush=True); raise SystemExit(3)"], Path.cwd())


def test_what_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    for words, told in (
        ((f"--timm={tmp_path / 'none'}",), "it has no train.py"),
        ((f"--nanogpt={tmp_path}",), "needs --text FILE"),
        ((f"--nanogpt={tmp_path}", f"--text={tmp_path / 'none'}"), "none: no such file"),
        ((f"--timm={tmp_path}", "--rounds=0"), "--rounds"),
    ):
        assert main(["peers", *words]) == 2, words
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1, error
    assert main(["peers"]) == 3


def test_the_text_of_nanogpt_is_that_of_both_sides(tmp_path: Path) -> None:
    script, folder, text = tmp_path / "train.py", tmp_path / "data", tmp_path / "text"
    script.touch()
    folder.mkdir()
    text.write_text("hello world\n" * 10)
    PEERS["nanogpt"].prepare(script, folder, text, 3)
    letters = sorted(set(text.read_text()))
    parts = [
        np.fromfile(folder / "data/shakespeare_char" / f"{name}.bin", np.uint16) for name in ("train", "val")
    ]
    assert "".join(letters[token] for token in np.concatenate(parts)) == (folder / "text.txt").read_text()
    assert len(parts[0]) == 108 and (folder / "train.py").is_symlink()
    theirs = SimpleNamespace(manual_seed=lambda number: number)
    exec((folder / "seed.py").read_text(), {"torch": theirs})
    assert theirs.manual_seed(1337) == 1340


def test_rounds_take_turns_and_change_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "their.py").touch()
    asked = []

    def ours(_peer: Peer, _data: Path, steps: int, seed: int) -> Run:
        asked.append(("ours", steps, seed))
        return Run(2.0, 3.0, 1.0, 1.0 + seed)

    def theirs(_peer: Peer, _script: Path, _data: Path, steps: int, seed: int) -> Run:
        asked.append(("theirs", steps, seed))
        return Run(4.0, 6.0, 0.5, 1.0)

    monkeypatch.setattr(peers, "_ours", ours)
    monkeypatch.setattr(peers, "_theirs", theirs)
    peer = Peer("their.py", lambda *_: None, lambda *_: (), lambda *_: (), "")
    monkeypatch.setitem(PEERS, "timm", peer)
    assert main(["peers", f"--timm={tmp_path}", "--text", sys.executable, "--rounds=2", "--steps=7"]) == 0
    assert asked == [("theirs", 7, 0), ("ours", 7, 0), ("ours", 7, 1), ("theirs", 7, 1)]
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith(
        "| timm | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) | 2.00 (2.00 to 2.00) | 2.0 / 4.0 |"
    )
    assert row.endswith("| 1.00 / 0.50 | 1.500 (1.000 to 2.000) / 1.000 (1.000 to 1.000) |")
