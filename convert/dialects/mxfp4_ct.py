"""MXFP4 of compressed-tensors: `X.weight_packed` U8 [N, K/2] and `X.weight_scale` U8 [N, K/32], e8m0."""

from __future__ import annotations

from tutel_pack.convert.dialects import Part, Stored, as_bytes, blocks_of, companion, packed
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.formats import FORMATS

_PACKED = ".weight_packed"


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The packed weights that are left. InputError if a scale is missing, or of another type or shape."""
    found, fmt = {}, FORMATS["mxfp4"]
    for name, info in index.items():
        if name.endswith(_PACKED) and info.dtype == "U8" and info.shape:
            base = name.removesuffix(_PACKED)
            scale = companion(index, info, base + ".weight_scale", ("U8", "F8_E8M0"), blocks_of(info, 2 * info.shape[-1], fmt))
            found[base] = packed(base + ".weight", info, 2, fmt, Part(scale, as_bytes))
    return found
