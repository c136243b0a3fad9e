"""The tuner, as far as it goes without a GPU: what it measures, on which weights, and what it writes."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.kernels import interpreted
from tests.kernels.reference import decode64, moe64, tokens_of_experts, tolerance, worst_tile
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import PTXASError

from tutel_pack.kernels.triton import model, tiles, tune
from tutel_pack.kernels.triton.aot import compile_for, compile_here
from tutel_pack.kernels.triton.chips import CHIPS, INTERPRETER
from tutel_pack.kernels.triton.layers import LAYERS, ExpertLayer
from tutel_pack.kernels.triton.matmul import summing
from tutel_pack.kernels.triton.tiles import Problem, tile_for
from tutel_pack.kernels.triton.tune import Job, Products

H100 = CHIPS["sm_90"]
EXPERTS = Problem("mxfp4", 128, 1536, 2048, 8, 128)
SMALL = ExpertLayer(6, 64, 32, 2)
FACTS = SimpleNamespace(spills=0, shared=1000, matrix_instructions=("mma",))


def problems(tokens: int) -> list[Problem]:
    return [Job(layer, fmt, tokens).problem("down") for layer in LAYERS.values() for fmt in ("mxfp4", "fp8")]


@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_few_tiles_are_measured(chip, tokens):
    for problem in problems(tokens):
        found, rule = tune.candidates(chip, problem), replace(tile_for(chip, problem), instruction="")
        assert found[0] == rule and 2 <= len(found) == len(set(found)) <= tune.MOST
        alike = [replace(tile, stages=0) for tile in found[1:]]
        assert max(map(alike.count, alike)) <= 2
        assert all(model.shared_bytes(problem, tile) <= chip.shared for tile in found[1:])
        times = [model.seconds(chip, problem, tile) for tile in found[1:]]
        assert times == sorted(times) and times[-1] <= tune.SLACK * times[0]


def test_the_model_knows_what_takes_time():
    tile = tile_for(H100, EXPERTS)
    seconds = lambda problem=EXPERTS, **how: model.seconds(H100, problem, replace(tile, **how))  # noqa: E731
    read = 8 * 1536 * 2048 * 0.5 / model.gpu_like(H100).bandwidth
    assert read < seconds() < 4 * read
    assert seconds(stages=2) > seconds(), "fewer loads on their way"
    assert seconds(replace(EXPERTS, rows=16)) > seconds(), "more experts to read"
    assert seconds(bn=256, stages=64) == float("inf"), "more than a unit holds"


def test_nothing_is_measured_twice():
    jobs = [Job(SMALL, fmt, tokens) for tokens in (3, 4, 5) for fmt in ("mxfp4", "fp8")]
    keys = [problem.key for _, _, problem in tune.wanted(jobs, {})]
    assert keys == [
        "mxfp4 6x64x64 8", "mxfp4 6x64x32 8", "fp8 6x64x64 8", "fp8 6x64x32 8",  # of three tokens and of four
        "mxfp4 6x64x64 16", "mxfp4 6x64x32 16", "fp8 6x64x64 16", "fp8 6x64x32 16",
    ]  # fmt: skip
    rest = tune.wanted(jobs, {"fp8 6x64x64 8": {}})
    assert [problem.key for _, _, problem in rest] == [key for key in keys if key != "fp8 6x64x64 8"]


def test_weights_come_from_memory(monkeypatch):
    """Before the first ones come again, more than a cache's bytes were read; of few experts as of all."""
    job = Job(SMALL, "mxfp4", 1)
    smaller = min(w.nbytes for w in SMALL.weights("mxfp4", "meta"))
    monkeypatch.setattr(tune, "CACHES", 3 * smaller - 1)
    products = job.products("cpu")
    (launch, *_), *rest = products.launches(INTERPRETER, "down", tile_for(INTERPRETER, products.problem("down")))
    read = [launch.arguments["w"].data_ptr(), *(r[0].arguments["w"].data_ptr() for r in rest)]
    assert len(read) == 9, "of six experts, two are read each time"
    assert len(set(read)) == 3 and read[:3] == read[3:6] == read[6:]
    ids = torch.stack([products.choice(i)[0] for i in range(9)])
    assert len(ids.sort(-1).values.unique(dim=0)) > 1
    whole = replace(SMALL, experts=2)
    assert len(list(Job(whole, "mxfp4", 99).products("cpu").sorts())) == 9, "smaller, but all of it is read"


def run_products(job: Job, split: int) -> tuple:
    """What is measured, run once; what belongs to the last choice. Run by a worker."""
    products = Products(job, "cpu", 2)
    for launch in products.sorts():
        launch.run()
    for which in tune.PRODUCTS:
        tile = replace(tile_for(INTERPRETER, products.problem(which)), bn=64, split=split)
        for launches in products.launches(INTERPRETER, which, tile):
            for launch in launches:
                launch.run()
    return products.x, *products.choice(1), products.pieces


@pytest.mark.parametrize("split", [1, 2])
def test_what_is_measured_is_a_layer(split):
    *arguments, pieces = interpreted.submit(
        "tests.kernels.test_triton_tune:run_products", Job(replace(SMALL, hidden=256), "mxfp4", 3), split
    ).result()
    x, ids, weights, gate_up, down = arguments
    y = pieces.view(3, 2, 256).float().sum(1).to(x.dtype)
    expected = moe64(x, ids, weights, decode64(gate_up), decode64(down))
    assert worst_tile(y, expected, tokens_of_experts(ids, 6)) < tolerance(torch.bfloat16, 256)


def at_once(facts):
    """A pool whose work is done: `facts` of a tile, raised if they are an error."""

    def submit(function, chip, job, which, tile) -> Future:
        done, found = Future(), facts(tile)
        done.set_exception(found) if isinstance(found, Exception) else done.set_result(found)
        return done

    return submit


@pytest.fixture
def tuning(monkeypatch):
    """tune.tuned of a small layer's products, by what compiling and measuring a tile gives."""
    monkeypatch.setattr(tune.Launch, "run", lambda launch: None)
    monkeypatch.setattr(tune, "CACHES", 1)

    def run(facts, measure) -> list[tuple[Problem, tiles.Tile]]:
        bar = SimpleNamespace(set_description=str, update=int)
        return list(tune.tuned(INTERPRETER, tune.wanted([Job(SMALL, "mxfp4", 1)], {}), at_once(facts), measure, bar))

    return run


def test_the_fastest_is_taken(tuning):
    def measure(launches) -> float:
        first = launches[0]
        return abs(first.arguments["BN"] - 64) + first.options["num_stages"]

    found = tuning(lambda tile: FACTS, measure)
    assert [problem.key for problem, _ in found] == ["mxfp4 6x64x64 2", "mxfp4 6x64x32 2"]
    for problem, tile in found:
        best = min(tune.candidates(INTERPRETER, problem), key=lambda t: abs(t.bn - 64) + t.stages)
        assert (tile.bn, tile.stages, tile.instruction) == (best.bn, best.stages, "mma") and tile.bn == 64


REFUSALS = {
    "spills": SimpleNamespace(**{**vars(FACTS), "spills": 8}),
    "too large": SimpleNamespace(**{**vars(FACTS), "shared": INTERPRETER.shared + 1}),
    "no matrix unit": SimpleNamespace(**{**vars(FACTS), "matrix_instructions": ()}),
    "the assembler": PTXASError("ptxas fatal: out of registers"),
    "a pass": RuntimeError("PassManager::run failed"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_passed_over(name, tuning, capsys):
    refused = REFUSALS[name]
    found = tuning(lambda tile: refused if tile.bn == 128 else FACTS, lambda launches: launches[0].arguments["BN"])
    assert found and all(tile.bn != 128 for _, tile in found)
    printed = capsys.readouterr().out
    assert ("skipped Tile(bm=16, bn=128" in printed and str(refused) in printed) == isinstance(refused, Exception)


def test_no_tile_is_written_that_does_not_run(tuning, capsys):
    def fail(launches) -> float:
        raise RuntimeError("an illegal memory access")

    with pytest.raises(SystemExit, match="No tile of mxfp4 6x64x64 2 runs here"):
        tuning(lambda tile: FACTS, fail)
    assert "an illegal memory access" in capsys.readouterr().out


def test_what_is_written_is_used(tmp_path, monkeypatch):
    shutil.copy(tiles.TABLES / "sm_90.json", tmp_path)
    path = tmp_path / "sm_90.json"
    rule = json.loads(path.read_text())["rule"]
    monkeypatch.setattr(tiles, "TABLES", tmp_path)
    tiles.table_of.cache_clear()
    best = replace(tile_for(H100, EXPERTS), bn=64, split=4)
    tune.write(path, EXPERTS, best)
    tiles.table_of.cache_clear()
    assert tile_for(H100, EXPERTS) == best and tile_for(H100, replace(EXPERTS, rows=7)) == best
    assert tile_for(H100, replace(EXPERTS, rows=9)) != best
    assert tile_for(H100, replace(EXPERTS, float32=True)) != best
    assert json.loads(path.read_text())["rule"] == rule and list(tmp_path.iterdir()) == [path]
    tiles.table_of.cache_clear()


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    shutil.copy(tiles.TABLES / "sm_90.json", tmp_path)
    path, measured, stopped = tmp_path / "sm_90.json", [], []
    shutdown = lambda cancel_futures: stopped.append(cancel_futures)  # noqa: E731
    pool = SimpleNamespace(submit=at_once(lambda tile: FACTS), shutdown=shutdown)

    def measure(launches) -> float:
        measured.append(launches[0].arguments["K"])
        if measured == [64] * measured.count(64) + [32]:
            raise KeyboardInterrupt
        return 1.0

    fakes = {
        "TABLES": tmp_path, "LAYERS": {"small": SMALL}, "CACHES": 1, "microseconds": measure,
        "chip_of": lambda device: H100, "_device": lambda chip: "cpu", "ProcessPoolExecutor": lambda *how: pool,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(tune, name, fake)
    monkeypatch.setattr(tune.Launch, "run", lambda launch: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = ("--formats", "mxfp4", "--tokens", "1")
    with pytest.raises(KeyboardInterrupt):
        run_main(monkeypatch, *arguments)
    assert list(json.loads(path.read_text())["tuned"]) == ["mxfp4 6x64x64 2"] and stopped == [True]
    assert "sm_90: 2 products" in capsys.readouterr().out
    measured.clear()
    measured.append(0)
    run_main(monkeypatch, *arguments)
    assert list(json.loads(path.read_text())["tuned"]) == ["mxfp4 6x64x64 2", "mxfp4 6x64x32 2"]
    assert set(measured[1:]) == {32}


class Driver:
    """Of a GPU that is not here."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def test_what_a_launch_would_compile_is_compiled_ahead(monkeypatch, tmp_path):
    """By Triton's own way to a launch; its result lies in the cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pieces, ids = (torch.empty(16, 64, dtype=d, device="meta") for d in (torch.bfloat16, torch.int64))
    launch = summing(pieces, ids[:8, :2], pieces[:8], 6)
    monkeypatch.setattr(driver, "_active", Driver())
    made = compile_here(H100, launch)
    assert list(tmp_path.glob("*/sum_pieces.cubin"))
    assert made == compile_for(H100, launch)


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tune", *arguments])
    tune.main()


def test_it_says_what_it_takes(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--help")
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--layers", "--formats", "--tokens", "--processes", "--again"))
    assert "deepseek-v3" in shown and "half an hour" in shown
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--layers", "qwen")
    assert "'qwen' is unknown: choose of" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="Tiles are tuned on a GPU, and there is none here."):
        run_main(monkeypatch, "--layers", "Qwen3-30B-A3B")
