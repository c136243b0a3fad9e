"""Test matrices, seeded, and the shapes that codecs are tried on."""

from __future__ import annotations

import pytest
import torch

from tutel_pack.quant.codec import CODECS

PACKED = ("fp8", "mxfp4", "nvfp4")
FORMAT_RULES = [(fmt, rule) for fmt in PACKED for rule in CODECS[fmt].RULES]

SHAPES = [
    pytest.param((1, 1), None, id="1x1-smallest"),
    pytest.param((1, 15), None, id="1x15-odd-and-short-of-an-nvfp4-block"),
    pytest.param((17, 17), None, id="17x17-one-past-an-nvfp4-block"),
    pytest.param((17, 33), None, id="17x33-one-past-an-mxfp4-block"),
    pytest.param((129, 96), None, id="129x96-one-row-past-an-fp8-block-whole-fp4-blocks"),
    pytest.param((129, 100), None, id="129x100-ragged-in-every-format"),
    pytest.param((576, 129), None, id="576x129-half-a-block-row-as-kv_a_proj-one-column-past"),
    pytest.param((3, 2880), None, id="3x2880-gpt-oss-whole-mxfp4-half-an-fp8-block"),
    pytest.param((3, 17, 33), None, id="3x17x33-experts-ragged"),
    pytest.param((2, 128, 128), None, id="2x128x128-experts-nothing-ragged"),
    pytest.param((2, 160, 96), (40, 120), id="2x160x96-unequal-segments-that-end-inside-blocks"),
    pytest.param((129, 100), (1, 127, 1), id="129x100-segments-of-one-row"),
]


def weights(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Gaussian weights with rows of other magnitudes, outliers, zeros of both signs and a value that is nearly zero."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.02 * torch.randn(shape, generator=generator)
    x *= 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1), generator=generator)
    pick = torch.rand(shape, generator=generator)
    x[pick < 0.02] *= 20
    x[(pick > 0.5) & (pick < 0.55)] = 0.0
    x[(pick > 0.55) & (pick < 0.6)] = -0.0
    x[(pick > 0.6) & (pick < 0.62)] *= 1e-4
    return x.to(dtype)
