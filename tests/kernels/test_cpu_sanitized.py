"""The native kernels' tests once more, on a library built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# They lower the limit of addresses, and AddressSanitizer ends a process that it cannot map its own tables in.
LIMITED = "tests/kernels/test_cpu_processes.py::test_with_memory_"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g"]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to build the sanitized library with")
    build = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
    folder, compilers = tmp_path_factory.mktemp("sanitized"), []
    for source, own in build["flags"]().items():
        command = ["g++", *build["FLAGS"], *own, *SANITIZE, "-c", source, "-o", folder / (Path(source).stem + ".o")]
        compilers.append(subprocess.Popen([str(part) for part in command], cwd=ROOT))
    assert [compiler.wait() for compiler in compilers] == [0] * len(compilers)
    target = folder / "sanitized.so"
    subprocess.run(["g++", "-shared", "-pthread", *SANITIZE, *folder.glob("*.o"), "-o", target], check=True)
    return target


def run(library: Path, *command: str) -> subprocess.CompletedProcess:
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime.stdout.strip(),
        # Python and torch keep memory until they end.
        "ASAN_OPTIONS": "detect_leaks=0",
        "TUTEL_PACK_CPU_LIBRARY": str(library),
    }
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_kernels_are_clean(library):
    tests = [str(path) for path in sorted((ROOT / "tests/kernels").glob("test_cpu_*.py")) if path != Path(__file__)]
    done = run(library, "-m", "pytest", "-x", "--deselect", LIMITED, *tests)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_sanitizer_sees(library):
    """One row more than a weight has."""
    script = """
import torch
from tutel_pack.kernels.cpu import native
native.select("portable")
w = torch.ones(4, 64, dtype=torch.bfloat16)
d = native.describe(w)
d.n, x = 400, torch.ones(1, 64)
native.library().tp_linear(__import__("ctypes").addressof(d), x.data_ptr(), 1, 0, None, 0, torch.empty(400).data_ptr())
"""
    done = run(library, "-c", script)
    assert done.returncode and "heap-buffer-overflow" in done.stderr
