"""The native kernels' threads where processes fork and Python threads meet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tutel_pack.kernels.cpu import native

if not native.LIBRARY.exists():
    pytest.skip("the native kernels were not built: there was no compiler", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
import os, threading
import torch
from tutel_pack.formats import FORMATS
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import get_ops
from tutel_pack.quant.codec import encode

ops, x = get_ops("cpu"), torch.ones(1, 256)
def weight():
    return encode(torch.randn(512, 256), FORMATS["mxfp4"]).tensor
"""
FORK = """
native.set_threads(3)
w = weight()
expected = ops.linear(x, w)
for _ in range(3):
    if (child := os.fork()) == 0:
        os._exit(0 if torch.equal(ops.linear(x, w), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
assert torch.equal(ops.linear(x, w), expected)
"""
FORK_MEANWHILE = """
import time
w, xs, stop = weight(), torch.ones(4096, 256), []
def work():
    while not stop:
        ops.linear(xs, w)
worker = threading.Thread(target=work)
worker.start()
for _ in range(40):
    time.sleep(0.001)
    if (child := os.fork()) == 0:
        os._exit(0 if native.threads() else 1)
    for _ in range(1000):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        stop.append("a child hangs")
        break
hangs, _ = bool(stop), stop.append("done")
worker.join()
assert not hangs
"""
MEET = """
import sys
sys.setswitchinterval(1e-6)
for _ in range(200):
    w, start, found = weight(), threading.Barrier(4), []
    def meet():
        start.wait()
        found.append(ops.linear(x, w))
    threads = [threading.Thread(target=meet) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(found) == 4 and all(torch.equal(found[0], y) for y in found) and found[0].isfinite().all()
"""
LITTLE_MEMORY = """
import resource
from tutel_pack.errors import ResourceError
def limit(bytes):
    resource.setrlimit(resource.RLIMIT_AS, (bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
"""
TOO_MANY = """
native.set_threads(100_000)
w = weight()
limit(4 << 30)
try:
    ops.linear(x, w)
except ResourceError:
    native.set_threads(2)
    ops.linear(x, w)
else:
    raise SystemExit("so many threads were made")
"""
IN_A_JOB = """
threads, inner = {}, {}
native.set_threads(threads)
native.select("portable")  # whose packed vectors are as long as they need be
gate_up, down = (encode(torch.randn(1, *shape), FORMATS["mxfp4"]) for shape in ((2 * inner, 32), (32, inner)))
x, ids, weights = torch.randn(200_000, 32), torch.zeros(200_000, 1, dtype=torch.int64), torch.ones(200_000, 1)
def run(n):
    return ops.moe(x[:n], ids[:n], weights[:n], gate_up.tensor, down.tensor)
expected = run(5)  # and there is a team now
# What the caller allocates still fits: 25 MB for each of the result, the packed x and the pieces, and the inner values
# twice. What a member with rows needs for their products does not: 100 MB.
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit(used + (100 << 20) + 200_000 * 8 * inner)
try:
    run(200_000)
except ResourceError:
    assert torch.equal(run(5), expected)
else:
    raise SystemExit("there was enough memory")
limit(resource.RLIM_INFINITY)
assert torch.equal(run(5000)[:5], expected)
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", SETUP + script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "script", [FORK, FORK_MEANWHILE, MEET], ids=["fork", "fork while a thread works", "threads that meet"]
)
def test_in_a_process_of_its_own(script):
    run(SETUP + script)


def test_with_memory_for_few_threads():
    run(SETUP + LITTLE_MEMORY + TOO_MANY)


@pytest.mark.parametrize("inner", [32, 96])  # a third member has no rows and waits for the others; all have some
@pytest.mark.parametrize("threads", [1, 3])
def test_with_memory_that_runs_out_in_a_job(threads, inner):
    run(SETUP + LITTLE_MEMORY + IN_A_JOB.format(threads, inner))
