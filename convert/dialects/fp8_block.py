"""Block-FP8 as DeepSeek, Qwen, GLM and MiniMax publish it: `X.weight` F8_E4M3 and `X.weight_scale_inv`, which multiplies."""

from __future__ import annotations

import math

from tutel_pack.convert.dialects import Stored, quantization
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.errors import InputError
from tutel_pack.formats import DATA, FORMATS, SCALE

_SCALE_NAME = "_scale_inv"


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The FP8 weights that have a block scale beside them. InputError if a scale does not fit its weight."""
    found = {}
    for name, info in index.items():
        scale = index.get(name + _SCALE_NAME)
        if info.dtype == "F8_E4M3" and len(info.shape) == 2 and scale is not None:
            fmt = FORMATS["fp8"].with_block(_block(config))
            _check(info, scale, fmt.block)
            found[name] = Stored(name, info.shape, fmt, {DATA: info, SCALE: scale})
    return found


def _block(config: dict) -> tuple[int, int]:
    block = quantization(config).get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
        raise InputError(
            "The checkpoint has block-FP8 weights, but its config.json gives no quantization_config.weight_block_size "
            f"of two positive numbers (found {block!r:.100}): download config.json again."
        )
    # Matrices are cut at multiples of 128 rows, which must be block edges.
    if any(128 % b for b in block):
        raise InputError(f"The checkpoint's FP8 blocks of {block[0]} × {block[1]} are not supported: only divisors of 128 are.")
    return tuple(block)


def _check(weight: TensorInfo, scale: TensorInfo, block: tuple[int, int]) -> None:
    expected = tuple(math.ceil(n / b) for n, b in zip(weight.shape, block))
    if scale.shape != expected or scale.dtype not in ("F32", "BF16"):
        raise InputError(
            f"{scale.name} is {scale.dtype} {list(scale.shape)}, but {weight.name} {list(weight.shape)} in blocks of "
            f"{block[0]} × {block[1]} needs F32 or BF16 {list(expected)}: the checkpoint and its config.json do not belong together."
        )
