"""Run folders for the tests of reports: all keys that a run may write, without a training."""

import contextlib
import json
import math
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from trainer.observe.rows import FILES
from trainer.runs.manifest import FORMAT

EVERY = 50
_SHARES = {"forward": 0.2, "backward": 0.38, "update": 0.04, "communication": 0.06, "copy": 0.01}
_SHARES |= {"data": 0.18, "host": 0.03, "logging": 0.005, "unexplained": 0.015, "end": 0.001}
# Of each row, the same.
_STILL = """
memory_bytes 50e9  cpu/limit 64  cpu/others 3  disk/written_bytes_per_s 1e6  network/received_bytes_per_s 5e7
network/sent_bytes_per_s 4e7  network/loopback_bytes_per_s 1e6  gpu/memory_bytes 71e9  gpu/power_limit_w 700
gpu/memory_total_bytes 85e9  memory/reserved_bytes 64e9  memory/peak_bytes 61e9  loader/cpu 0.7
loader/blocked 0.2  loader/seconds_per_sample 0.003  loader/workers 48  time/gc 0.01
"""
_SAME = {name: float(value) for name, value in (pair.split() for pair in re.split(r"\n|  ", _STILL) if pair)}


def manifest(steps: int, /, **changes: Any) -> dict[str, Any]:
    """A manifest as `trainer.runs.manifest` makes them."""
    start = {"started": "2026-11-21T09:12:04+0000", "step": 0, "ranks": 8, "threads": 8, "log_every": EVERY}
    again = {**start, "started": "2026-11-21T12:02:11+0000", "step": steps // 3}
    return {
        "format": FORMAT,
        "recipe": "resnet50",
        "config": {"seed": 0, "optim": {"name": "sgd", "lr": 0.4}, "log": {"to": ["jsonl"]}, "path": None},
        "config_hash": "a5656be2b4f4df829c2207e1fab067eb",
        "seed": 0,
        "command": "trainer train resnet50 --gpus 8",
        "started": start["started"],
        "ended": "2026-11-21T17:47:31+0000",
        "restarts": 1,
        "attempts": [{**start, "changed": []}, {**again, "changed": ["optim.lr: 0.5, now 0.4"]}],
        "commit": "3b71744e125283ca3689e9a41a9f7e56e6a8c290+",
        "dirty": True,
        "lock": "9446cea79a38d8ff9c78c0061d4f7141",
        "image": "sha256:0b56a5f0d4a5c4b2",
        "versions": {"trainer": "0.1.0", "torch": "2.9.1+cu128", "nccl": None},
        "device": {"kind": "cuda", "name": "NVIDIA H100", "gpus": ["NVIDIA H100"] * 8, "cpu": "Xeon"},
        "fingerprint": {"training data": "1281167 samples 76653bb0e1857bfe"},
        "host": "node17",
        "world_size": 8,
        "threads": 8,
        "planned_steps": steps,
        "steps_done": steps,
        "notes": ["data.workers=12: 75 % of 16 CPUs"],
        "anomalies": 2,
        "status": "finished",
        **changes,
    }


def train_row(n: int, rows: int, draw: random.Random) -> dict[str, Any]:
    """Row number n of so many, with every key of a GPU run on several ranks."""
    t = n / rows
    seconds = {f"time/{phase}": 20 * part * (1 + 0.2 * draw.random()) for phase, part in _SHARES.items()}
    seconds["time/data"] *= 1 + 1.5 * (t > 0.4) * math.sin(6 * t) ** 2
    seconds["time/start"] = 8.0 * (n == 1)
    ends = n % max(1, rows // 20) == 0
    seconds |= {"time/evaluation": 9.0 * ends, "time/checkpoint": 1.2 * ends}
    wall = sum(seconds.values())
    speed = 1024 * EVERY / wall
    row: dict[str, Any] = {
        "kind": "train",
        "step": n * EVERY,
        "epoch": round(90 * t, 4),
        "loss": 6.9 * math.exp(-3 * t) + 1 + 0.1 * draw.random(),
        "lr": 0.2 * (math.cos(math.pi * t) + 1) * min(1, t * 20),
        "updates": n * EVERY,
        "grad_norm": 1 / (t + 0.2) + 0.3 * draw.random(),
        "seconds": wall,
        "samples_per_s": speed,
        "time/wall": wall,
        **seconds,
        **_SAME,
        "flops_per_s": speed * 12.3e9,
        "mfu": speed * 12.3e9 / (8 * 989e10),
        "tokens_per_s": speed * 196,
        "cpu/used": 40 + 20 * draw.random(),
        "cpu/throttled": 0.05 * draw.random(),
        "cpu/starved": 0.02 * draw.random(),
        "disk/read_bytes_per_s": 8e8 * draw.random(),
        "gpu/utilization": 0.8 + 0.1 * draw.random(),
        "gpu/power_w": 600 + 50 * draw.random(),
        "gpu/temperature_c": 60 + 10 * t,
        "gpu/clock_mhz": 1900 - 100 * t,
        "gpu/throttled": 0.1 * (t > 0.8),
        "energy/joules": wall * 4800,
        "memory/allocated_bytes": 5e10 + 2e9 * draw.random(),
        "memory/retries": int(n == rows),
        "memory/rss_bytes": 3e10 + 1e10 * t,
        "loader/starved": 0.1 * draw.random(),
    }
    if t > 0.8:
        row["gpu/throttle_reason"] = "sw_power_cap"
    if draw.random() < 0.1:
        row |= {"slow_rank": draw.choice([3, 3, 5]), "slow_phase": "data", "slow_excess": 0.1 * draw.random()}
    return row


def alone(folder: Path) -> None:
    """Leaves of a run's rows those of training only."""
    for kind, name in FILES.items():
        if kind != "train":
            (folder / name).unlink()


def write_run(folder: Path, rows: int = 60, leap: int = 0, **changes: Any) -> Path:
    """Writes a run folder.

    Args:
        folder: Made if it isn't there.
        rows: Of kind "train".
        leap: Number of the row whose loss leaps; 0: none.
        changes: Of the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest(rows * EVERY, **changes)))
    draw, timed = random.Random(0), defaultdict[str, float](float)
    text = "data-cpu: the GPU waits 27 % of each step: pack the data or add cores"
    verdict = {"kind": "verdict", "cause": "data-cpu", "share": 0.27, "text": text}
    with contextlib.ExitStack() as stack:
        files = {kind: stack.enter_context((folder / name).open("w")) for kind, name in FILES.items()}
        for n in range(1, rows + 1):
            row, step = train_row(n, rows, draw), n * EVERY
            row["loss"] += 30 * (n == leap)
            for name in filter(lambda name: name.startswith("time/"), row):
                timed[name] += row[name]
            _write(files["train"], row)
            if n % max(1, rows // 20) == 0:
                quality = {"loss": 0.9 * row["loss"], "accuracy": 0.78 * (1 - math.exp(-4 * n / rows))}
                _write(files["eval"], {"kind": "eval", "step": step, "epoch": row["epoch"], **quality})
                for at in ("start", "end"):
                    held = {"memory/allocated_bytes": 2e10, "memory/reserved_bytes": 6.4e10}
                    _write(
                        files["memory"],
                        {"kind": "memory", "step": step, "epoch": row["epoch"], "at": at, **held},
                    )
            if n == rows // 2:
                _write(files["verdict"], {**verdict, "step": step, "final": 0})
        _write(files["verdict"], {**verdict, "step": step, "final": 1})
        for name in ("time/wall", "time/evaluation"):  # after the last row
            timed[name] += 9.0
        end: dict[str, float] = {
            **timed,
            "loss": 1.2,
            "accuracy": 0.7712,
            "samples_per_s": 2400.0,
            "seconds": 29000.0,
        }
        money = {"energy/joules": 1.23e8, "cost/money": 812.4, "cost/per_thousand_samples": 0.0071}
        _write(files["end"], {"kind": "end", "step": step, **end, **money})
    anomaly = {"number": 1, "step": rows * 25, "kind": "spike", "policy": "stop", "loss": 33.1}
    infinite = {"number": 2, "step": rows * 30, "kind": "nonfinite", "policy": "skip", "loss": "nan"}
    with (folder / "anomalies.jsonl").open("w") as file:
        for one in (anomaly, infinite):
            _write(file, {**one, "grad_norm": 181.2, "median": 2.3, "time": "2026-11-21T12:01:01+0000"})
    for step in (rows * 40, rows * 50):
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "model.safetensors").write_bytes(b"x" * 2_000_000)
        (checkpoint / "state.json").write_text(json.dumps({"state": {"best": [0.77, rows * 40]}}))
    return folder


def _write(file: Any, row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
