"""INT4 of compressed-tensors (Kimi-K2-Thinking): `X.weight_packed` I32 [N, K/8], `X.weight_scale` BF16 [N, K/32].

Word w of a row holds the elements 8w … 8w + 7, the first in its lowest bits, each with 8 added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.convert.dialects import Part, Stored, blocks_of, companion, config_groups
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.errors import InputError
from tutel_pack.formats import DATA, FORMATS, SCALE

_PACKED = ".weight_packed"
_EXPECTED = {
    "num_bits": (4,), "group_size": (32,), "symmetric": (True,), "strategy": ("group", None),
    "actorder": (None, "weight", "static"),  # the other kinds store columns in an order of their own
}  # fmt: skip


def find(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """The packed integers. InputError if the config says other integers than these, or if a scale is missing or misshapen."""
    names = [name for name, info in index.items() if name.endswith(_PACKED) and info.dtype == "I32"]
    if names:
        _check(config)
    return {stored.name: stored for stored in (_stored(index, index[name]) for name in names)}


def _stored(index: dict[str, TensorInfo], info: TensorInfo) -> Stored:
    fmt, base, k = FORMATS["int4"], info.name.removesuffix(_PACKED), 8 * (info.shape[-1:] or (0,))[0]
    scale = companion(index, info, base + ".weight_scale", ("BF16",), blocks_of(info, k, fmt))
    parts = {DATA: Part(info, _signed), SCALE: Part(scale, lambda raw: raw)}
    return Stored(base + ".weight", (info.shape[0], k), fmt, parts)


def _signed(words: Tensor) -> Tensor:
    """int32 [n, K/8] -> uint8 [n, K/2] of two's complement nibbles: u − 8 differs from u in its top bit alone."""
    return words.view(torch.uint8) ^ 0x88


def _check(config: dict) -> None:
    """Headers alone cannot tell 4 bits in groups of 32 from 8 bits, from zero points or from columns in another order."""
    groups = config_groups(config)
    if groups and not any(weights.get("type") == "int" for weights in groups):
        raise InputError("The checkpoint has packed integers, and its config.json describes none: download both again.")
    for weights in (weights for weights in groups if weights.get("type") == "int"):
        for key, expected in _EXPECTED.items():
            if weights.get(key) not in expected:
                raise InputError(
                    f"The checkpoint's integer weights have {key} {weights.get(key)!r:.50}, and only {expected[0]!r} is supported: "
                    "convert the original checkpoint instead."
                )
