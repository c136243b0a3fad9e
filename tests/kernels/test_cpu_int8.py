"""Activations in int8 by the native kernels: products of every format on every instruction set of this processor,
against float64 sums of values that are quantized here."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest
import torch
from tests.kernels.reference import decode64, linear64, random_packed, tokens_of_experts, tolerance, worst_tile
from tests.kernels.test_cpu_products import DTYPES, LINEAR, MOE, isa, three_threads  # noqa: F401  its fixtures
from tests.kernels.test_fused import Attention, assert_close, at_once, by_parts, layer_of, normal
from tests.kernels.test_products import CONTROLS, MoeCase, one_neighbours_scale, x_of
from torch import Tensor

from tutel_pack.errors import InputError
from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.cpu import backend, native
from tutel_pack.kernels.ops import CPU_ACTS, Ops, get_ops
from tutel_pack.spec import ClampedSwiglu, Swiglu

FORMATS = CPU_ACTS["int8"]
BLOCK = 32
INT8 = backend.with_act("int8")


def product(x: Tensor, w: PackedTensor) -> Tensor:
    """x · wᵀ with x in int8."""
    described, x, out = native.describe(w, "int8"), x.contiguous(), x.new_empty(len(x), w.shape[0])
    backend._check(backend._linear(
        ctypes.addressof(described), x.data_ptr(), len(x), native.DTYPES[x.dtype], None, 0, out.data_ptr()
    ))  # fmt: skip
    return out


def moe(arguments: tuple, activation=Swiglu(), *biases: Tensor | None) -> Tensor:
    return INT8.moe(*arguments, activation, *(biases or (None, None)))


def codes64(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [rows, K] -> where its values lie between whole numbers, and their scales, both float64 [rows, K]."""
    places, scales = np.zeros(x.shape), np.zeros(x.shape)
    for row, values in enumerate(x.astype(np.float32)):
        for start in range(0, x.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            scale = max(np.abs(values[block]).max() / np.float32(127), np.float32(2.0**-126))
            places[row, block], scales[row, block] = values[block] / scale, scale
    return places, scales


def act64(x: Tensor) -> np.ndarray:
    """What activations are once quantized: np.rint takes ties to even."""
    places, scales = codes64(x.float().numpy())
    return np.rint(places) * scales


def unusual(k: int, dtype: torch.dtype) -> Tensor:
    """Magnitudes over many powers of two; a block and a row of zeros; ties; one value far above its block; the largest
    and the smallest there are."""
    rows = 24
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)) * 2.0 ** (4.0 * torch.arange(-12, 12))[:, None]
    x[0, :32], x[1], x[2, 5] = 0, 0, 100 * x[2].abs().max()
    x[3] = torch.arange(k) % 61 / 2 - 15
    x[3, ::32] = 127  # under a scale of 1
    x[4], x[5], x[6] = x[4] * 2.0**-110, 2.0**-140 * torch.arange(k), 3e38
    x[7] = 2.0**-126 * (torch.arange(k) % 40 - 20) / 4
    return x.to(dtype)


def identity(fmt: str, k: int) -> PackedTensor:
    """1 on the diagonal, 0 elsewhere."""
    w = random_packed(fmt, (k, k))
    data, one = torch.zeros_like(w.data), {"int4": 1}.get(fmt, 2)
    rows = torch.arange(k)
    data[rows, rows // 2] = torch.where(rows % 2 == 0, one, one << 4).to(torch.uint8)
    scale = {"mxfp4": torch.full_like(w.scale, 127)}.get(fmt, torch.ones_like(w.scale))
    factors = None if w.global_scale is None else torch.ones_like(w.global_scale)
    return PackedTensor(w.format, w.shape, w.segments, data, scale, factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_activations_themselves(isa, fmt, dtype):
    """Seen through a weight of ones and zeros, one by one and many at once."""
    for k in (96, 160):
        x, w = unusual(k, dtype), identity(fmt, k)
        assert np.array_equal(decode64(w), np.eye(k))
        expected = act64(x)
        for y in (product(x.float(), w), torch.cat([product(v[None].float(), w) for v in x])):
            # What is smaller than float32's smallest normal number is as it happens to be rounded.
            assert np.allclose(y.double().numpy(), expected, rtol=2.0**-23, atol=2.0**-149)
        x64 = x[8:].double().numpy()
        assert np.sqrt(np.square(expected[8:] - x64).sum(1) / np.square(x64).sum(1)).max() < 0.012


PRODUCTS = {
    **LINEAR,
    "a block cut short": (3, (33,), 80),
    "many": (67, (90,), 160),
    "many, a block cut short": (20, (33,), 80),
    "many of gpt-oss's width": (40, (49,), 2880),
    "many of one row": (33, (1,), 96),
    "two segments, many": (37, (130, 30), 160),
}


@cache
def product_arguments(shape: str, fmt: str, dtype: torch.dtype):
    """x, w, and their products with x quantized and as it is: made once, for every instruction set judges the same."""
    t, segments, k = PRODUCTS[shape]
    w, x = random_packed(fmt, (sum(segments), k), segments), x_of(t, k, dtype=dtype)
    return x, w, *(linear64(a, decode64(w)) for a in (torch.from_numpy(act64(x)), x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", PRODUCTS)
def test_product(isa, three_threads, shape, fmt, dtype):
    x, w, expected, unquantized = product_arguments(shape, fmt, dtype)
    y, limit = product(x, w), tolerance(dtype, x.shape[1])
    assert y.dtype == dtype
    assert worst_tile(y, expected) < limit
    if dtype == torch.float32:  # not what it would be without quantizing, by far
        assert worst_tile(y, unquantized) > 100 * limit


@pytest.mark.parametrize("fmt", FORMATS)
def test_others_change_nothing(isa, fmt):
    """But the order of sums, whatever way many go."""
    w, x = random_packed(fmt, (70, 288)), x_of(100, 288, dtype=torch.float32)
    together = product(x, w)
    for n in (1, 2, 3, 5, 8, 9, 17, 33):
        assert worst_tile(product(x[:n], w), together[:n].double().numpy()) < tolerance(torch.float32, 288) / 2


@pytest.mark.parametrize("tokens", [1, 6, 50])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_check_of_products_sees(isa, fmt, tokens):
    stack, x = random_packed(fmt, (1, 40, 288), (20, 20)), x_of(tokens, 288, dtype=torch.float32)
    limit, w = tolerance(torch.float32, 288), stack.expert(0)
    places, scales = codes64(x.numpy())
    right = linear64(torch.from_numpy(np.rint(places) * scales), decode64(w))
    assert worst_tile(product(x, w), right) < limit
    wrong = {
        "zeros": torch.zeros(tokens, 40),
        "a neighbour's scale": product(x, one_neighbours_scale(stack, 0).expert(0)),
        "swapped nibbles": product(x, CONTROLS["swapped nibbles"][0](stack, 0).expert(0)),
        "the neighbours' scales of vectors": np.rint(places) * np.roll(scales, BLOCK, 1) @ decode64(w).T,
        "rounded up": np.floor(places + 0.5 + 2.0**-6) * scales @ decode64(w).T,
        "one code beside": (np.rint(places) + np.eye(288)[77]) * scales @ decode64(w).T,
    }
    for damage, y in wrong.items():
        y = y if isinstance(y, Tensor) else torch.from_numpy(y).float()
        assert worst_tile(y, right) > limit, damage


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_of_an_element(isa, fmt):
    """One row per code, all of it in every column, with vectors that pick out a column each."""
    w = random_packed(fmt, (16, 160))
    w.data.copy_(torch.arange(16, dtype=torch.uint8)[:, None].expand(16, 80) * 17)
    x = torch.eye(160)
    expected = linear64(torch.from_numpy(act64(x)), decode64(w))
    for y in (product(x, w), torch.cat([product(v[None], w) for v in x])):
        assert np.allclose(y.double().numpy(), expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_largest_sums(isa, fmt, sign):
    """All elements and codes as large as they can be: no sum on the way may overflow."""
    for code in range(16):
        w = random_packed(fmt, (33, 288))
        w.data.fill_(17 * code)
        for tokens in (1, 4, 40):
            x = torch.full((tokens, 288), sign * 127.0)
            expected = linear64(x, decode64(w))
            assert np.allclose(product(x, w).double().numpy(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_not_finite_stays_so(isa, fmt, tokens):
    w = random_packed(fmt, (33, 288))
    for dtype in DTYPES:
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = x_of(tokens, 288, dtype=dtype)
            x[-1, 77] = bad
            y = product(x, w)
            assert not y[-1].isfinite().any()
            if tokens > 1:
                expected = linear64(torch.from_numpy(act64(x[:-1])), decode64(w))
                assert worst_tile(y[:-1], expected) < tolerance(dtype, 288)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_a_scale_that_is_no_number_makes_its_row_none(isa, fmt, tokens):
    w, x = random_packed(fmt, (33, 160)), x_of(tokens, 160, dtype=torch.float32)
    w.scale.view(torch.uint8)[17, 2] = 0xFF
    others = torch.arange(33) != 17
    y, expected = product(x, w), linear64(torch.from_numpy(act64(x)), decode64(w))
    assert y[:, 17].isnan().all()
    assert worst_tile(y[:, others], expected[:, others.numpy()]) < tolerance(torch.float32, 160)


def moe_act64(arguments: tuple, activation=None, biases: tuple = (None, None)) -> tuple[np.ndarray, np.ndarray]:
    """Both of a token's products with quantized activations, pair by pair, and how far off a result may be because an
    activation between them, which is known here in float64, lies so near the middle between two codes that float32 may
    round it to the other one."""
    x, ids, weights, gate_up, down = arguments
    up, back = (decode64(w) if isinstance(w, PackedTensor) else w for w in (gate_up, down))
    x64, out, unsure, half = act64(x), np.zeros(x.shape), np.zeros(x.shape), up.shape[1] // 2
    activation = activation or (lambda g, u: g / (1 + np.exp(-g)) * u)
    first, second = (0 * w[..., 0] if b is None else b.double().numpy() for w, b in zip((up, back), biases))
    for t in range(len(x)):
        for j, e in enumerate(ids[t].tolist()):
            if e < 0:
                continue
            both = up[e] @ x64[t] + first[e]
            places, scales = (a[0] for a in codes64(activation(both[:half], both[half:])[None]))
            near = np.abs(np.abs(places - np.floor(places)) - 0.5) < 2e-4
            out[t] += weights[t, j].item() * (back[e] @ (np.rint(places) * scales) + second[e])
            unsure[t] += abs(weights[t, j].item()) * (np.abs(back[e]) @ (near * scales))
    return out, unsure


def worst_sure_tile(y: Tensor, right: tuple[np.ndarray, np.ndarray], groups: list[np.ndarray]) -> float:
    """worst_tile of what is off by more than it may be."""
    expected, unsure = right
    off = y.double().numpy() - expected
    return worst_tile(torch.from_numpy(expected + np.sign(off) * np.maximum(np.abs(off) - unsure, 0)), expected, groups)


@cache
def moe_arguments(case: str, fmt: str, dtype: torch.dtype):
    arguments = MOE[case].arguments(fmt, dtype)
    return arguments, moe_act64(arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("case", [case for case in MOE if case != "no token"])
def test_moe(isa, three_threads, case, fmt, dtype):
    arguments, right = moe_arguments(case, fmt, dtype)
    groups, limit = tokens_of_experts(arguments[1], MOE[case].experts), tolerance(dtype, MOE[case].intermediate)
    y = moe(arguments)
    assert y.dtype == dtype and worst_sure_tile(y, right, groups) < limit
    assert (right[1] == 0).mean() > 0.5, "most results have nothing unsure in them"


def test_no_token(isa):
    arguments = MOE["no token"].arguments("mxfp4", torch.float32)
    assert moe(arguments).shape == Ops("cpu", "int8").moe(*arguments).shape == (0, 96)


@pytest.mark.parametrize("tokens", [24, 90], ids=["few tokens an expert", "many"])
@pytest.mark.parametrize(
    "damage,fmt", [(name, fmt) for name, (_, formats) in CONTROLS.items() for fmt in formats if fmt in FORMATS]
)
def test_the_check_of_moe_sees(isa, damage, fmt, tokens):
    case = MoeCase(tokens, 2, 4, 160, 288)
    x, ids, weights, gate_up, down = case.arguments(fmt, torch.float32)
    right, groups = control_right(fmt, tokens), tokens_of_experts(ids, case.experts)
    change, limit = CONTROLS[damage][0], tolerance(torch.float32, case.intermediate)
    damaged = [(change(gate_up, 1), down)]
    if damage != "gate and up swapped":
        damaged.append((gate_up, change(down, 1)))
    for pair in damaged:
        assert worst_sure_tile(moe((x, ids, weights, *pair)), right, groups) > limit
    # Nor is it what activations that are not quantized give.
    assert worst_sure_tile(isa.moe(x, ids, weights, gate_up, down), right, groups) > limit


@cache
def control_right(fmt: str, tokens: int):
    return moe_act64(MoeCase(tokens, 2, 4, 160, 288).arguments(fmt, torch.float32))


@pytest.mark.parametrize("tokens", [2, 40], ids=["decoding", "many tokens"])
def test_moe_with_biases_and_a_clamped_activation(isa, tokens):
    case, activation = MoeCase(tokens, 2, 4, 96, 160), ClampedSwiglu(1.5, 1.702, 1.0)
    arguments = case.arguments("mxfp4", torch.float32)
    biases = x_of(4, 320, dtype=torch.bfloat16, seed=7), x_of(4, 96, dtype=torch.float32, seed=8)

    def clamped(g: np.ndarray, u: np.ndarray) -> np.ndarray:
        g, u = g.clip(max=1.5), u.clip(-1.5, 1.5)
        return g / (1 + np.exp(-1.702 * g)) * (u + 1)

    right, groups = moe_act64(arguments, clamped, biases), tokens_of_experts(arguments[1], 4)
    assert worst_sure_tile(moe(arguments, activation, *biases), right, groups) < tolerance(torch.float32, 160)
    assert worst_sure_tile(moe(arguments, activation, None, biases[1]), right, groups) > 1e-2


def test_threads_change_nothing(isa):
    arguments, _ = moe_arguments("128 experts", "nvfp4", torch.bfloat16)
    before, results = native.threads(), []
    for n in (1, 2, 3, 5):
        native.set_threads(n)
        results.append(moe(arguments))
    native.set_threads(before)
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mlp", ["experts", "shared", "dense"])
def test_a_layer_in_one_call(isa, mlp, dtype):
    """As its operations one by one, of which only the experts are others than without quantizing."""
    case, quantized, single = Attention(dtype), Ops("cpu", "int8"), Ops("cpu", "int8")
    layer, x = layer_of(case, False, mlp), normal(7, 96, dtype=dtype, seed=13)

    def run(ops: Ops) -> Tensor:
        return at_once(ops, x, layer, [pool.clone() for pool in case.pools], case)

    single._fused = dict.fromkeys(single._fused)
    exact, got = run(isa), run(quantized)
    assert_close(got, by_parts(single, x, layer, [pool.clone() for pool in case.pools], case))
    assert torch.equal(got, exact) == (mlp == "dense")
    assert torch.equal(run(isa), exact), "a description made for one is used for the other"


def test_other_formats_take_activations_as_they_are(isa):
    for fmt in ("fp8", "bf16"):
        arguments = MoeCase(3, 2, 3, 96, 64).arguments(fmt, torch.bfloat16)
        assert torch.equal(moe(arguments), isa.moe(*arguments))


def test_float16(isa):
    """By float32, which holds it."""
    x, *rest = MoeCase(3, 2, 3, 96, 64).arguments("mxfp4", torch.float16)
    y = moe((x, *rest))
    assert y.dtype == torch.float16 and torch.equal(y, moe((x.float(), *rest)).half())


def test_only_what_is_on_a_cpu_and_of_its_names():
    assert get_ops("cpu", "cpu", "int8").act == "int8"
    with pytest.raises(InputError, match="to 'mxfp8': the backend 'cpu' has no kernels for it; .* on a GPU by triton"):
        get_ops("cpu", "cpu", "mxfp8")
    with pytest.raises(InputError, match="to 'int8': the backend 'torch' has no kernels for it; .* native kernels"):
        get_ops("torch", "cpu", "int8")
    with pytest.raises(InputError, match="to 'int4': choose one of fp8, mxfp8, nvfp4, int8, or leave act out"):
        get_ops("cpu", "cpu", "int4")
