"""Which tile a product is cut into: by a table that the tuner wrote, otherwise by a rule from the shape.

A chip's file in tiles/ has the rule's tiles by format and tokens of a tile ("rule"), and those that were measured
("tuned"), by `Problem.key`. Other chips take the file of their vendor's oldest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tutel_pack.kernels.triton.chips import Chip

TABLES = Path(__file__).parent / "tiles"
TOKENS = (16, 32, 64, 128)
"""Of a tile. Matrix units have no smaller one, and accumulators of larger ones leave decoding no registers."""

MOST_PARTS = 8
_STEPS_OF_A_PART = 4


@dataclass(frozen=True)
class Tile:
    """bm tokens by bn rows of a weight, bk columns at a time; split: parts that K falls into."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    split: int = 1


@dataclass(frozen=True)
class Problem:
    """A product of `rows` rows, tokens or pairs, over the experts (1 for a plain matrix) [n, k] in a format.

    steps: columns that are decoded at a time.
    """

    fmt: str
    experts: int
    n: int
    k: int
    rows: int
    bk: int

    @property
    def key(self) -> str:
        """Of all problems of about this size."""
        return f"{self.fmt} {self.experts}x{self.n}x{self.k} {1 << (self.rows - 1).bit_length()}"

    @property
    def bm(self) -> int:
        """Tokens of a tile: about what an expert gets."""
        return next((bm for bm in TOKENS if bm * self.experts >= self.rows), TOKENS[-1])

    @property
    def tiles(self) -> int:
        """The most tiles of tokens there can be: every expert in use may leave one that is not full."""
        if self.experts == 1:
            return -(-self.rows // self.bm)
        return self.rows // self.bm + min(self.experts, self.rows)


def tile_for(chip: Chip, problem: Problem) -> Tile:
    table = table_of(chip)
    if tuned := table["tuned"].get(problem.key):
        return Tile(problem.bm, bk=problem.bk, **tuned)
    bn, warps, stages = table["rule"][problem.fmt][str(problem.bm)]
    return Tile(problem.bm, bn, problem.bk, warps, stages, _parts(chip, problem, bn))


def _parts(chip: Chip, problem: Problem, bn: int) -> int:
    """As many parts of K as it takes to give every unit of the chip work, each of a few steps."""
    programs, steps = problem.tiles * -(-problem.n // bn), -(-problem.k // problem.bk)
    parts = 1
    while parts < MOST_PARTS and programs * parts < chip.units and steps >= 2 * parts * _STEPS_OF_A_PART:
        parts *= 2
    return parts


@cache
def table_of(chip: Chip) -> dict:
    path = TABLES / f"{chip.name}.json"
    if not path.exists():
        path = TABLES / {"cuda": "other_cuda.json", "hip": "other_hip.json", "interpreter": "interpreter.json"}[chip.vendor]
    return json.loads(path.read_text())
