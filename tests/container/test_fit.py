"""Promise: under tight limits workers and prefetch fit the box: no bus error, no OOM kill, no hang."""

import os
from pathlib import Path

import pytest

from benchmarks.photographs import write_photographs
from tests.container.run import engine

pytestmark = pytest.mark.container

# With workers of its own choice and with two; the promise is a hundred of each (docs/results/workers.json).
RUNS = int(os.environ.get("TRAINER_FIT_RUNS", "1"))
LIMITS = ["--cpus=2", "--memory=2g", "--memory-swap=2g", "--shm-size=64m", "--network=none"]
# Photographs; a model small enough that what it needs itself, with torch for launcher and rank, leaves room.
RECIPE = """
epochs: 100
max_steps: 6
data: {name: folder, path: /data, image_size: 160, global_batch_size: 64, micro_batch_size: 32,
eval_batch_size: 64}
model: {width: 4}
parallel: {threads: 1}
log: {to: [jsonl]}
checkpoint: {minutes: 0}
"""
# `timeout` ends a run that hangs with code 124; a bus error would be 1 with a line that names it.
LOOP = """
set -eu
for workers in $(yes auto 2 | head -n {runs}); do
    timeout 600 trainer train /recipe/fit.yaml --set data.workers=$workers --out /tmp/run >/tmp/log 2>&1 ||
        {{ cat /tmp/log; exit 1; }}
    grep 'loader: ' /tmp/log
    rm -r /tmp/run
done
cat /sys/fs/cgroup/memory/memory.max_usage_in_bytes /sys/fs/cgroup/memory.peak 2>/dev/null || true
"""


def test_short_runs_under_tight_limits(train_image: str, tmp_path: Path) -> None:
    for part, count in (("train", 192), ("val", 128)):
        write_photographs(tmp_path / "data" / part, count)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "fit.yaml").write_text(RECIPE)
    tmp_path.chmod(0o755)
    mounts = ["-v", f"{tmp_path / 'data'}:/data:ro", "-v", f"{tmp_path / 'recipe'}:/recipe:ro"]
    name = f"trainer-fit-{os.getpid()}"
    run = ["run", f"--name={name}", *LIMITS, *mounts, train_image, "bash", "-c", LOOP.format(runs=RUNS)]
    try:
        out = engine(*run, timeout=1300 * RUNS)
        assert out.count("loader: ") == 2 * RUNS
        assert engine("inspect", "--format", "{{.State.OOMKilled}}", name).strip() == "false"
    finally:
        engine("rm", "-f", name, code=None)
    print(out)
