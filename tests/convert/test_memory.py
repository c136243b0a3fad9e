"""Memory of a conversion: bounded by a few units, whatever the number of layers and the size of the model."""

import pytest
import torch

from tests.checkpoints import measured, qwen3_config, write_layers
from tutel_pack.artifact import Artifact

KEEP_ALL = "kept, read = [], pipeline.read_unit\npipeline.read_unit = lambda *a: kept.append(read(*a)) or kept[-1]"


def peak(source, out, fmt, **options) -> int:
    return measured(source, out, fmt, **options)["peak"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Layers -> a checkpoint of so many, of half a MB each."""
    folder, noise = tmp_path_factory.mktemp("memory"), (torch.randn(1 << 20) * 0.02).bfloat16()
    size = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "vocab_size": 256, "mlp_only_layers": []}
    return {n: write_layers(folder / str(n), qwen3_config(num_hidden_layers=n, **size), noise) for n in (20, 60)}


def test_memory_does_not_grow_with_layers(checkpoints, tmp_path):
    few, many = (peak(checkpoints[n], tmp_path / str(n), "mxfp4", unit=1 << 16) for n in (20, 60))
    assert many - few < 4 << 20 and many < 100 << 20
    assert len(Artifact(tmp_path / "60").spec.layers) == 60
    # A leak of what was read would show: 40 layers of it are 20 MB.
    assert peak(checkpoints[60], tmp_path / "leak", "mxfp4", unit=1 << 16, before=KEEP_ALL) - many > 8 << 20


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "nvfp4", "source"])
def test_two_gigabytes_in_less_than_one(tmp_path, fmt):
    config = qwen3_config(hidden_size=2048, moe_intermediate_size=768, num_experts=64, num_hidden_layers=3, mlp_only_layers=[],
                          num_attention_heads=32, num_key_value_heads=4, head_dim=64, vocab_size=50_000)  # fmt: skip
    noise = (torch.randn(1 << 27) * 0.02).bfloat16()
    source = write_layers(tmp_path / "m", config, noise)
    assert sum(path.stat().st_size for path in source.glob("*.safetensors")) > 2e9
    assert peak(source, tmp_path / "out", fmt) < 1e9
