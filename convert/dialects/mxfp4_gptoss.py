"""MXFP4 as gpt-oss has it: `X_blocks` U8 [E, N, K/32, 16] and `X_scales` U8 [E, N, K/32], e8m0, for the experts of a layer.

Whether rows of gate and up are interleaved is the family's to say.
"""

from __future__ import annotations

from tutel_pack.convert.dialects import Part, Stored, as_bytes, companion
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.errors import InputError
from tutel_pack.formats import DATA, FORMATS, SCALE

_BLOCK_BYTES = 16


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The weights in blocks. InputError if one has no scales, or others than it needs."""
    found = {}
    for name, info in index.items():
        if name.endswith("_blocks") and info.dtype == "U8":
            if len(info.shape) not in (3, 4) or info.shape[-1] != _BLOCK_BYTES:
                raise InputError(f"{name} has shape {list(info.shape)}, where MXFP4 needs blocks of {_BLOCK_BYTES} bytes: the checkpoint is damaged.")
            base = name.removesuffix("_blocks")
            scales = companion(index, info, base + "_scales", ("U8", "F8_E8M0"), info.shape[:-1])
            shape = (*info.shape[:-2], info.shape[-2] * 2 * _BLOCK_BYTES)
            found[base] = Stored(base, shape, FORMATS["mxfp4"], {DATA: Part(info, as_bytes), SCALE: Part(scales, as_bytes)})
    return found
