"""Plain tensors: BF16, F16 and F32 weights, and whatever else is stored as it is used."""

from __future__ import annotations

from tutel_pack.artifact import DTYPE_NAMES, DTYPES
from tutel_pack.convert.dialects import Part, Stored, unused_reason
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS

_FORMATS = {DTYPE_NAMES[FORMATS[name].dtype]: FORMATS[name] for name in ("bf16", "f16", "f32")}


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """Everything in `index`. InputError for 8-bit floats, whose scales no dialect before this one has found."""
    bare = [name for name, info in index.items() if _is_bare(info)]
    if bare:
        scales = [name for name in index if "scale" in name]
        hint = f" (it holds scales of an unknown name, such as {scales[0]})" if scales else ""
        raise InputError(
            f"{len(bare)} quantized tensors have no scale that this version knows, the first is {bare[0]}{hint}: "
            "the checkpoint is incomplete, or its quantization is not supported."
        )
    return {name: _stored(info) for name, info in index.items()}


def _is_bare(info: TensorInfo) -> bool:
    packed = info.dtype in ("I8", "U8") and len(info.shape) > 1 and info.name.endswith((".weight", "_packed"))
    return packed or info.dtype.startswith("F8_E4M3") or info.dtype not in DTYPES


def _stored(info: TensorInfo) -> Stored:
    fmt = _FORMATS.get(info.dtype) if len(info.shape) > 1 else None
    return Stored(info.name, info.shape, fmt, {"": Part(info, lambda raw: raw)}, unused_reason(info.name))
