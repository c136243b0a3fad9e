#!/usr/bin/env bash
# The Triton kernels on the GPU that is here, in at most five minutes: their tests, then their speed.
# Results go to bench/results/<chip>.json.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
started=$SECONDS
"$python" -m pytest tests/kernels/test_triton_gpu.py
"$python" bench/gpu.py --seconds $((280 - (SECONDS - started))) "$@"
