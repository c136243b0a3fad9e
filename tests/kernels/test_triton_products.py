"""linear and moe of the triton backend in the interpreter, against float64: worst tile and worst expert.

A case is what one call costs the interpreter, half a second for each tile of 128 rows: shapes are as small as what they
show allows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import interpreted
from tests.kernels.reference import (
    decode64,
    linear64,
    moe64,
    random_packed,
    swiglu64,
    tokens_of_experts,
    tolerance,
    worst_tile,
)
from tests.kernels.test_products import CONTROLS, MoeCase, one_neighbours_scale, x_of

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.kernels.ops import Dense, get_ops
from tutel_pack.spec import ClampedSwiglu, Swiglu

FORMATS_HERE = ["fp8", "mxfp4", "nvfp4", "int4"]

LINEAR = {
    # T, segments of N, K
    "ragged": (5, (17,), 96),  # nothing is whole: rows, columns, the one step along K
    "one row": (3, (1,), 160),
    "a ragged last step": (2, (17,), 2880),  # 22.5 steps of 128 columns, in parts that are added up
    "two segments": (1, (130, 30), 160),  # the second begins a block row of its own, within a tile
    "several tiles": (33, (160,), 128),  # of tokens and of rows, the last ones short
}


@pytest.mark.parametrize("fmt", FORMATS_HERE)
@pytest.mark.parametrize("shape", LINEAR)
def test_linear(shape, fmt):
    t, segments, k = LINEAR[shape]
    dtype = torch.float16 if shape == "ragged" else torch.bfloat16
    w, x = random_packed(fmt, (sum(segments), k), segments), x_of(t, k, dtype=dtype)
    bias = x_of(sum(segments), dtype=torch.bfloat16, seed=6)
    y = interpreted.op("linear", x, w, bias).result()
    assert y.dtype == dtype
    assert worst_tile(y, linear64(x, decode64(w), bias)) < tolerance(dtype, k)


@pytest.mark.parametrize("fmt", FORMATS_HERE)
def test_linear_in_float32(fmt):
    """Where a wrong bit of a weight cannot hide behind the rounding of the rest."""
    w, x = random_packed(fmt, (40, 96)), x_of(3, 96, dtype=torch.float32)
    y = interpreted.op("linear", x, w).result()
    assert worst_tile(y, linear64(x, decode64(w))) < tolerance(torch.float32, 96)


PLAIN = {
    # dtypes of the weight and of x: those of heads and routers, and what other sources would make of them
    "a head": (torch.bfloat16, torch.float32),
    "a head in float16": (torch.float16, torch.float32),
    "a router in float32": (torch.float32, torch.bfloat16),
    "float16": (torch.bfloat16, torch.float16),
}


@pytest.mark.parametrize("case", PLAIN)
def test_linear_of_plain_weights(case):
    """Ragged in all dimensions, with more tokens than a tile of float32 ones has; a matrix of 2880 columns in parts."""
    dtype, of_x = PLAIN[case]
    for t, n, k in ((33, 150, 96), (2, 17, 2880)):
        w, x = x_of(n, k, dtype=dtype, seed=3) * k**-0.5, x_of(t, k, dtype=of_x)
        bias = x_of(n, dtype=torch.bfloat16, seed=6)
        y = interpreted.op("linear", x, w, bias).result()
        assert y.dtype == of_x
        assert worst_tile(y, linear64(x, w.double().numpy(), bias)) < tolerance(of_x, k)


def all_bits() -> torch.Tensor:
    """float32 [7, 96] of any size whose last bit is no subnormal."""
    bits = torch.randint(-(2**31), 2**31, (7, 96), generator=torch.Generator().manual_seed(1)).int()
    x = bits.view(torch.float32)
    x = torch.where(x.isfinite() & (x.abs() > 2.0**-100), x, 1.0)
    x[0, :2] = torch.tensor([torch.finfo(torch.float32).max, -(2.0**-100)])
    return x


def test_float32_tokens_keep_all_of_their_bits():
    """By weights of one, whatever their sizes; by others, bits that are left out would be seen."""
    x = all_bits()
    ones = interpreted.op("linear", x, torch.eye(96, dtype=torch.bfloat16))
    w, x1 = random_packed("fp8", (40, 96)), x_of(3, 96, dtype=torch.float32)
    expected, limit = linear64(x1, decode64(w)), tolerance(torch.float32, 96)
    fewer = [(x1.view(torch.int32) & -(1 << bits)).view(torch.float32) for bits in (0, 8, 16)]
    cut = [interpreted.op("linear", x, w) for x in fewer]
    assert torch.equal(ones.result(), x)
    assert [worst_tile(y.result(), expected) < limit for y in cut] == [True, False, False]


GEOMETRIES = {
    "a row": FORMATS["fp8"].with_block((1, 96)),
    "32 × 32": FORMATS["fp8"].with_block((32, 32)),
    "MXFP8": FORMATS["fp8"].with_scale((1, 32), torch.uint8),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_linear_with_a_source_s_own_blocks(geometry):
    fmt = GEOMETRIES[geometry]
    if fmt.scale_dtype == torch.uint8:
        w = random_packed(fmt.with_scale(fmt.block, torch.float32), (70, 96), (40, 30))
        exponents = torch.randint(112, 120, w.scale.shape, generator=torch.Generator().manual_seed(2)).to(torch.uint8)
        exponents[0, 0] = 0  # 2^-127, which float32 has as a subnormal
        floats = replace(w, scale=2.0 ** (exponents.float() - 127))
        w = replace(w, format=fmt, scale=exponents)
    else:
        w = floats = random_packed(fmt, (70, 96), (40, 30))
    x = x_of(4, 96, dtype=torch.float32)
    y = interpreted.op("linear", x, w).result()
    assert worst_tile(y, linear64(x, decode64(floats))) < tolerance(torch.float32, 96)


def natively(x: torch.Tensor, w: PackedTensor) -> torch.Tensor:
    """linear as on a chip that converts fp8 by itself; run by a worker."""
    from tutel_pack.kernels.triton import backend, chips

    kept = backend.chip_of
    backend.chip_of = lambda device: replace(chips.INTERPRETER, converts_fp8="e4m3fn")
    try:
        return backend.linear(x, w, None)
    finally:
        backend.chip_of = kept


def test_fp8_that_the_chip_converts():
    """Every code; the last step is ragged."""
    w, x = random_packed("fp8", (256, 160)), x_of(4, 160, dtype=torch.float32)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    w.data.view(torch.uint8)[:] = codes[:, None]
    y = interpreted.submit("tests.kernels.test_triton_products:natively", x, w).result()
    assert worst_tile(y, linear64(x, decode64(w))) < tolerance(torch.float32, 160)


def test_every_code_under_every_scale():
    """Two rows of each of the scales that a weight may have, and of each 4-bit code: exact in float32."""
    scales = {"mxfp4": torch.arange(60, 190), "nvfp4": torch.arange(127), "int4": torch.arange(0x3000, 0x3100)}
    calls = {}
    for fmt, codes in scales.items():
        w = random_packed(fmt, (len(codes), 32))
        data = torch.arange(0, 256, 17).repeat(len(codes), 1)
        scale = codes[:, None].repeat(1, w.scale.shape[1])
        scale = scale.to(torch.int16 if fmt == "int4" else torch.uint8).view(w.scale.dtype)
        ones = None if w.global_scale is None else torch.ones_like(w.global_scale)
        w = PackedTensor(w.format, w.shape, w.segments, data.to(torch.uint8), scale, ones)
        # Every column alone.
        calls[fmt] = w, interpreted.op("linear", torch.eye(32), w)
    for fmt, (w, y) in calls.items():
        assert np.array_equal(y.result().double().numpy(), decode64(w).T), fmt


MOE = {
    "ragged": MoeCase(9, 3, 5, 96, 80),  # hidden and intermediate are no multiples of a step, a tile or a block of fp8
    "one token": MoeCase(1, 2, 4, 96, 32),
    "one hot expert": MoeCase(20, 1, 4, 96, 32, [[2]] * 20),  # more than a tile of tokens
    "dropped": MoeCase(4, 3, 4, 96, 32, [[-1, 1, 3], [0, -1, -1], [-1, -1, -1], [2, 1, 7]]),  # 7 does not exist
}


def _check_moe(case: MoeCase, y: torch.Tensor, arguments: tuple, **rest) -> None:
    x, ids, weights, gate_up, down = arguments
    ids = ids.masked_fill(ids >= case.experts, -1)
    expected = moe64(x, ids, weights, decode64(gate_up), decode64(down), **rest)
    assert y.dtype == x.dtype
    assert worst_tile(y, expected, tokens_of_experts(ids, case.experts)) < tolerance(x.dtype, case.intermediate)


@pytest.mark.parametrize("case", MOE)
def test_moe(case):
    case = MOE[case]
    formats = [*FORMATS_HERE, "bf16"] if case is MOE["ragged"] else ["fp8", "nvfp4"]
    arguments = {fmt: case.arguments(fmt, torch.bfloat16) for fmt in formats}
    for y, made in [(interpreted.op("moe", *made), made) for made in arguments.values()]:
        _check_moe(case, y.result(), made)


def test_no_tokens():
    x, ids, weights, gate_up, down = MoeCase(0, 2, 4, 96, 32).arguments("mxfp4", torch.bfloat16)
    assert interpreted.op("moe", x, ids, weights, gate_up, down).result().shape == (0, 96)


ACTIVATION = ClampedSwiglu(0.5, 1.702, 1.0)


def clamped64(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def test_clamped_swiglu_with_biases():
    case = MoeCase(5, 2, 3, 96, 64)
    made = case.arguments("mxfp4", torch.bfloat16)
    biases = x_of(3, 128, dtype=torch.bfloat16, seed=7), x_of(3, 96, dtype=torch.bfloat16, seed=8)
    y = interpreted.op("moe", *made, ACTIVATION, *biases)
    _check_moe(case, y.result(), made, activation=clamped64, gate_up_bias=biases[0], down_bias=biases[1])


def in_parts(arguments: tuple, activation, biases: tuple, parts: int, run: int) -> torch.Tensor:
    """moe with the K of both products in parts, and decoded words in an order of their own; run by a worker."""
    import dataclasses

    from tutel_pack.kernels.triton import backend, matmul, tiles

    rule = tiles.table_of(backend.chip_of(torch.device("cpu")))["rule"]

    def tile_for(chip, problem):
        return dataclasses.replace(tiles.Tile(problem.bm, **rule[problem.fmt][str(problem.bm)]), split=parts)

    kept = backend.tile_for, matmul.fragment_run
    backend.tile_for, matmul.fragment_run = tile_for, lambda chip, dot: run
    try:
        return backend.moe(*arguments, activation, *biases)
    finally:
        backend.tile_for, matmul.fragment_run = kept


def test_parts_of_k_and_orders_of_columns():
    """The natural one, and those of matrix instructions for Triton from 3.8 on and before."""
    case = MoeCase(3, 2, 3, 288, 160)
    made = case.arguments("nvfp4", torch.bfloat16)
    biases = x_of(3, 320, dtype=torch.bfloat16, seed=7), x_of(3, 288, dtype=torch.bfloat16, seed=8)
    rest = {"activation": clamped64, "gate_up_bias": biases[0], "down_bias": biases[1]}
    function = "tests.kernels.test_triton_products:in_parts"
    calls = [interpreted.submit(function, made, ACTIVATION, biases, *how) for how in ((2, 1), (1, 0), (1, 2))]
    for y in calls:
        _check_moe(case, y.result(), made, **rest)


def jointly(op: str, split: int, *arguments) -> tuple[list[torch.Tensor], list[str]]:
    """Run by a worker: linears or dense, and the kernels that it takes. split: parts of the widest weight's K; the
    others' would be whole."""
    from tutel_pack.kernels.triton import matmul
    from tutel_pack.kernels.triton.launch import Launch

    ops, kept, names = get_ops("triton"), (matmul.tile_for, Launch.run), []
    widest = max(w.shape[0] for w, _ in (arguments[1] if op == "linears" else (arguments[1].gate,)))
    matmul.tile_for = lambda chip, p: replace(kept[0](chip, p), split=split if p.n == widest else 1)
    Launch.run = lambda self: names.append(self.kernel.__name__) or kept[1](self)
    try:
        out = getattr(ops, op)(*arguments)
    finally:
        matmul.tile_for, Launch.run = kept
    return [*out] if op == "linears" else [out], names


def submit_jointly(*arguments):
    return interpreted.submit("tests.kernels.test_triton_products:jointly", *arguments)


@pytest.mark.parametrize("fmt", FORMATS_HERE)
def test_linears_share_a_sum(fmt):
    """Where there is one, and no bias: otherwise they are made one by one."""
    x, rows = x_of(3, 288, dtype=torch.float32), (40, 17, 130)
    parts = [(random_packed(fmt, (n, 288), seed=n), None) for n in rows]
    biased = [*parts[:2], (parts[2][0], x_of(130, dtype=torch.float32))]
    runs = [submit_jointly("linears", *how) for how in ((2, x, parts), (1, x, parts), (2, x, biased))]
    for run, finishes, given in zip(runs, (1, 0, 0), (parts, parts, biased)):
        got, names = run.result()
        assert names == ["grouped_matmul"] * 3 + ["finish"] * finishes
        for y, (w, bias) in zip(got, given, strict=True):
            assert worst_tile(y, linear64(x, decode64(w), bias)) < tolerance(torch.float32, 288)
    first, second, _ = got
    assert worst_tile(first[:, :17], linear64(x, decode64(parts[1][0]))) > tolerance(torch.float32, 288)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [Swiglu(), ACTIVATION], ids=["swiglu", "clamped"])
def test_dense_shares_a_sum(activation, dtype):
    shapes, x = ((96, 288), (96, 288), (50, 96)), x_of(5, 288, dtype=dtype)
    gate, up, down = (random_packed("nvfp4", shape, seed=i) for i, shape in enumerate(shapes))
    dense = Dense((gate, None), (up, None), (down, None), activation)
    swapped = replace(dense, gate=dense.up, up=dense.gate)
    runs = [submit_jointly("dense", split, x, given) for split, given in ((2, dense), (1, dense), (2, swapped))]
    inner = (clamped64 if activation is ACTIVATION else swiglu64)(*(linear64(x, decode64(w)) for w in (gate, up)))
    expected = np.stack([decode64(down) @ row for row in inner])
    (joint,), names = runs[0].result()
    assert names == ["grouped_matmul", "grouped_matmul", "finish", "grouped_matmul"]
    for (got,), _ in (runs[0].result(), runs[1].result()):
        assert worst_tile(got, expected) < tolerance(dtype, 288)
    (wrong,), _ = runs[2].result()
    assert worst_tile(wrong, expected) > tolerance(dtype, 288) < worst_tile(torch.zeros_like(joint), expected)


def test_many_experts():
    """384, of which few are used: tables longer than the tiles."""
    case = MoeCase(2, 2, 384, 32, 16, [[383, 0], [128, 383]])
    made = case.arguments("mxfp4", torch.bfloat16)
    _check_moe(case, interpreted.op("moe", *made).result(), made)


# Negative controls: what a faulty kernel would do, done to a weight; the result must not pass for the right one's.

CONTROL_CASE = MoeCase(12, 2, 3, 160, 160)


@pytest.mark.parametrize("fmt", FORMATS_HERE)
def test_the_check_of_moe_sees(fmt):
    """By torch's results, as the check does not know where they come from."""
    x, ids, weights, gate_up, down = CONTROL_CASE.arguments(fmt, torch.bfloat16)
    expected, groups = moe64(x, ids, weights, decode64(gate_up), decode64(down)), tokens_of_experts(ids, 3)
    limit = tolerance(torch.bfloat16, CONTROL_CASE.intermediate)
    moe = get_ops("torch").moe
    assert worst_tile(moe(x, ids, weights, gate_up, down), expected, groups) < limit
    for name, (damage, formats) in CONTROLS.items():
        if fmt in formats or (fmt == "int4" and "mxfp4" in formats):
            assert worst_tile(moe(x, ids, weights, damage(gate_up, 1), down), expected, groups) > limit, name
            if name != "gate and up swapped":
                assert worst_tile(moe(x, ids, weights, gate_up, damage(down, 1)), expected, groups) > limit, name
    assert worst_tile(torch.zeros_like(x), expected, groups) > limit


def test_the_kernels_read_what_is_damaged():
    """One block's scale, one expert's nibbles, one expert's global scale."""
    case = MoeCase(6, 2, 3, 96, 48)
    x, ids, weights, gate_up, down = case.arguments("nvfp4", torch.bfloat16)
    expected, groups = moe64(x, ids, weights, decode64(gate_up), decode64(down)), tokens_of_experts(ids, 3)
    damaged = [CONTROLS[name][0](gate_up, 1) for name in ("swapped nibbles", "the next expert's global scale")]
    calls = [interpreted.op("moe", x, ids, weights, w, down) for w in damaged]
    w, x1 = random_packed("nvfp4", (1, 20, 96)), x_of(8, 96, dtype=torch.bfloat16)
    one = interpreted.op("linear", x1, one_neighbours_scale(w, 0).expert(0))
    limit = tolerance(torch.bfloat16, 96)
    assert all(worst_tile(y.result(), expected, groups) > limit for y in calls)
    assert worst_tile(one.result(), linear64(x1, decode64(w.expert(0)))) > limit


