"""Block-FP8: `X.weight` F8_E4M3 and `X.weight_scale_inv` or `X.scale` (DeepSeek, Qwen, GLM, MiniMax), or `X.weight_scale`
(compressed-tensors), one scale per block. All multiply, whatever their name says. The config gives the block."""

from __future__ import annotations

import math

import torch

from tutel_pack.convert.dialects import Part, Stored, as_bytes, config_groups, quantization, widened
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.errors import InputError
from tutel_pack.formats import DATA, FORMATS, SCALE

_DTYPES = ("F32", "BF16", "F8_E8M0")


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The FP8 weights that have a block scale beside them. InputError if a scale does not fit its weight."""
    found = {}
    for name, info in index.items():
        if info.dtype == "F8_E4M3" and len(info.shape) == 2 and (scale := _scale(index, info, config)) is not None:
            block = _block(config)
            _check(info, scale, block)
            e8m0 = scale.dtype == "F8_E8M0"
            fmt = FORMATS["fp8"].with_scale(block, torch.uint8 if e8m0 else torch.float32)
            found[name] = Stored(name, info.shape, fmt, {DATA: Part(info), SCALE: Part(scale, as_bytes if e8m0 else widened)})
    return found


def _scale(index: dict[str, TensorInfo], weight: TensorInfo, config: dict) -> TensorInfo | None:
    """The scale of a weight, if it is one per block. Those per row or for the whole are another dialect's."""
    base = weight.name.removesuffix(".weight")
    scale = index.get(weight.name + "_scale_inv") or (index.get(base + ".scale") if base != weight.name else None)
    if scale is not None:
        single = math.prod(scale.shape) == 1 and _configured(config) is None
        return None if single else scale
    scale = index.get(weight.name + "_scale")
    per_block = scale is not None and len(scale.shape) == 2 and scale.shape[1] > 1
    return scale if per_block or (scale and _configured(config) and scale.shape == _grid(weight, _block(config))) else None


def _configured(config: dict) -> list | None:
    """The block of the config: DeepSeek's spelling, or that of compressed-tensors."""
    found = [g.get("block_structure") for g in config_groups(config) if g.get("strategy") == "block"]
    return quantization(config).get("weight_block_size") or (found[0] if found else None)


def _block(config: dict) -> tuple[int, int]:
    block = _configured(config)
    if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
        raise InputError(
            "The checkpoint has block-FP8 weights, but its config.json gives no quantization_config.weight_block_size "
            f"of two positive numbers (found {block!r:.100}): download config.json again."
        )
    # Matrices are cut at multiples of 128 rows, which must be block edges.
    if any(128 % b for b in block):
        raise InputError(f"The checkpoint's FP8 blocks of {block[0]} × {block[1]} are not supported: only divisors of 128 are.")
    return tuple(block)


def _grid(weight: TensorInfo, block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(math.ceil(n / b) for n, b in zip(weight.shape, block))


def _check(weight: TensorInfo, scale: TensorInfo, block: tuple[int, int]) -> None:
    expected = _grid(weight, block)
    if scale.shape != expected or scale.dtype not in _DTYPES:
        raise InputError(
            f"{scale.name} is {scale.dtype} {list(scale.shape)}, but {weight.name} {list(weight.shape)} in blocks of "
            f"{block[0]} × {block[1]} needs {', '.join(_DTYPES)} {list(expected)}: the checkpoint and its config.json do not belong together."
        )
