"""NVFP4 of compressed-tensors: `X.weight_packed` U8, `X.weight_scale` F8_E4M3 [N, K/16], and `X.weight_global_scale`, which divides."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.convert.dialects import Part, Stored, blocks_of, companion, packed
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.formats import FORMATS, GLOBAL

_PACKED = ".weight_packed"


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The packed weights whose block scales are e4m3. InputError if a global scale is missing, or a scale is misshapen."""
    found, fmt = {}, FORMATS["nvfp4"]
    for name, info in index.items():
        base = name.removesuffix(_PACKED)
        scale = index.get(base + ".weight_scale")
        if name.endswith(_PACKED) and info.dtype == "U8" and info.shape and scale is not None and scale.dtype == "F8_E4M3":
            companion(index, info, scale.name, ("F8_E4M3",), blocks_of(info, 2 * info.shape[-1], fmt))
            divisor = companion(index, info, base + ".weight_global_scale", ("F32",), ())
            found[base] = packed(base + ".weight", info, 2, fmt, Part(scale), **{GLOBAL: Part(divisor, reciprocal)})
    return found


def reciprocal(divisor: Tensor) -> Tensor:
    """The float32 nearest to 1/g, by which this package multiplies; NaN where g is no divisor."""
    return torch.where(torch.isfinite(divisor) & (divisor != 0), 1.0 / divisor, torch.nan)
