"""The native kernels of another processor: compiled for it here, and called under emulation.

`Arm` has functions of api.h that take the same addresses as those of the library. A process of emulated_main.cpp is
sent the memory that they point to.
"""

from __future__ import annotations

import ctypes
import math
import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tutel_pack.kernels.cpu import native

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")

ITEM = {0: 4, 1: 2}
"""Bytes of an item of a dtype."""
SCALE = {0: 0, 1: 4, 2: 1, 3: 1, 4: 2}
"""Bytes of a scale of a type."""


def compile_for_arm(folder: Path) -> Path:
    """The program of all kernels that setup.py compiles there. Skips the test where there are no tools for it."""
    if shutil.which(COMPILER) is None or EMULATOR is None:
        pytest.skip(f"{COMPILER} and qemu-aarch64 are not both installed")
    build, target = runpy.run_path(str(ROOT / "setup.py"), run_name="setup"), folder / "kernels"
    command, objects = [COMPILER, *build["FLAGS"], "-I", ROOT / build["FOLDER"]], []
    sources = {ROOT / source: own for source, own in build["flags"]("aarch64").items()}
    for source, own in {**sources, ROOT / "tests/kernels/emulated_main.cpp": []}.items():
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([*command, *own, "-c", source, "-o", objects[-1]], check=True)
    subprocess.run([COMPILER, "-static", "-pthread", *objects, "-o", target], check=True)
    return target


def memory(address: int | None, size: int) -> bytes:
    return ctypes.string_at(address, size) if address and size else b""


def numbers(*items: int) -> bytes:
    return np.array(items, dtype=np.int64).tobytes()


def weight(address: int) -> tuple[native.Weight, list[bytes]]:
    w = native.Weight.from_address(address)
    parts = [
        (w.data, w.experts * w.expert_bytes),
        (w.scale, w.experts * w.expert_scales * SCALE[w.scale_type]),
        (w.global_scale, w.experts * w.segment_count * 4),
        (w.segments, w.segment_count * 8),
    ]
    return w, [bytes(w), *(memory(*part) for part in parts)]


class Arm:
    """By one instruction set; arguments as in native.py."""

    def __init__(self, program: Path, instruction_set: str) -> None:
        command = [EMULATOR, str(program), instruction_set]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait() == 0

    def linear(self, w, x, tokens, dtype, bias, bias_dtype, out) -> int:
        w, blocks = weight(w)
        blocks += [memory(x, tokens * w.k * ITEM[dtype]), memory(bias, w.n * ITEM[bias_dtype])]
        return self._call("linear", numbers(tokens, dtype, bias_dtype), blocks, out, tokens * w.n * ITEM[dtype])

    def moe(
        self, gate_up, down, x, ids, weights, tokens, k, dtype, limit, alpha, shift,
        first, first_dtype, second, second_dtype, out,
    ) -> int:  # fmt: skip
        (gate_up, up_blocks), (down, down_blocks) = weight(gate_up), weight(down)
        size = tokens * down.n * ITEM[dtype]
        blocks = [
            *up_blocks, *down_blocks, memory(x, size), memory(ids, tokens * k * 8), memory(weights, tokens * k * 4),
            np.array([limit, alpha, shift], dtype=np.float32).tobytes(),
            memory(first, gate_up.experts * gate_up.n * ITEM[first_dtype]),
            memory(second, down.experts * down.n * ITEM[second_dtype]),
        ]  # fmt: skip
        return self._call("moe", numbers(tokens, k, dtype, first_dtype, second_dtype), blocks, out, size)

    def attend(self, attention, layout, q, keys, values, out) -> int:
        a, layout = native.Attention.from_address(attention), native.Layout.from_address(layout)
        starts, lengths = memory(layout.starts, 8 * layout.sequences + 8), memory(layout.lengths, 8 * layout.sequences)
        addresses = np.frombuffer(memory(layout.tables, 8 * layout.sequences), dtype=np.int64).tolist()
        counts = [math.ceil(n / a.block_size) for n in np.frombuffer(lengths, dtype=np.int64)]
        tables = b"".join(memory(address, 8 * n) for address, n in zip(addresses, counts))
        entries = int(np.frombuffer(tables, dtype=np.int64).max() + 1) * a.block_size * a.kv_heads * ITEM[a.cached]
        queries = int(np.frombuffer(starts, dtype=np.int64)[-1]) * a.heads * ITEM[a.dtype]
        blocks = [
            bytes(a), memory(a.sinks, 4 * a.heads), starts, lengths, tables,
            memory(q, queries * a.width), memory(keys, entries * a.width), memory(values, entries * a.value_width),
        ]  # fmt: skip
        return self._call("attend", numbers(layout.sequences), blocks, out, queries * a.value_width)

    def _call(self, function: str, first: bytes, blocks: list[bytes], out: int, size: int) -> int:
        """`size` bytes at `out` go there too, so that a result that is not written keeps what it was poisoned with."""
        blocks = [function.encode() + b"\0", numbers(native.threads()) + first, *blocks, memory(out, size)]
        self.process.stdin.write(numbers(len(blocks)) + b"".join(numbers(len(block)) + block for block in blocks))
        self.process.stdin.flush()
        status, got = self.process.stdout.read(4), self.process.stdout.read(size)
        assert len(status) == 4 and len(got) == size
        if size:
            ctypes.memmove(out, got, size)
        return int.from_bytes(status, "little", signed=True)
