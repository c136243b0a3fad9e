"""Decoding by AMD's instructions, which the interpreter takes from instructions.py: bit for bit, and whole products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.kernels import instructions, interpreted
from tests.kernels.reference import decode64, linear64, moe64, random_packed, tokens_of_experts, tolerance, worst_tile
from tests.kernels.test_products import MoeCase, x_of

from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.triton.chips import CHIPS, INTERPRETER
from tutel_pack.kernels.triton.decode_amd import decode_by_amd
from tutel_pack.kernels.triton.matmul import way_of
from tutel_pack.spec import Swiglu

HERE = "tests.kernels.test_triton_amd"

LIKE = {
    name: replace(INTERPRETER, vendor="hip", converts_fp8=chip.converts_fp8, converts_fp4=chip.converts_fp4)
    for name, chip in CHIPS.items()
    if chip.vendor == "hip"
}
"""The interpreter with a chip's ways of decoding."""

DOTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _decode(
    words, bits, out, FMT: tl.constexpr, DOT: tl.constexpr, WAY: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = W * (4 if FMT == "fp8" else 8)
    row = tl.arange(0, R)[:, None]
    loaded = tl.load(words + row * W + tl.arange(0, W)[None, :])
    scales = tl.load(bits + row * B + tl.arange(0, B)[None, :])
    tl.store(out + row * K + tl.arange(0, K)[None, :], decode_by_amd(loaded, scales, FMT, DOT, WAY))


def decoded(w: PackedTensor, dtype: torch.dtype, way: str, wrong: str | None = None) -> torch.Tensor:
    """All of a weight, whose rows and columns are powers of two; run by a worker. wrong: of _WRONG."""
    kept = {name: getattr(instructions, name) for name in ("permuted", "averaged", "converted")}
    try:
        if wrong:
            setattr(instructions, *_WRONG[wrong])
        words, scale = w.data.view(torch.uint8).view(torch.int32), w.scale
        scale = scale.view(torch.int16 if scale.dtype == torch.bfloat16 else torch.uint8)
        out = torch.empty(w.shape, dtype=dtype)
        shape = w.shape[0], words.shape[1], scale.shape[1]
        _decode[(1,)](words, scale, out, w.format.name, DOTS[dtype], way, *shape)
        return out
    finally:
        for name, function in kept.items():
            setattr(instructions, name, function)


_permuted, _averaged, _converted = instructions.permuted, instructions.averaged, instructions.converted
_WRONG = {
    "operands swapped": ("permuted", lambda high, low, which: _permuted(low, high, which)),
    "rounded up": ("averaged", lambda a, b, up: _averaged(a, b, np.ones_like(up))),
    "bytes in another order": ("converted", lambda into, byte, *rest: _converted(into, 3 - byte, *rest)),
    "no scale": ("converted", lambda into, byte, words, scale: _converted(into, byte, words, np.ones_like(scale))),
}
"""How a manual might be misread."""


def every_code(fmt: str, scales: torch.Tensor) -> PackedTensor:
    """Every element, in every place of a word, under each of the scales of a row."""
    rows = 1 << (len(scales) - 1).bit_length()
    w = random_packed(fmt, (rows, 128))
    nibbles = (torch.arange(128) + torch.arange(128) // 16) % 16  # turned by one in every 16
    data = (nibbles[0::2] | nibbles[1::2] << 4).to(torch.uint8).repeat(rows, 1)
    scales = torch.cat([scales, scales[:1].expand(rows - len(scales))])[:, None].repeat(1, w.scale.shape[1])
    scales = scales.to(torch.int16 if w.scale.dtype == torch.bfloat16 else torch.uint8).view(w.scale.dtype)
    ones = None if w.global_scale is None else torch.ones_like(w.global_scale)
    return PackedTensor(w.format, w.shape, w.segments, data, scales, ones)


SCALES = {
    ("mxfp4", torch.bfloat16): torch.arange(255),  # 255 is NaN
    ("mxfp4", torch.float16): torch.arange(127 - 13, 127 + 14),  # what float16 has
    ("nvfp4", torch.bfloat16): torch.arange(127),
    ("nvfp4", torch.float16): torch.arange(127),
    ("int4", torch.bfloat16): torch.arange(0x3000, 0x3100),  # every mantissa, two exponents
    ("int4", torch.float16): torch.arange(0x3F00, 0x4000),
}


def expected(w: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded once: products of an element and a scale are exact in float32."""
    return torch.from_numpy(decode64(w)).float().to(dtype)


@pytest.mark.parametrize("chip", LIKE)
@pytest.mark.parametrize("fmt, dtype", SCALES, ids=[f"{fmt}-{dtype}" for fmt, dtype in SCALES])
def test_every_code_under_every_scale(fmt, dtype, chip):
    w = every_code(fmt, SCALES[fmt, dtype])
    way = way_of(LIKE[chip], fmt, DOTS[dtype])
    assert way == {"gfx942": "table", "gfx950": "conversion"}[chip]
    got = interpreted.submit(f"{HERE}:decoded", w, dtype, way).result()
    assert torch.equal(got, expected(w, dtype))


def every_byte() -> PackedTensor:
    """256 rows of every byte but the NaN of e4m3fn, each in every place of a word."""
    w = random_packed("fp8", (256, 16))
    codes = (torch.arange(256)[:, None] + 37 * torch.arange(16)[None, :]).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    w.data.view(torch.uint8)[:] = codes
    return replace(w, scale=torch.ones_like(w.scale))


@pytest.mark.parametrize("dtype", DOTS, ids=str)
def test_every_byte_as_fnuz(dtype):
    w = every_byte()
    assert way_of(LIKE["gfx942"], "fp8", DOTS[dtype]) == "fnuz"
    got = interpreted.submit(f"{HERE}:decoded", w, dtype, "fnuz").result()
    assert torch.equal(2 * got, expected(w, dtype)) and (w.data.view(torch.uint8) == 0x80).any()


@pytest.mark.parametrize("wrong", _WRONG)
def test_a_misread_manual_is_seen(wrong):
    fmt, way = {"permuted": ("nvfp4", "table"), "averaged": ("fp8", "fnuz"), "converted": ("mxfp4", "conversion")}[
        _WRONG[wrong][0]
    ]
    w = every_byte() if fmt == "fp8" else every_code(fmt, torch.arange(100, 127))
    got = interpreted.submit(f"{HERE}:decoded", w, torch.bfloat16, way, wrong).result()
    assert not torch.equal(got * (2 if fmt == "fp8" else 1), expected(w, torch.bfloat16))


def on(chip: str, name: str, *arguments) -> torch.Tensor:
    """An operation as on that chip, but for products of bfloat16, which the interpreter cannot do; run by a worker."""
    from tutel_pack.kernels.triton import backend, matmul

    kept = backend.chip_of, matmul.dot_type
    backend.chip_of = lambda device: LIKE[chip]
    matmul.dot_type = lambda chip, dtype: kept[1](replace(chip, vendor="interpreter"), dtype)
    try:
        return getattr(backend, name)(*arguments)
    finally:
        backend.chip_of, matmul.dot_type = kept


@pytest.mark.parametrize("chip", LIKE)
@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "nvfp4", "int4"])
def test_linear(fmt, chip):
    """Two segments, ragged in rows and columns."""
    w, x = random_packed(fmt, (160, 96), (130, 30)), x_of(5, 96, dtype=torch.float16)
    y = interpreted.submit(f"{HERE}:on", chip, "linear", x, w, None).result()
    assert worst_tile(y, linear64(x, decode64(w))) < tolerance(torch.float16, 96)


@pytest.mark.parametrize("chip, fmt", [("gfx942", "fp8"), ("gfx942", "nvfp4"), ("gfx950", "mxfp4")])
def test_moe(chip, fmt):
    case = MoeCase(9, 3, 5, 96, 80)
    x, ids, weights, gate_up, down = case.arguments(fmt, torch.float16)
    y = interpreted.submit(f"{HERE}:on", chip, "moe", x, ids, weights, gate_up, down, Swiglu(), None, None).result()
    wanted = moe64(x, ids, weights, decode64(gate_up), decode64(down))
    assert worst_tile(y, wanted, tokens_of_experts(ids, case.experts)) < tolerance(torch.float16, case.intermediate)


def test_fp8_in_float32():
    """Where a wrong bit cannot hide."""
    w = every_byte()
    x = x_of(4, 16, dtype=torch.float32)
    y = interpreted.submit(f"{HERE}:on", "gfx942", "linear", x, w, None).result()
    assert worst_tile(y, linear64(x, decode64(w))) < tolerance(torch.float32, 16)
