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
TOO_MANY = """
import resource
from tutel_pack.errors import ResourceError
native.set_threads(100_000)
w = weight()
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    ops.linear(x, w)
except ResourceError:
    native.set_threads(2)
    ops.linear(x, w)
else:
    raise SystemExit("so many threads were made")
"""


@pytest.mark.parametrize("script", [FORK, MEET, TOO_MANY], ids=["fork", "threads that meet", "too many threads"])
def test_in_a_process_of_its_own(script):
    done = subprocess.run([sys.executable, "-c", SETUP + script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
