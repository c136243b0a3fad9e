"""How fast the Triton kernels are on the GPU that is here: `python bench/gpu.py [--seconds N] [--json FILE]`.

Expert layers of real models, decoding 1, 4, 16 and 64 tokens and prefilling 4096, each as a captured graph that finds
nothing in the chip's caches. Decoding is compared with the measured rate of copying memory, by the weights of the
experts in use; prefilling with the measured rate of a bfloat16 product, and with torch's grouped product of bfloat16
weights. Where the chip has instructions for it, prefilling is measured with quantized activations, too. What the time
is not enough for is named. Goal: 0.8 of the copy's bandwidth, 0.65 of the product's rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from tutel_pack.kernels.ops import ACTS, get_ops
from tutel_pack.kernels.triton.chips import chip_of
from tutel_pack.kernels.triton.layers import LAYERS, ExpertLayer, random_routing

RESULTS = Path(__file__).parent / "results"
FORMATS = ("mxfp4", "nvfp4", "fp8")
DECODE, PREFILL = (1, 4, 16, 64), 4096
OTHER = 512 << 20
"""Bytes, twice what the largest cache of these chips holds (MI300's)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here to measure.")
    deadline = time.monotonic() + options.seconds
    limits = {"copy_bytes_per_second": copy_rate(), "bf16_flops_per_second": product_rate()}
    print(f"{torch.cuda.get_device_name()}: {limits}")
    layers, skipped = [], []
    for fmt, name in itertools.product(FORMATS, LAYERS):
        if time.monotonic() > deadline:
            skipped.append(f"{name} {fmt}")
            continue
        layers += measure(name, fmt, limits, deadline)
    if not layers:
        raise SystemExit(f"No layer was measured in {options.seconds:g} seconds, so nothing is written: give it more.")
    chip, grouped = chip_of(torch.device("cuda")).name, []
    found = {
        "device": torch.cuda.get_device_name(), "chip": chip, "torch": torch.__version__, "triton": triton.__version__,
        **limits, "layers": layers, "torch_grouped_mm": grouped, "skipped": skipped,
    }  # fmt: skip
    path = options.json or RESULTS / f"{chip}.json"
    write(path, found)  # before what is not ours, and could end the process
    grouped += [torch_grouped(name, limits) for name in LAYERS if time.monotonic() < deadline]
    write(path, found)
    print(f"not measured for want of time: {', '.join(skipped) or 'nothing'}\n{path}")


def write(path: Path, found: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def measure(name: str, fmt: str, limits: dict, deadline: float) -> list[dict]:
    layer, rows = LAYERS[name], []
    weights = layer.weights(fmt, "cuda")
    for tokens in (*DECODE, PREFILL):
        if time.monotonic() > deadline:
            break
        seconds = moe_seconds(layer, weights, tokens)
        row = {"layer": name, "format": fmt, "tokens": tokens, "seconds": seconds}
        if tokens == PREFILL:
            row["fraction_of_matmul_rate"] = layer.flops(tokens) / seconds / limits["bf16_flops_per_second"]
        else:
            used = layer.used_experts(tokens) / layer.experts * sum(w.nbytes for w in weights)
            row["fraction_of_copy_bandwidth"] = used / seconds / limits["copy_bytes_per_second"]
        rows.append(row)
        print(row, flush=True)
    for act in (a for a in chip_of(torch.device("cuda")).acts if ACTS[a] == fmt and time.monotonic() < deadline):
        seconds = moe_seconds(layer, weights, PREFILL, act)
        row = {"layer": name, "format": fmt, "act": act, "tokens": PREFILL, "seconds": seconds}
        row["fraction_of_matmul_rate"] = layer.flops(PREFILL) / seconds / limits["bf16_flops_per_second"]
        rows.append(row)
        print(row, flush=True)
    return rows


def moe_seconds(layer: ExpertLayer, weights: tuple, tokens: int, act: str | None = None) -> float:
    """Median over several routings, each as a graph: what was read the last time is not read again at once."""
    ops = get_ops("triton", "cuda", act)
    x = torch.randn(tokens, layer.hidden, device="cuda").bfloat16()
    routings = [random_routing(layer, tokens, "cuda") for _ in range(8)]
    return median_seconds([lambda r=r: ops.moe(x, *r, *weights, layer.activation) for r in routings])


def median_seconds(calls: list[Callable], repeats: int = 5) -> float:
    """Of graphs, each after as much has been written as no cache holds. The GPU is busy with that while the host
    launches the graph."""
    graphs, other = [captured(call) for call in calls], torch.empty(OTHER, dtype=torch.uint8, device="cuda")
    times = []
    for graph in graphs * repeats:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        other.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def captured(call: Callable) -> torch.cuda.CUDAGraph:
    """RuntimeError for what cannot be captured."""
    call()
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            call()
    finally:
        torch.cuda.set_stream(before)  # which torch leaves to captures that end well
    return graph


def copy_rate() -> float:
    """Bytes read and written per second, of 2 GiB."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds([lambda: target.copy_(source)])


def product_rate() -> float:
    """Of 8192³, the fastest that torch has."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / median_seconds([lambda: a @ b])


def torch_grouped(name: str, limits: dict) -> dict:
    """gate_up alone, of bfloat16 weights, for as many tokens an expert as prefilling gives each; None, with the reason,
    where torch has no kernel for it or cannot capture it."""
    layer = LAYERS[name]
    rows = PREFILL * layer.top_k
    x = torch.randn(rows, layer.hidden, device="cuda").bfloat16()
    w = torch.randn(layer.experts, layer.hidden, 2 * layer.intermediate, dtype=torch.bfloat16, device="cuda")
    ends = torch.linspace(rows / layer.experts, rows, layer.experts, device="cuda").int()
    try:
        seconds = median_seconds([lambda: F.grouped_mm(x, w, offs=ends)])
    except RuntimeError as e:
        return {"layer": name, "seconds": None, "fraction_of_matmul_rate": None, "reason": str(e).splitlines()[0]}
    rate = 4.0 * rows * layer.hidden * layer.intermediate / seconds
    return {"layer": name, "seconds": seconds, "fraction_of_matmul_rate": rate / limits["bf16_flops_per_second"]}


if __name__ == "__main__":
    main()
