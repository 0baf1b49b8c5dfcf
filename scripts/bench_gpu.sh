#!/usr/bin/env bash
# The targets on one H200, in pieces of at most 8 minutes: `--piece 1` (the promises), 2, …, or `--only KEY,…`.
# What a call finds stays in build/targets/CARD, compiled code too; the table says what is still missing.
# --dry-run shows the commands. Exit code 0: all met, 1: one missed, 3: no GPU, or one that could not be judged.
# A machine that lacks pydantic and cannot reach a registry takes it from .whl/*.whl
# (`pip download --no-deps -d .whl --python-version 3.12 --only-binary :all: pydantic pydantic-core
# annotated-types typing-inspection`, beforehand and elsewhere).
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
exec "$python" -m benchmarks targets "$@"
