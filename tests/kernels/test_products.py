"""linear and moe against float64, worst tile and worst expert, and proof that the check sees what must be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from tests.kernels.reference import (
    ALL_FORMATS,
    DTYPES,
    QUANTIZED,
    decode64,
    linear64,
    moe64,
    random_packed,
    tokens_of_experts,
    tolerance,
    worst_tile,
)

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.ops import get_ops
from tutel_pack.quant.codec import decode

OPS = get_ops("torch")

LINEAR_SHAPES = {
    # T, segments of N, K
    "ragged": (5, (17,), 96),  # nothing is a multiple of a block
    "whole blocks": (4, (256,), 256),
    "two segments": (4, (130, 30), 160),  # a block row of each is cut short, and the second starts a new one
    "several tiles": (3, (1500,), 1024),  # more than is decoded at a time, the last tile a short one
    "rows filled up": (33, (17,), 96),  # the torch backend makes 40 of them on a CPU
    "one token": (1, (160,), 96),
    "no token": (0, (17,), 96),
}


def x_of(*shape: int, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ALL_FORMATS)
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_linear(shape, fmt, dtype):
    t, segments, k = LINEAR_SHAPES[shape]
    w = random_packed(fmt, (sum(segments), k), segments)
    x, bias = x_of(t, k, dtype=dtype), x_of(sum(segments), dtype=torch.bfloat16, seed=6)
    for b in (None, bias):
        y = OPS.linear(x, w, b)
        assert y.dtype == dtype
        assert worst_tile(y, linear64(x, decode64(w), b)) < tolerance(dtype, k)


@pytest.mark.parametrize("block", [(1, 128), (32, 32)], ids=str)
def test_linear_with_a_source_s_own_blocks(block):
    w = random_packed(FORMATS["fp8"].with_block(block), (150, 96), (100, 50))
    x = x_of(4, 96, dtype=torch.float32)
    assert worst_tile(OPS.linear(x, w), linear64(x, decode64(w))) < tolerance(torch.float32, 96)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plain", DTYPES, ids=str)
def test_linear_of_a_plain_weight(plain, dtype):
    """Of the compute dtype it is used as it is, of another it is cast a tile at a time (1500 × 1024 makes two)."""
    w, x = x_of(1500, 1024, dtype=plain), x_of(3, 1024, dtype=dtype)
    assert worst_tile(OPS.linear(x, w), linear64(x, w.double().numpy())) < tolerance(dtype, 1024)


@dataclass
class MoeCase:
    """top: ids [T, k]; drawn if None, a token's distinct."""

    tokens: int
    k: int
    experts: int
    hidden: int
    intermediate: int
    ids: list[list[int]] | None = None

    def arguments(self, fmt: str, dtype: torch.dtype):
        g = torch.Generator().manual_seed(3)
        e, h, i = self.experts, self.hidden, self.intermediate
        gate_up = random_packed(fmt, (e, 2 * i, h), (i, i), seed=1)
        down = random_packed(fmt, (e, h, i), seed=2)
        ids = torch.rand(self.tokens, e, generator=g).argsort(1)[:, : self.k]
        if self.ids is not None:
            ids = torch.tensor(self.ids)
        weights = torch.rand(ids.shape, generator=g) * 0.8 + 0.2
        return x_of(self.tokens, self.hidden, dtype=dtype), ids, weights, gate_up, down


MOE_CASES = {
    "ragged": MoeCase(17, 3, 5, 96, 160),  # hidden and intermediate are no multiples of 128, nor 17 of anything
    "whole blocks": MoeCase(9, 2, 3, 128, 256),
    "one token": MoeCase(1, 2, 4, 96, 160),  # as in decoding; most experts have no token
    "no token": MoeCase(0, 2, 4, 96, 160),
    "one hot expert": MoeCase(12, 1, 4, 96, 160, [[2]] * 12),
    "dropped": MoeCase(5, 3, 4, 96, 160, [[-1, 1, 3], [0, -1, -1], [-1, -1, -1], [2, 1, 0], [3, -1, 0]]),
    "all dropped": MoeCase(2, 2, 4, 96, 160, [[-1, -1]] * 2),
    "one expert twice": MoeCase(3, 2, 4, 96, 160, [[1, 1], [1, 2], [0, 0]]),  # no router does it, the contract allows
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ALL_FORMATS)
@pytest.mark.parametrize("case", MOE_CASES)
def test_moe(case, fmt, dtype):
    case = MOE_CASES[case]
    x, ids, weights, gate_up, down = case.arguments(fmt, dtype)
    y = OPS.moe(x, ids, weights, gate_up, down)
    assert y.dtype == dtype
    expected = moe64(x, ids, weights, decode64(gate_up), decode64(down))
    assert worst_tile(y, expected, tokens_of_experts(ids, case.experts)) < tolerance(dtype, case.intermediate)


def test_a_dropped_token_s_weight_does_not_matter():
    x, ids, weights, gate_up, down = MOE_CASES["dropped"].arguments("nvfp4", torch.float32)
    y = OPS.moe(x, ids, weights, gate_up, down)
    assert torch.equal(y, OPS.moe(x, ids, weights.masked_fill(ids < 0, torch.nan), gate_up, down))


def test_an_expert_that_does_not_exist_is_an_error():
    x, _, weights, gate_up, down = MOE_CASES["one hot expert"].arguments("bf16", torch.float32)
    for e in (4, -2):
        with pytest.raises((IndexError, RuntimeError)):
            OPS.moe(x, torch.full((12, 1), e), weights, gate_up, down)


@pytest.fixture
def decoded(monkeypatch) -> list[PackedTensor]:
    """Everything that is decoded, in order."""
    seen = []

    def spy(p, dtype):
        seen.append(p)
        return decode(p, dtype)

    monkeypatch.setattr(torch_backend, "decode", spy)
    return seen


def test_moe_decodes_only_the_experts_in_use(decoded):
    x, ids, weights, gate_up, down = MOE_CASES["one hot expert"].arguments("mxfp4", torch.float32)
    OPS.moe(x, ids, weights, gate_up, down)
    used = [range(w.expert(2).data.data_ptr(), w.expert(3).data.data_ptr()) for w in (gate_up, down)]
    assert decoded and all(any(p.data.data_ptr() in expert for expert in used) for p in decoded)


def test_few_numbers_of_rows_reach_the_library(monkeypatch):
    """oneDNN keeps a compiled kernel for each, almost a megabyte."""
    seen = set()
    product = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: seen.add(len(x)) or product(x, *rest))
    w = x_of(16, 16, dtype=torch.bfloat16)
    for rows in range(1, 1025):
        assert OPS.linear(torch.ones(rows, 16, dtype=torch.bfloat16), w).shape == (rows, 16)
    assert len(seen) < 40 and max(seen) == 1024


def test_linear_decodes_a_tile_at_a_time(decoded):
    OPS.linear(x_of(2, 1024, dtype=torch.float32), random_packed("fp8", (5000, 1024)))
    assert sum(p.shape[0] for p in decoded) == 5000 and all(p.shape[0] <= 1024 for p in decoded)


@pytest.mark.parametrize("device, tiles", [("cpu", 4), ("meta", 1)])
def test_an_accelerator_converts_large_tiles(device, tiles, monkeypatch):
    """Of a plain matrix, whose launches would take longer than its bytes."""
    calls = []
    monkeypatch.setattr(torch_backend.F, "linear", lambda x, w, b: calls.append(w.shape) or x.new_zeros(len(x), len(w)))
    w = torch.zeros(4096, 1024, dtype=torch.bfloat16, device=device)
    torch_backend.linear(torch.zeros(1, 1024, device=device), w, None)
    assert len(calls) == tiles and sum(n for n, _ in calls) == 4096


def test_shapes_that_do_not_fit_are_named():
    x, w = torch.ones(2, 96), random_packed("bf16", (17, 96))
    with pytest.raises(ValueError, match=r"linear cannot take arguments of shapes \(2, 95\), \(17, 96\)"):
        OPS.linear(x[:, 1:], w)
    with pytest.raises(ValueError, match=r"linear cannot .* \(2, 96\), \(17, 96\), \(16,\)"):
        OPS.linear(x, w, torch.ones(16))
    experts = random_packed("bf16", (2, 17, 96))
    with pytest.raises(ValueError, match=r"moe cannot .* \(2, 96\), \(2, 17, 96\), \(2, 17, 96\)"):
        OPS.moe(x, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), experts, experts)


# Negative controls. Each does to one expert, or to one block of a matrix, what a faulty kernel would; the op then runs
# on the damaged weight and is judged by the right one. Wherever the check did not fail, it would prove nothing.


def altered(p: PackedTensor, **parts: torch.Tensor) -> PackedTensor:
    return replace(p, **parts)


def on_bytes(t: torch.Tensor, change: Callable[[torch.Tensor], None]) -> torch.Tensor:
    t = t.clone()
    change(t.view(torch.uint8))
    return t


def swap_nibbles(p: PackedTensor, e: int) -> PackedTensor:
    def change(data):
        data[e] = data[e] << 4 | data[e] >> 4

    return altered(p, data=on_bytes(p.data, change))


def kill(p: PackedTensor, e: int) -> PackedTensor:
    return altered(p, data=on_bytes(p.data, lambda data: data[e].zero_()))


def neighbours_scales(p: PackedTensor, e: int) -> PackedTensor:
    """Every block takes the scale of the one beside it in K: an index off by one."""
    return altered(p, scale=on_bytes(p.scale, lambda scale: scale[e].copy_(scale[e].roll(p.scale.itemsize, 1))))


def one_neighbours_scale(p: PackedTensor, e: int) -> PackedTensor:
    """The first block of the first row of blocks takes the scale of one beside it that differs."""
    scale = p.scale.clone()
    row = scale.view(torch.uint8)[e, 0].view(-1, scale.itemsize)
    row[0] = next(other for other in row if not torch.equal(other, row[0]))
    return altered(p, scale=scale)


def next_expert_s_scales(p: PackedTensor, e: int) -> PackedTensor:
    def change(scale):
        scale[e] = scale[e + 1].clone()

    return altered(p, scale=on_bytes(p.scale, change))


def next_expert_s_global(p: PackedTensor, e: int) -> PackedTensor:
    scale = p.global_scale.clone()
    scale[e] = scale[e + 1]
    return altered(p, global_scale=scale)


def swap_halves(p: PackedTensor, e: int) -> PackedTensor:
    """Gate for up: rows, their scales and their global scales."""

    def swap(part):
        return on_bytes(part, lambda b: b[e].copy_(b[e].roll(b[e].shape[0] // 2, 0)))

    return altered(p, data=swap(p.data), **({"scale": swap(p.scale)} if p.scale is not None else {}))


CONTROLS = {
    "swapped nibbles": (swap_nibbles, ["mxfp4", "nvfp4"]),
    "a dead expert": (kill, ALL_FORMATS),
    "the neighbours' scales": (neighbours_scales, QUANTIZED),
    "the next expert's scales": (next_expert_s_scales, QUANTIZED),
    "the next expert's global scale": (next_expert_s_global, ["nvfp4"]),
    "gate and up swapped": (swap_halves, ALL_FORMATS),
}
# 160 and 288 columns make several blocks in each format, so that a block has a neighbour.
CONTROL_CASE = MoeCase(24, 2, 4, 160, 288)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("damage,fmt", [(name, fmt) for name, (_, formats) in CONTROLS.items() for fmt in formats])
def test_the_check_of_moe_sees(damage, fmt, dtype):
    x, ids, weights, gate_up, down = CONTROL_CASE.arguments(fmt, dtype)
    expected = moe64(x, ids, weights, decode64(gate_up), decode64(down))
    groups = tokens_of_experts(ids, CONTROL_CASE.experts)
    limit = tolerance(dtype, CONTROL_CASE.intermediate)
    change, _ = CONTROLS[damage]
    damaged = [(change(gate_up, 1), down)]
    if damage != "gate and up swapped":
        damaged.append((gate_up, change(down, 1)))
    for pair in damaged:
        assert worst_tile(OPS.moe(x, ids, weights, *pair), expected, groups) > limit
    assert worst_tile(torch.zeros_like(x), expected, groups) > limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", QUANTIZED)
def test_the_check_of_linear_sees_one_block(fmt, dtype):
    stack, x = random_packed(fmt, (1, 256, 288)), x_of(8, 288, dtype=dtype)
    expected, limit = linear64(x, decode64(stack.expert(0))), tolerance(dtype, 288)
    assert worst_tile(OPS.linear(x, one_neighbours_scale(stack, 0).expert(0)), expected) > limit
    if fmt != "fp8":
        assert worst_tile(OPS.linear(x, swap_nibbles(stack, 0).expert(0)), expected) > limit


def test_the_check_sees_zeros_and_nan():
    expected = linear64(x_of(8, 96, dtype=torch.float32), x_of(32, 96, dtype=torch.float32).double().numpy())
    for value in (0.0, torch.nan):
        y = torch.from_numpy(expected.copy())
        y[:, 16:] = value
        assert worst_tile(y, expected) > tolerance(torch.bfloat16, 96)
