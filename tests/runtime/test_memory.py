"""Weights stay packed and mapped: what a process holds after a forward pass is the artifact and little more."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from tutel_pack.artifact import Entry, FileWriter, Manifest, describe_file, write_manifest
from tutel_pack.formats import DATA, FORMATS, SCALE
from tutel_pack.spec import Attention, Layer, ModelSpec, Moe, Rope
from tutel_pack.tensors import EXPERTS, KEEP, canonical_tensors

ALLOWED = 500e6
MEASURE = """
import json, sys, torch
from tutel_pack import load_packed
model = load_packed(sys.argv[1])
ids = torch.arange(256)[None] % model.spec.vocab
assert torch.isfinite(model.forward(ids)).all()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({name: 1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmHWM", "RssAnon")}))
"""


def random_artifact(folder: Path, layers: int) -> Path:
    """About 95 MB a layer, of random codes: mxfp4 experts, fp8 attention and head."""
    attention = Attention(heads=16, kv_heads=4, head_dim=64, rope=Rope(1e4, 64), qk_norm="head")
    layer = Layer(attention, Moe(experts=64, top_k=8, intermediate=768))
    spec = ModelSpec("qwen3_moe", 1024, 8192, 1024, 1e-6, False, (layer,) * layers)
    formats = {EXPERTS: FORMATS["mxfp4"], KEEP: None}
    entries = {
        name: Entry("all.safetensors", t.shape, f := formats.get(t.role, FORMATS["fp8"]), f and (t.segments or t.shape[-2:-1]), torch.bfloat16)
        for name, t in canonical_tensors(spec).items()
    }
    writer = FileWriter(folder / "all.safetensors", {n: p for name, e in entries.items() for n, p in e.stored(name).items()})
    for name, entry in entries.items():
        for stored, (dtype, shape) in entry.stored(name).items():
            writer.write(stored, (), random_part(stored.removeprefix(name), dtype, shape))
    writer.close()
    write_manifest(folder, Manifest({"repo": "random", "commit": None}, spec, {}, entries, {"all.safetensors": describe_file(folder / "all.safetensors")}))
    return folder


def random_part(suffix: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return torch.randn(shape).mul_(0.02).add_(len(shape) == 1).to(dtype)  # norms around 1, routers that disagree
    if suffix == SCALE:
        return torch.full(shape, 2.0**-7) if dtype == torch.float32 else torch.full(shape, 120, dtype=dtype)
    assert suffix == DATA
    # Below 0x70, so that no code is e4m3's NaN; of both signs, or all tokens become alike and choose the same experts.
    signs = torch.randint(0, 2, shape, dtype=torch.uint8) << 7
    return (torch.randint(0, 0x70, shape, dtype=torch.uint8) | signs).view(dtype)


def test_a_forward_pass_holds_the_artifact_and_500_mb_at_most(tmp_path):
    folder = random_artifact(tmp_path, layers=12)
    size = (folder / "all.safetensors").stat().st_size
    assert size > 1e9
    found = json.loads(subprocess.run([sys.executable, "-c", MEASURE, folder], check=True, capture_output=True, text=True).stdout)
    assert found["VmRSS"] <= size + ALLOWED
    # The peak too: nothing is decoded whole and dropped again.
    assert found["VmHWM"] <= size + ALLOWED
    # The mapped file counts, so the bound above is one: most of it was touched.
    assert found["VmRSS"] - found["RssAnon"] > 0.8 * size
