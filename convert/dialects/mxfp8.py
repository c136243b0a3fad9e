"""MXFP8 (MiniMax-M3, Quark): `X.weight` F8_E4M3 and `X.weight_scale_inv` or `X.weight_scale` U8 [N, K/32], e8m0."""

from __future__ import annotations

import math

import torch

from tutel_pack.convert.dialects import Part, Stored, as_bytes, companion
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.formats import DATA, FORMATS, SCALE

BLOCK = (1, 32)


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The FP8 weights whose scales are bytes. InputError if these are of another shape."""
    found, fmt = {}, FORMATS["fp8"].with_scale(BLOCK, torch.uint8)
    for name, info in index.items():
        scale = next((index[name + s] for s in ("_scale_inv", "_scale") if name + s in index), None)
        if info.dtype == "F8_E4M3" and len(info.shape) == 2 and scale is not None and scale.dtype == "U8":
            grid = info.shape[0], math.ceil(info.shape[1] / BLOCK[1])
            companion(index, info, scale.name, ("U8",), grid)
            found[name] = Stored(name, info.shape, fmt, {DATA: Part(info), SCALE: Part(scale, as_bytes)})
    return found
