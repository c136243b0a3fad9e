"""Which tile a product is cut into: by a table that the tuner wrote, otherwise by a rule from the shape.

A chip's file in tiles/ has the rule's tiles by format and tokens of a tile ("rule"), and those that were measured
("tuned"), by `Problem.key`. Other chips take the file of their vendor's oldest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tutel_pack.kernels.triton.chips import Chip

TABLES = Path(__file__).parent / "tiles"
TOKENS = (16, 32, 64, 128)
"""Of a tile. Matrix units have no smaller one, and accumulators of larger ones leave decoding no registers."""

WIDE_TOKENS, WIDE_COLUMNS = 32, 64
"""The most that a tile has where tokens are float32: registers hold no more."""

FLOAT32 = {"bn": 64, "bk": 32, "warps": 8, "stages": 2}
"""Where tokens are multiplied in float32 on NVIDIA's chips, whose matrix units would round them: by fused
multiply-adds, which in the tiles of matrix units do not fit the registers, and take minutes to compile."""

MOST_PARTS = 8
_STEPS_OF_A_PART = 4


@dataclass(frozen=True)
class Tile:
    """bm tokens by bn rows of a weight, bk columns at a time; split: parts that K falls into.

    instruction: the matrix instruction that bfloat16 tokens become, by its full name.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    instruction: str = ""
    split: int = 1


@dataclass(frozen=True)
class Problem:
    """A product of `rows` rows, tokens or pairs, over the experts (1 for a plain matrix) [n, k] in a format.

    fmt: of the weights; "mxfp8 x mxfp4" if tokens are quantized, too.
    columns: the most that can be decoded at a time.
    float32: tokens are.  in_parts: they are multiplied as three bfloat16 each, as they are otherwise.
    """

    fmt: str
    experts: int
    n: int
    k: int
    rows: int
    columns: int
    float32: bool = False
    in_parts: bool = False

    @property
    def key(self) -> str:
        """Of all problems of about this size."""
        return f"{self.fmt} {self.experts}x{self.n}x{self.k} {1 << (self.rows - 1).bit_length()}"

    @property
    def bm(self) -> int:
        """Tokens of a tile: about what an expert gets. The same for both products of a layer, whatever the formats."""
        enough = next((bm for bm in TOKENS if bm * self.experts >= self.rows), TOKENS[-1])
        return min(enough, WIDE_TOKENS) if self.float32 else enough

    @property
    def tiles(self) -> int:
        """The most tiles of tokens there can be: every expert in use may leave one that is not full."""
        if self.experts == 1:
            return -(-self.rows // self.bm)
        return self.rows // self.bm + min(self.experts, self.rows)


def tile_for(chip: Chip, problem: Problem) -> Tile:
    table = table_of(chip)
    tuned = None if problem.float32 else table["tuned"].get(problem.key)  # which were measured with bfloat16
    as_it_is = problem.float32 and not problem.in_parts and chip.vendor == "cuda"
    rule = FLOAT32 if as_it_is else table["rule"][problem.fmt][str(problem.bm)]
    tile = Tile(problem.bm, **(tuned or rule))
    columns = min(problem.columns, WIDE_COLUMNS) if problem.float32 else problem.columns
    tile = replace(tile, bk=min(tile.bk, columns))
    if problem.in_parts and tile.bm == WIDE_TOKENS:
        tile = replace(tile, stages=2)  # three spill on sm_80 by Triton 3.6
    return tile if tuned else replace(tile, split=_parts(chip, problem, tile))


def _parts(chip: Chip, problem: Problem, tile: Tile) -> int:
    """As many parts of K as it takes to give every unit of the chip work, each of a few steps."""
    programs, steps = problem.tiles * -(-problem.n // tile.bn), -(-problem.k // tile.bk)
    parts = 1
    while parts < MOST_PARTS and programs * parts < chip.units and steps >= 2 * parts * _STEPS_OF_A_PART:
        parts *= 2
    return parts


@cache
def table_of(chip: Chip) -> dict:
    path = TABLES / f"{chip.name}.json"
    if not path.exists():
        path = TABLES / ("interpreter.json" if chip.vendor == "interpreter" else f"other_{chip.vendor}.json")
    return json.loads(path.read_text())
