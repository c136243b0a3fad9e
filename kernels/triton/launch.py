"""A kernel with all that it is launched with: run it here, or compile it for a chip that is not here (aot.py)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

TRITON = tuple(int(n) for n in triton.__version__.split(".")[:2])
"""Its version, by which machine code differs, and what it makes of some layouts."""


@dataclass(frozen=True)
class Launch:
    """arguments: by parameter name; tensors, numbers, None and constants."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Products and sums are fused, whatever the installed Triton's default."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def run(self) -> None:
        with self._device():
            self.kernel[self.grid](**self.arguments, **self.options)

    def compile(self) -> CompiledKernel:
        """As `run` would for the GPU that is here; later runs, of any process, find it in Triton's cache. Tensors may
        be on "meta"."""
        return self.kernel.warmup(**self.arguments, **self.options, grid=self.grid)

    def _device(self) -> AbstractContextManager:
        """Makes the device of the tensors the current one, which is where Triton launches."""
        device = next(v.device for v in self.arguments.values() if isinstance(v, Tensor))
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
