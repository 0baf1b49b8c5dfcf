"""Promise: under tight limits workers and prefetch fit the box: no bus error, no OOM kill, no hang."""

import os
from pathlib import Path

import pytest

from benchmarks.photographs import write_photographs
from tests.container.run import engine

pytestmark = pytest.mark.container

# Of each kind; the promise is a hundred (docs/results/tune.md); each takes some ten seconds.
RUNS = int(os.environ.get("TRAINER_FIT_RUNS", "3"))
LIMITS = ["--cpus=2", "--memory=2g", "--memory-swap=2g", "--shm-size=64m", "--network=none"]
# Photographs; a model small enough that what it needs itself, with torch for launcher and rank, leaves room.
RECIPE = """
epochs: 100
max_windows: 6
data: {name: folder, path: /data, image_size: 160, global_batch: 64, micro_batch: 32, evaluation_batch: 64}
model: {width: 4}
log: {sinks: [jsonl]}
checkpoint: {minutes: 0}
"""
# `timeout` ends a run that hangs with code 124; a bus error would be 1 with a line that names it.
LOOP = """
set -eu
for run in $(seq {runs}); do
    timeout 200 trainer train /recipe/fit.yaml --out /tmp/run >/tmp/log 2>&1 || {{ cat /tmp/log; exit 1; }}
    grep 'loader: ' /tmp/log
    rm -r /tmp/run
done
cat /sys/fs/cgroup/memory/memory.max_usage_in_bytes /sys/fs/cgroup/memory.peak 2>/dev/null || true
"""


@pytest.mark.parametrize("workers", ["auto", "2"])
def test_short_runs_under_tight_limits(train_image: str, tmp_path: Path, workers: str) -> None:
    for part, count in (("train", 256), ("val", 256)):
        write_photographs(tmp_path / "data" / part, count)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "fit.yaml").write_text(RECIPE)
    tmp_path.chmod(0o755)
    mounts = ["-v", f"{tmp_path / 'data'}:/data:ro", "-v", f"{tmp_path / 'recipe'}:/recipe:ro"]
    name = f"trainer-fit-{os.getpid()}"
    script = LOOP.format(runs=RUNS).replace("--out", f"--set data.workers={workers} --out")
    try:
        out = engine(
            "run", f"--name={name}", *LIMITS, *mounts, train_image, "bash", "-c", script, timeout=300 * RUNS
        )
        assert out.count("loader: ") == RUNS
        assert engine("inspect", "--format", "{{.State.OOMKilled}}", name).strip() == "false"
    finally:
        engine("rm", "-f", name, code=None)
    print(out)
