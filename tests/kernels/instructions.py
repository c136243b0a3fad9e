"""What the instructions in inline assembly do, by AMD's manuals of MI300 and CDNA 4, for Triton's interpreter."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
from tests.kernels.reference import E2M1


def run(builder, code: str, constraints: str, values: list, types: list, pure: bool, pack: int) -> SimpleNamespace:
    """In place of InterpreterBuilder.create_inline_asm: one instruction on whole tensors."""
    from triton.runtime.interpreter import TensorHandle

    assert pack == 1 and constraints.split(",")[0] == "=v" and len(types) == 1
    name, rest = code.split(" ", 1)
    operands = [o.strip() for o in rest.split(" op_sel")[0].split(",")][1:]
    sources = [values[int(o[1:]) - 1].data if o[0] == "$" else np.int32(o) for o in operands]
    op_sel = [int(bit) for bit in re.findall(r"[01]", rest.partition("op_sel:")[2])] or [0, 0, 0]
    made = _instruction(name, op_sel, *np.broadcast_arrays(*sources))
    dtype = types[0].scalar
    return SimpleNamespace(get_result=lambda i: TensorHandle(made.view(f"int{dtype.primitive_bitwidth}"), dtype))


def _instruction(name: str, op_sel: list[int], *sources: np.ndarray) -> np.ndarray:
    if name == "v_perm_b32":
        return permuted(*sources)
    if name == "v_lerp_u8":
        return averaged(*sources)
    into = re.fullmatch(r"v_cvt_scalef32_pk_(\w+)_fp4", name)[1]
    return converted(into, op_sel[0] + 2 * op_sel[1], *sources)


def permuted(high: np.ndarray, low: np.ndarray, which: np.ndarray) -> np.ndarray:
    """V_PERM_B32: selectors 0 … 3 are bytes of the second operand, 4 … 7 of the first, 12 is zero."""
    both = np.concatenate([_bytes(low), _bytes(high)], axis=-1)
    which = _bytes(which)
    assert np.isin(which, [*range(8), 12]).all(), "others copy signs, or are 0xFF"
    picked = np.where(which == 12, np.uint8(0), np.take_along_axis(both, which & 7, axis=-1))
    return picked.view(np.int32)[..., 0]


def averaged(a: np.ndarray, b: np.ndarray, up: np.ndarray) -> np.ndarray:
    """V_LERP_U8: the mean of bytes, rounded up where the third operand is odd."""
    total = _bytes(a).astype(np.int32) + _bytes(b) + (_bytes(up) & 1)
    return (total >> 1).astype(np.uint8).view(np.int32)[..., 0]


def converted(into: str, byte: int, words: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """V_CVT_SCALEF32_PK_*_FP4: the byte of a word that OP_SEL says, its low half first, times the power of two that the
    exponent of a float32 is, whatever its sign and mantissa; exponent 0 is 2^-127."""
    import torch

    codes = _bytes(words)[..., byte]
    power = np.ldexp(1.0, (scale.astype(np.float32).view(np.int32) >> 23 & 255) - 127)
    pair = np.stack([E2M1[codes & 15] * power, E2M1[codes >> 4] * power], axis=-1)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[into]
    bits = torch.from_numpy(pair).float().to(dtype).view(torch.int32 if into == "f32" else torch.int16).numpy()
    return bits.view(np.int64 if into == "f32" else np.int32)[..., 0]


def _bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
