"""How long a product should take by a tile, by what a GPU can do in a second: enough to tell which are worth measuring.

Programs run in waves, as many at a time as a unit's shared memory and registers allow. In a step along K each waits for
what is slowest: its loads to come back, the bandwidths of memory and cache, matrix units and the issue of instructions
(these two one after the other where a unit has no second program).
"""

from __future__ import annotations

import math

from tutel_pack.formats import FORMATS
from tutel_pack.kernels.triton.chips import Chip
from tutel_pack.kernels.triton.gpus import GPUS, INT_OPS, Gpu
from tutel_pack.kernels.triton.layers import used_experts
from tutel_pack.kernels.triton.tiles import Problem, Tile

LATENCY, START, LAUNCH = 1e-6, 2e-6, 2e-6
"""Seconds: of a load under load; from a program's start to its first product (its tile, its tokens and their columns
are loaded one after another); of one more kernel in a graph. Assumed, not measured."""

CACHE = 2.0
"""Bandwidth of the cache to that of memory. Assumed as well."""

_OTHER_INSTRUCTIONS = 1.6
"""All instructions of the loop to integer ones, as bench/kernels_aot.py counts them."""

_OTHER_REGISTERS = 130
"""Of a thread, beside those for sums, as the rule's tiles have them on sm_90."""

_SUMS_APART = ("sm_100",)
"""Chips with a memory of its own for sums."""

_REGISTERS = {"cuda": 1 << 16, "hip": 1 << 17, "interpreter": 1 << 16}
"""Of a unit, 32 bits each."""


def gpu_like(chip: Chip) -> Gpu:
    """The first that is sold with it; another chip counts as its vendor's oldest."""
    oldest = "mi300x" if chip.vendor == "hip" else "a100"
    return next((gpu for gpu in GPUS.values() if gpu.architecture == chip.name), GPUS[oldest])


def shared_bytes(problem: Problem, tile: Tile) -> int:
    """Of the memory on the chip, for what is loaded ahead; about."""
    return tile.stages * tile.bk * (tile.bn * _bits(problem) // 8 + tile.bm * (4 if problem.float32 else 2))


def programs_at_a_time(chip: Chip, problem: Problem, tile: Tile) -> int:
    """On a unit; 0 if not even one fits."""
    threads = tile.warps * chip.warp
    registers = _OTHER_REGISTERS + (0 if chip.name in _SUMS_APART else tile.bn * tile.bm // threads)
    if registers > chip.registers:
        return 0
    return min(chip.shared // shared_bytes(problem, tile), _REGISTERS[chip.vendor] // (threads * registers))


def seconds(chip: Chip, problem: Problem, tile: Tile) -> float:
    """Infinity for a tile that does not fit."""
    gpu, fit = gpu_like(chip), programs_at_a_time(chip, problem, tile)
    if not fit:
        return math.inf
    used = used_experts(problem.experts, 1, problem.rows)
    tiles = max(used, problem.rows / tile.bm + used / 2)
    programs = math.ceil(tiles) * -(-problem.n // tile.bn) * tile.split
    waves, running = math.ceil(programs / (chip.units * fit)), min(programs, chip.units * fit)
    steps = math.ceil(problem.k / tile.bk / tile.split)
    total = waves * (START + steps * _step(gpu, problem, tile, running, fit > 1))
    if tile.split > 1:
        total += LAUNCH + 8.0 * tile.split * problem.rows * problem.n / gpu.bandwidth
    return total


def _step(gpu: Gpu, problem: Problem, tile: Tile, running: int, overlap: bool) -> float:
    weights = tile.bn * tile.bk
    memory = running * (weights * _bits(problem) / 8) / gpu.bandwidth
    matrix = running * 2.0 * weights * tile.bm / gpu.matrix
    ints = INT_OPS[gpu.architecture][_format(problem)]
    issue = running * weights * ints * _OTHER_INSTRUCTIONS / gpu.issue
    cache = running * tile.bk * (tile.bn * _bits(problem) / 8 + tile.bm * 2) / (CACHE * gpu.bandwidth)
    work = max(matrix, issue) if overlap else matrix + issue
    return max(memory, cache, LATENCY + work if tile.stages == 1 else max(LATENCY / (tile.stages - 1), work))


def _format(problem: Problem) -> str:
    """Of the weights, as gpus.INT_OPS has it."""
    return {"plain": "bf16"}.get(problem.fmt, problem.fmt)


def _bits(problem: Problem) -> int:
    """Of a weight."""
    fmt = FORMATS[_format(problem)]
    return 8 * fmt.dtype.itemsize // fmt.per_item
