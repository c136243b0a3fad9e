"""Bit for bit against compressed-tensors and ModelOpt, the libraries whose files others load. Differences that are
their convention and not ours are named where they are set aside."""

from __future__ import annotations

import pytest
import torch
from tests.quant.data import weights
from tests.quant.oracle import codes_of, scales_of

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import decode, encode

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    pytest.param((1, 32), id="1x32-one-block"),
    pytest.param((129, 96), id="129x96-neither-side-a-multiple-of-128"),
    pytest.param((64, 2880), id="64x2880-gpt-oss"),
]


def ordinary(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Weights of many magnitudes without the zeros on whose sign libraries disagree."""
    x = weights(shape, dtype)
    return torch.where(x == 0, torch.tensor(0.02, dtype=dtype), x)


@pytest.fixture(scope="module")
def ct():
    """compressed-tensors' entry points: (compressor of a format, arguments, scales of amax)."""
    pytest.importorskip("compressed_tensors", reason="a peer of the extra 'peers', which .ci/run installs")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    class Peer:
        gparam = staticmethod(generate_gparam)

        def __init__(self, name: str, **args):
            self.args = QuantizationArgs(type="float", symmetric=True, dynamic=False, **args)
            self.scheme = QuantizationScheme(targets=["Linear"], weights=self.args)
            self.compressor = BaseCompressor.get_value_from_registry(name)

        def scales(self, amax: torch.Tensor, global_scale: torch.Tensor | None = None) -> torch.Tensor:
            return calculate_qparams(-amax, amax, self.args, global_scale=global_scale)[0]

        def compress(self, x: torch.Tensor, scale: torch.Tensor, **more) -> dict[str, torch.Tensor]:
            return self.compressor.compress({"weight": x, "weight_scale": scale, **more}, self.scheme)

        def decompress(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.compressor.decompress(state, self.scheme)["weight"]

    return Peer


@pytest.fixture(scope="module")
def qtensor():
    """ModelOpt's module of quantized tensors."""
    pytest.importorskip("modelopt", reason="a peer of the extra 'peers', which .ci/run installs")
    from modelopt.torch.quantization import qtensor

    return qtensor


def block_amax(x: torch.Tensor, block: int) -> torch.Tensor:
    return x.abs().unflatten(-1, (-1, block)).amax(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp4_even_is_compressed_tensors(ct, shape, dtype):
    x = ordinary(shape, dtype)
    peer = ct("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32, scale_dtype="torch.uint8")
    state = peer.compress(x.float(), peer.scales(block_amax(x, 32).float()))
    p = encode(x, FORMATS["mxfp4"], rule="even").tensor
    assert torch.equal(p.data, state["weight_packed"]) and torch.equal(p.scale, state["weight_scale"])
    assert torch.equal(decode(p, torch.bfloat16), peer.decompress(state).bfloat16())


def test_mxfp4_zero_block_is_compressed_tensors(ct):
    peer = ct("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32, scale_dtype="torch.uint8")
    x = torch.zeros(2, 64)
    x[0, 0] = 1.0
    # Scale bytes of zero blocks differ (theirs comes from an epsilon): values are compared.
    state = peer.compress(x, peer.scales(block_amax(x, 32)))
    p = encode(x, FORMATS["mxfp4"], rule="even").tensor
    assert torch.equal(decode(p), peer.decompress(state).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp4_ceil_is_modelopt(qtensor, shape, dtype):
    x = ordinary(shape, dtype)
    theirs, scale = qtensor.MXFP4QTensor.quantize(x, 32)
    p = encode(x, FORMATS["mxfp4"], rule="ceil").tensor
    assert torch.equal(p.scale.flatten(), scale.flatten())
    # ModelOpt rounds ties toward zero, we to even.
    exponents = p.scale.double() - 127
    quotient = x.double().abs() / torch.exp2(exponents).repeat_interleave(32, dim=1)
    tie = (quotient.unsqueeze(-1) == torch.tensor([0.75, 1.75, 3.5]).double()).any(-1)
    ours, other = codes_of(p), nibbles_of(theirs._quantized_data)
    assert (ours[~tie.numpy()] == other[~tie.numpy()]).all()
    assert (ours[tie.numpy()] == other[tie.numpy()] + 1).all()
    data = PackedTensor(p.format, p.shape, p.segments, theirs._quantized_data, p.scale)
    assert torch.equal(decode(data), theirs.dequantize(torch.float32, scale=scale, block_sizes={-1: 32}))


def nibbles_of(data: torch.Tensor):
    """Codes in the order of k."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_amax_is_modelopt(qtensor, shape, dtype):
    x = ordinary(shape, dtype)
    theirs, scale, global_scale = qtensor.NVFP4QTensor.quantize(x.clone(), 16)
    p = encode(x, FORMATS["nvfp4"], rule="amax").tensor
    assert p.global_scale.item() == global_scale.item()
    assert (scales_of(p) == scale.view(torch.uint8).numpy()).all()
    assert torch.equal(p.data, theirs._quantized_data)
    values = theirs.dequantize(torch.float32, scale=scale, double_scale=global_scale, block_sizes={-1: 16})
    assert torch.equal(decode(p), values)


def test_nvfp4_zero_block_and_zeros_are_modelopt(qtensor):
    # A zero block's scale is 1 there and the smallest here, and -0 is 0 there: values are compared.
    x = weights((8, 64))
    x[3] = 0.0
    theirs, scale, global_scale = qtensor.NVFP4QTensor.quantize(x.clone(), 16)
    p = encode(x, FORMATS["nvfp4"], rule="amax").tensor
    values = theirs.dequantize(torch.float32, scale=scale, double_scale=global_scale, block_sizes={-1: 16})
    assert torch.equal(decode(p), values)


@pytest.fixture(scope="module")
def ct_nvfp4(ct):
    block = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    return ct("nvfp4-pack-quantized", **block)


@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_amax_is_compressed_tensors(ct_nvfp4, shape):
    """Under a global scale that is a power of two: theirs divides, and other reciprocals round."""
    x = ordinary(shape, torch.float32).clamp(-0.5, 0.5)
    x[0, 0] = 2688 * 2.0**-12
    divisor = ct_nvfp4.gparam(x.amin(), x.amax())
    assert divisor.item() == 2.0**12
    state = ct_nvfp4.compress(x, ct_nvfp4.scales(block_amax(x, 16), divisor), weight_global_scale=divisor)
    p = encode(x, FORMATS["nvfp4"], rule="amax").tensor
    assert p.global_scale.item() == 2.0**-12
    assert (scales_of(p) == state["weight_scale"].view(torch.uint8).numpy()).all()
    assert torch.equal(p.data, state["weight_packed"])
    assert torch.equal(decode(p, torch.bfloat16), ct_nvfp4.decompress(state).bfloat16())


@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_decodes_what_compressed_tensors_packed(ct_nvfp4, shape):
    """Under any global scale. Their sums are in bfloat16: block scale over global, times element, are rounded twice."""
    x = ordinary(shape, torch.float32)
    divisor = ct_nvfp4.gparam(x.amin(), x.amax())
    state = ct_nvfp4.compress(x, ct_nvfp4.scales(block_amax(x, 16), divisor), weight_global_scale=divisor)
    parts = {"": state["weight_packed"], "_scale": state["weight_scale"], "_scale_2": 1 / divisor}
    p = PackedTensor.from_parts(FORMATS["nvfp4"], shape, shape[:1], parts)
    torch.testing.assert_close(decode(p), ct_nvfp4.decompress(state).float(), rtol=2 * 2.0**-9, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_amax_is_modelopt(qtensor, shape, dtype):
    x = ordinary(shape, dtype).float()
    theirs, scale = qtensor.FP8QTensor.quantize(x, block_sizes={-1: 128, -2: 128})
    p = encode(x, FORMATS["fp8"], rule="amax").tensor
    assert torch.equal(p.scale, scale)
    assert torch.equal(p.data.view(torch.uint8), theirs._quantized_data.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_amax_is_compressed_tensors(ct, shape):
    x = ordinary(shape, torch.float32)
    peer = ct("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128])
    p = encode(x, FORMATS["fp8"], rule="amax").tensor
    state = peer.compress(x, p.scale)
    assert torch.equal(p.data.view(torch.uint8), state["weight"].view(torch.uint8))
