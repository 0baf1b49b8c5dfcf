"""Plays a random recipe: whole, in parts, and the commands that follow; gives what there is to record.

All of it goes through the command line and the files of run folders, so that a change within the package
leaves this module alone.
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.numpy
import yaml
from safetensors import safe_open

from tests.helpers import preloaded
from tests.recorded.draw import STEPS, Attempt, Case
from tests.recorded.files import left_out, write_files
from tests.recorded.given import cut

BEGIN_FROM = "--init-from"
MORE_STEPS = 3  # of a run that is extended
_SECONDS = 900  # for one command, on a machine that does much else
_AT_ONCE = 2  # recipes that are played side by side
_ENDS = {"done": (0,), "stop": (75,), "restart": (0,), "kill": (1,), "raise": (1,), "term": (75, 0)}
_LEARNED = ("kind", "step", "epoch", "loss", "lr", "updates", "grad_norm", "loss_scale")
ROWS = ("metrics", "evaluations", "hooks", "answers", "anomalies", "quarantine", "checksums")


class Workplace:
    """A folder, empty at first, with all files that recipes name, in which commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_files(folder)
        own = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
        # No GPU, no cache of the user's.
        own |= {"XDG_CACHE_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.environment = {**own, "GIT_CEILING_DIRECTORIES": str(folder)}

    def trainer(self, *words: str | Path, ends: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Runs a command of the trainer; `ends` says to the hook how a run ends."""
        command = [sys.executable, "-m", "trainer", *map(str, words)]
        environment = {**self.environment, cut.NAME: str(ends or self.folder / "none")}
        return preloaded.run(command, _SECONDS, cwd=self.folder, env=environment)


class WrongError(Exception):
    """Something that must not be."""


def play(case: Case, place: Workplace) -> dict[str, Any]:
    """Plays a case, whose files stay there; returns what there is to record, as JSON holds it.

    That is `codes` of all commands in their order, hashes and norms of the `weights`, `rows` of learning,
    `evaluations`, the `order` of the samples. WrongError is raised if an exit code isn't right, or the run in
    parts has other bits than the whole one.
    """
    folder = place.folder / f"{case.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(case.recipe))
    codes: list[int] = []

    def go(right: Sequence[int], *words: str | Path) -> "subprocess.CompletedProcess[str]":
        done = place.trainer(*words, ends=folder / "cut")
        if done.returncode not in right:
            told = f"{' '.join(map(str, words))}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
            raise WrongError(f"exit code {done.returncode} in place of {right}: {told}")
        codes.append(75 if right == _ENDS["term"] else done.returncode)
        return done

    whole, parts = folder / "whole", folder / "parts"
    stops = case.recipe.get("anomaly", {}).get("nonfinite") == "stop" and case.kind == "spoiled"
    train = ("train", recipe, "--no-progress")
    go((1, 0) if stops else (0,), *train, *_ranks(case.ranks), "--out", whole)
    recorded = {"codes": codes, **read_run(whole), "order": _order(recipe, place)}
    if json.loads((whole / "manifest.json").read_text())["status"] != "finished":
        return recorded
    for attempt in case.attempts:
        _ask(attempt, folder / "cut")
        go(_ENDS[attempt.end], *train, *_words(attempt), "--out", parts)
    compare(whole, parts)
    (folder / "cut").unlink(missing_ok=True)
    task = str(case.recipe.get("task", ""))
    code = ("--task", task) if task.endswith(".py") else ()  # a run folder names no code
    for command in case.commands:
        name, _, rest = command.partition(" ")
        if name == "evaluate":
            said = go((0,), name, parts, *code, "--json", *_ranks(case.ranks)).stdout
            _same_figures(json.loads(said)["metrics"], read_rows(whole, "evaluations")[-1])
        elif name in ("verify", "report"):
            go((0,), name, parts, *(code if name == "verify" else ()))
        elif name == "export":
            go((0,), name, parts, *code, "--to", rest, "--out", folder / "export")
            if rest == "safetensors":
                _same_weights(folder / "export", whole)
        elif name == "extend":
            for run in (whole, parts):
                go((0,), *train, f"max_steps={STEPS + MORE_STEPS}", *_ranks(case.ranks), "--out", run)
            compare(whole, parts)
            recorded["extended"] = read_run(whole)["weights"]
        elif name == "from":
            for run in (whole, parts):
                out = folder / f"from-{run.name}"
                go((0,), *train, *_ranks(case.ranks), "max_steps=4", BEGIN_FROM, run, "--out", out)
            compare(folder / "from-whole", folder / "from-parts")
            recorded["begun_from"] = read_run(folder / "from-whole")["weights"]
        else:
            raise AssertionError(command)
    return recorded


def play_all(cases: Sequence[Case], place: Workplace) -> Iterator[tuple[Case, dict[str, Any] | str]]:
    """Plays cases, two at a time; yields each with what there is to record, or what is wrong."""

    def of(case: Case) -> dict[str, Any] | str:
        if why := left_out(case.kind):
            return why
        try:
            return dict(json.loads(json.dumps({"case": case._asdict(), **play(case, place)})))
        except (WrongError, AssertionError) as error:  # also a command without an end
            return str(error)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from zip(cases, pool.map(of, cases), strict=True)


def _ask(attempt: Attempt, asked: Path) -> None:
    """Writes for the hook how the next attempt ends."""
    how = {"kill": "kill", "restart": "kill", "raise": "raise", "term": "term"}.get(attempt.end)
    asked.unlink(missing_ok=True)
    if how is not None:
        asked.write_text(f"{how} {attempt.step}")


def _ranks(count: int) -> list[str]:
    return ["--nproc-per-node", str(count)] if count > 1 else []


def _words(attempt: Attempt) -> list[str]:
    words = [*_ranks(attempt.ranks), f"data.workers={attempt.workers}"]
    words += ["--stop-after", str(attempt.step)] if attempt.end == "stop" else []
    return words + (["--max-restarts", "1"] if attempt.end == "restart" else [])


def _order(recipe: Path, place: Workplace) -> str:
    """Returns a hash of the order of the samples in three epochs."""
    code = "import sys; from tests.recorded.order import tell; tell(sys.argv[1])"
    environment = {**place.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = preloaded.run([sys.executable, "-c", code, recipe], _SECONDS, cwd=place.folder, env=environment)
    if done.returncode:
        raise WrongError(f"the order of the samples: {done.stderr[-1500:]}")
    return done.stdout.strip()


def read_rows(run: Path, name: str) -> list[dict[str, Any]]:
    """Reads records, without what a machine's speed decides."""
    file = run / f"{name}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{key: value for key, value in row.items() if _is_learned(name, key)} for row in rows]


def _is_learned(name: str, key: str) -> bool:
    if name == "metrics":
        return key in _LEARNED or key.startswith(("loss/", "watched/"))
    return key not in ("time", "seconds")


def read_weights(file: Path) -> dict[str, Any]:
    """Returns a hash over names, types, shapes and bytes of a file's tensors, and their norm."""
    digest, squares = hashlib.sha256(), []
    with safe_open(file, "np") as opened:
        for name in sorted(opened.keys()):
            tensor = opened.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
            squares += tensor.astype("float64").ravel().tolist()
    return {"sha256": digest.hexdigest(), "norm": math.sqrt(math.fsum(one * one for one in squares))}


def read_run(run: Path) -> dict[str, Any]:
    """Returns what a run is recorded by."""
    rows = read_rows(run, "evaluations")
    newer = "token_accuracy"  # than the record
    return {
        "weights": {file.stem: read_weights(file) for file in sorted(run.glob("*.safetensors"))},
        "rows": read_rows(run, "metrics"),
        "evaluations": [{key: row[key] for key in row if not key.endswith(newer)} for row in rows],
    }


def compare(whole: Path, parts: Path) -> None:
    """Compares a run that was disturbed with one that wasn't: weights and records."""
    weights = [read_run(run)["weights"] for run in (whole, parts)]
    if weights[0] != weights[1] or not weights[0]:
        raise WrongError(f"weights: {weights[0]}, in parts {weights[1]}")
    for name in ROWS:
        rows = [read_rows(run, name) for run in (whole, parts)]
        if rows[0] != rows[1]:
            first = next((pair for pair in zip(*rows, strict=False) if pair[0] != pair[1]), None)
            raise WrongError(f"{name}: {len(rows[0])} records, in parts {len(rows[1])}; first {first}")


def _same_figures(said: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """Compares what `evaluate` measures with the last evaluation of the run."""
    if not said or any(said[key] != row[key] for key in said):
        raise WrongError(f"evaluate says {said}, the run {row}")


def _same_weights(export: Path, run: Path) -> None:
    """Compares exported weights with those that a run is evaluated by."""
    (file,) = export.glob("*.safetensors")
    kept = run / "ema.safetensors"
    wanted = safetensors.numpy.load_file(kept if kept.exists() else run / "model.safetensors")
    found = safetensors.numpy.load_file(file)
    if any(found[name].tobytes() != wanted[name].tobytes() for name in found) or not found:
        raise WrongError(f"exported weights differ: {sorted(found)}, of the run {sorted(wanted)}")
