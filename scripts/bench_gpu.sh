#!/usr/bin/env bash
# The targets on one H200, measured in at most 8 minutes; nothing is downloaded. --dry-run shows the commands.
# Exit code 0: all met, 1: one missed, 3: no GPU, or one that could not be judged.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks targets "$@"
