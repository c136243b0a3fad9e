"""Weights that compressed-tensors and ModelOpt packed: what is read of them is bit for bit what these libraries decode."""

import pytest
import torch
from safetensors.torch import save_file

from tutel_pack.convert.dialects import find_weights, read_rows
from tutel_pack.convert.headers import read_index
from tutel_pack.convert.source import open_source
from tutel_pack.quant.codec import decode

SHAPES = [pytest.param((96, 192), id="96x192"), pytest.param((576, 96), id="576x96-ragged-block-rows")]


def weight(shape, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return (0.02 * torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-4, 5, (shape[0], 1), generator=generator)).to(dtype)


@pytest.fixture
def read(tmp_path):
    """{suffix: tensor} -> what the dialects make of x.weight."""

    def decoded(state: dict, method: str, **config) -> torch.Tensor:
        save_file({"x." + name: t.contiguous() for name, t in state.items()}, tmp_path / "model.safetensors")
        source = open_source(str(tmp_path))
        found = find_weights(read_index(source), {"quantization_config": {"quant_method": method, **config}})
        stored = found["x.weight"]
        return decode(read_rows(source, stored, 0, stored.shape[0]))

    return decoded


@pytest.fixture(scope="module")
def peer():
    """(compress, decompress) of a format of compressed-tensors, with weight scales of its own."""
    pytest.importorskip("compressed_tensors", reason="a peer of the extra 'peers', which .ci/run installs")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def make(name: str, x: torch.Tensor, amax: torch.Tensor, divisor: torch.Tensor | None = None, **args):
        arguments = QuantizationArgs(symmetric=True, dynamic=False, **args)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        compressor = BaseCompressor.get_value_from_registry(name)
        state = {"weight": x, "weight_scale": calculate_qparams(-amax, amax, arguments, global_scale=divisor)[0]}
        if divisor is not None:
            state["weight_global_scale"] = divisor
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(dict(stored), scheme)["weight"]

    return make


def blocks(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.abs().unflatten(-1, (-1, width)).amax(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp4_of_compressed_tensors(peer, read, shape):
    x = weight(shape)
    stored, theirs = peer("mxfp4-pack-quantized", x, blocks(x, 32), num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8")
    assert torch.equal(read(stored, "compressed-tensors").bfloat16(), theirs.bfloat16())


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_of_compressed_tensors(peer, read, shape):
    x = weight(shape, torch.bfloat16)
    amax = blocks(x, 32)
    stored, theirs = peer("pack-quantized", x, amax, num_bits=4, type="int", strategy="group", group_size=32)
    assert stored["weight_packed"].dtype == torch.int32 and stored["weight_scale"].dtype == torch.bfloat16
    assert theirs.dtype == torch.bfloat16 and torch.equal(read(stored, "compressed-tensors").bfloat16(), theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_channels_of_compressed_tensors(peer, read, shape):
    x = weight(shape, torch.bfloat16)
    stored, theirs = peer("float-quantized", x, x.abs().amax(1, keepdim=True), num_bits=8, type="float", strategy="channel")
    assert stored["weight"].dtype == torch.float8_e4m3fn and stored["weight_scale"].shape == (shape[0], 1)
    assert torch.equal(read(stored, "compressed-tensors").to(theirs.dtype), theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_of_compressed_tensors(peer, read, shape):
    """Their sums are in bfloat16, which rounds scale over global and then the product: equal where the global is a power of two."""
    x = weight(shape).clamp(-0.5, 0.5)
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    stored, theirs = peer("nvfp4-pack-quantized", x, blocks(x, 16), torch.tensor([2.0**12]), **args)
    assert torch.equal(read(stored, "compressed-tensors").bfloat16(), theirs.bfloat16())
    stored, theirs = peer("nvfp4-pack-quantized", x, blocks(x, 16), torch.tensor([2688 / 0.37]), **args)
    torch.testing.assert_close(read(stored, "compressed-tensors"), theirs.float(), rtol=2 * 2.0**-9, atol=0)


@pytest.fixture(scope="module")
def qtensor():
    pytest.importorskip("modelopt", reason="a peer of the extra 'peers', which .ci/run installs")
    from modelopt.torch.quantization import qtensor

    return qtensor


@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_of_modelopt(qtensor, read, shape):
    x = weight(shape)
    theirs, scale, second = qtensor.NVFP4QTensor.quantize(x.clone(), 16)
    values = theirs.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
    stored = {"weight": theirs._quantized_data, "weight_scale": scale.view(shape[0], -1), "weight_scale_2": second.view(())}
    assert torch.equal(read(stored, "modelopt"), values)


@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp4_of_modelopt(qtensor, read, shape):
    x = weight(shape)
    theirs, scale = qtensor.MXFP4QTensor.quantize(x.clone(), 32)
    values = theirs.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
    assert torch.equal(read({"weight": theirs._quantized_data, "weight_scale": scale.view(shape[0], -1)}, "quark"), values)


def test_mxfp4_of_gpt_oss(tmp_path):
    """transformers' own decode, of every byte of elements and every exponent that is a number."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 170, 3, 16), dtype=torch.uint8, generator=generator)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    # Beyond these, bfloat16 has no room for the product, and ldexp's own rounding begins.
    scales = torch.randint(3, 252, (3, 170, 3), dtype=torch.uint8, generator=generator)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    source = open_source(str(tmp_path))
    stored = find_weights(read_index(source), {"quantization_config": {"quant_method": "mxfp4"}})["x"]
    ours = decode(read_rows(source, stored, 0, 3 * 170), torch.bfloat16).view(3, 170, 96)
    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.isfinite(theirs).all() and torch.equal(ours, theirs)
    swapped = convert_moe_packed_tensors((blocks << 4) | (blocks >> 4), scales).transpose(1, 2)
    assert not torch.equal(ours, swapped)
