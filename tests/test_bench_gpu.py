"""bench/gpu.py, as far as it goes without a GPU: what becomes of results when something fails."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench" / "gpu.py"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The module, measuring nothing, with a result of an earlier run."""
    spec = importlib.util.spec_from_file_location("bench_gpu", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.path = tmp_path / "chip.json"
    module.path.write_text("earlier")
    fakes = {
        "copy_rate": lambda: 1.0, "product_rate": lambda: 1.0, "measure": lambda *args: [{"seconds": 1.0}],
        "chip_of": lambda device: SimpleNamespace(name="chip"), "LAYERS": {"small": module.ExpertLayer(2, 16, 16, 1)},
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a chip")
    return module


def run(bench, monkeypatch, seconds: int) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(bench.path), "--seconds", str(seconds)])
    bench.main()


def test_a_run_without_layers_overwrites_nothing(bench, monkeypatch):
    with pytest.raises(SystemExit, match="No layer was measured in 0 seconds, so nothing is written: give it more"):
        run(bench, monkeypatch, 0)
    assert bench.path.read_text() == "earlier"


def test_results_are_written_before_the_peer_runs(bench, monkeypatch):
    def crash(name, limits):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "torch_grouped", crash)
    with pytest.raises(KeyboardInterrupt):
        run(bench, monkeypatch, 100)
    assert len(json.loads(bench.path.read_text())["layers"]) == len(bench.FORMATS)


def test_a_peer_that_fails_is_recorded(bench, monkeypatch):
    def refuse(calls):
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")

    made = SimpleNamespace(bfloat16=lambda: None, int=lambda: None)
    monkeypatch.setattr(bench.torch, "randn", lambda *shape, **how: made)
    monkeypatch.setattr(bench.torch, "linspace", lambda *ends, **how: made)
    monkeypatch.setattr(bench, "median_seconds", refuse)
    run(bench, monkeypatch, 100)
    (peer,) = json.loads(bench.path.read_text())["torch_grouped_mm"]
    assert peer["seconds"] is None and peer["reason"] == "operation not permitted when stream is capturing"
