"""From tensors to launches of `grouped_matmul` and what belongs to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.ops import ACTS, Weight
from tutel_pack.kernels.triton import grouped, sort
from tutel_pack.kernels.triton.activations import STEP, Activations
from tutel_pack.kernels.triton.chips import Chip
from tutel_pack.kernels.triton.launch import TRITON, Launch
from tutel_pack.kernels.triton.tiles import Problem, Tile, tile_for
from tutel_pack.spec import ClampedSwiglu, Swiglu

PLAIN = "plain"
_BITS = {
    torch.uint8: torch.uint8, torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.int16, torch.float32: torch.float32,
}  # fmt: skip
DOTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_COLUMNS = 1024
"""Of an output that a program adds up."""


@dataclass(frozen=True)
class Operand:
    """A weight as the kernel takes it: words [E, N, ·] (elements if plain), scale [E, ·, ·] of bits, factors [E, S].

    first: rows of the first segment.
    """

    fmt: str
    shape: tuple[int, int, int]
    words: Tensor
    scale: Tensor | None
    factors: Tensor | None
    block: tuple[int, int]
    first: int

    @property
    def columns(self) -> int:
        """The most that may be decoded at a time: blocks of fp8 are as wide as a step along K, or whole steps."""
        if self.fmt != "fp8":
            return 128
        return next(columns for columns in _FP8_COLUMNS if _fits(self.block[1], columns, self.shape[2]))

    @property
    def is_bfloat16(self) -> bool:
        """Whether decoded weights are bfloat16 without a rounding; scales of fp8 go to sums."""
        return self.fmt != "int4" if self.fmt != PLAIN else self.words.dtype == torch.bfloat16

    def in_fragment_order(self, tile: Tile) -> bool:
        """Whether decoded words can be put in the order of matrix instructions without moving them."""
        return tile.bk == {"fp8": 64, PLAIN: 0}.get(self.fmt, 128) and tile.bn % (16 * tile.warps) == 0

    def takes(self, act: str) -> bool:
        """Whether it can be multiplied with activations in that format; scales of fp8 go to sums of whole steps."""
        if self.fmt != "fp8":
            return ACTS[act] == self.fmt
        return ACTS[act] == "fp8" and self.scale.dtype == torch.float32 and _fits(self.block[1], STEP, self.shape[2])

    def stored(self, as_bytes: bool) -> dict[str, Tensor | int]:
        """The words, or their bytes, with strides in units of ALIGN of them if they are words."""
        w = self.words.view(torch.uint8) if as_bytes else self.words
        expert, row, _ = w.stride()
        width = w.shape[2]
        align = next(a for a in (4, 2, 1) if expert % a == row % a == width % a == 0) if w.dtype == torch.int32 else 1
        return {"w": w, "w_expert": expert // align, "w_row": row // align, "w_words": width // align, "ALIGN": align}


_FP8_COLUMNS = (64, 32, 16)


def _fits(block: int, columns: int, k: int) -> bool:
    return block % columns == 0 or block >= k


def elements(w: Weight) -> Tensor | None:
    """Those of a plain weight, None for a packed one."""
    if isinstance(w, Tensor):
        return w
    return w.data if w.format.block is None else None


def is_served(w: Weight) -> bool:
    """Whether the kernel can take this weight: rows of fp8 must be whole words, and its blocks whole steps; there may
    be two segments. Everything that is packed here is; the rest are geometries that only sources can have."""
    if (plain := elements(w)) is not None:
        return plain.is_contiguous() and plain.dtype in DOTS
    if len(w.segments) > 2:
        return False
    if w.format.name != "fp8":
        return True
    return w.shape[-1] % 4 == 0 and any(_fits(w.format.block[1], c, w.shape[-1]) for c in _FP8_COLUMNS)


def operand(w: Weight) -> Operand:
    """Views of a served weight, [N, K] or [E, N, K]; nothing is copied."""
    e, n, k = w.shape if len(w.shape) == 3 else (1, *w.shape)
    if (plain := elements(w)) is not None:
        return Operand(PLAIN, (e, n, k), plain.view(e, n, k), None, None, (1, 1), n)
    words = w.data.view(torch.uint8).view(torch.int32)
    scale = w.scale.view(_BITS[w.scale.dtype])
    words, scale = (p.view(e, *p.shape[-2:]) for p in (words, scale))
    factors = None if w.global_scale is None else w.global_scale.reshape(e, -1)
    return Operand(w.format.name, (e, n, k), words, scale, factors, w.format.block, w.segments[0])


@dataclass(frozen=True)
class Tiles:
    """Of sorted pairs, see `sort.sort_pairs`."""

    order: Tensor
    expert: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def empty(cls, pairs: int, tiles: int, device: torch.device) -> Tiles:
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in (pairs, tiles, tiles, tiles)))


def sorting(ids: Tensor, experts: int, bm: int, tiles: Tiles) -> Launch:
    """Of ids int64 [pairs]."""
    arguments = dict(
        ids=ids, order=tiles.order, tile_expert=tiles.expert, tile_first=tiles.first, tile_last=tiles.last,
        pairs=len(ids), experts=experts, tiles=len(tiles.expert),
        BM=bm, BUCKETS=triton.next_power_of_2(experts + 1), BLOCK=min(1024, triton.next_power_of_2(max(32, len(ids)))),
    )  # fmt: skip
    return Launch(sort.sort_pairs, (experts + 1,), arguments)


def summing(pieces: Tensor, ids: Tensor, out: Tensor, experts: int) -> Launch:
    """Of pieces [T · k, H] by ids [T, k] into out [T, H]."""
    h = out.shape[1]
    block = min(_COLUMNS, triton.next_power_of_2(h))
    arguments = dict(pieces=pieces, ids=ids, out=out, H=h, top_k=ids.shape[1], experts=experts, BLOCK=block)
    return Launch(sort.sum_pieces, (len(out), -(-h // block)), arguments)


@dataclass(frozen=True)
class Epilogue:
    """bias [E, N], weights float32 [pairs] of output rows, an activation of gate and up rows; each may be None."""

    bias: Tensor | None = None
    weights: Tensor | None = None
    activation: Swiglu | ClampedSwiglu | None = None

    def constants(self) -> dict:
        a = self.activation
        clamped = isinstance(a, ClampedSwiglu)
        limit, alpha, shift = (float(a.limit), float(a.alpha), float(a.shift)) if clamped else (None, 1.0, 0.0)
        return {"GATED": a is not None, "LIMIT": limit, "ALPHA": alpha, "SHIFT": shift}


def product(
    chip: Chip, x: Tensor | Activations, w: Operand, out: Tensor, tile: Tile, epilogue: Epilogue = Epilogue(),
    ids: Tensor | None = None, tiles: Tiles | None = None, gather: int = 0, scatter: bool = False,
    apart: Tensor | None = None,
) -> list[Launch]:  # fmt: skip
    """Launches that fill out [rows, ·] from x and w.

    ids, tiles: of the pairs, for weights of experts.  gather: pairs of a token, where x is by token.  scatter: out is
    by pair.  apart: float32 [tile.split, rows, N], where the sums of parts of K are left, instead of in `out`.
    """
    e, n, k = w.shape
    rows = len(out)
    parts = out if tile.split == 1 else apart
    if parts is None:
        parts = torch.empty(tile.split, rows, n, dtype=torch.float32, device=out.device)
    own = epilogue if tile.split == 1 else Epilogue(activation=epilogue.activation)
    tiles_m = len(tiles.expert) if tiles else -(-rows // tile.bm)
    act = x.act if isinstance(x, Activations) else None
    dtype = out.dtype if act else x.dtype
    in_parts = not act and _in_parts(w, dtype)
    dot = dot_type(chip, torch.bfloat16 if in_parts else dtype)
    way = way_of(chip, w.fmt, dot)
    arguments = dict(
        **_taken(x), scale=w.scale, factors=w.factors, bias=own.bias, weights=own.weights, out=parts,
        order=tiles and tiles.order, tile_expert=tiles and tiles.expert, tile_first=tiles and tiles.first,
        tile_last=tiles and tiles.last,
        tiles_m=tiles_m, pairs=rows, x_per_row=max(1, gather), N=n, K=k, first=w.first,
        segments=1 if w.factors is None else w.factors.shape[1],
        **w.stored(way == "native" or act is not None), scale_expert=0 if w.scale is None else w.scale.stride(0),
        scale_row=0 if w.scale is None else w.scale.stride(1),
        out_row=parts.stride(-2), out_split=parts.stride(0) if tile.split > 1 else 0,
        FMT=w.fmt, ACT=act, DOT=dot, PARTS=3 if in_parts else 1, WAY=way,
        FRAGMENT=fragment_run(chip, dot) if way in ("pairs", "float32") and not act and w.in_fragment_order(tile) else 0,
        BLOCK_N=w.block[0], BLOCK_K=w.block[1], E8M0=w.fmt == "fp8" and w.scale.dtype == torch.uint8,
        GROUPED=tiles is not None, GATHER=gather > 0, SCATTER=scatter, **epilogue.constants(),
        BM=tile.bm, BN=tile.bn, BK=tile.bk, SPLIT=tile.split, EVEN_K=k % tile.bk == 0, WARPS=tile.warps,
        THREADS=tile.warps * chip.warp,
    )  # fmt: skip
    grid = (tiles_m * -(-n // tile.bn), tile.split)
    launches = [Launch(grouped.grouped_matmul, grid, arguments, tile.warps, tile.stages)]
    if tile.split > 1 and apart is None:
        launches.append(_finishing(parts, out, e, epilogue, ids, tiles and tiles.order, sorted_rows=not scatter))
    return launches


def joint(
    chip: Chip, x: Tensor, weights: Sequence[Operand], activation: Swiglu | ClampedSwiglu | None = None
) -> tuple[Tensor, list[Launch]] | None:
    """(out [rows, N], launches that fill it) with the products of x and several weights side by side, or with an
    activation of two: the sums of parts of K are added up for all of them at once. None where K is not cut."""
    widths = [w.shape[1] for w in weights]
    tiles = [tile_for(chip, problem_of(w, len(x), x.dtype)) for w in weights]
    split, columns = max(tile.split for tile in tiles), sum(widths)
    if split == 1:
        return None
    out = x.new_empty(len(x), columns // 2 if activation else columns)
    parts = torch.empty(split, len(x), columns, dtype=torch.float32, device=x.device)
    launches = []
    for w, tile, own in zip(weights, tiles, parts.split(widths, dim=2)):
        launches += product(chip, x, w, out, replace(tile, split=split), apart=own)
    return out, [*launches, _finishing(parts, out, 1, Epilogue(activation=activation), None, None, False)]


def fragment_run(chip: Chip, dot: tl.dtype) -> int:
    """Pairs of columns side by side that a thread holds of a matrix instruction's operand; 0 where decoded words cannot
    be put in its order. For `mma.sync` Triton makes them two where it sees joined words; from 3.8 on it does not see
    through the inline assembly that decodes to bfloat16."""
    if chip.vendor == "hip":
        return 0
    return 1 if chip.name in ("sm_90", "sm_100") or (dot == tl.bfloat16 and TRITON >= (3, 8)) else 2


def _taken(x: Tensor | Activations) -> dict[str, Tensor | int | None]:
    if isinstance(x, Tensor):
        return {"x": x, "x_scale": None, "x_factors": None, "x_row": 0, "x_scale_row": 0}
    rows = {"x_row": x.data.shape[1], "x_scale_row": x.scale.shape[1]}
    return {"x": x.data, "x_scale": x.scale, "x_factors": x.factors, **rows}


def _finishing(
    parts: Tensor, out: Tensor, experts: int, epilogue: Epilogue, ids: Tensor | None, order: Tensor | None,
    sorted_rows: bool,
) -> Launch:  # fmt: skip
    width = out.shape[1]
    block = min(_COLUMNS, triton.next_power_of_2(width))
    arguments = dict(
        parts=parts, ids=ids, order=order, bias=epilogue.bias, weights=epilogue.weights, out=out,
        N=parts.shape[2], experts=experts, part_stride=parts.stride(0),
        SORTED=ids is not None and sorted_rows, **epilogue.constants(), SPLIT=len(parts), BLOCK=block,
    )  # fmt: skip
    return Launch(grouped.finish, (len(out), -(-width // block)), arguments)


def _in_parts(w: Operand, dtype: torch.dtype) -> bool:
    """Whether tokens are multiplied as three bfloat16 that add up to them: by matrix units, to which float32 is slow on
    AMD's chips, and unknown on NVIDIA's."""
    return dtype == torch.float32 and w.is_bfloat16


def dot_type(chip: Chip, dtype: torch.dtype) -> tl.dtype:
    """What is multiplied. The interpreter multiplies bfloat16 as integers (seen in Triton 3.8 and 3.9)."""
    if chip.vendor == "interpreter" and dtype == torch.bfloat16:
        return tl.float32
    return DOTS[dtype]


def way_of(chip: Chip, fmt: str, dot: tl.dtype) -> str:
    """How a chip decodes packed weights to what is multiplied. "native": a conversion of fp8 as it is stored; "pairs",
    "float32": see decode.py; "fnuz", "table", "conversion": see decode_amd.py."""
    if fmt == "fp8" and chip.converts_fp8:
        return {"e4m3fn": "native", "e4m3fnuz": "fnuz"}[chip.converts_fp8]
    if fmt in ("mxfp4", "nvfp4", "int4") and chip.vendor == "hip" and dot != tl.float32:
        return "conversion" if chip.converts_fp4 else "table"
    return "pairs" if chip.vendor == "cuda" and dot == tl.bfloat16 else "float32"


def problem_of(w: Operand, rows: int, dtype: torch.dtype, act: str | None = None) -> Problem:
    """A product with that many rows, tokens or pairs, of a dtype, quantized by `act` or not."""
    if act:
        return Problem(f"{act} x {w.fmt}", *w.shape, rows, STEP)
    return Problem(w.fmt, *w.shape, rows, w.columns, dtype == torch.float32, _in_parts(w, dtype))
