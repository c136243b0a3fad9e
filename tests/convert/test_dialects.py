"""Dialects: how weights are recognised by names and header types, and read by rows with the bytes of the source."""

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import fp8_config, quantize_fp8, qwen3_config, qwen3_weights, spread, write_checkpoint
from tutel_pack.convert import pipeline
from tutel_pack.convert.dialects import REFUSED, find_weights, read_rows
from tutel_pack.convert.headers import read_index
from tutel_pack.convert.source import open_source
from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import decode
from tutel_pack.quant.recipe import Recipe


@pytest.fixture
def find(tmp_path):
    """(source, logical weights) of tensors under a config."""

    def write(tensors: dict, config: dict):
        save_file(tensors, tmp_path / "model.safetensors")
        source = open_source(str(tmp_path))
        return source, find_weights(read_index(source), config)

    return write


def refusal(call) -> str:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_are_known_by_their_types(find):
    q, scale = quantize_fp8(torch.randn(130, 200))
    tensors = {"a": torch.ones(2, 2), "b": torch.ones(2, 3, 4, dtype=torch.bfloat16), "c": torch.ones(3, dtype=torch.float16),
               "d": torch.ones(2, 2, dtype=torch.int32), "w": q, "w_scale_inv": scale}  # fmt: skip
    _, found = find(tensors, fp8_config())
    names = {name: stored.format and stored.format.name for name, stored in found.items()}
    assert names == {"a": "f32", "b": "bf16", "c": None, "d": None, "w": "fp8"}
    assert found["w"].parts["_scale"].info.name == "w_scale_inv" and found["w"].nbytes == 130 * 200 + 2 * 2 * 4


@pytest.mark.parametrize("shape", [(576, 300), (160, 160), (1, 1), (128, 128), (129, 127)], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 32), (64, 128)], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_rows_of_block_fp8(find, shape, block, scale_dtype):
    q, scale = quantize_fp8(torch.randn(shape), block, scale_dtype)
    source, found = find({"w": q, "w_scale_inv": scale}, fp8_config(block))
    expected = q.float() * spread(scale, block, shape)
    for start, stop in {(0, shape[0]), (0, min(128, shape[0])), (shape[0] // 128 * 128, shape[0])}:
        if start < stop:
            rows = read_rows(source, found["w"], start, stop)
            assert rows.format == FORMATS["fp8"].with_block(block) and rows.shape == (stop - start, shape[1])
            assert torch.equal(rows.data.view(torch.uint8), q[start:stop].view(torch.uint8))
            assert torch.equal(decode(rows), expected[start:stop])


def test_rows_of_plain_tensors(find):
    tensors = {"m": torch.randn(5, 3).bfloat16(), "v": torch.randn(7), "e": torch.randn(2, 4, 3), "empty": torch.empty(0, 4)}
    source, found = find(tensors, {})
    rows = read_rows(source, found["m"], 1, 4)
    assert isinstance(rows, PackedTensor) and torch.equal(rows.data, tensors["m"][1:4])
    assert torch.equal(read_rows(source, found["v"], 2, 5), tensors["v"][2:5])
    assert torch.equal(read_rows(source, found["e"], 3, 6).data, tensors["e"].view(8, 3)[3:6])  # across experts
    assert read_rows(source, found["empty"], 0, 0).data.shape == (0, 4)


def test_scales_are_read_by_blocks_not_by_tensors(find, monkeypatch):
    q, scale = quantize_fp8(torch.randn(640, 128))
    source, found = find({"w": q, "w_scale_inv": scale}, fp8_config())
    reads = []
    monkeypatch.setattr(source, "_read", lambda file, a, b, read=source._read: reads.append(b - a) or read(file, a, b))
    read_rows(source, found["w"], 256, 384)
    assert reads == [128 * 128, 4]


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_foreign_quantization_is_refused_by_name(tmp_path, method):
    config = qwen3_config(quantization_config={"quant_method": method, "bits": 4})
    source = write_checkpoint(tmp_path / "m", qwen3_weights(qwen3_config()), config)
    text = refusal(lambda: pipeline.plan(str(source), Recipe()))
    assert REFUSED[method] in text and "convert the original checkpoint" in text


def test_gguf_files_are_refused_by_name(tmp_path):
    source = write_checkpoint(tmp_path / "m", {"a": torch.ones(1)}, qwen3_config(), shards=1)
    (source / "model.safetensors").rename(source / "model.gguf")
    text = refusal(lambda: pipeline.plan(str(source), Recipe()))
    assert "GGUF" in text and "original checkpoint" in text


@pytest.mark.parametrize("found, part", [
    ({"quant_method": "fbgemm_fp8"}, "'fbgemm_fp8' is not supported yet"), ({"quant_method": ["awq"]}, "['awq']"), ({"quant_method": {}}, "{}"),
    ({"quant_method": 8}, "8"), ({"quant_method": "fp8\n"}, "fp8"), ("awq", "where an object is needed"), ([1], "where an object"),
    ({"quant_method": "x" * 10**6}, "xxx"),
])  # fmt: skip
def test_unknown_quantization(find, found, part):
    text = refusal(lambda: find({"a": torch.ones(1)}, {"quantization_config": found}))
    assert part in text and len(text) < 400


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}, {"quantization_config": {"quant_method": None}}])
def test_no_quantization(find, config):
    assert list(find({"a": torch.ones(1)}, config)[1]) == ["a"]


def test_awq_without_a_config_is_refused_too(tmp_path):
    """Packed integers under other names: the tensors decide, whatever the config says."""
    weights = qwen3_weights(qwen3_config())
    name = "model.layers.0.self_attn.q_proj."
    del weights[name + "weight"]
    weights |= {name + "qweight": torch.ones(160, 24, dtype=torch.int32), name + "scales": torch.ones(2, 192).half()}
    text = refusal(lambda: pipeline.plan(str(write_checkpoint(tmp_path / "m", weights, qwen3_config())), Recipe()))
    assert name + "weight" in text and name + "qweight" in text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint16, torch.uint32, torch.complex64])
def test_types_without_a_meaning(find, dtype):
    tensors = {"good": torch.ones(1), "bad": torch.zeros(4, 8, dtype=torch.uint8).view(dtype), "bad.scale": torch.ones(1)}
    text = refusal(lambda: find(tensors, {}))
    assert "the first is bad " in text and "bad.scale" in text
