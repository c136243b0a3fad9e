"""Every code point of every element and scale, and every rounding threshold, against the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.quant.data import FORMAT_RULES, PACKED, weights
from tests.quant.oracle import E2M1, E4M3, E8M0, codes_of, decode_matrix, float32_product, scales_of

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import decode, encode

F32 = np.float32
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def packed(fmt: str, data: torch.Tensor, scale: torch.Tensor, k: int) -> PackedTensor:
    """A matrix from its bytes; nvfp4's global scale is 1."""
    shape = (len(data), k)
    parts = {"": data, "_scale": scale}
    if FORMATS[fmt].has_global:
        parts["_scale_2"] = torch.ones(1)
    return PackedTensor.from_parts(FORMATS[fmt], shape, shape[:1], parts)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_decode_of_every_pair_of_e2m1_codes(fmt):
    one = torch.tensor(127, dtype=torch.uint8) if fmt == "mxfp4" else torch.tensor(1.0).to(torch.float8_e4m3fn)
    k = 2 * len(ALL_BYTES)
    p = packed(fmt, ALL_BYTES[None], one.repeat(1, k // FORMATS[fmt].block[1]), k)
    want = np.stack([E2M1[np.arange(256) % 16], E2M1[np.arange(256) // 16]], axis=1).reshape(1, -1)
    got = decode(p).numpy()
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    assert sorted(set(np.abs(want[0]))) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_low_nibble_is_the_even_element(fmt):
    one = torch.tensor([[127]], dtype=torch.uint8) if fmt == "mxfp4" else torch.ones(1, 1).to(torch.float8_e4m3fn)
    data = torch.full((1, FORMATS[fmt].block[1] // 2), 0x21, dtype=torch.uint8)
    assert decode(packed(fmt, data, one, 2)).tolist() == [[0.5, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_decode_of_every_e8m0_byte(dtype):
    data = torch.full((256, 16), 0x97, dtype=torch.uint8)  # 6 and −0.5: the largest and the smallest magnitude
    got = decode(packed("mxfp4", data, ALL_BYTES[:, None], 32), dtype)
    with np.errstate(over="ignore"):  # the largest two scales times 6 are beyond float32, in which values are defined
        want = np.outer(E8M0, np.tile([6.0, -0.5], 16)).astype(F32)
    np.testing.assert_array_equal(got.double().numpy(), want)
    assert got[255].isnan().all() and not got[:255].isnan().any() and got[0, 0] == 6 * 2.0**-127


def test_decode_of_every_e4m3_element():
    got = decode(packed("fp8", ALL_BYTES.view(torch.float8_e4m3fn)[None], torch.ones(1, 2), 256)).numpy()
    np.testing.assert_array_equal(got[0], E4M3)
    np.testing.assert_array_equal(np.signbit(got[0])[E4M3 == 0], [False, True])


def test_decode_of_every_e4m3_scale():
    data = torch.full((256, 8), 0x72, dtype=torch.uint8)
    got = decode(packed("nvfp4", data, ALL_BYTES.view(torch.float8_e4m3fn)[:, None], 16)).numpy()
    np.testing.assert_array_equal(got, np.outer(E4M3, np.tile([1.0, 6.0], 8)))


def bfloat16_of(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, to nearest, ties to even."""
    bits = x.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(F32)


@pytest.mark.parametrize("fmt", PACKED)
def test_decode_rounds_once_to_the_dtype(fmt):
    p = encode(weights((64, 256)) * 37, FORMATS[fmt]).tensor
    values = decode_matrix(p, float32_product).astype(F32)
    np.testing.assert_array_equal(decode(p).numpy(), values)
    np.testing.assert_array_equal(decode(p, torch.float64).numpy(), values.astype(np.float64))
    np.testing.assert_array_equal(decode(p, torch.float16).numpy(), values.astype(np.float16))
    np.testing.assert_array_equal(decode(p, torch.bfloat16).float().numpy(), bfloat16_of(values))


# Threshold, the code below it, the code above it; of a tie the even one is right.
E2M1_THRESHOLDS = [(0.25, 0, 1), (0.75, 1, 2), (1.25, 2, 3), (1.75, 3, 4), (2.5, 4, 5), (3.5, 5, 6), (5.0, 6, 7)]


def e2m1_cases() -> tuple[list, list]:
    """Quotients at every threshold, every value and an ulp beside each, and their codes, in both signs."""
    cases = [(0.0, 0), (5.99, 7), (6.0, 7), (7.0, 7), (np.nextafter(F32(8), F32(0)), 7), (2.0**-149, 0), (2.0**-127, 0)]
    for threshold, below, above in E2M1_THRESHOLDS:
        cases += [(threshold, below if below % 2 == 0 else above)]
        cases += [(np.nextafter(F32(threshold), F32(0)), below), (np.nextafter(F32(threshold), F32(9)), above)]
    for code in range(1, 8):
        cases += [(np.nextafter(F32(E2M1[code]), F32(v)), code) for v in (0, E2M1[code], 9)]
    y, codes = (list(c) for c in zip(*cases))
    return [F32(v) for v in y] + [-F32(v) for v in y], codes + [c + 8 for c in codes]


def test_e2m1_rounding_at_every_threshold():
    y, codes = e2m1_cases()
    x = torch.zeros(len(y), 32)
    x[:, 0], x[:, 31] = 4.0, torch.from_numpy(np.array(y))  # 4 makes the scale of the floor rule 1
    p = encode(x, FORMATS["mxfp4"], rule="floor").tensor
    assert (p.scale == 127).all()
    assert codes_of(p)[:, 31].tolist() == codes and (codes_of(p)[:, 0] == 6).all()


def test_e2m1_rounding_at_every_threshold_under_an_nvfp4_scale():
    y, codes = e2m1_cases()
    y, codes = zip(*[(v, c) for v, c in zip(y, codes) if abs(v) <= 6])
    x = torch.zeros(len(y), 16)
    x[:, 0], x[:, 15] = 6.0, torch.from_numpy(np.array(y, F32))  # 6 makes the scale of the amax rule 1
    p = encode(x, FORMATS["nvfp4"], rule="amax", global_scale=torch.ones(1)).tensor
    assert (scales_of(p) == 0x38).all()
    assert codes_of(p)[:, 15].tolist() == list(codes)


def test_e4m3_rounding_at_every_threshold():
    cases = []
    for low in range(126):
        threshold = F32((E4M3[low] + E4M3[low + 1]) / 2)
        cases += [(np.nextafter(threshold, F32(0)), low), (np.nextafter(threshold, F32(999)), low + 1)]
        cases += [(threshold, low + low % 2), (F32(E4M3[low]), low)]
    y, codes = np.array(cases, F32).T
    x = torch.zeros(128, 128)
    x[0, 0] = 448.0  # makes the scale 1
    x.view(-1)[1 : 1 + len(y)], x.view(-1)[-len(y) :] = torch.from_numpy(y), -torch.from_numpy(y)
    p = encode(x, FORMATS["fp8"], rule="amax").tensor
    got = codes_of(p).flatten()
    assert p.scale.item() == 1.0 and got[0] == 126
    np.testing.assert_array_equal(got[1 : 1 + len(y)], codes)
    np.testing.assert_array_equal(got[-len(y) :], codes + 128)


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_mxfp4_scale_at_every_power_of_two_and_mantissa_threshold(rule):
    """Exponents as the definitions have them; a rounded logarithm is off by one an ulp above a power of two."""
    powers = 2.0 ** np.arange(-126, 128)
    exactly = np.concatenate([F32(m) * powers.astype(F32) for m in (1, 1.5, 1.75)])
    amax = np.concatenate([exactly, np.nextafter(exactly, F32(0)), np.nextafter(exactly, F32(np.inf))])
    amax = amax[np.isfinite(amax)]
    exact = amax.astype(np.float64)
    floor = np.searchsorted(2.0 ** np.arange(-150, 129), exact, side="right") - 151
    mantissa = exact / 2.0**floor
    want = floor - 2 + {"floor": 0, "even": mantissa >= 1.75, "ceil": mantissa > 1.5}[rule]
    if rule == "ceil":
        assert (exact <= 6 * 2.0**want).all() and (exact > 6 * 2.0 ** (want - 1)).all()
    p = encode(torch.from_numpy(amax)[:, None], FORMATS["mxfp4"], rule=rule).tensor
    np.testing.assert_array_equal(scales_of(p)[:, 0], want.clip(-127, 125) + 127)  # no product beyond float32


def test_block_maximum_2_7_has_the_floor_scale_a_half():
    p = encode(torch.tensor([[2.7]]), FORMATS["mxfp4"], rule="floor").tensor
    assert E8M0[scales_of(p)[0, 0]] == 0.5


@pytest.mark.parametrize("fmt, rule", FORMAT_RULES)
@pytest.mark.parametrize("value", [2.0**-149, 2.0**-130, 2.0**-126, 1e-19, 1e18, 3e38, float(np.finfo(F32).max)])
def test_smallest_and_largest_float32(fmt, rule, value):
    """Finite scales, right signs, and nothing off by more than the format's step."""
    x = torch.tensor([[value, -value, 0.0, -0.0]])
    p = encode(x, FORMATS[fmt], rule=rule).tensor
    values = decode(p)
    assert values.isfinite().all() and (values.signbit() == x.signbit()).all()
    smallest = {"fp8": 2.0**-135, "mxfp4": 2.0**-128, "nvfp4": 2.0**-136}[fmt]  # the smallest element's magnitude
    if rule != "lsq" or 1e-19 <= value <= 1e18:  # beyond, float32 does not hold the squares that are compared
        assert (values - x).abs().max() <= max(smallest / 2, 0.26 * value)
