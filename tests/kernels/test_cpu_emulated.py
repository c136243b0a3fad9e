"""The portable kernels on Arm, compiled for it here and run under emulation."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.kernels.reference import decode64, linear64, random_packed, tolerance, worst_tile
from tests.kernels.test_products import x_of

from tutel_pack.kernels.cpu import native

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    if shutil.which(COMPILER) is None or EMULATOR is None:
        pytest.skip(f"{COMPILER} and qemu-aarch64 are not both installed")
    build, target = runpy.run_path(str(ROOT / "setup.py"), run_name="setup"), tmp_path_factory.mktemp("arm") / "linear"
    folder = ROOT / build["FOLDER"]
    sources = [folder / f"{name}.cpp" for name in build["COMMON"]]
    own = ROOT / "tests/kernels/emulated_main.cpp"
    subprocess.run([COMPILER, *build["FLAGS"], "-static", "-I", folder, *sources, own, "-o", target], check=True)
    return target


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4", "fp8", "bf16"])
def test_linear_on_arm(program, tmp_path, fmt):
    p, x = random_packed(fmt, (17, 288)), x_of(11, 288, dtype=torch.float32)
    w = native.describe(p)
    header = [w.n, w.k, w.row_bytes, w.grid_columns, w.block_rows, w.block_columns, w.format, w.scale_type, len(x)]
    empty = torch.empty(0, dtype=torch.uint8)
    parts = [torch.tensor(header), p.data, empty if p.scale is None else p.scale]
    parts += [torch.empty(0) if p.global_scale is None else p.global_scale, x]
    with open(tmp_path / "in", "wb") as f:
        for i, part in enumerate(parts):
            items = part.contiguous().view(torch.uint8).numpy() if i in (1, 2) and part.numel() else part.numpy()
            f.write(np.int64(items.size).tobytes() + items.tobytes())
    subprocess.run([EMULATOR, program, tmp_path / "in", tmp_path / "out"], check=True)
    y = torch.from_numpy(np.fromfile(tmp_path / "out", dtype=np.float32).reshape(11, 17))
    assert worst_tile(y, linear64(x, decode64(p))) < tolerance(torch.float32, 288)
    assert worst_tile(y.flip(1), linear64(x, decode64(p))) > tolerance(torch.float32, 288)
