"""Packed words -> tiles of a matrix product's operand by AMD's instructions: bytes picked by bytes, and conversions.

A word is 32 bits of packed weights, as in decode.py; elements stay in their order, for two neighbours are made at once.
Scales of blocks are applied on the way, but for those of fp8, and nothing is left to the sums but the factor 2 of
e4m3fnuz. For what instructions do see "AMD Instinct MI300 Instruction Set Architecture", that of CDNA 4, and, for the
interpreter, tests/kernels/instructions.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TWO_TO_120 = tl.constexpr(2.0**120)

_SEVENS, _FIFTEENS, _MAGNITUDES = tl.constexpr(0x07070707), tl.constexpr(0x0F0F0F0F), tl.constexpr(0x7F7F7F7F)
_SIGNS, _HIGH_BITS = tl.constexpr(-0x7F7F7F80), tl.constexpr(-0x77777778)
"""0x80808080 and 0x88888888 as signed integers."""

_FIRST_HALVES, _LAST_HALVES = tl.constexpr(0x05010400), tl.constexpr(0x07030602)
_EVEN_BYTES, _ODD_BYTES = tl.constexpr(0x06040200), tl.constexpr(0x07050301)
"""What to pick from two words: of their first or last halves byte by byte in turn, or every second byte of both."""


@triton.jit
def _picked(low, high, which):
    """Bytes 0 … 3 of `low` and 4 … 7 of `high` by the bytes of `which`."""
    return tl.inline_asm_elementwise("v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [high, low, which], tl.int32, True, 1)


@triton.jit
def _picked_alike(low, high, which: tl.constexpr):
    """The same everywhere."""
    return tl.inline_asm_elementwise("v_perm_b32 $0, $1, $2, $3", "=v,v,v,s", [high, low, which], tl.int32, True, 1)


@triton.jit
def _in_turn(a, b, c, d):
    """[R, W] each -> [R, W, 4]."""
    R: tl.constexpr = a.shape[0]
    W: tl.constexpr = a.shape[1]
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(R, W, 4)


@triton.jit
def _bytes(words):
    """[R, W] -> uint8 [R, W, 4]."""
    return _in_turn(
        words.to(tl.uint8), (words >> 8).to(tl.uint8), (words >> 16).to(tl.uint8), (words >> 24).to(tl.uint8)
    )


@triton.jit
def _by_word(x, W: tl.constexpr):
    """Of blocks [R, B] -> of words [R, W]."""
    R: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    return tl.broadcast_to(x[:, :, None], (R, B, W // B)).reshape(R, W)


@triton.jit
def _block_scale(bits, FMT: tl.constexpr):
    """Stored block scales, integers of their bits -> float32."""
    bits = bits.to(tl.int32)
    if FMT == "mxfp4":
        return tl.maximum(bits << 23, 1 << 22).to(tl.float32, bitcast=True)  # 0 is 2^-127, a subnormal
    elif FMT == "nvfp4":
        # e4m3 bits in place of float32's are 2^-120 of the value, subnormals included.
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * _TWO_TO_120
    else:
        return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _fp8_as_fnuz(words, DOT: tl.constexpr):
    """e4m3fn -> DOT [R, W, 4] by the conversion of e4m3fnuz, which is half the value, and NaN where this has −0.

    The average of a byte and 0x7F, rounded down, has the byte's own sign, except for 0x80: that becomes a zero.
    """
    average = tl.inline_asm_elementwise("v_lerp_u8 $0, $1, $2, 0", "=v,v,s", [words, _MAGNITUDES], tl.int32, True, 1)
    words = (words & _MAGNITUDES) | (average & _SIGNS)
    return _bytes(words).to(tl.float8e4b8, bitcast=True).to(DOT)


@triton.jit
def _bits(values, DOT: tl.constexpr):
    """float32 -> the 16 bits of DOT, as int32. FP4 times its block's scale is exact in bfloat16."""
    if DOT == tl.bfloat16:
        return (values.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    else:
        return values.to(DOT).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _table(scale, DOT: tl.constexpr):
    """What the magnitudes of e2m1 are under a scale: their low bytes, four to a word, and their high ones."""
    p0 = _bits(scale * 0.5, DOT) << 16
    p1 = _bits(scale, DOT) | (_bits(scale * 1.5, DOT) << 16)
    p2 = _bits(scale * 2.0, DOT) | (_bits(scale * 3.0, DOT) << 16)
    p3 = _bits(scale * 4.0, DOT) | (_bits(scale * 6.0, DOT) << 16)
    return (
        _picked_alike(p0, p1, _EVEN_BYTES), _picked_alike(p2, p3, _EVEN_BYTES),
        _picked_alike(p0, p1, _ODD_BYTES), _picked_alike(p2, p3, _ODD_BYTES),
    )  # fmt: skip


@triton.jit
def _looked_up(nibbles, low0, low1, high0, high1):
    """Four elements, the last bits of bytes -> two pairs in 32 bits each."""
    which = nibbles & _SEVENS
    low = _picked(low0, low1, which)
    high = _picked(high0, high1, which) | ((nibbles << 4) & _SIGNS)
    return _picked_alike(low, high, _FIRST_HALVES), _picked_alike(low, high, _LAST_HALVES)


@triton.jit
def _fp4_by_table(words, scale, DOT: tl.constexpr):
    """-> DOT [R, W, 4, 2]. Every block has its table, of eight values in four registers."""
    low0, low1, high0, high1 = _table(_by_word(scale, words.shape[1]), DOT)
    odd = words >> 4
    p0, p1 = _looked_up(_picked_alike(words, odd, _FIRST_HALVES), low0, low1, high0, high1)
    p2, p3 = _looked_up(_picked_alike(words, odd, _LAST_HALVES), low0, low1, high0, high1)
    return _halves(_in_turn(p0, p1, p2, p3), DOT)


@triton.jit
def _halves(pairs, DOT: tl.constexpr):
    """[…] of two elements in 32 bits -> DOT […, 2]."""
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(DOT, bitcast=True)


@triton.jit
def _converted(words, scale, BYTE: tl.constexpr, INTO: tl.constexpr):
    """The two elements of e2m1 in a byte of each word, times the power of two in `scale`, in an integer."""
    PLACE: tl.constexpr = ("0,0", "1,0", "0,1", "1,1")[BYTE]
    CODE: tl.constexpr = "v_cvt_scalef32_pk_" + INTO + "_fp4 $0, $1, $2 op_sel:[" + PLACE + ",0]"
    if INTO == "f32":
        return tl.inline_asm_elementwise(CODE, "=v,v,v", [words, scale], tl.int64, True, 1)
    else:
        return tl.inline_asm_elementwise(CODE, "=v,v,v", [words, scale], tl.int32, True, 1)


@triton.jit
def _all_converted(words, scale, INTO: tl.constexpr):
    """-> [R, W, 4]."""
    return _in_turn(
        _converted(words, scale, 0, INTO), _converted(words, scale, 1, INTO),
        _converted(words, scale, 2, INTO), _converted(words, scale, 3, INTO),
    )  # fmt: skip


@triton.jit
def _fp4_by_conversion(words, scale, FMT: tl.constexpr, DOT: tl.constexpr):
    """-> DOT [R, W, 4, 2]."""
    scale = _by_word(scale, words.shape[1])
    if FMT == "mxfp4":
        return _halves(_all_converted(words, scale, "bf16" if DOT == tl.bfloat16 else "f16"), DOT)
    else:
        pairs = _all_converted(words, 1.0, "f32")
        values = tl.join(pairs.to(tl.int32), (pairs >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        return (values * scale[:, :, None, None]).to(DOT)


@triton.jit
def _in_8_bits(values):
    """float32 of 15 bits at most -> rounded to the 8 of bfloat16. Dekker, "A floating-point technique for extending the
    available precision", 1971; that it is a fused addition keeps the compiler from fusing it with what follows."""
    far = tl.fma(values, 65536.0, values)
    return far + (values - far)


@triton.jit
def _above_2_to_15(words, BYTE: tl.constexpr):
    """A small number in a byte of each word -> 2^15 + that number, in float32."""
    bits = _picked_alike(words, tl.full(words.shape, 0x47, tl.int32), 0x040C000C + (BYTE << 8))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bytes_above_2_to_15(words):
    """[R, W] -> float32 [R, W, 4]."""
    return _in_turn(
        _above_2_to_15(words, 0), _above_2_to_15(words, 1), _above_2_to_15(words, 2), _above_2_to_15(words, 3)
    )


@triton.jit
def _int4(words, scale, DOT: tl.constexpr, ROUNDS: tl.constexpr):
    """-> DOT [R, W, 4, 2]. ROUNDS: the chip has an instruction for it."""
    words ^= _HIGH_BITS  # adds 8 to every element
    values = tl.join(_bytes_above_2_to_15(words & _FIFTEENS), _bytes_above_2_to_15((words >> 4) & _FIFTEENS))
    scale = tl.broadcast_to(_by_word(scale, words.shape[1])[:, :, None, None], values.shape)
    products = tl.fma(values, scale, scale * -(2.0**15 + 8))
    if ROUNDS or DOT != tl.bfloat16:
        return products.to(DOT)
    else:
        return _bits(_in_8_bits(products), DOT).to(tl.int16).to(DOT, bitcast=True)


@triton.jit
def decode_by_amd(words, bits, FMT: tl.constexpr, DOT: tl.constexpr, WAY: tl.constexpr):
    """int32 words [R, W] and the stored scales of their blocks [R, B], B dividing W -> DOT [R, K].

    WAY: "fnuz" for fp8, whose scales are not applied; "table", or "conversion" where there are instructions for it.
    """
    R: tl.constexpr = words.shape[0]
    K: tl.constexpr = words.shape[1] * (4 if FMT == "fp8" else 8)
    if WAY == "fnuz":
        weights = _fp8_as_fnuz(words, DOT)
    elif FMT == "int4":
        weights = _int4(words, _block_scale(bits, FMT), DOT, WAY == "conversion")
    elif WAY == "conversion":
        weights = _fp4_by_conversion(words, _block_scale(bits, FMT), FMT, DOT)
    else:
        weights = _fp4_by_table(words, _block_scale(bits, FMT), DOT)
    return weights.reshape(R, K)
