"""Measure tiles on the GPU that is here, and write the best into its table: `python -m tutel_pack.kernels.triton.tune`.

Of every layer, format and number of tokens both products are tuned, one tile at a time. Of all tiles the few that a
model of time puts first are compiled, by several processes ahead of the one that measures, and those that do not fit
the chip are left. A measurement goes through random choices of experts and, where a layer would stay in the cache,
through copies of it, so that weights come from memory as they do in decoding. What the table has is not measured again,
so that a run that was stopped goes on where it was. The table is read when a process starts: nothing is tuned while
serving.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import triton
from torch import Tensor
from tqdm import tqdm

from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.triton import model
from tutel_pack.kernels.triton.aot import Compiled, compile_here
from tutel_pack.kernels.triton.chips import Chip, chip_of
from tutel_pack.kernels.triton.launch import Launch
from tutel_pack.kernels.triton.layers import LAYERS, ExpertLayer, random_routing
from tutel_pack.kernels.triton.matmul import Epilogue, Operand, Tiles, operand, problem_of, product, sorting
from tutel_pack.kernels.triton.tiles import TABLES, Problem, Tile, table_of, tile_for

ROWS, WARPS, STAGES, PARTS = (64, 128, 256), (4, 8), (1, 2, 3, 4, 5), (1, 2, 4, 8)
MOST = 12
"""Tiles measured for a product."""

SLACK = 1.5
"""Of the model of time: what it finds slower than its best by so much is not measured."""

CACHES = 512 << 20
"""Bytes of weights to go through before the first come again: twice what the largest cache of these chips holds."""

FORMATS, TOKENS = ("mxfp4", "nvfp4", "fp8"), (1, 4, 16, 64, 4096)
PRODUCTS = ("gate_up", "down")


@dataclass(frozen=True)
class Job:
    """A layer's expert weights in a format, and a number of tokens."""

    layer: ExpertLayer
    fmt: str
    tokens: int

    def problem(self, which: str) -> Problem:
        """Of gate_up or down."""
        return Products(self, "meta", 1).problem(which)

    def products(self, device: str | torch.device) -> Products:
        """As many as it takes to go through CACHES, two at least."""
        used = self.layer.used_experts(self.tokens) / self.layer.experts
        smaller = min(w.nbytes for w in self.layer.weights(self.fmt, "meta"))
        return Products(self, device, max(2, math.ceil(CACHES / (used * smaller))))


class Products:
    """The products of a job for `count` random choices of experts, and as many copies of the weights as hold CACHES."""

    def __init__(self, job: Job, device: str | torch.device, count: int):
        self._job, self._device, self._count, layer = job, torch.device(device), count, job.layer
        weights = layer.weights(job.fmt, "meta")
        copies = min(count, math.ceil(CACHES / min(w.nbytes for w in weights)))
        self._copies = [layer.weights(job.fmt, device) for _ in range(copies)]
        self._routings = [random_routing(layer, job.tokens, device) for _ in range(count)]
        self.pairs = job.tokens * layer.top_k
        shapes = (job.tokens, layer.hidden), (self.pairs, layer.intermediate), (self.pairs, layer.hidden)
        self.x, self.inner, self.pieces = (torch.randn(shape, device=device).bfloat16() for shape in shapes)

    def choice(self, i: int) -> tuple[Tensor, Tensor, PackedTensor, PackedTensor]:
        """ids, weights of pairs, gate_up and down."""
        return *self._routings[i], *self._copies[i % len(self._copies)]

    def problem(self, which: str) -> Problem:
        return problem_of(self._weight(0, which), self.pairs, torch.bfloat16)

    def _weight(self, i: int, which: str) -> Operand:
        return operand(self.choice(i)[2 + PRODUCTS.index(which)])

    @cached_property
    def _tiles(self) -> list[Tiles]:
        """Of every choice, not sorted yet."""
        most = self.problem("gate_up").tiles
        return [Tiles.empty(self.pairs, most, self._device) for _ in range(self._count)]

    def sorts(self) -> list[Launch]:
        """What must run before any product."""
        bm, experts = self.problem("gate_up").bm, self._job.layer.experts
        return [sorting(ids.view(-1), experts, bm, tiles) for (ids, _), tiles in zip(self._routings, self._tiles)]

    def launches(self, chip: Chip, which: str, tile: Tile) -> Iterator[list[Launch]]:
        """Of one product after another."""
        for i, ((ids, weights), tiles) in enumerate(zip(self._routings, self._tiles)):
            w, flat = self._weight(i, which), ids.view(-1)
            if which == "gate_up":
                epilogue = Epilogue(activation=self._job.layer.activation)
                yield product(chip, self.x, w, self.inner, tile, epilogue, flat, tiles, gather=self._job.layer.top_k)
            else:
                epilogue = Epilogue(weights=weights)
                yield product(chip, self.inner, w, self.pieces, tile, epilogue, flat, tiles, scatter=True)


def main() -> None:
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("Tiles are tuned on a GPU, and there is none here.")
    chip = chip_of(torch.device("cuda"))
    path = TABLES / f"{chip.name}.json"
    if not path.exists():
        path.write_text(json.dumps({**table_of(chip), "tuned": {}}))
    every = itertools.product(options.layers, options.formats, options.tokens)
    done = {} if options.again else json.loads(path.read_text())["tuned"]
    work = wanted([Job(LAYERS[name], fmt, tokens) for name, fmt, tokens in every], done)
    count = sum(len(candidates(chip, problem)) for _, _, problem in work)
    print(f"{chip.name}: {len(work)} products, {count} tiles, compiled by {options.processes} processes; into {path}")
    pool = ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn"))
    try:
        for problem, tile in tuned(chip, work, pool.submit, microseconds, tqdm(total=count, unit="tile")):
            tqdm.write(f"{problem.key}: {tile}")
            write(path, problem, tile)
    finally:
        pool.shutdown(cancel_futures=True)


def _options() -> argparse.Namespace:
    """SystemExit names what is unknown."""
    parser = argparse.ArgumentParser(
        prog="python -m tutel_pack.kernels.triton.tune", description=__doc__.split(":")[0] + ".",
        epilog="All of them take about half an hour. What is measured is written at once: stop it, and start it again.",
    )  # fmt: skip
    listed = lambda of, known: lambda text: [_known(of(part), known) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--layers", type=listed(str.lower, LAYERS), default=list(LAYERS), metavar="NAME,…",
                        help=f"whose experts: {', '.join(LAYERS)} (default: all)")  # fmt: skip
    parser.add_argument("--formats", type=listed(str, FORMATS), default=FORMATS, metavar="FMT,…",
                        help=f"of weights: {', '.join(FORMATS)} (default: all)")  # fmt: skip
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=TOKENS, metavar="N,…",
                        help=f"tokens of a step (default: {','.join(map(str, TOKENS))})")  # fmt: skip
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), metavar="N",
                        help="that compile (default: one fewer than there are processors)")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="measure what the table has as well")
    return parser.parse_args()


def _known(name: str, known: tuple[str, ...] | dict) -> str:
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is unknown: choose of {', '.join(known)}")
    return name


def wanted(jobs: list[Job], done: dict) -> list[tuple[Job, str, Problem]]:
    """What is to be tuned, each problem once."""
    found = {}
    for job, which in itertools.product(jobs, PRODUCTS):
        problem = job.problem(which)
        if problem.key not in done:
            found.setdefault(problem.key, (job, which, problem))
    return list(found.values())


def candidates(chip: Chip, problem: Problem) -> list[Tile]:
    """The rule's tile, and those that should be fastest by the model of time, within SLACK; of those that differ in
    their stages alone two, next to the rule's if the model sees no difference."""
    rule = replace(tile_for(chip, problem), instruction="")
    times = {}
    for bn, warps, stages, split in itertools.product(ROWS, WARPS, STAGES, PARTS):
        tile = replace(rule, bn=bn, warps=warps, stages=stages, split=split)
        times[tile] = model.seconds(chip, problem, tile), abs(stages - rule.stages)
    found, alike, limit = [rule], Counter(), SLACK * min(seconds for seconds, _ in times.values())
    for tile in sorted(times, key=times.get):
        but_for_stages = replace(tile, stages=0)
        if tile != rule and times[tile][0] <= limit and alike[but_for_stages] < 2:
            alike[but_for_stages] += 1
            found.append(tile)
    return found[:MOST]


def tuned(
    chip: Chip, work: list[tuple[Job, str, Problem]], submit: Callable[..., Future],
    measure: Callable[[list[Launch]], float], bar: tqdm,
) -> Iterator[tuple[Problem, Tile]]:  # fmt: skip
    """The fastest tile of every problem, as it is known. submit: to what compiles.  measure: of launches, any unit.

    SystemExit if none runs, as after an error that the device does not recover from.
    """
    tiles = {problem: candidates(chip, problem) for _, _, problem in work}
    made = {(p, t): submit(compiled, chip, job, which, t) for job, which, p in work for t in tiles[p]}
    here, products = None, None
    for job, which, problem in work:
        if job != here:
            products = None  # before the next one's weights are made
            here, products = job, job.products(_device(chip))
            for launch in products.sorts():
                launch.run()
        found = {}
        for tile in tiles[problem]:
            bar.set_description(problem.key)
            fits = _that_fits(chip, tile, made.pop((problem, tile)))
            if fits:
                found[fits] = _measured(products, chip, which, fits, measure)
            bar.update()
        best = min(found, key=found.get, default=None)
        if best is None or found[best] == math.inf:
            raise SystemExit(f"No tile of {problem.key} runs here: what is written stays, and nothing more is tuned.")
        yield problem, best


def _device(chip: Chip) -> str:
    return "cpu" if chip.vendor == "interpreter" else "cuda"


def compiled(chip: Chip, job: Job, which: str, tile: Tile) -> Compiled:
    """Its first launch, by a process of its own, whose work is found in Triton's cache."""
    (launch, *_) = next(Products(job, "meta", 1).launches(chip, which, tile))
    return compile_here(chip, launch)


def _that_fits(chip: Chip, tile: Tile, made: Future) -> Tile | None:
    """The tile with its matrix instruction, which tests then hold it to; None, said so, for what the compiler does not
    make, and for what the chip cannot hold or keeps in memory."""
    try:
        found = made.result()
    except Exception as e:  # whatever a compiler raises, and a process that it ended
        tqdm.write(f"skipped {tile}: {type(e).__name__}: {str(e)[-200:]}")
        return None
    if found.spills or found.shared > chip.shared or len(found.matrix_instructions) != 1:
        return None
    return replace(tile, instruction=found.matrix_instructions[0])


def _measured(products: Products, chip: Chip, which: str, tile: Tile, measure: Callable) -> float:
    """Infinity, said so, for what does not run."""
    try:
        return measure([launch for launches in products.launches(chip, which, tile) for launch in launches])
    except RuntimeError as e:
        tqdm.write(f"skipped {tile}: {type(e).__name__}: {str(e)[-200:]}")
        return math.inf


def microseconds(launches: list[Launch]) -> float:
    """Of all of them as a graph, which is how they decode; the median of several."""

    def run() -> None:
        for launch in launches:
            launch.run()

    run()
    return 1e3 * triton.testing.do_bench_cudagraph(run, rep=20, return_mode="median")


def write(path: Path, problem: Problem, tile: Tile) -> None:
    """Into a chip's table; the rule stays as it is."""
    table = json.loads(path.read_text())
    table["tuned"][problem.key] = {name: value for name, value in asdict(tile).items() if name != "bm"}
    rule = ",\n".join(f'    "{fmt}": {{\n{_lines(tiles, 6)}\n    }}' for fmt, tiles in table["rule"].items())
    tuned = f"{{\n{_lines(table['tuned'], 4)}\n  }}"
    written = path.with_suffix(".new")
    written.write_text(f'{{\n  "rule": {{\n{rule}\n  }},\n  "tuned": {tuned}\n}}\n')
    written.replace(path)


def _lines(tiles: dict, indent: int) -> str:
    return ",\n".join(f"{' ' * indent}{json.dumps(key)}: {json.dumps(values)}" for key, values in tiles.items())


if __name__ == "__main__":
    main()
