"""How fast a checkpoint is converted, beside what this machine's disk and page cache can do, and in how much memory.

    python bench/convert.py [--gb 1] [--formats fp8,mxfp4] [--threads N] [--dir DIR] [--json FILE]

Each conversion is a process of its own on a checkpoint made on the spot, which the page cache may hold; reading and
writing are measured in the same state, in the same run. What is timed is what tests/convert proves to be right.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.checkpoints import measured, qwen3_config, write_layers  # noqa: E402

FORMATS = ("source", "bf16", "fp8", "mxfp4", "nvfp4")
CHUNK = 16 << 20
SHAPE = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
         "num_experts": 32, "vocab_size": 8192, "mlp_only_layers": []}  # fmt: skip
"""Qwen3-30B-A3B with a quarter of its experts, 0.35 GB a layer."""
SMALL = SHAPE | {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 8}
"""Layers of 10 MB, of which 20 and 60 are compared."""


def main() -> None:
    options = parse()
    noise = (torch.randn(1 << 24) * 0.02).bfloat16()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-convert-") as name:
        folder = Path(name)
        layers = max(1, round(options.gb * 1e9 / layer_bytes(SHAPE)))
        source = write_layers(folder / "big", qwen3_config(num_hidden_layers=layers, **SHAPE), noise)
        facts = {"gb": size_of(source) / 1e9, "threads": options.threads, "read_gbps": read_speed(source), "write_gbps": write_speed(folder)}
        print(f"source {facts['gb']:.2f} GB; this machine reads {facts['read_gbps']:.2f} GB/s and writes {facts['write_gbps']:.2f} GB/s")
        facts["formats"] = {fmt: time_format(source, folder / "out", fmt, facts, options.threads) for fmt in options.formats}
        facts["layers"] = compare_layers(folder, noise, options)
    if options.json:
        Path(options.json).write_text(json.dumps(facts, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the source")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=FORMATS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dir", help="where to work, if not in the system's place for temporary files")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def layer_bytes(shape: dict) -> int:
    return 6 * shape["num_experts"] * shape["hidden_size"] * shape["moe_intermediate_size"]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_speed(folder: Path) -> float:
    """GB/s of reading all files once, as the converter does it: into memory, one reader."""
    buffer, started = bytearray(CHUNK), time.monotonic()
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    return size_of(folder) / (time.monotonic() - started) / 1e9


def write_speed(folder: Path, size: int = 1 << 29) -> float:
    """GB/s of writing half a gigabyte and flushing it to the disk."""
    data, started = os.urandom(CHUNK), time.monotonic()
    with open(folder / "written", "wb", buffering=0) as f:
        for _ in range(size // CHUNK):
            f.write(data)
        os.fsync(f.fileno())
    seconds = time.monotonic() - started
    (folder / "written").unlink()
    return size / seconds / 1e9


def time_format(source: Path, out: Path, fmt: str, facts: dict, threads: int) -> dict:
    """Seconds, speed and memory of one conversion, and the ratio to the machine's limit: the slower of reading and writing."""
    found = measured(source, out, fmt, threads=threads)
    read, written = size_of(source) / 1e9, size_of(out) / 1e9
    shutil.rmtree(out)
    limit = max(read / facts["read_gbps"], written / facts["write_gbps"])
    found |= {"written_gb": written, "read_gbps": read / found["seconds"], "of_limit": limit / found["seconds"]}
    print(f"{fmt:<7}{found['seconds']:8.2f} s {found['read_gbps']:7.3f} GB/s read {found['of_limit']:8.1%} of the machine's limit "
          f"{found['peak'] / 1e6:8.0f} MB over imports")  # fmt: skip
    return found


def compare_layers(folder: Path, noise: torch.Tensor, options: argparse.Namespace) -> dict:
    """Peak memory of 20 and of 60 small layers, in units small enough for each layer to have several."""
    peaks = {}
    for layers in (20, 60):
        source = write_layers(folder / str(layers), qwen3_config(num_hidden_layers=layers, **SMALL), noise)
        peaks[layers] = measured(source, folder / "out", options.formats[-1], unit=1 << 20, threads=options.threads)["peak"]
        shutil.rmtree(folder / "out")
    print(f"20 layers {peaks[20] / 1e6:.1f} MB, 60 layers {peaks[60] / 1e6:.1f} MB over imports")
    return peaks


if __name__ == "__main__":
    main()
