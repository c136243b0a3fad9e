"""MXFP4 of DeepSeek-V4's experts: `X.weight` I8 [N, K/2] and `X.scale` F8_E8M0 [N, K/32]."""

from __future__ import annotations

from tutel_pack.convert.dialects import Part, Stored, as_bytes, blocks_of, companion, packed
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.formats import FORMATS


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The I8 weights that have a scale of this name. InputError if it is of another type or shape."""
    found, fmt = {}, FORMATS["mxfp4"]
    for name, info in index.items():
        scale_name = name.removesuffix(".weight") + ".scale"
        if name.endswith(".weight") and info.dtype == "I8" and len(info.shape) == 2 and scale_name in index:
            scale = companion(index, info, scale_name, ("F8_E8M0",), blocks_of(info, 2 * info.shape[1], fmt))
            found[name] = packed(name, info, 2, fmt, Part(scale, as_bytes))
    return found
