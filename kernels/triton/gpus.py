"""GPUs as they are sold: the rates that a model of time needs, beside what kernels need of their chips (chips.py)."""

from __future__ import annotations

from dataclasses import dataclass

from tutel_pack.errors import InputError
from tutel_pack.kernels.triton.chips import CHIPS, Chip


@dataclass(frozen=True)
class Gpu:
    """architecture: of CHIPS, whose units it has all of.  memory: bytes.  bandwidth: of it, bytes/s.
    matrix: multiplications and additions of bfloat16 per second, dense.  clock: the highest, Hz.
    measured: the run in bench/results/ that this was compared with; None until there is one.
    """

    name: str
    architecture: str
    memory: float
    bandwidth: float
    matrix: float
    clock: float
    measured: str | None = None

    @property
    def chip(self) -> Chip:
        return CHIPS[self.architecture]

    @property
    def issue(self) -> float:
        """Instructions of threads per second: a unit starts four for a warp of 32 in a clock on NVIDIA's chips; on
        AMD's it has four times 16 lanes."""
        return self.chip.units * {"cuda": 128, "hip": 64}[self.chip.vendor] * self.clock


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", "sm_80", 80e9, 2.039e12, 312e12, 1.41e9),
        Gpu("h100", "sm_90", 80e9, 3.35e12, 989e12, 1.98e9),
        Gpu("h200", "sm_90", 141e9, 4.8e12, 989e12, 1.98e9),
        Gpu("b200", "sm_100", 180e9, 8e12, 2250e12, 1.965e9),
        Gpu("mi300x", "gfx942", 192e9, 5.3e12, 1307e12, 2.1e9),
        Gpu("mi355x", "gfx950", 288e9, 8e12, 2500e12, 2.4e9),
    )
}
"""The makers' data sheets of A100 80GB SXM, H100 SXM, H200 SXM, HGX B200, MI300X and MI355X; clocks of NVIDIA's are the
"max" of nvidia-smi -q -d CLOCK. Issue: "NVIDIA A100 Tensor Core GPU Architecture" (four schedulers to a multiprocessor,
and so in those after it), "AMD CDNA 3 Architecture" (four vector units of 16 lanes)."""

INT_OPS = {
    "sm_80": {"bf16": 0.4, "fp8": 2.4, "int4": 1.9, "mxfp4": 2.2, "nvfp4": 2.7},
    "sm_90": {"bf16": 0.3, "fp8": 2.2, "int4": 1.6, "mxfp4": 2.1, "nvfp4": 2.5},
    "sm_100": {"bf16": 0.3, "fp8": 0.5, "int4": 1.5, "mxfp4": 2.1, "nvfp4": 2.7},
    "gfx942": {"bf16": 0.4, "fp8": 1.7, "int4": 2.6, "mxfp4": 3.2, "nvfp4": 3.8},
    "gfx950": {"bf16": 0.8, "fp8": 0.8, "int4": 2.1, "mxfp4": 0.6, "nvfp4": 0.9},
}
"""Integer instructions to decode a weight for up to 16 tokens, as bench/kernels_aot.json has them of Triton 3.9."""


def find_gpu(name: str) -> Gpu:
    """InputError lists the names."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise InputError(f"Unknown chip {name!r}: choose one of {', '.join(GPUS)}.") from None
