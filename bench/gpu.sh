#!/usr/bin/env bash
# The Triton kernels on the GPU that is here: their tests, then their speed, in five minutes, of which compiling takes
# most: both do that by as many processes as there are processors. Results go to bench/results/<chip>.json.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
limit=290 least=60
command -v "$python" > /dev/null || { echo "There is no $python: run 'make test' once, or set PYTHON." >&2; exit 2; }
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("There is no GPU here to measure.")'

processes=$(nproc)
processes=$((processes > 12 ? 12 : processes))
tests=$("$python" -m pytest --collect-only tests/kernels/test_triton_gpu.py | grep ::)
share=$((($(wc -l <<< "$tests") + 2 * processes - 1) / (2 * processes)))
tr '\n' '\0' <<< "$tests" | xargs -0 -P "$processes" -n "$share" "$python" -m pytest
echo "tests passed in $SECONDS s"

left=$((limit - SECONDS))
"$python" bench/gpu.py --seconds $((left < least ? least : left)) "$@"
