"""How fast the Triton kernels are on the GPU that is here: `python bench/gpu.py [--seconds N] [--json FILE]`.

Expert layers of real models, decoding 1, 4, 16 and 64 tokens and prefilling 4096, as captured graphs of several steps
with other experts each, so that weights come from memory. Decoding is compared with the measured rate of copying
memory, by the weights of the experts in use; prefilling with the measured rate of a bfloat16 product, and with torch's
grouped product of bfloat16 weights. Where the chip has instructions for it, prefilling is measured with quantized
activations, too. Kernels are compiled by several processes first. What the time is not enough for is named, and so is
what fails. Goal: 0.8 of the copy's bandwidth, 0.65 of the product's rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from tutel_pack.kernels.ops import ACTS, get_ops
from tutel_pack.kernels.triton.backend import experts
from tutel_pack.kernels.triton.chips import chip_of
from tutel_pack.kernels.triton.layers import LAYERS, ExpertLayer, random_routing
from tutel_pack.kernels.triton.matmul import Epilogue, operand

RESULTS = Path(__file__).parent / "results"
FORMATS = ("mxfp4", "nvfp4", "fp8")
DECODE, PREFILL = (1, 4, 16, 64), 4096
OTHER = 512 << 20
"""Bytes, twice what the largest cache of these chips holds (MI300's)."""
STEPS = 8
"""Of a graph, so that its own start does not count."""
PEER = 0.15
"""Of the time, for torch's product."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240, help="at most, compiling included (default: 240)")
    parser.add_argument("--json", type=Path, help="where results go (default: bench/results/<chip>.json)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here to measure.")
    started, chip = time.monotonic(), chip_of(torch.device("cuda"))
    deadline, end = (started + share * options.seconds for share in (1 - PEER, 1))
    cases = [(name, fmt, tokens, act) for fmt, name in itertools.product(FORMATS, LAYERS) for tokens, act in steps(fmt)]
    compile_ahead(cases, deadline)
    limits = {"copy_bytes_per_second": copy_rate(), "bf16_flops_per_second": product_rate()}
    print(f"{torch.cuda.get_device_name()}: {limits}, after {time.monotonic() - started:.0f} s of compiling")
    found = {
        "device": torch.cuda.get_device_name(), "chip": chip.name, "torch": torch.__version__,
        "triton": triton.__version__, **limits, "layers": [], "torch_grouped_mm": [], "skipped": [], "failed": [],
    }  # fmt: skip
    path = options.json or RESULTS / f"{chip.name}.json"
    for (fmt, name), group in itertools.groupby(cases, key=lambda case: (case[1], case[0])):
        measure(name, fmt, list(group), limits, deadline, found)
        if found["layers"]:
            write(path, found)  # before what comes next, and could end the process
    if not found["layers"]:
        raise SystemExit(f"No layer was measured in {options.seconds:g} seconds, so nothing is written: give it more.")
    for name in LAYERS:
        peer(name, limits, end, found)
        write(path, found)
    print(f"not measured for want of time: {', '.join(found['skipped']) or 'nothing'}\n{path}")
    if found["failed"]:
        sys.exit(f"failed: {'; '.join(found['failed'])}")


def write(path: Path, found: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def steps(fmt: str) -> list[tuple[int, str | None]]:
    """Tokens, and what their activations are quantized to."""
    acts = [act for act in chip_of(torch.device("cuda")).acts if ACTS[act] == fmt]
    return [*((tokens, None) for tokens in (*DECODE, PREFILL)), *((PREFILL, act) for act in acts)]


def compile_ahead(cases: list[tuple], deadline: float) -> None:
    """What fails fails again where it is measured, and is recorded there."""
    count = max(1, min(16, (os.cpu_count() or 2) - 1))
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))
    left = (deadline - time.monotonic()) / 2
    wait([pool.submit(compile_case, *case) for case in cases], timeout=max(0.0, left))
    pool.shutdown(wait=False, cancel_futures=True)


def compile_case(name: str, fmt: str, tokens: int, act: str | None) -> None:
    """All kernels of a step, for tensors that are not there."""
    layer, chip = LAYERS[name], chip_of(torch.device("cuda"))
    gate_up, down = (operand(w) for w in layer.weights(fmt, "meta"))
    x = torch.empty(tokens, layer.hidden, dtype=torch.bfloat16, device="meta")
    ids, weights = random_routing(layer, tokens, "meta")
    first, second = Epilogue(activation=layer.activation), Epilogue(weights=weights)
    for launch in experts(chip, x, ids, gate_up, down, first, second, torch.empty_like(x), act):
        launch.compile()


def measure(name: str, fmt: str, cases: list[tuple], limits: dict, deadline: float, found: dict) -> None:
    """A layer's steps, into `found`."""
    if time.monotonic() > deadline:
        found["skipped"].append(f"{name} {fmt}")
        return
    layer = LAYERS[name]
    weights = layer.weights(fmt, "cuda")
    for _, _, tokens, act in cases:
        if time.monotonic() > deadline:
            found["skipped"].append(f"{name} {fmt} {tokens} {act or ''}".strip())
            continue
        try:
            seconds = moe_seconds(layer, weights, tokens, act)
        except RuntimeError as e:
            found["failed"].append(f"{name} {fmt} {tokens} {act or ''}".strip() + f": {first_line(e)}")
            continue
        found["layers"].append({"layer": name, "format": fmt, **({"act": act} if act else {}), "tokens": tokens,
                                "seconds": seconds, **fractions(layer, weights, tokens, seconds, limits)})  # fmt: skip
        print(found["layers"][-1], flush=True)


def fractions(layer: ExpertLayer, weights: tuple, tokens: int, seconds: float, limits: dict) -> dict[str, float]:
    if tokens == PREFILL:
        return {"fraction_of_matmul_rate": layer.flops(tokens) / seconds / limits["bf16_flops_per_second"]}
    used = layer.used_experts(tokens) / layer.experts * sum(w.nbytes for w in weights)
    return {"fraction_of_copy_bandwidth": used / seconds / limits["copy_bytes_per_second"]}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def moe_seconds(layer: ExpertLayer, weights: tuple, tokens: int, act: str | None = None) -> float:
    """Of a step, by several with other experts each."""
    ops = get_ops("triton", "cuda", act)
    x = torch.randn(tokens, layer.hidden, device="cuda").bfloat16()
    routings = [random_routing(layer, tokens, "cuda") for _ in range(STEPS)]
    return median_seconds([lambda r=r: ops.moe(x, *r, *weights, layer.activation) for r in routings])


def median_seconds(calls: list[Callable], repeats: int = 9) -> float:
    """Of one of the calls, which are one graph, each time after as much has been read as no cache holds (written bytes
    would still be on their way to memory). The GPU is busy with that while the host launches the graph."""
    graph, other = captured(calls), torch.zeros(OTHER // 4, device="cuda")
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        other.sum()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2] / len(calls)


def captured(calls: list[Callable]) -> torch.cuda.CUDAGraph:
    """RuntimeError for what cannot be captured."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
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


def peer(name: str, limits: dict, end: float, found: dict) -> None:
    """torch's grouped product, into `found`: None, with the reason, where torch has no kernel or cannot capture it."""
    if time.monotonic() > end:
        found["skipped"].append(f"torch's product, {name}")
        return
    layer, row = LAYERS[name], {"layer": name, "seconds": None, "fraction_of_matmul_rate": None}
    try:
        row["seconds"] = grouped_seconds(layer)
        flops = 4.0 * PREFILL * layer.top_k * layer.hidden * layer.intermediate
        row["fraction_of_matmul_rate"] = flops / row["seconds"] / limits["bf16_flops_per_second"]
    except RuntimeError as e:
        row["reason"] = first_line(e)
    found["torch_grouped_mm"].append(row)
    print(row, flush=True)


def grouped_seconds(layer: ExpertLayer) -> float:
    """gate_up alone, of bfloat16 weights as models have them, for as many tokens an expert as prefilling gives each."""
    rows, n, k = PREFILL * layer.top_k, 2 * layer.intermediate, layer.hidden
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(layer.experts, n, k, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    ends = (torch.arange(1, layer.experts + 1, device="cuda") * rows // layer.experts).int()
    return median_seconds([lambda: F.grouped_mm(x, w, offs=ends)])


if __name__ == "__main__":
    main()
