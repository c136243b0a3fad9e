"""Measure tiles on the GPU that is here, and write the best into its table: `python -m tutel_pack.kernels.triton.tune`.

Of every layer, format and number of tokens both products are tuned, one tile at a time, on random weights. The table is
read when a process starts: nothing is tuned while serving.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
import triton
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from tutel_pack.kernels.triton.aot import compile_for
from tutel_pack.kernels.triton.chips import Chip, chip_of
from tutel_pack.kernels.triton.launch import Launch
from tutel_pack.kernels.triton.layers import LAYERS, ExpertLayer, random_routing
from tutel_pack.kernels.triton.matmul import Epilogue, Tiles, operand, problem_of, product, sorting
from tutel_pack.kernels.triton.tiles import TABLES, Problem, Tile, tile_for

ROWS, WARPS, STAGES, PARTS = (64, 128, 256), (4, 8), (1, 2, 3, 4, 5), (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--formats", default="mxfp4,nvfp4,fp8")
    parser.add_argument("--tokens", default="1,4,16,64,4096")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("Tiles are tuned on a GPU, and there is none here.")
    chip = chip_of(torch.device("cuda"))
    for name, fmt in itertools.product(options.layers.split(","), options.formats.split(",")):
        for tokens in map(int, options.tokens.split(",")):
            for problem, tile in tuned(chip, LAYERS[name], fmt, tokens):
                print(f"{name} {problem.key}: {tile}")
                write(TABLES / f"{chip.name}.json", problem, tile)


def tuned(chip: Chip, layer: ExpertLayer, fmt: str, tokens: int) -> list[tuple[Problem, Tile]]:
    """The fastest tiles of gate_up and down."""
    gate_up, down = (operand(w) for w in layer.weights(fmt, "cuda"))
    ids, weights = random_routing(layer, tokens, "cuda")
    pairs, flat = ids.numel(), ids.view(-1)
    x, inner, pieces = (torch.randn(n, k, device="cuda").bfloat16() for n, k in _shapes(layer, tokens))
    problem = problem_of(gate_up, pairs, x.dtype)
    tiles = Tiles.empty(pairs, problem.tiles, torch.device("cuda"))
    sorting(flat, layer.experts, problem.bm, tiles).run()

    def up(tile: Tile) -> list[Launch]:
        epilogue = Epilogue(activation=layer.activation)
        return product(chip, x, gate_up, inner, tile, epilogue, flat, tiles, gather=layer.top_k)

    def back(tile: Tile) -> list[Launch]:
        return product(chip, inner, down, pieces, tile, Epilogue(weights=weights), flat, tiles, scatter=True)

    problems = (problem, up), (problem_of(down, pairs, x.dtype), back)
    return [(p, _stated(chip, fastest(chip, p, launches), launches)) for p, launches in problems]


def _shapes(layer: ExpertLayer, tokens: int) -> list[tuple[int, int]]:
    pairs = tokens * layer.top_k
    return [(tokens, layer.hidden), (pairs, layer.intermediate), (pairs, layer.hidden)]


def fastest(chip: Chip, problem: Problem, launches) -> Tile:
    """Of all there are. SystemExit if none runs, as after an error that the device does not recover from."""
    rule = tile_for(chip, problem)
    found = {}
    for bn, warps, stages, split in itertools.product(ROWS, WARPS, STAGES, PARTS):
        tile = replace(rule, bn=bn, warps=warps, stages=stages, split=split)
        if split == 1 or problem.tiles * -(-problem.n // bn) < 2 * chip.units:
            found[tile] = _milliseconds(launches(tile))
    best = min(found, key=found.get)
    if found[best] == float("inf"):
        raise SystemExit(f"No tile of {problem.key} runs here: what is written stays, and nothing more is tuned.")
    return best


def _milliseconds(launches: list[Launch]) -> float:
    """As a graph, which is how they decode. Infinity for what the chip cannot hold or the compiler does not make."""

    def run() -> None:
        for launch in launches:
            launch.run()

    try:
        run()
    except OutOfResources:
        return float("inf")
    except (TritonError, RuntimeError) as e:
        tile = {name: launches[0].arguments[name] for name in ("FMT", "BM", "BN", "BK", "SPLIT")}
        print(f"skipped {tile}, {launches[0].options}: {type(e).__name__}: {str(e)[-200:]}")
        return float("inf")
    return triton.testing.do_bench_cudagraph(run, rep=20)


def _stated(chip: Chip, tile: Tile, launches) -> Tile:
    """With the matrix instruction that it becomes, which tests then hold it to."""
    (instruction,) = compile_for(chip, launches(tile)[0]).matrix_instructions
    return replace(tile, instruction=instruction)


def write(path: Path, problem: Problem, tile: Tile) -> None:
    """Into a chip's table; the rule stays as it is."""
    table = json.loads(path.read_text())
    table["tuned"][problem.key] = {name: value for name, value in asdict(tile).items() if name != "bm"}
    rule = ",\n".join(f'    "{fmt}": {{\n{_lines(tiles, 6)}\n    }}' for fmt, tiles in table["rule"].items())
    tuned = f"{{\n{_lines(table['tuned'], 4)}\n  }}"
    path.write_text(f'{{\n  "rule": {{\n{rule}\n  }},\n  "tuned": {tuned}\n}}\n')


def _lines(tiles: dict, indent: int) -> str:
    return ",\n".join(f"{' ' * indent}{json.dumps(key)}: {json.dumps(values)}" for key, values in tiles.items())


if __name__ == "__main__":
    main()
