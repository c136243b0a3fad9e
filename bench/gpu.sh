#!/usr/bin/env bash
# The Triton kernels on the GPU that is here: their tests, then for four minutes their speed.
# Tests take minutes the first time, for every kernel is compiled. Results go to bench/results/<chip>.json.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -m pytest tests/kernels/test_triton_gpu.py
"$python" bench/gpu.py "$@"
