"""NVFP4 of ModelOpt: `X.weight` U8 [N, K/2], `X.weight_scale` F8_E4M3 [N, K/16], and `X.weight_scale_2` F32, which multiplies."""

from __future__ import annotations

from tutel_pack.convert.dialects import Part, Stored, blocks_of, companion, packed
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.formats import FORMATS, GLOBAL


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The packed weights whose block scales are e4m3. InputError if the second scale is missing, or one is misshapen."""
    found, fmt = {}, FORMATS["nvfp4"]
    for name, info in index.items():
        scale = index.get(name + "_scale")
        if info.dtype == "U8" and scale is not None and scale.dtype == "F8_E4M3" and info.shape:
            companion(index, info, scale.name, ("F8_E4M3",), blocks_of(info, 2 * info.shape[-1], fmt))
            second = companion(index, info, name + "_scale_2", ("F32",), ())
            found[name] = packed(name, info, 2, fmt, Part(scale), **{GLOBAL: Part(second)})
    return found
