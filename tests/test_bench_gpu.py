"""bench/gpu.py, as far as it goes without a GPU: what becomes of results when something fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tutel_pack.kernels.triton.chips import CHIPS
from tutel_pack.kernels.triton.launch import Launch

MISSING = "There is no nowhere: run 'make test' once, or set PYTHON.\n"
BENCH = Path(__file__).parents[1] / "bench" / "gpu.py"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The module, measuring nothing, with a result of an earlier run."""
    spec = importlib.util.spec_from_file_location("bench_gpu", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.path = tmp_path / "chip.json"
    module.path.write_text("earlier")
    layer = module.ExpertLayer(2, 16, 16, 1)
    fakes = {
        "copy_rate": lambda: 1.0, "product_rate": lambda: 1.0, "compile_ahead": lambda *args: None,
        "chip_of": lambda device: SimpleNamespace(name="chip", acts=("mxfp8",)), "LAYERS": {"small": layer},
        "moe_seconds": lambda *args: 1.0, "grouped_seconds": lambda layer: 1.0,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(module, name, fake)
    made, ten = module.ExpertLayer.weights, torch.zeros(10)
    weights = lambda self, fmt, device: (ten, ten) if device == "cuda" else made(self, fmt, device)  # noqa: E731
    monkeypatch.setattr(module.ExpertLayer, "weights", weights)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a chip")
    return module


def run(bench, monkeypatch, seconds: int) -> dict:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(bench.path), "--seconds", str(seconds)])
    bench.main()
    return json.loads(bench.path.read_text())


def test_all_is_measured(bench, monkeypatch):
    found = run(bench, monkeypatch, 100)
    rows = [(row["format"], row["tokens"], row.get("act")) for row in found["layers"]]
    plain = [(fmt, tokens, None) for fmt in ("mxfp4", "nvfp4", "fp8") for tokens in (1, 4, 16, 64, 4096)]
    assert [row for row in rows if not row[2]] == plain and ("mxfp4", 4096, "mxfp8") in rows and len(rows) == 16
    used = found["layers"][0]["fraction_of_copy_bandwidth"]
    assert used == pytest.approx(0.5 * 80), "one of two experts, 80 bytes, in a second, at a byte a second"
    assert found["torch_grouped_mm"][0]["fraction_of_matmul_rate"] == 4.0 * 4096 * 16 * 16
    assert found["skipped"] == found["failed"] == []


def test_a_run_without_layers_overwrites_nothing(bench, monkeypatch):
    with pytest.raises(SystemExit, match="No layer was measured in 0 seconds, so nothing is written: give it more"):
        run(bench, monkeypatch, 0)
    assert bench.path.read_text() == "earlier"


def test_what_the_time_is_not_enough_for_is_named(bench, monkeypatch):
    now = [0.0]

    def slow(*args) -> float:
        now[0] += 30
        return 1.0

    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(bench, "moe_seconds", slow)
    found = run(bench, monkeypatch, 100)
    assert [row["tokens"] for row in found["layers"]] == [1, 4, 16]
    missing = "mxfp4 64", "mxfp4 4096", "mxfp4 4096 mxfp8", "nvfp4", "fp8"
    assert found["skipped"] == [f"small {case}" for case in missing]
    assert found["torch_grouped_mm"], "which has a share of the time"


@pytest.mark.parametrize("name", ["moe_seconds", "peer"])
def test_results_are_written_before_what_ends_the_process(name, bench, monkeypatch):
    calls = []

    def crash(*args):
        calls.append(args)
        if name == "peer" or len(calls) > 6:  # in the second layer
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(bench, name, crash)
    with pytest.raises(KeyboardInterrupt):
        run(bench, monkeypatch, 100)
    assert len(json.loads(bench.path.read_text())["layers"]) == (16 if name == "peer" else 6)


def test_what_fails_is_recorded(bench, monkeypatch):
    def refuse(*args):
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(bench, "grouped_seconds", refuse)
    (peer,) = run(bench, monkeypatch, 100)["torch_grouped_mm"]
    reason = "RuntimeError: operation not permitted when stream is capturing"
    assert peer["seconds"] is None and peer["reason"] == reason
    monkeypatch.setattr(bench, "moe_seconds", lambda layer, w, tokens, act: refuse() if tokens == 4 else 1.0)
    with pytest.raises(SystemExit, match="failed: small mxfp4 4: RuntimeError: operation"):
        run(bench, monkeypatch, 100)
    found = json.loads(bench.path.read_text())
    assert len(found["failed"]) == 3 and len(found["layers"]) == 13


def test_what_is_compiled_ahead_is_what_runs(bench, monkeypatch):
    """The kernels of a layer, for the chip that is here, with tensors that are not there."""
    compiled = []
    monkeypatch.setattr(bench, "chip_of", lambda device: CHIPS["sm_100"])
    monkeypatch.setattr(Launch, "compile", lambda launch: compiled.append(launch))
    bench.compile_case("small", "mxfp4", 4096, "mxfp8")
    names = [launch.kernel.__name__ for launch in compiled]
    assert names == ["sort_pairs", "quantize", "grouped_matmul", "quantize", "grouped_matmul", "sum_pieces"]
    assert all(launch.arguments["ACT"] == "mxfp8" for launch in compiled if "ACT" in launch.arguments)


def test_without_a_gpu_it_says_so():
    """And runs no test, of which there would be none."""
    for python, code, message in ((sys.executable, 1, "There is no GPU here to measure.\n"), ("nowhere", 2, MISSING)):
        how = dict(capture_output=True, text=True, env={**os.environ, "PYTHON": python})
        done = subprocess.run(["bash", BENCH.with_suffix(".sh")], **how)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", message)
