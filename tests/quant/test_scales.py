"""What the scale rules promise: least squares against every scale there is, in float64, and the rules' order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.quant.data import weights
from tests.quant.oracle import E2M1, E4M3, E8M0, exact_error, fp8_scale, in_columns, scales_of

from tutel_pack.formats import FORMATS
from tutel_pack.quant.codec import encode

FLOAT32_NOISE = 1e-5
"""Relative, of an error sum of at most 32 terms."""


def gauss() -> torch.Tensor:
    return 0.02 * torch.randn(64, 128, generator=torch.Generator().manual_seed(1))


def heavy() -> torch.Tensor:
    """Student-t with three degrees of freedom, and outlier columns."""
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn(4, 64, 128, generator=generator)
    x = 0.02 * normal[0] / normal[1:].square().mean(0).sqrt()
    x[:, ::31] *= 10
    return x


DATA = {"gauss": gauss, "heavy": heavy, "magnitudes": lambda: weights((64, 128))}


@pytest.mark.parametrize("data", DATA)
def test_nvfp4_lsq_is_the_best_of_all_126_scales(data):
    x = DATA[data]()
    result = encode(x, FORMATS["nvfp4"], rule="lsq")
    columns, scale = in_columns(x.numpy(), 16), np.float64(result.tensor.global_scale.item())
    every = np.stack([exact_error(columns, E4M3[code] * scale, E2M1[:8]) for code in range(1, 127)])
    chosen = every[scales_of(result.tensor).ravel() - 1, np.arange(columns.shape[1])]
    # Of a block that is nearly exact, the noise is that of its products.
    noise = 1e-12 * np.square(columns.astype(np.float64)).sum(0)
    np.testing.assert_array_less(chosen, every.min(0) * (1 + FLOAT32_NOISE) + noise + 1e-60)


@pytest.mark.parametrize("data", DATA)
def test_mxfp4_lsq_is_the_best_of_all_255_scales(data):
    x = DATA[data]()
    result = encode(x, FORMATS["mxfp4"], rule="lsq")
    columns = in_columns(x.numpy(), 32)
    every = np.stack([exact_error(columns, E8M0[code], E2M1[:8]) for code in range(255)])
    best = scales_of(result.tensor).ravel()
    chosen = every[best, np.arange(columns.shape[1])]
    np.testing.assert_array_less(chosen, every.min(0) * (1 + FLOAT32_NOISE) + 1e-60)
    floor = scales_of(encode(x, FORMATS["mxfp4"], rule="floor").tensor).ravel().astype(int)
    assert set(best - floor) == {0, 1}


@pytest.mark.parametrize("data", DATA)
def test_fp8_lsq_is_the_best_of_its_candidates_and_never_worse_than_amax(data):
    x = DATA[data]()
    plain, searched = (encode(x, FORMATS["fp8"], rule=rule) for rule in ("amax", "lsq"))
    assert searched.error.item() <= plain.error.item() * (1 + FLOAT32_NOISE)
    block = np.zeros((128, 128), np.float32)
    block[:64] = x.numpy()
    assert plain.tensor.scale.item() == fp8_scale(block, "amax") == np.abs(block).max() / np.float32(448)
    assert searched.tensor.scale.item() == fp8_scale(block, "lsq")


@pytest.mark.parametrize(
    "fmt, others", [("mxfp4", ("floor", "even", "ceil")), ("nvfp4", ("amax",)), ("fp8", ("amax",))]
)
@pytest.mark.parametrize("data", DATA)
def test_lsq_has_the_least_error_of_all_rules(fmt, others, data):
    x = DATA[data]()
    best = encode(x, FORMATS[fmt], rule="lsq").error.item()
    errors = [encode(x, FORMATS[fmt], rule=rule).error.item() for rule in others]
    assert 0 < best <= min(errors) * (1 + FLOAT32_NOISE)


@pytest.mark.parametrize(
    "fmt, value, scale",
    [
        pytest.param("mxfp4", 1.0, 0.25, id="1-is-4-quarters-or-2-halves"),
        pytest.param("nvfp4", 6.0, 1.0, id="6-is-6-times-1-or-4-times-1.5"),
    ],
)
def test_of_equal_errors_the_smaller_scale_counts(fmt, value, scale):
    result = encode(torch.full((1, FORMATS[fmt].block[1]), value), FORMATS[fmt], rule="lsq", global_scale=torch.ones(1))
    table = E8M0 if fmt == "mxfp4" else E4M3
    assert result.error.item() == 0 and table[scales_of(result.tensor).item()] == scale


def test_nvfp4_lsq_clips_the_maximum_where_that_pays():
    """A block made for the lowest of the codes that are searched: 13/16, at which 13/32 and 39/8 are exact."""
    x = torch.tensor([[6.0, *[4.875] * 6, *[0.40625] * 9]])
    result = encode(x, FORMATS["nvfp4"], rule="lsq", global_scale=torch.ones(1))
    assert scales_of(result.tensor).item() == 0x38 - 3
    assert result.error.item() == (6 - 4.875) ** 2


@pytest.mark.parametrize("fmt, smallest", [("mxfp4", 0), ("nvfp4", 1), ("fp8", np.finfo(np.float32).tiny)])
def test_zeros_have_the_smallest_scale(fmt, smallest):
    """All candidates are equally good."""
    assert scales_of(encode(torch.zeros(1, 16), FORMATS[fmt], rule="lsq").tensor).item() == smallest
