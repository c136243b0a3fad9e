"""Packed words -> tiles of a matrix product's operand, in registers.

A word is 32 bits of packed weights: 2·H elements, H = 4 for 4-bit formats and H = 2 for fp8. Element H·c + h of a word
(c = 0, 1) goes to half c of its h-th pair: two bfloat16 side by side in 32 bits, made by shifts and masks alone. Sign
and magnitude are put where bfloat16 has them, which for small exponents is a power of two below the value, subnormals
included; one multiplication per pair puts that right and brings the block's scale with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

OFFSET = tl.constexpr(63)
"""Weights of mxfp4 and nvfp4 are made 2^63 too small, so that the multiplier of a pair is a finite bfloat16 for block
scales up to 2^64; what is left of them is exact down to 2^-69. The product's epilogue puts it right."""

UNDO_OFFSET = tl.constexpr(2.0**63)

FP8_FACTOR = tl.constexpr(2.0**120)
"""What makes a pair of fp8 elements right; their scales go to the sums."""

TWO_TO_127, TWO_TO_56 = tl.constexpr(2.0**127), tl.constexpr(2.0**56)

SIGNS = tl.constexpr(-0x7FFF8000)
"""0x80008000 as a signed integer: the sign bits of a pair."""

FP4_BITS = tl.constexpr(-0x7E3F7E40)
"""0x81C081C0: those of a pair of e2m1 elements."""

_MULTIPLY = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }")
"""There is no mul.bf16x2 on sm_80. −0 as the addend keeps the sign of zeros."""

_MINUS_136 = tl.constexpr(
    "{ .reg .b32 one, n; mov.b32 one, 0x3f803f80; mov.b32 n, 0xc308c308; fma.rn.bf16x2 $0, $1, one, n; }"
)


@triton.jit
def multiplier(s, FMT: tl.constexpr):
    """Stored block scales, integers of their bits -> float32: what a pair is to be multiplied with."""
    bits = s.to(tl.int32)
    if FMT == "mxfp4":
        return ((bits + (126 - OFFSET)) << 23).to(tl.float32, bitcast=True)
    elif FMT == "nvfp4":
        # e4m3 bits in place of float32's are 2^-120 of the value, subnormals included; 2^183 is no float32.
        e4m3 = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
        return e4m3 * TWO_TO_127 * TWO_TO_56
    else:
        return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _fp4_pair_by_product(word, h: tl.constexpr):
    """The same as `_fp4_pair`. A product puts a nibble in two places, and the mask keeps what is right of each."""
    if h >= 2:
        word = word >> 8
    if h % 2 == 0:
        return ((word & 0x000F000F) * ((1 << 12) + (1 << 6))) & FP4_BITS
    else:
        return ((word & 0x00F000F0) * ((1 << 8) + (1 << 2))) & FP4_BITS


@triton.jit
def _fp4_pair(word, h: tl.constexpr):
    """Nibbles h and h + 4, seem -> s at bit 15 and eem at bits 8..6 of their halves: 2^-126 of the value."""
    sign = (word << (12 - 4 * h)) & SIGNS
    if h < 2:
        return sign | ((word << (6 - 4 * h)) & 0x01C001C0)
    else:
        return sign | ((word >> (4 * h - 6)) & 0x01C001C0)


@triton.jit
def _int4_pair(word, h: tl.constexpr):
    """Nibbles h and h + 4 -> 136 + the value, which the last bits of a bfloat16 between 128 and 256 are."""
    return ((word >> (4 * h)) & 0x000F000F) ^ 0x43084308


@triton.jit
def _fp8_pair(word, h: tl.constexpr):
    """Bytes h and h + 2, seeeemmm -> s at bit 15 and eeeemmm at bits 10..4 of their halves: 2^-120 of the value."""
    sign = (word << (8 - 8 * h)) & SIGNS
    if h == 0:
        return sign | ((word << 4) & 0x07F007F0)
    else:
        return sign | ((word >> 4) & 0x07F007F0)


@triton.jit
def _in_half_precision(pair, factor, FMT: tl.constexpr):
    """Both halves of `pair` by those of `factor`, two to an instruction -> bfloat16 [..., 2]."""
    if FMT == "int4":
        pair = tl.inline_asm_elementwise(_MINUS_136, "=r,r", [pair], tl.int32, True, 1)
    pair = tl.inline_asm_elementwise(_MULTIPLY, "=r,r,r", [pair, factor], tl.int32, True, 1)
    low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
    return tl.join(low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True))


@triton.jit
def _in_float32(pair, factor, FMT: tl.constexpr, DOT: tl.constexpr):
    """The same by float32 `factor`, rounded once to DOT -> [..., 2]. float16 lacks the range of scaled-down weights."""
    halves = tl.join((pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True))
    if FMT == "int4":
        halves -= 136.0
    values = halves * tl.expand_dims(factor, len(factor.shape))
    if DOT == tl.float16 and (FMT == "mxfp4" or FMT == "nvfp4"):
        return (values * UNDO_OFFSET).to(DOT)
    elif DOT == tl.bfloat16 and FMT != "int4":
        # Exact: the last 16 bits are zeros, and cutting them off is one instruction where rounding is five.
        return (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(DOT)


@triton.jit
def _pair(
    word, factor, h: tl.constexpr,
    FMT: tl.constexpr, DOT: tl.constexpr, PAIRS: tl.constexpr, BY_PRODUCT: tl.constexpr,
):  # fmt: skip
    if FMT == "fp8":
        pair = _fp8_pair(word, h)
    elif FMT == "int4":
        pair = _int4_pair(word, h)
    elif BY_PRODUCT:
        pair = _fp4_pair_by_product(word, h)
    else:
        pair = _fp4_pair(word, h)
    if PAIRS:
        return _in_half_precision(pair, factor, FMT)
    else:
        return _in_float32(pair, factor, FMT, DOT)


@triton.jit
def decode(
    words, factor, FMT: tl.constexpr, DOT: tl.constexpr, PAIRS: tl.constexpr, BY_PRODUCT: tl.constexpr
):  # fmt: skip
    """int32 words [R, W] and the float32 multipliers of their blocks [R, B], B dividing W -> DOT [R, W, 2, H], the
    elements by word, c and h: those of a row in their order.

    PAIRS: multiply in bfloat16, which NVIDIA's chips do for a pair at once.
    BY_PRODUCT: shift by integer products, which are slow on AMD's chips and idle units on NVIDIA's.
    """
    R: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    B: tl.constexpr = factor.shape[1]
    if PAIRS:
        bits = factor.to(tl.int32, bitcast=True)
        factor = (bits & -65536) | ((bits >> 16) & 0xFFFF)
    factor = tl.broadcast_to(factor[:, :, None], (R, B, W // B)).reshape(R, W)
    p0 = _pair(words, factor, 0, FMT, DOT, PAIRS, BY_PRODUCT)
    p1 = _pair(words, factor, 1, FMT, DOT, PAIRS, BY_PRODUCT)
    if FMT == "fp8":
        return tl.join(p0, p1)
    else:
        p2 = _pair(words, factor, 2, FMT, DOT, PAIRS, BY_PRODUCT)
        p3 = _pair(words, factor, 3, FMT, DOT, PAIRS, BY_PRODUCT)
        return tl.join(tl.join(p0, p2), tl.join(p1, p3)).reshape(R, W, 2, 4)
