"""What the kernels must know of a chip, and which one a device is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Chip:
    """name: as compilers call it.  vendor: "cuda", "hip" or "interpreter".
    units: multiprocessors or compute units of the largest one sold.  shared: bytes of shared memory a block may have.
    registers: 32-bit ones a thread may have.  warp: threads that go together.
    converts_fp8: "e4m3fn" or "e4m3fnuz", if it has an instruction that makes bfloat16 or float32 of two of these; sm_90
        only makes float16, and needs a slow one for each to go on from there.
    converts_fp4: has such instructions for e2m1, too, and one that rounds to bfloat16.
    acts: formats of activations that it multiplies packed weights with as they are stored, of ops.ACTS.
    """

    name: str
    vendor: str
    units: int
    shared: int
    registers: int
    warp: int
    converts_fp8: str | None = None
    converts_fp4: bool = False
    acts: tuple[str, ...] = ()


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", "cuda", 108, 163 << 10, 255, 32),
        Chip("sm_90", "cuda", 132, 227 << 10, 255, 32, acts=("fp8",)),
        Chip("sm_100", "cuda", 148, 227 << 10, 255, 32, converts_fp8="e4m3fn", acts=("fp8", "mxfp8", "nvfp4")),
        Chip("gfx942", "hip", 304, 64 << 10, 512, 64, converts_fp8="e4m3fnuz"),
        Chip("gfx950", "hip", 256, 160 << 10, 512, 64, converts_fp8="e4m3fn", converts_fp4=True, acts=("fp8", "mxfp8")),
    )
}
"""A100, H100 and H200, B200, MI300, MI355: CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; AMD CDNA 3 and CDNA 4 ISA, "Local Data Share". These are compiled for in tests."""

INTERPRETER = Chip("interpreter", "interpreter", 4, 1 << 40, 255, 32, acts=("fp8", "mxfp8", "nvfp4"))


@cache
def chip_of(device: torch.device) -> Chip:
    """The chip behind a device; one that is not in CHIPS takes the smallest limits of its vendor."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name, warp = properties.gcnArchName.split(":")[0], properties.warp_size
        return CHIPS.get(name) or Chip(name, "hip", properties.multi_processor_count, 64 << 10, 512, warp)
    name = f"sm_{properties.major}{properties.minor}"
    return CHIPS.get(name) or Chip(name, "cuda", properties.multi_processor_count, 99 << 10, 255, 32)
