"""Kernels in Triton's interpreter, in processes of their own: importing kernels settles whether it is used."""

from __future__ import annotations

import atexit
import importlib
import io
import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache

import torch

WORKERS = 2


def submit(function: str, *args, **kwargs) -> Future:
    """Call a function, "module:name", with memory poisoned by NaN.

    Arguments are copied here and now: torch would move tensors to shared memory in the pool's own thread, while the
    caller reads them.
    """
    arguments = io.BytesIO()
    torch.save((args, kwargs), arguments)
    return _pool().submit(_call, function, arguments.getvalue())


def op(name: str, *args) -> Future:
    """An operation of `kernels.ops` by the triton backend."""
    return submit("tests.kernels.interpreted:_op", name, *args)


def _op(name: str, *args):
    from tutel_pack.kernels.ops import Ops

    return getattr(Ops("triton"), name)(*args)


def _call(function: str, arguments: bytes):
    module, name = function.split(":")
    args, kwargs = torch.load(io.BytesIO(arguments), weights_only=False)
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


@cache
def _pool() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"), _prepare)
    atexit.register(pool.shutdown)
    return pool


def _prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all()

    from triton.runtime import interpreter

    from tests.kernels import instructions

    interpreter.InterpretedFunction.__call__ = _call_patched_once
    interpreter.InterpreterBuilder.create_inline_asm = instructions.run
    interpreter._convert_float = _as_chips_do(interpreter._convert_float)
    interpreter._dot_scaled_scale_to_f32 = _scales(interpreter._dot_scaled_scale_to_f32)


def _scales(as_e8m0):
    """Of scaled products: the interpreter (3.9) takes those in e4m3, which nvfp4 has, for e8m0."""
    import triton.language as tl
    from triton.runtime.interpreter import _mxfp_value_handle_to_float32

    def read(handle, compute_type):
        return _mxfp_value_handle_to_float32(handle) if handle.dtype == tl.float8e4nv else as_e8m0(handle, compute_type)

    return read


def _as_chips_do(convert):
    """Of conversions: the interpreter (3.9) cuts bits off where chips round to bfloat16, and takes NaN of e4m3fnuz for
    −0."""
    import numpy as np
    import triton.language as tl

    def converted(data, dtype, into, rounding_mode):
        if dtype == tl.float32 and into == tl.bfloat16:
            return torch.from_numpy(data.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        made = convert(data, dtype, into, rounding_mode)
        return np.where(data == 0x80, np.iinfo(made.dtype).max, made) if dtype == tl.float8e4b8 else made

    return converted


_patched: set[int] = set()


def _call_patched_once(function, *args, **kwargs):
    """Triton patches its language anew for every call inside a kernel, which takes a third of the time."""
    from triton.runtime import interpreter

    if id(function.fn.__globals__) not in _patched:
        _patched.add(id(function.fn.__globals__))
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)
