"""MXFP4 of Quark, and of Ling and MiMo: `X.weight` U8 [N, K/2], and `X.weight_scale` or `X.weight_scale_inv` U8 [N, K/32], e8m0."""

from __future__ import annotations

from tutel_pack.convert.dialects import Part, Stored, as_bytes, blocks_of, companion, packed
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.formats import FORMATS


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The byte weights that are left. InputError if a scale is missing, or of another type or shape."""
    found, fmt = {}, FORMATS["mxfp4"]
    for name, info in index.items():
        if name.endswith(".weight") and info.dtype == "U8" and len(info.shape) == 2:
            scale_name = name + ("_scale_inv" if name + "_scale_inv" in index else "_scale")
            scale = companion(index, info, scale_name, ("U8", "F8_E8M0"), blocks_of(info, 2 * info.shape[1], fmt))
            found[name] = packed(name, info, 2, fmt, Part(scale, as_bytes))
    return found
