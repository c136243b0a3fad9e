"""The small ops against float64: each is computed in float32 and rounded once."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from tests.kernels.reference import ON_A_CPU, ALL_FORMATS, DTYPES, UNIT, decode64, random_packed

from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import get_ops
from tutel_pack.spec import Moe, Rope, Router

OPS = get_ops("torch")
SLACK = 8 * UNIT[torch.float32]
"""What a few float32 operations on the way may add."""


@pytest.fixture(autouse=True, params=ON_A_CPU)
def every_backend(request, monkeypatch):
    if request.param == "cpu" and not native.LIBRARY.exists():
        pytest.skip("the native kernels were not built: there was no compiler")
    monkeypatch.setitem(globals(), "OPS", get_ops(request.param))


def x_of(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(8)) * scale).to(dtype)


def assert_rounded_once(
    got: torch.Tensor, expected: np.ndarray, dtype: torch.dtype, size: np.ndarray | None = None
) -> None:
    """size: of the terms that `expected` is the sum of, where they may cancel."""
    size = np.abs(expected) if size is None else size
    assert got.dtype == dtype and got.shape == expected.shape
    error = np.abs(got.double().numpy() - expected)
    assert (error <= UNIT[dtype] * np.abs(expected) + SLACK * size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 96), (3, 4, 32), (1, 1)], ids=["tokens", "heads", "one value"])
def test_rms_norm(shape, dtype):
    x, weight = x_of(*shape, dtype=dtype, scale=3), 1 + x_of(shape[-1], dtype=torch.bfloat16, scale=0.3)
    x[0] = 0  # nothing but eps under the root
    x64 = x.double().numpy()
    expected = x64 / np.sqrt(np.square(x64).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    assert_rounded_once(OPS.rms_norm(x, weight, 1e-5), expected, dtype)
    assert OPS.rms_norm(x[:0], weight, 1e-5).shape == (0, *shape[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [7, 600], ids=["one thread", "all threads"])
def test_rms_norm_of_a_sum(rows, dtype):
    """Whose parts are rows apart; the norm is of the sum as it is rounded."""
    whole, weight = x_of(rows, 250, dtype=dtype, scale=3), 1 + x_of(72, dtype=torch.bfloat16, scale=0.3)
    x, added = whole[:, :72], whole[:, 100:172]
    total, normed = OPS.add_norm(x, added, weight, 1e-5)
    assert torch.equal(total, (x.double() + added.double()).to(dtype)) and not torch.equal(total, x)
    assert torch.equal(normed, OPS.rms_norm(total, weight, 1e-5))
    assert not torch.equal(normed, OPS.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype):
    gate, up = x_of(7, 33, dtype=dtype, scale=4), x_of(7, 33, dtype=dtype)
    gate[0, :3] = torch.tensor([60.0, -60.0, 0.0])  # where the sigmoid is 1, vanishes, and is a half
    g, u = gate.double().numpy(), up.double().numpy()
    expected = g / (1 + np.exp(-g)) * u
    got = OPS.swiglu(gate, up)
    tiny = torch.finfo(dtype).tiny
    assert_rounded_once(torch.where(got.abs() < tiny, 0, got), np.where(np.abs(expected) < tiny, 0, expected), dtype)


def test_rotation_is_that_of_transformers():
    """Frequencies and angles are float32 there, which at high positions is what the model was trained with."""
    positions = torch.tensor([0, 1, 7, 4095, 131071])
    cos, sin = OPS.rotation(positions, Rope(1e6, 64))
    inv_freq = 1.0 / (1e6 ** (torch.arange(0, 64, 2, dtype=torch.float) / 64))
    angles = positions[:, None].float() * inv_freq
    assert cos.dtype == torch.float32 and torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())
    assert torch.equal(cos[0], torch.ones(32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [32, 20], ids=["all dimensions", "the first 20 of 32"])
def test_rope(dim, dtype):
    x, positions = x_of(4, 3, 32, dtype=dtype), torch.tensor([0, 1, 50, 3])
    rotation = OPS.rotation(positions, Rope(1e4, dim))
    cos, sin = (r.double().numpy() for r in rotation)
    x64, half = x.double().numpy(), dim // 2
    expected, size = x64.copy(), np.abs(x64)
    for t in range(4):
        for h in range(3):
            for i in range(half):
                a, b = x64[t, h, i], x64[t, h, i + half]
                expected[t, h, i] = a * cos[t, i] - b * sin[t, i]
                expected[t, h, i + half] = b * cos[t, i] + a * sin[t, i]
                size[t, h, [i, i + half]] = abs(a) + abs(b)
    assert_rounded_once(OPS.rope(x, rotation), expected, dtype, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
def test_route(renormalize, dtype):
    logits = x_of(9, 12, dtype=dtype, scale=3)
    logits[0], logits[1, 4] = 1e4, 1e4  # all alike, and one that takes everything: no overflow
    ids, weights = OPS.route(logits, Moe(12, 3, 1, Router(renormalize=renormalize)))
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32 and ids.shape == weights.shape == (9, 3)
    l64 = logits.double().numpy()
    p = np.exp(l64 - l64.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = -np.sort(-p, axis=-1)[:, :3]
    chosen = np.take_along_axis(p, ids.numpy(), -1)
    assert np.allclose(chosen, expected, rtol=1e-5, atol=1e-30)
    assert all(len(set(row)) == 3 for row in ids.tolist())
    expected = chosen / chosen.sum(-1, keepdims=True) if renormalize else chosen
    assert np.allclose(weights.double().numpy(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_embedding(fmt, dtype):
    w = random_packed(fmt, (150, 160))  # rows of two block rows in fp8, the second cut short
    ids = torch.tensor([0, 149, 127, 128, 127])
    assert_rounded_once(OPS.embedding(ids, w, dtype), decode64(w)[ids.numpy()], dtype)
    assert OPS.embedding(ids[:0], w, dtype).shape == (0, 160)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_of_a_plain_weight(dtype):
    w = x_of(20, 16, dtype=torch.bfloat16)
    assert torch.equal(OPS.embedding(torch.tensor([3, 3, 19]), w, dtype), w[[3, 3, 19]].to(dtype))


def test_an_id_outside_the_embedding_is_an_error():
    for bad in (20, -1):
        with pytest.raises((IndexError, RuntimeError)):
            OPS.embedding(torch.tensor([bad]), x_of(20, 16, dtype=torch.bfloat16), torch.float32)


def test_source_blocks_of_an_embedding():
    w = random_packed(FORMATS["fp8"].with_block((32, 32)), (70, 96))
    ids = torch.tensor([31, 32, 69])
    assert_rounded_once(OPS.embedding(ids, w, torch.float32), decode64(w)[ids.numpy()], torch.float32)


def test_the_backend_is_chosen_by_name_and_logged(caplog):
    with caplog.at_level(logging.INFO, "tutel_pack"):
        assert get_ops("torch").name == "torch"
    assert "backend torch, as asked for" in caplog.text
    with pytest.raises(InputError, match="'tensorrt': choose one of auto, cpu, triton, torch"):
        get_ops("tensorrt")
