"""Keeping mapped weights in memory: read at once instead of on first use, or locked."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator

from torch import Tensor

from tutel_pack.errors import InputError, ResourceError
from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.ops import Weight

_MLOCK_ONFAULT = 1
_MADV_POPULATE_READ = 22


def resident(load: Callable[[str], Weight], lock: bool) -> Callable[[str], Weight]:
    """Like `load`, but what it returns has been read from the disk, and with `lock` it never leaves memory again.

    ResourceError if the system does not let this process lock so much, InputError if it cannot do that at all.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if lock and not hasattr(libc, "mlock2"):
        raise InputError("Only Linux can lock mapped files in memory as they are needed here: leave out mlock.")

    def load_resident(name: str) -> Weight:
        weight = load(name)
        for part in _parts(weight):
            first, size = _pages(part)
            # Locking first and reading then: mlock alone would write to a private mapping, which copies every page.
            if lock and libc.mlock2(first, size, _MLOCK_ONFAULT):
                raise ResourceError(_refused(ctypes.get_errno()))
            _read(libc, first, size)
        return weight

    return load_resident


def _parts(weight: Weight) -> Iterator[Tensor]:
    if isinstance(weight, PackedTensor):
        yield from (part for part in weight.parts().values() if part is not None)
    else:
        yield weight


def _pages(part: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    """Address and size of the whole pages that a tensor lies in."""
    first = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return ctypes.c_void_p(first), ctypes.c_size_t(part.data_ptr() + part.nbytes - first)


def _read(libc: ctypes.CDLL, first: ctypes.c_void_p, size: ctypes.c_size_t) -> None:
    if libc.madvise(first, size, _MADV_POPULATE_READ):
        libc.madvise(first, size, mmap.MADV_WILLNEED)  # kernels before 5.14: it is read soon, if not now


def _refused(error: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = f", of which this process may lock {limit / 1e6:.0f} MB" if error in (errno.ENOMEM, errno.EPERM) else ""
    return f"The weights cannot be locked in memory{allowed} ({os.strerror(error)}): raise `ulimit -l`, or leave out mlock."
