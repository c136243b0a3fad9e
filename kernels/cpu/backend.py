"""The operations of ops.py by the C++ of this folder, in float32 and bfloat16.

Native are `linear` and `moe` of mxfp4, nvfp4, int4, fp8 and bfloat16 weights. Everything else is torch's, and so are
activations in float16 and weights that `native.describe` has no kernel for.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from tutel_pack.errors import ResourceError
from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import Weight
from tutel_pack.kernels.torch_backend import (  # noqa: F401  what is not native
    attention,
    embedding,
    latent_attention,
    rms_norm,
    rope,
    rotation,
    route,
    swiglu,
    top_positions,
)
from tutel_pack.spec import ClampedSwiglu, Swiglu

_library = native.library()
_linear, _moe = _library.tp_linear, _library.tp_moe

_DTYPES = native.DTYPES

_known: dict[int, tuple[weakref.ref, int]] = {}
"""By id of a weight: a reference to it, and where its description is, 0 if there is none."""

_described: dict[int, native.Weight] = {}


def _place(w: Weight) -> int:
    """Address of a weight's description, 0 where there is no kernel for it. Described once."""
    found = _known.get(id(w))
    return found[1] if found is not None and found[0]() is w else _describe(w)


def _describe(w: Weight) -> int:
    key, description = id(w), native.describe(w)

    def forget(_, key=key):
        _known.pop(key, None)
        _described.pop(key, None)

    _described[key] = description
    _known[key] = weakref.ref(w, forget), ctypes.addressof(description) if description else 0
    return _known[key][1]


def _bias(bias: Tensor | None) -> tuple[int | None, int, Tensor | None]:
    """(address, dtype, the tensor to be kept) of a bias."""
    if bias is None:
        return None, 0, None
    if bias.dtype not in _DTYPES:
        bias = bias.float()
    bias = bias.contiguous()
    return bias.data_ptr(), _DTYPES[bias.dtype], bias


def _check(status: int) -> None:
    if status == 1:
        raise IndexError("an expert id is outside −1 … experts − 1")
    if status == 2:
        raise ResourceError("There is not enough memory for this many tokens at once: run fewer or shorter sequences.")


def linear(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    place, dtype = _place(w), _DTYPES.get(x.dtype)
    if not place or dtype is None:
        return torch_backend.linear(x, w, bias)
    x, out = x.contiguous(), x.new_empty(len(x), w.shape[0])
    address, bias_dtype, _kept = _bias(bias)
    _check(_linear(place, x.data_ptr(), len(x), dtype, address, bias_dtype, out.data_ptr()))
    return out


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, activation: Swiglu | ClampedSwiglu,
    gate_up_bias: Tensor | None, down_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    gate_up_place, down_place, dtype = _place(gate_up), _place(down), _DTYPES.get(x.dtype)
    if not gate_up_place or not down_place or dtype is None:
        return torch_backend.moe(x, ids, weights, gate_up, down, activation, gate_up_bias, down_bias)
    x, ids, weights, out = x.contiguous(), ids.contiguous(), weights.contiguous(), torch.empty_like(x)
    clamped = isinstance(activation, ClampedSwiglu)
    limit, alpha, shift = (activation.limit, activation.alpha, activation.shift) if clamped else (0.0, 0.0, 0.0)
    first, first_dtype, _first = _bias(gate_up_bias)
    second, second_dtype, _second = _bias(down_bias)
    _check(_moe(
        gate_up_place, down_place, x.data_ptr(), ids.data_ptr(), weights.data_ptr(), len(x), ids.shape[1], dtype,
        limit, alpha, shift, first, first_dtype, second, second_dtype, out.data_ptr(),
    ))  # fmt: skip
    return out
