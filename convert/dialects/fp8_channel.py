"""FP8 with a scale per row or one for the whole: `X.weight` F8_E4M3 and `X.weight_scale` [N, 1], [N] or a single number
(compressed-tensors' float-quantized, ModelOpt, Quark); also a single `X.weight_scale_inv`."""

from __future__ import annotations

import math

from tutel_pack.convert.dialects import Part, Stored
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.errors import InputError
from tutel_pack.formats import DATA, FORMATS, SCALE

_DTYPES = ("F32", "BF16", "F16")


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The FP8 weights that are left and have a scale. InputError if it is of another type or shape."""
    found = {}
    for name, info in index.items():
        scale = index.get(name + "_scale") or index.get(name + "_scale_inv")
        if info.dtype == "F8_E4M3" and len(info.shape) == 2 and scale is not None:
            fmt = FORMATS["fp8"].with_block(_block(info, scale))
            found[name] = Stored(name, info.shape, fmt, {DATA: Part(info), SCALE: Part(scale)})
    return found


def _block(weight: TensorInfo, scale: TensorInfo) -> tuple[int, int]:
    n, k = weight.shape
    single = math.prod(scale.shape) == 1
    if scale.dtype not in _DTYPES or not (single or scale.shape in ((n, 1), (n,))) or not weight.shape[0] * weight.shape[1]:
        raise InputError(
            f"{scale.name} is {scale.dtype} {list(scale.shape)}, but {weight.name} {list(weight.shape)} needs {', '.join(_DTYPES)} "
            f"[{n}, 1] or a single number: the checkpoint is damaged, or its quantization is not supported."
        )
    return (n if single else 1), k
