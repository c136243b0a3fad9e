"""linear and moe of the native kernels: every format on every instruction set of this processor, against float64."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tests.kernels.reference import (
    UNIT,
    decode64,
    linear64,
    moe64,
    random_packed,
    tokens_of_experts,
    tolerance,
    worst_tile,
)
from tests.kernels.test_products import CONTROLS, MOE_CASES, MoeCase, one_neighbours_scale, x_of

from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, Format, PackedTensor
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import get_ops
from tutel_pack.spec import ClampedSwiglu

DTYPES = [torch.float32, torch.bfloat16]
WEIGHTS: dict[str, Format] = {
    **{name: FORMATS[name] for name in ("mxfp4", "nvfp4", "int4", "bf16", "fp8")},
    "fp8 1x128": FORMATS["fp8"].with_block((1, 128)),
    "fp8 32x32": FORMATS["fp8"].with_block((32, 32)),
    "fp8 per row": FORMATS["fp8"].with_block((1, 4096)),
    "fp8 whole": FORMATS["fp8"].with_block((4096, 4096)),
    "mxfp8": FORMATS["fp8"].with_scale((1, 32), torch.uint8),
}


@pytest.fixture(params=native.available())
def isa(request):
    """The operations by one instruction set."""
    native.select(request.param)
    yield get_ops("cpu")
    native.select(None)


@pytest.fixture
def three_threads():
    """They do not divide anything evenly."""
    before = native.threads()
    native.set_threads(3)
    yield
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
    # Sums are kept between chunks of columns, those of three blocks of tokens at the end.
    "three blocks": (48, (40,), 288),
    "five blocks": (75, (33,), 544),
    "ten blocks": (150, (33,), 1056),
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


MOE = {
    **MOE_CASES,
    # Most experts have no token, some have more than a pass over a weight takes.
    "128 experts": MoeCase(40, 8, 128, 96, 96),
    "384 experts": MoeCase(3, 6, 384, 96, 32),
    # Tiles of one, two and three blocks of 16 tokens, whole ones and not.
    "counts": MoeCase(147, 1, 7, 160, 288, [[e] for e, n in enumerate((1, 15, 16, 17, 33, 8, 57)) for _ in range(n)]),
    "a hot expert of gpt-oss's width": MoeCase(37, 1, 2, 2880, 96, [[1]] * 37),
}
FORMATS_OF_EXPERTS = ["mxfp4", "nvfp4", "int4", "fp8", "bf16", "mxfp8"]


@cache
def moe_arguments(case: str, fmt: str, dtype: torch.dtype):
    """Arguments of Ops.moe, and what it must give: made once, for every instruction set judges the same."""
    arguments = MOE[case].arguments(WEIGHTS[fmt], dtype)
    x, ids, weights, gate_up, down = arguments
    return arguments, moe64(x, ids, weights, decode64(gate_up), decode64(down))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS_OF_EXPERTS)
@pytest.mark.parametrize("case", MOE)
def test_moe(isa, three_threads, case, fmt, dtype):
    arguments, expected = moe_arguments(case, fmt, dtype)
    y = isa.moe(*arguments)
    assert y.dtype == dtype
    groups = tokens_of_experts(arguments[1], MOE[case].experts)
    assert worst_tile(y, expected, groups) < tolerance(dtype, MOE[case].intermediate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [2, 40], ids=["decoding", "many tokens"])
def test_moe_with_biases_and_a_clamped_activation(isa, tokens, dtype):
    case, activation = MoeCase(tokens, 2, 4, 96, 160), ClampedSwiglu(1.5, 1.702, 1.0)
    x, ids, weights, gate_up, down = case.arguments("mxfp4", dtype)
    biases = x_of(4, 320, dtype=torch.bfloat16, seed=7), x_of(4, 96, dtype=torch.float32, seed=8)
    expected = np.zeros(x.shape)
    for t in range(tokens):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist()):
            both = decode64(gate_up.expert(e)) @ x[t].double().numpy() + biases[0][e].double().numpy()
            g, u = both[:160].clip(max=1.5), both[160:].clip(-1.5, 1.5)
            inner = g / (1 + np.exp(-1.702 * g)) * (u + 1)
            expected[t] += weight * (decode64(down.expert(e)) @ inner + biases[1][e].double().numpy())

    def error(*biases):
        y = isa.moe(x, ids, weights, gate_up, down, activation, *biases)
        return worst_tile(y, expected, tokens_of_experts(ids, 4))

    limit = tolerance(dtype, 160)
    assert error(*biases) < limit
    assert error(biases[0].roll(1, 0), biases[1]) > limit and error(biases[0].roll(160, 1), biases[1]) > limit
    assert error(biases[0], biases[1].roll(1, 1)) > limit and error(None, biases[1]) > limit


@pytest.mark.parametrize("formats", [("mxfp4", "fp8"), ("fp8", "nvfp4"), ("int4", "bf16"), ("bf16", "int4")], ids=str)
def test_moe_of_two_formats(isa, three_threads, formats):
    """What experts pass on has the order of columns that the second format wants, with zeros behind its end: 288 are
    two groups of FP4 and a quarter. 140 vectors of an expert are more than tiles have sums for."""
    case = MoeCase(150, 2, 3, 160, 288, [[0, 1]] * 140 + [[2, 1]] * 9 + [[1, -1]])
    x, ids, weights, gate_up, _ = case.arguments(WEIGHTS[formats[0]], torch.bfloat16)
    down = case.arguments(WEIGHTS[formats[1]], torch.bfloat16)[-1]
    expected = moe64(x, ids, weights, decode64(gate_up), decode64(down))
    y = isa.moe(x, ids, weights, gate_up, down)
    assert worst_tile(y, expected, tokens_of_experts(ids, 3)) < tolerance(torch.bfloat16, 288)


@pytest.mark.parametrize("case", ["dropped", "all dropped"])
def test_a_dropped_token_s_weight_does_not_matter(isa, case):
    (x, ids, weights, gate_up, down), _ = moe_arguments(case, "nvfp4", torch.float32)
    y = isa.moe(x, ids, weights, gate_up, down)
    assert torch.equal(y, isa.moe(x, ids, weights.masked_fill(ids < 0, torch.nan), gate_up, down))


def test_an_expert_that_does_not_exist_is_an_error(isa):
    (x, ids, weights, gate_up, down), _ = moe_arguments("one hot expert", "bf16", torch.float32)
    for e in (4, -2):
        with pytest.raises(IndexError, match="an expert id is outside"):
            isa.moe(x, torch.full_like(ids, e), weights, gate_up, down)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [24, 90], ids=["few tokens an expert", "tiles"])
@pytest.mark.parametrize("damage,fmt", [(name, fmt) for name, (_, formats) in CONTROLS.items() for fmt in formats])
def test_the_check_of_moe_sees(isa, damage, fmt, tokens, dtype):
    case = MoeCase(tokens, 2, 4, 160, 288)
    x, ids, weights, gate_up, down = case.arguments(fmt, dtype)
    expected, groups = control_expected(fmt, tokens, dtype), tokens_of_experts(ids, case.experts)
    change, limit = CONTROLS[damage][0], tolerance(dtype, case.intermediate)
    damaged = [(change(gate_up, 1), down)]
    if damage != "gate and up swapped":
        damaged.append((gate_up, change(down, 1)))
    for pair in damaged:
        assert worst_tile(isa.moe(x, ids, weights, *pair), expected, groups) > limit


@cache
def control_expected(fmt: str, tokens: int, dtype: torch.dtype):
    x, ids, weights, gate_up, down = MoeCase(tokens, 2, 4, 160, 288).arguments(fmt, dtype)
    return moe64(x, ids, weights, decode64(gate_up), decode64(down))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "nvfp4"])
def test_the_check_of_linear_sees_one_block(isa, fmt, dtype):
    stack = random_packed(fmt, (1, 256, 288))
    for tokens in (1, 40):
        x = x_of(tokens, 288, dtype=dtype)
        expected, limit = linear64(x, decode64(stack.expert(0))), tolerance(dtype, 288)
        assert worst_tile(isa.linear(x, one_neighbours_scale(stack, 0).expert(0)), expected) > limit


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "nvfp4", "int4"])
def test_every_code_of_an_element(isa, fmt):
    """One row per code, all of it in every column, with vectors that pick out a column each."""
    codes, fmt = (16 if FORMATS[fmt].per_item == 2 else 256), FORMATS[fmt]
    w = random_packed(fmt, (codes, 128))
    data = torch.arange(codes, dtype=torch.uint8)[:, None].expand(codes, 128 // fmt.per_item)
    data = data * 17 if fmt.per_item == 2 else data
    w = replace(w, data=data.contiguous().view(w.data.dtype))
    # Tiles take many vectors, other code takes one, and that reads the columns of a byte apart.
    ways = {"many": lambda x: isa.linear(x, w), "one by one": lambda x: torch.cat([isa.linear(v[None], w) for v in x])}
    for dtype, linear in itertools.product(DTYPES, ways.values()):
        y = linear(torch.eye(128, dtype=dtype))
        expected = torch.from_numpy(decode64(w).T)
        assert torch.equal(y.isnan(), expected.isnan())
        error = (y.double() - expected)[~expected.isnan()].abs()
        # Twice: fp8 may be rounded when it is decoded, and all are when they are returned.
        assert (error <= 2.01 * UNIT[dtype] * expected[~expected.isnan()].abs()).all()


def test_every_scale_of_mxfp4(isa):
    """2^−125 … 2^125: what bfloat16 multiplies with float32 sums. NaN makes its row NaN where vectors are few."""
    w = random_packed("mxfp4", (251, 32))
    w = replace(w, scale=torch.arange(2, 253, dtype=torch.uint8)[:, None].contiguous(), data=torch.full_like(w.data, 0x22))
    for tokens in (1, 20):
        x = torch.zeros(tokens, 32, dtype=torch.bfloat16)
        x[:, 3] = 1
        y = isa.linear(x, w)
        assert torch.equal(y.double(), torch.from_numpy(decode64(w)[:, 3]).expand(tokens, -1))


@pytest.mark.parametrize("size", [2.0**-90, 1.0, 2.0**90])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4"])
def test_a_vector_with_outliers(isa, fmt, size):
    """They meet weights of zero, so that what is small beside them is the result: nothing of it may be lost."""
    w, k = random_packed(fmt, (33, 160)), 160
    w.data.view(torch.uint8)[:, 3::4] &= 0xF0  # columns 6, 14, …
    x = (torch.rand(1, k, generator=torch.Generator().manual_seed(3)) * 0.75 + 0.25).to(torch.bfloat16)
    x[:, 1::3] *= -1
    x[:, 6::8] = 2.0**12
    limit = tolerance(torch.float32, k)
    y = isa.linear((x * size).float(), w)
    assert worst_tile(y / size, linear64(x, decode64(w))) < limit
    x[:, ::8] *= 1 + 2**-7
    assert worst_tile(y / size, linear64(x, decode64(w))) > limit


@pytest.mark.parametrize("fmt", WEIGHTS)
def test_a_vector_that_is_not_finite_gives_nothing_finite(isa, fmt):
    w = random_packed(WEIGHTS[fmt], (17, 288))
    met = torch.from_numpy(decode64(w)[:, 77] != 0)
    assert met.any()
    for dtype, bad in itertools.product(DTYPES, (torch.nan, torch.inf, -torch.inf)):
        x = x_of(1, 288, dtype=dtype)
        x[0, 77] = bad
        assert not isa.linear(x, w)[0, met].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outlier", [2.0**12, 2.0**20, 2.0**40])
def test_an_outlier_takes_nothing_from_its_neighbours(isa, outlier, dtype):
    """A single one, that meets a weight of zero."""
    w = random_packed("mxfp4", (33, 160))
    w.data[:, 3] &= 0xF0  # column 6
    w.data[:, 4:] = 0  # the other columns of eight alone make the results
    x = x_of(1, 160, dtype=dtype)
    x[:, 6] = outlier
    y = isa.linear(x, w)
    assert worst_tile(y, linear64(x, decode64(w))) < tolerance(dtype, 8)


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_a_scale_that_is_no_number_makes_its_row_none(isa, fmt, tokens):
    w, x = random_packed(fmt, (33, 160)), x_of(tokens, 160, dtype=torch.bfloat16)
    w.scale.view(torch.uint8)[17, 2] = 0xFF
    others = torch.arange(33) != 17
    y, expected = isa.linear(x, w), linear64(x, decode64(w))
    assert y[:, 17].isnan().all()
    assert worst_tile(y[:, others], expected[:, others.numpy()]) < tolerance(torch.bfloat16, 160)


def test_float32_that_is_bfloat16_in_fact(isa):
    """Logits: hidden states are rounded, what is computed of them is not."""
    w = random_packed("fp8", (160, 288))
    for tokens in (1, 20):
        x = x_of(tokens, 288, dtype=torch.bfloat16).float()
        # Fp8 weights may be rounded to bfloat16 by tiles.
        assert worst_tile(isa.linear(x, w), linear64(x, decode64(w))) < tolerance(torch.float32, 288)


@pytest.mark.parametrize("case", ["128 experts", "counts"])  # one token at a time, and many by tiles
def test_threads_change_nothing(isa, case):
    (x, ids, weights, gate_up, down), _ = moe_arguments(case, "mxfp4", torch.bfloat16)
    before, results = native.threads(), []
    for n in (1, 2, 3, 5):
        native.set_threads(n)
        results.append(isa.moe(x, ids, weights, gate_up, down))
    native.set_threads(before)
    assert all(torch.equal(y, results[0]) for y in results)


def test_callers_take_turns(isa):
    """ctypes lets go of the GIL, so that operations may meet."""
    w, x = random_packed("mxfp4", (200, 288)), x_of(3, 288, dtype=torch.float32)
    expected, before = isa.linear(x, w), native.threads()
    native.set_threads(2)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, expected) for y in pool.map(lambda _: isa.linear(x, w), range(200)))
    native.set_threads(before)


def test_what_has_no_kernel_goes_to_torch(isa):
    odd = random_packed(FORMATS["fp8"].with_block((1, 48)), (17, 96))
    for w in (odd, x_of(17, 96, dtype=torch.float16), x_of(96, 17, dtype=torch.bfloat16).T):
        assert native.describe(w) is None
        x = x_of(3, 96, dtype=torch.float32)
        w64 = decode64(w) if isinstance(w, PackedTensor) else w.double().numpy()
        assert worst_tile(isa.linear(x, w), linear64(x, w64)) < tolerance(torch.float32, 96)


def test_an_unknown_instruction_set_is_named():
    with pytest.raises(InputError, match=r"no instruction set 'neon2' \(TUTEL_PACK_ISA\): choose one of .*portable"):
        native.select("neon2")


def test_the_environment_forces_an_instruction_set():
    script = "from tutel_pack.kernels.cpu import native; print(native.selected())"
    environment = {**os.environ, "TUTEL_PACK_ISA": "portable"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "portable\n"


def test_tokens_side_by_side(isa):
    """In memory, as a transposed tensor has them."""
    x, *others = MoeCase(9, 3, 5, 96, 80).arguments("mxfp4", torch.float32)
    assert torch.equal(isa.moe(x.T.contiguous().T, *others), isa.moe(x, *others))


PLAIN = {"router": (128, 2048), "one row": (1, 96), "ragged": (17, 33), "narrow": (70, 5), "wide": (576, 2880)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 8])  # of more, torch's products are faster
@pytest.mark.parametrize("shape", PLAIN)
def test_plain_weights_in_float32(isa, shape, tokens, dtype, monkeypatch):
    """As routers are in some checkpoints, of which no bit may be rounded off."""
    monkeypatch.setattr("tutel_pack.kernels.torch_backend.linear", None)
    n, k = PLAIN[shape]
    g = torch.Generator().manual_seed(n)
    w, bias = torch.randn(n, k, generator=g) * k**-0.5, torch.randn(n, generator=g)
    x = x_of(tokens, k, dtype=dtype)
    got, expected = isa.linear(x, w, bias), linear64(x, w.double().numpy(), bias)
    assert worst_tile(got, expected) < tolerance(dtype, k)
    if dtype == torch.float32:
        rounded = linear64(x, w.bfloat16().double().numpy(), bias)
        assert worst_tile(got, rounded) > 10 * tolerance(dtype, k)
    other = w.clone()
    other[-1] = -w[-1]
    assert worst_tile(isa.linear(x, other, bias), expected) > 2 * tolerance(dtype, k)


def test_threads_change_nothing_in_plain_weights(isa, three_threads):
    w, x = torch.randn(130, 77, generator=torch.Generator().manual_seed(1)), x_of(5, 77, dtype=torch.float32)
    several = isa.linear(x, w)
    native.set_threads(1)
    assert torch.equal(isa.linear(x, w), several)


def test_experts_in_float32_are_left_to_torch(isa):
    assert native.describe(torch.ones(2, 32, 32)) is None and native.describe(torch.ones(32, 32)) is not None
