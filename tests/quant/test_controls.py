"""The checks of this folder must notice what they are for: damage that real converters have done, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.quant.data import PACKED, weights
from tests.quant.oracle import check_decoded, check_encoded

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import decode, encode


def bytes_of(part: torch.Tensor) -> torch.Tensor:
    """A copy as bytes."""
    return part.clone().view(torch.uint8)


def swapped_nibbles(p: PackedTensor) -> PackedTensor:
    return replace(p, data=p.data << 4 | p.data >> 4)


def zeros(p: PackedTensor) -> PackedTensor:
    return replace(p, data=torch.zeros_like(p.data.view(torch.uint8)).view(p.data.dtype))


def neighbours_scale(p: PackedTensor) -> PackedTensor:
    return replace(p, scale=bytes_of(p.scale).view(p.scale.dtype).roll(1, dims=-1))


def segments_scale(p: PackedTensor) -> PackedTensor:
    return replace(p, scale=p.scale.roll(1, dims=-2))


def other_experts_scale(p: PackedTensor) -> PackedTensor:
    return replace(p, scale=p.scale.roll(1, dims=0))


def exponent_off_by_one(p: PackedTensor) -> PackedTensor:
    scale = p.scale * 2 if p.format.name == "fp8" else bytes_of(p.scale) + (1 if p.format.name == "mxfp4" else 8)
    return replace(p, scale=scale.view(p.scale.dtype))


def dropped_signs(p: PackedTensor) -> PackedTensor:
    mask = 0x7F if p.format.name == "fp8" else 0x77
    return replace(p, data=(bytes_of(p.data) & mask).view(p.data.dtype))


def one_wrong_sign_of_zero(p: PackedTensor) -> PackedTensor:
    data = bytes_of(p.data)
    sign = 0x80 if p.format.name == "fp8" else 0x08
    low_nibble_or_all = data & (0x7F if p.format.name == "fp8" else 0x07)
    first = torch.nonzero(low_nibble_or_all.flatten() == 0)[0]
    data.view(-1)[first] ^= sign
    return replace(p, data=data.view(p.data.dtype))


def rows_shifted(p: PackedTensor) -> PackedTensor:
    return replace(p, data=bytes_of(p.data).roll(1, dims=-2).view(p.data.dtype))


def dead_expert(p: PackedTensor) -> PackedTensor:
    data = bytes_of(p.data)
    data[-1] = 0
    return replace(p, data=data.view(p.data.dtype))


DAMAGES_TO_VALUES = [
    zeros, neighbours_scale, segments_scale, other_experts_scale, exponent_off_by_one, dropped_signs, rows_shifted,
    dead_expert,
]  # fmt: skip


def cases(damages: list[Callable]) -> list:
    """Every format with every damage, and with swapped nibbles where it has nibbles."""
    pairs = [(fmt, damage) for fmt in PACKED for damage in damages]
    pairs += [(fmt, swapped_nibbles) for fmt in PACKED if FORMATS[fmt].per_item == 2]
    return [pytest.param(fmt, damage, id=f"{fmt}-{damage.__name__}") for fmt, damage in pairs]


@pytest.mark.parametrize("fmt, damage", cases([*DAMAGES_TO_VALUES, one_wrong_sign_of_zero]))
def test_encoding_check_notices(fmt, damage: Callable[[PackedTensor], PackedTensor]):
    x = weights((2, 160, 160))
    p = encode(x, FORMATS[fmt], (40, 120)).tensor
    check_encoded(p, x, "amax" if fmt == "fp8" else "lsq")
    with pytest.raises(AssertionError, match="differ, first at"):
        check_encoded(damage(p), x, "amax" if fmt == "fp8" else "lsq")


@pytest.mark.parametrize("fmt, damage", cases(DAMAGES_TO_VALUES))
def test_decoding_check_notices(fmt, damage: Callable[[PackedTensor], PackedTensor]):
    """A decoder that read a tensor as if it were damaged in this way is caught."""
    p = encode(weights((2, 160, 160)), FORMATS[fmt], (40, 120)).tensor
    check_decoded(decode(p), p)
    with pytest.raises(AssertionError):
        check_decoded(decode(damage(p)), p)


@pytest.mark.parametrize("fmt, other", [("mxfp4", "floor"), ("nvfp4", "amax"), ("fp8", "lsq")])
def test_encoding_check_notices_another_rule(fmt, other):
    x = weights((1, 160, 160))
    with pytest.raises(AssertionError, match="scales differ"):
        check_encoded(encode(x, FORMATS[fmt], rule=other).tensor, x, "amax" if fmt == "fp8" else "lsq")


def test_a_wrong_global_scale_is_noticed():
    x = weights((2, 20, 40))
    p = encode(x, FORMATS["nvfp4"]).tensor
    wrong = replace(p, global_scale=p.global_scale.flip(0))
    with pytest.raises(AssertionError, match="differ, first at"):
        check_encoded(wrong, x, "lsq")
    with pytest.raises(AssertionError):
        check_decoded(decode(wrong), p)
