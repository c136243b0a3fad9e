"""How many threads the operations work on.

Unless told otherwise it is OMP_NUM_THREADS, else as many as the processors that this process may run on; the native
kernels also stay within what a control group grants.
"""

from __future__ import annotations

import torch

from tutel_pack.kernels.cpu import native

MOST = 1024
"""Threads that are a count, and no mistake."""


def set_threads(n: int) -> None:
    """Work on n threads from now on, in the whole process, torch's own operations included."""
    torch.set_num_threads(n)
    if not native.missing():  # else torch does all the work
        native.set_threads(n)
