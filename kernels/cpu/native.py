"""The shared library of this folder, through ctypes: it is found, checked and described here.

Its functions release the GIL. For tests, `TUTEL_PACK_ISA` forces an instruction set (portable; avx2, avx512, avx512_bf16, amx; neon),
and `TUTEL_PACK_CPU_LIBRARY` another build of the library.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.spec import Moe

LIBRARY = Path(os.environ.get("TUTEL_PACK_CPU_LIBRARY") or Path(__file__).resolve().parent / "libtutel_pack_cpu.so")
"""What the package's build makes where there is a compiler."""

_INTERFACE = 10

_BYTES, _P, _I32, _I64, _F32 = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_FUNCTIONS = {
    "tp_interface": (_I32, ()),
    "tp_select": (_I32, (_BYTES,)),
    "tp_selected": (_BYTES, ()),
    "tp_available": (_BYTES, ()),
    "tp_threads": (_I32, ()),
    "tp_set_threads": (None, (_I32,)),
    "tp_linear": (_I32, (_P, _P, _I64, _I32, _P, _I32, _P)),
    "tp_moe": (_I32, (_P, _P, _P, _P, _P, _I64, _I64, _I32, _F32, _F32, _F32, _P, _I32, _P, _I32, _P)),
    "tp_linears": (_I32, (_I64, _P, _P, _I64, _I32, _P, _I32, _P)),
    "tp_rms_norm": (_I32, (_P, _I64, _I64, _I32, _P, _I32, _F32, _P)),
    "tp_add_norm": (_I32, (_P, _P, _I64, _I64, _I32, _P, _I32, _F32, _P, _P)),
    "tp_route": (_I32, (_P, _P, _I64, _P, _P)),
    "tp_place_heads": (_I32, (_P, _I64, _P, _P, _P, _P, _P, _P, _P, _P, _P)),
    "tp_attend": (_I32, (_P, _P, _P, _P, _P, _P)),
    "tp_attends": (_I32, (_P, _P)),
    "tp_attend_latents": (_I32, (_P, _P, _P, _P, _P, _P, _I64, _P)),
    "tp_delta_net": (_I32, (_P, _P, _P, _P, _P, _P)),
    "tp_dense_step": (_I32, (_P, _P, _I64, _I32, _P)),
    "tp_routed": (_I32, (_P, _P, _I64, _I32, _P)),
    "tp_layers": (_I32, (_I64, _P, _P, _P, _P, _I64, _P)),
    "tp_logits": (_I32, (_P, _P, _I64, _I32, _P, _I32, _F32, _P)),
    "tp_read": (ctypes.c_uint64, (_P, _I64)),
}


class Unavailable(Exception):
    """Why there is no library to use, as a clause of a sentence."""


@cache
def library() -> ctypes.CDLL:
    """The library, with the instruction set of the environment. Unavailable if it is not there or does not fit,
    InputError if the environment asks for an instruction set that this processor lacks."""
    if not LIBRARY.exists():
        named = f"TUTEL_PACK_CPU_LIBRARY names {LIBRARY}, which is not there"
        built = "the library was not built: install a C++17 compiler and then tutel-pack again"
        raise Unavailable(named if "TUTEL_PACK_CPU_LIBRARY" in os.environ else built)
    try:
        found = ctypes.CDLL(str(LIBRARY.resolve()))
        if found.tp_interface() != _INTERFACE:
            raise Unavailable("the library was built from another version: install tutel-pack again")
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as e:
        raise Unavailable(f"the library cannot be loaded ({e}): install tutel-pack again") from e
    if wanted := os.environ.get("TUTEL_PACK_ISA"):
        _select(found, wanted)
    return found


def missing() -> str:
    """Why there is no library to use, as a clause of a sentence; empty if there is one."""
    try:
        library()
    except Unavailable as e:
        return str(e)
    return ""


def _select(found: ctypes.CDLL, name: str | None) -> None:
    if found.tp_select(None if name is None else name.encode()):
        have = found.tp_available().decode().replace(",", ", ")
        raise InputError(f"This processor has no instruction set {name!r} (TUTEL_PACK_ISA): choose one of {have}.")


def select(name: str | None) -> None:
    """Run by this instruction set from now on, by the best one here if None. InputError if the processor lacks it.
    Not while operations run."""
    _select(library(), name)


def selected() -> str:
    """The instruction set in use."""
    return library().tp_selected().decode()


def available() -> list[str]:
    """The instruction sets that this processor has, best first."""
    return library().tp_available().decode().split(",")


def threads() -> int:
    """How many threads work: OMP_NUM_THREADS, else the processors this process may run on, unless set."""
    return library().tp_threads()


def set_threads(n: int) -> None:
    """Work on n threads from now on."""
    library().tp_set_threads(n)


def read(data: Tensor) -> None:
    """Read a contiguous tensor's memory on all threads, and do nothing else: the limit that products are held to."""
    library().tp_read(data.data_ptr(), data.nbytes)


class Weight(ctypes.Structure):
    """tp_weight of weight.h, with the tensors it points into."""

    _fields_ = [
        ("data", _P), ("scale", _P), ("global_scale", _P), ("segments", _P),
        ("experts", _I64), ("n", _I64), ("k", _I64),
        ("row_bytes", _I64), ("expert_bytes", _I64),
        ("grid_columns", _I64), ("expert_scales", _I64),
        ("block_rows", _I64), ("block_columns", _I64),
        ("segment_count", _I32), ("format", _I32), ("scale_type", _I32), ("act", _I32),
    ]  # fmt: skip


_FORMATS = {"mxfp4": 0, "nvfp4": 0, "int4": 1, "fp8": 2, "bf16": 3, "f32": 4}
FOUR_BITS = ("mxfp4", "nvfp4", "int4")
"""Formats that take vectors in int8, too."""
_ACTS = {None: 0, "int8": 1}
_E8M0 = torch.uint8
_SCALES = {None: 0, torch.float32: 1, _E8M0: 2, torch.float8_e4m3fn: 3, torch.bfloat16: 4}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Of activations and biases."""


def describe(w: Tensor | PackedTensor, act: str | None = None) -> Weight | None:
    """A weight as the library takes it; None if that has no kernel for it: a plain one in float16 or a stack in float32,
    blocks of another width (fp8: no multiple of 32), or memory that is not laid out row after row.

    act: the format of ops.CPU_ACTS that vectors are quantized to for it, if it is in a format for that."""
    if isinstance(w, PackedTensor):
        fmt, data, scale, factors, segments = w.format, w.data, w.scale, w.global_scale, w.segments
        name, block = fmt.name, fmt.block
    else:
        data, scale, factors, segments, block = w, None, None, (w.shape[-2],), None
        name = {torch.bfloat16: "bf16", torch.float32: "f32"}.get(w.dtype, "")
    n, k = w.shape[-2:]
    parts = [p for p in (data, scale, factors) if p is not None]
    if name not in _FORMATS or any(p.device.type != "cpu" or not p.is_contiguous() for p in parts):
        return None
    if name == "f32" and len(w.shape) != 2:
        return None
    if name == "fp8" and block[1] < k and block[1] % 32:
        return None
    if name in FOUR_BITS and block != FORMATS[name].block:
        return None
    experts = w.shape[0] if len(w.shape) == 3 else 1
    rows = (_I64 * len(segments))(*segments)
    found = Weight(
        data=data.data_ptr(), scale=None if scale is None else scale.data_ptr(),
        global_scale=None if factors is None else factors.data_ptr(), segments=ctypes.addressof(rows),
        experts=experts, n=n, k=k, row_bytes=data.stride(-2) * data.itemsize,
        expert_bytes=n * data.stride(-2) * data.itemsize,
        grid_columns=0 if scale is None else scale.shape[-1],
        expert_scales=0 if scale is None else scale.shape[-2] * scale.shape[-1],
        block_rows=block[0] if block else n, block_columns=block[1] if block else k,
        segment_count=len(segments), format=_FORMATS[name], scale_type=_SCALES[None if scale is None else scale.dtype],
        act=_ACTS[act] if name in FOUR_BITS else 0,
    )  # fmt: skip
    found.keep = rows, *(p for p in parts if p is not w)  # a weight that is kept would never be forgotten
    return found


class Router(ctypes.Structure):
    """tp_router of small_ops.h."""

    _fields_ = [
        ("experts", _I64), ("chosen", _I64), ("groups", _I64), ("top_groups", _I64), ("correction", _P),
        ("score", _I32), ("renormalize", _I32), ("epsilon", _F32), ("scale", _F32),
    ]  # fmt: skip


class Heads(ctypes.Structure):
    """tp_heads of small_ops.h."""

    _fields_ = [
        ("heads", _I64), ("kv_heads", _I64), ("width", _I64), ("rotated", _I64), ("q_norm", _P), ("k_norm", _P),
        ("norm_dtype", _I32), ("interleaved", _I32), ("dtype", _I32), ("eps", _F32),
    ]  # fmt: skip


class Layout(ctypes.Structure):
    """tp_layout of attention.h."""

    _fields_ = [("sequences", _I64), ("starts", _P), ("lengths", _P), ("tables", _P), ("states", _P)]


class Attention(ctypes.Structure):
    """tp_attention of attention.h."""

    _fields_ = [
        ("heads", _I64), ("kv_heads", _I64), ("width", _I64), ("value_width", _I64), ("block_size", _I64),
        ("window", _I64), ("sinks", _P), ("scale", _F32), ("dtype", _I32), ("cached", _I32),
    ]  # fmt: skip


class Latents(ctypes.Structure):
    """tp_latents of latents.h."""

    _fields_ = [
        ("heads", _I64), ("nope", _I64), ("value", _I64), ("rank", _I64), ("shared", _I64), ("block_size", _I64),
        ("scale", _F32), ("dtype", _I32),
    ]  # fmt: skip


class Vector(ctypes.Structure):
    """tp_vector of weight.h."""

    _fields_ = [("data", _P), ("dtype", _I32)]


class Dense(ctypes.Structure):
    """tp_dense of layer.h."""

    _fields_ = [("weights", _P * 3), ("biases", Vector * 3), ("limit", _F32), ("alpha", _F32), ("shift", _F32)]


class Experts(ctypes.Structure):
    """tp_experts of layer.h."""

    _fields_ = [
        ("router_weight", _P), ("gate_up", _P), ("down", _P), ("router", _P),
        ("router_bias", Vector), ("gate_up_bias", Vector), ("down_bias", Vector),
        ("limit", _F32), ("alpha", _F32), ("shift", _F32), ("shared", _P), ("shared_gate", _P),
    ]  # fmt: skip


class Grouped(ctypes.Structure):
    """tp_grouped of layer.h."""

    _fields_ = [
        ("weights", _P * 4), ("biases", Vector * 4), ("heads", _P), ("attention", _P), ("norms", Vector * 2),
        ("normed", _I64 * 2), ("clip", _F32), ("gated", _I32),
    ]  # fmt: skip


class Latent(ctypes.Structure):
    """tp_latent of layer.h."""

    _fields_ = [
        ("weights", _P * 4), ("biases", Vector * 4), ("q_norm", Vector), ("kv_norm", Vector), ("up", _P),
        ("latents", _P), ("index", _P), ("eps", _F32), ("interleaved", _I32), ("reuses", _I32),
    ]  # fmt: skip


class Index(ctypes.Structure):
    """tp_index of index.h."""

    _fields_ = [
        ("q", _P), ("k", _P), ("weights", _P), ("norm", _P), ("bias", _P), ("heads", _I64), ("dim", _I64),
        ("rotated", _I64), ("top", _I64), ("block_size", _I64), ("eps", _F32), ("interleaved", _I32), ("dtype", _I32),
    ]  # fmt: skip


class Delta(ctypes.Structure):
    """tp_delta of delta.h."""

    _fields_ = [
        ("qkv", _P), ("z", _P), ("b", _P), ("a", _P), ("output", _P), ("filter", _P), ("rate", _P), ("bias", _P),
        ("norm", _P), ("key_heads", _I64), ("shared", _I64), ("key_dim", _I64), ("value_dim", _I64), ("kernel", _I64),
        ("eps", _F32), ("dtype", _I32),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    """tp_layer of layer.h."""

    _fields_ = [
        ("input_norm", Vector), ("post_norm", Vector), ("grouped", _P), ("latent", _P), ("delta", _P), ("experts", _P),
        ("dense", _P), ("eps", _F32), ("scale", _F32), ("dtype", _I32),
    ]  # fmt: skip


class Rotation(ctypes.Structure):
    """tp_rotation of layer.h."""

    _fields_ = [("cosines", _P), ("sines", _P)]


class PlacedLayer(ctypes.Structure):
    """tp_placed_layer of layer.h."""

    _fields_ = [
        ("layer", _P), ("rotation", _I64), ("index_rotation", _I64), ("pool", _P), ("second_pool", _P),
    ]  # fmt: skip


_SCORE_NUMBERS = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "softmax_chosen": 3}


def describe_router(spec: Moe, correction: Tensor | None) -> Router:
    """A router as the library takes it."""
    r = spec.router
    correction = None if correction is None else correction.float().contiguous()
    found = Router(
        spec.experts, spec.top_k, r.groups, r.top_groups, None if correction is None else correction.data_ptr(),
        _SCORE_NUMBERS[r.score], r.renormalize, r.epsilon, r.scale,
    )  # fmt: skip
    found.keep = correction
    return found
