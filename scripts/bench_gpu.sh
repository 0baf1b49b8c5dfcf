#!/usr/bin/env bash
# What one GPU is asked for (benchmarks/gpu.py): a call measures rows without a result for about four minutes, and
# writes docs/results/gpu.json after each. --small runs them on this machine's CPU, --dry-run shows the commands.
# A machine without pydantic and a network takes it from .whl/*.whl (`pip download --no-deps -d .whl
# --python-version 3.12 --only-binary :all: pydantic pydantic-core annotated-types typing-inspection`, elsewhere).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
wheels=(.whl/*.whl)
if [ -e "${wheels[0]}" ]; then
  [ -d build/site ] || "$python" -m pip install -q --no-index --no-deps --target build/site "${wheels[@]}"
  export PYTHONPATH="$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks gpu "$@"
