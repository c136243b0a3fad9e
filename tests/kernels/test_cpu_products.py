"""linear and moe of the native kernels: every format on every instruction set of this processor, against float64."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.reference import decode64, linear64, moe64, random_packed, tokens_of_experts, tolerance, worst_tile
from tests.kernels.test_products import MoeCase, x_of

from tutel_pack.formats import FORMATS, Format
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import get_ops

DTYPES = [torch.float32, torch.bfloat16]
WEIGHTS: dict[str, Format] = {
    **{name: FORMATS[name] for name in ("mxfp4", "nvfp4", "int4", "bf16", "fp8")},
    "fp8 1x128": FORMATS["fp8"].with_block((1, 128)),
    "fp8 32x32": FORMATS["fp8"].with_block((32, 32)),
    "fp8 per row": FORMATS["fp8"].with_block((1, 4096)),
    "fp8 whole": FORMATS["fp8"].with_block((4096, 4096)),
    "mxfp8": FORMATS["fp8"].with_scale((1, 32), torch.uint8),
}


def isas() -> list[str]:
    return native.available()


@pytest.fixture(params=isas())
def isa(request):
    """The operations by one instruction set."""
    native.select(request.param)
    yield get_ops("cpu")
    native.select(None)


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request):
    """Three do not divide anything evenly."""
    before = native.threads()
    native.set_threads(request.param)
    yield request.param
    native.set_threads(before)


LINEAR = {
    # T, segments of N, K
    "one token": (1, (17,), 96),
    "ragged": (5, (17,), 96),  # a group of columns cut short, and rows that threads do not share evenly
    "one row": (3, (1,), 160),
    "many rows": (2, (576,), 160),
    "gpt-oss's width": (2, (40,), 2880),
    "a batch": (8, (33,), 256),
    "more than a batch": (19, (70,), 288),
    "two segments": (4, (130, 30), 160),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", WEIGHTS)
@pytest.mark.parametrize("shape", LINEAR)
def test_linear(isa, shape, fmt, dtype):
    t, segments, k = LINEAR[shape]
    w = random_packed(WEIGHTS[fmt], (sum(segments), k), segments)
    x, bias = x_of(t, k, dtype=dtype), x_of(sum(segments), dtype=torch.bfloat16, seed=6)
    expected = linear64(x, decode64(w))
    for b in (None, bias, bias.float()):
        y = isa.linear(x, w, b)
        assert y.dtype == dtype
        assert worst_tile(y, expected if b is None else expected + b.double().numpy()) < tolerance(dtype, k)
