"""Quantized activations by the triton backend in the interpreter: their bits against codes searched for here, and
products with them against float64 sums of what those bits mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import interpreted
from tests.kernels.reference import (
    E2M1,
    E4M3,
    decode64,
    linear64,
    moe64,
    random_packed,
    tokens_of_experts,
    tolerance,
    worst_tile,
)
from tests.kernels.test_products import CONTROLS, MoeCase, x_of
from torch import Tensor

from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.kernels.ops import ACTS, Ops, get_ops
from tutel_pack.kernels.triton import backend, chips
from tutel_pack.kernels.triton.matmul import operand

GROUP = {"mxfp8": 32, "nvfp4": 16, "fp8": 128}


def quantized(x: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run by a worker, into memory of NaN and ones: data, scale, factors."""
    from tutel_pack.kernels.triton.activations import quantizing

    made, launch = quantizing(x, act)
    made.data.fill_(0xFF), made.scale.fill_(0xFF)
    launch.run()
    return made.data, made.scale, made.factors


def quantize(x: Tensor, act: str):
    return interpreted.submit("tests.kernels.test_triton_act:quantized", x, act)


def nearest(y: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Indices of the values nearest to float64 y [n]; of two as near the even one.  values: by code, none negative."""
    distance = np.abs(np.abs(y)[:, None] - values)
    best = distance.min(1, keepdims=True)
    codes = np.arange(len(values))
    return np.where(distance == best, codes + 1000 * (codes % 2), 1 << 20).argmin(1)


def signed(y: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(y < 0, -1, 1) * values[nearest(y, values)]


def act64(x: Tensor, act: str) -> np.ndarray:
    """What activations are once quantized, by the definitions: float64 [rows, K]."""
    x32, out = x.float().numpy(), np.zeros(x.shape)
    for row, values in enumerate(x32):
        # In float32, as scales are stored and divided by; a product of scales is rounded too.
        largest = np.abs(values).max()
        factor = max(largest / np.float32(6 * 448), np.float32(2.0**-126)) if largest else np.float32(1)
        for start in range(0, x.shape[1], GROUP[act]):
            block = slice(start, start + GROUP[act])
            out[row, block] = _block64(values[block], act, factor)
    return out


def _block64(block: np.ndarray, act: str, factor: np.float32) -> np.ndarray:
    amax, positive = np.abs(block).max(), E4M3[:127]
    if act == "mxfp8":
        exponent = -126 if amax == 0 else max(-126, int(np.ceil(np.log2(float(amax) / 448))))
        scale = np.float64(2.0**exponent)
        return signed(block.astype(np.float64) / scale, positive) * scale
    if act == "fp8":
        scale = max(amax / np.float32(448), np.float32(2.0**-126))
        return signed((block / scale).astype(np.float64), positive) * np.float64(scale)
    wanted = max(amax / (np.float32(6) * factor), np.float32(2.0**-9))
    own = np.float32(positive[nearest(np.array([wanted], np.float64), positive)[0]])
    return signed((block / (own * factor)).astype(np.float64), E2M1[:8]) * np.float64(own) * np.float64(factor)


def stored64(data: Tensor, scale: Tensor, factors: Tensor | None, act: str, k: int) -> np.ndarray:
    """What the bits of quantized activations mean."""
    if act == "nvfp4":
        elements = np.stack([E2M1[data.numpy() & 15], E2M1[data.numpy() >> 4]], -1).reshape(len(data), -1)
    else:
        elements = E4M3[data.numpy()]
    scales = {"mxfp8": lambda s: 2.0 ** (s.astype(np.float64) - 127), "nvfp4": lambda s: E4M3[s], "fp8": np.float64}
    whole = elements * np.repeat(scales[act](scale.numpy()), GROUP[act], axis=1)
    assert not whole[:, k:].any(), "what fills a row up is not zero"
    return whole[:, :k] * (1 if factors is None else factors.double().numpy()[:, None])


def unusual(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Magnitudes over many powers of two; a block and a row of zeros; ties; one value far above its block."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-12, -12 + rows)[:, None]
    x[0, :32], x[1], x[2, 5] = 0, 0, 100 * x[2].abs().max()
    x[3] = torch.arange(k) % 61 / 8 - 3.5
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_activations(act, dtype):
    runs = [(x, quantize(x, act)) for x in (unusual(20, 160, dtype), x_of(2, 2080, dtype=dtype))]
    for x, run in runs:
        got, expected = stored64(*run.result(), act, x.shape[1]), act64(x, act)
        assert np.allclose(got, expected, rtol=1e-6, atol=0)
        error = np.sqrt(np.square(got - x.double().numpy()).sum() / np.square(x.double().numpy()).sum())
        assert error < {"mxfp8": 0.05, "fp8": 0.05, "nvfp4": 0.15}[act]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(act, value):
    x = x_of(2, 256, dtype=torch.float32)
    x[1, 200] = value
    got = stored64(*quantize(x, act).result(), act, 256)
    assert np.isfinite(got[0]).all() and not np.isfinite(got[1, 200])


def product(x: Tensor, w: PackedTensor, act: str, split: int = 1, damage: str = "") -> Tensor:
    """Run by a worker: x · wᵀ with x quantized."""
    from tutel_pack.kernels.triton.activations import quantizing
    from tutel_pack.kernels.triton.chips import INTERPRETER
    from tutel_pack.kernels.triton.matmul import Epilogue, problem_of, product
    from tutel_pack.kernels.triton.tiles import tile_for

    weight, out = operand(w), x.new_empty(len(x), w.shape[0])
    made, launch = quantizing(x, act)
    launch.run()
    if damage == "scales":
        made.scale.copy_(made.scale.roll(1, 1))
    if damage == "elements":
        made.data.copy_(made.data.roll(1, 1))
    tile = replace(tile_for(INTERPRETER, problem_of(weight, len(x), x.dtype, act)), split=split)
    for launch in product(INTERPRETER, made, weight, out, tile, Epilogue()):
        launch.run()
    return out


def submit(x: Tensor, w: PackedTensor, act: str, *how):
    return interpreted.submit("tests.kernels.test_triton_act:product", x, w, act, *how)


def expected(x: Tensor, w: PackedTensor, act: str) -> np.ndarray:
    return linear64(torch.from_numpy(act64(x, act)), decode64(w))


SHAPES = {
    "ragged": (5, (17,), 96, 1),
    "a ragged last step": (2, (17,), 2080, 4),
    "two segments": (1, (130, 30), 160, 1),
    "several tiles": (33, (160,), 256, 1),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_product(shape, act):
    """In float32: nothing is left to hide behind, as both factors are known to the last bit."""
    t, segments, k, split = SHAPES[shape]
    w, x = random_packed(ACTS[act], (sum(segments), k), segments), x_of(t, k, dtype=torch.float32)
    y = submit(x, w, act, split).result()
    limit = tolerance(torch.float32, k)
    assert worst_tile(y, expected(x, w, act)) < limit
    # Not what it would be without quantizing, by far.
    assert worst_tile(y, linear64(x, decode64(w))) > 100 * limit


@pytest.mark.parametrize("act", ACTS)
def test_the_check_of_products_sees(act):
    w, x = random_packed(ACTS[act], (1, 40, 288), (20, 20)), x_of(6, 288, dtype=torch.float32)
    right, limit = expected(x, w.expert(0), act), tolerance(torch.float32, 288)
    runs = {damage: submit(x, w.expert(0), act, 1, damage) for damage in ("scales", "elements")}
    if act != "fp8":
        runs["nibbles"] = submit(x, CONTROLS["swapped nibbles"][0](w, 0).expert(0), act)
    for damage, run in runs.items():
        assert worst_tile(run.result(), right) > limit, damage
    assert worst_tile(torch.zeros(6, 40), right) > limit


def experts(arguments: tuple, act: str) -> Tensor:
    """Run by a worker: moe with quantized activations."""
    return Ops("triton", act).moe(*arguments)


def moe_act64(arguments: tuple, act: str) -> np.ndarray:
    """Both of a token's products with quantized activations, pair by pair."""
    x, ids, weights, gate_up, down = arguments
    up, back = decode64(gate_up), decode64(down)
    x64, out = act64(x, act), np.zeros(x.shape)
    half = up.shape[1] // 2
    for t in range(len(x)):
        for j, e in enumerate(ids[t].tolist()):
            if 0 <= e < len(up):
                both = up[e] @ x64[t]
                inner = both[:half] / (1 + np.exp(-both[:half])) * both[half:]
                inner = act64(torch.from_numpy(inner).float()[None], act)[0]
                out[t] += weights[t, j].item() * (back[e] @ inner)
    return out


MOE = MoeCase(9, 3, 5, 96, 160, [[-1, 1, 3], [0, -1, -1], [-1, -1, -1], [2, 1, 7], *[[0, 2, 4]] * 5])


@pytest.mark.parametrize("act", ACTS)
def test_moe(act):
    """An activation between its products that is a last bit off may be rounded to another code: rare, and of one value
    in 160 by 2⁻⁴ of it at most (2⁻² for nvfp4)."""
    arguments = MOE.arguments(ACTS[act], torch.float32)
    y = interpreted.submit("tests.kernels.test_triton_act:experts", arguments, act).result()
    ids = arguments[1].masked_fill(arguments[1] >= MOE.experts, -1)
    groups = tokens_of_experts(ids, MOE.experts)
    right = moe_act64(arguments, act)
    assert worst_tile(y, right, groups) < 1e-4
    without = moe64(arguments[0], ids, *arguments[2:3], *map(decode64, arguments[3:]))
    assert worst_tile(y, without, groups) > 1e-2
    swapped = CONTROLS["gate and up swapped"][0](arguments[3], 1)
    assert worst_tile(torch.from_numpy(moe_act64((*arguments[:3], swapped, arguments[4]), act)), right, groups) > 1e-2


def test_weights_in_another_format_take_them_as_they_are():
    arguments = MoeCase(3, 2, 3, 96, 64).arguments("nvfp4", torch.float32)
    runs = [interpreted.submit("tests.kernels.test_triton_act:experts", arguments, act) for act in ("mxfp8", None)]
    assert torch.equal(*(run.result() for run in runs))


def test_what_takes_which():
    def weight(fmt, shape=(40, 256)) -> PackedTensor:
        return PackedTensor.empty(fmt, shape, shape[:1], "meta")

    fp8 = FORMATS["fp8"]
    assert operand(weight(fp8)).takes("fp8") and operand(weight(fp8.with_block((1, 256)))).takes("fp8")
    assert not operand(weight(fp8.with_block((32, 32)))).takes("fp8")
    assert not operand(weight(fp8.with_scale((1, 32), torch.uint8))).takes("fp8")
    for act, own in ACTS.items():
        formats = ("fp8", "mxfp4", "nvfp4", "int4", "bf16")
        assert [fmt for fmt in formats if operand(weight(FORMATS[fmt])).takes(act)] == [own]


@pytest.mark.parametrize(
    "chip, act, message",
    [
        ("sm_80", "fp8", "sm_80 has no instructions for it; it has none for other formats either"),
        ("sm_90", "mxfp8", "sm_90 has no instructions for it; it has them for fp8"),
        ("gfx942", "fp8", "gfx942 has no instructions"),
        ("gfx950", "nvfp4", "it has them for fp8, mxfp8"),
        ("sm_100", "int8", "the backend 'triton' has no kernels for it; leave act out, or run on a CPU"),
        ("sm_100", "nvfp4", None),
        ("gfx950", "mxfp8", None),
    ],
)
def test_chips_without_the_instructions_refuse(chip, act, message, monkeypatch):
    monkeypatch.setattr(chips, "chip_of", lambda device: chips.CHIPS[chip])
    if message is None:
        assert get_ops("triton", "cuda", act).act == act
        return
    with pytest.raises(InputError, match=message):
        get_ops("triton", "cuda", act)


def test_other_backends_refuse():
    with pytest.raises(InputError, match="cannot be quantized to 'fp8': the backend 'torch' has no kernels for it"):
        get_ops("torch", "cpu", "fp8")


def test_only_experts_change():
    other = backend.with_act("fp8")
    assert other.linear is backend.linear and other.attend is backend.attend and other.moe is not backend.moe
