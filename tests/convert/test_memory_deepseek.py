"""A layer of DeepSeek-V3 at its true sizes: 11 GB of block-FP8, packed within the memory of a few units."""

import json
import math
from pathlib import Path

import pytest

from tests.checkpoints import measured
from tutel_pack.artifact import Artifact

CONFIG = {
    "model_type": "deepseek_v3", "hidden_act": "silu", "attention_bias": False, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 0, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": None, "vocab_size": 1024, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip


def shapes() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of everything such a checkpoint holds."""
    c, layer = CONFIG, "model.layers.0."
    h, heads = c["hidden_size"], c["num_attention_heads"]
    matrices = {
        "self_attn.q_a_proj": (c["q_lora_rank"], h), "self_attn.q_b_proj": (heads * 192, c["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa": (576, h), "self_attn.kv_b_proj": (heads * 256, 512), "self_attn.o_proj": (h, heads * 128),
    }  # fmt: skip
    for prefix in ("mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(c["n_routed_experts"]))):
        for name, shape in (("gate", (2048, h)), ("up", (2048, h)), ("down", (h, 2048))):
            matrices[f"{prefix}.{name}_proj"] = shape
    found = {}
    for name, shape in matrices.items():
        found[f"{layer}{name}.weight"] = "F8_E4M3", shape
        found[f"{layer}{name}.weight_scale_inv"] = "F32", tuple(math.ceil(n / 128) for n in shape)
    for name, n in (("input_layernorm", h), ("post_attention_layernorm", h), ("self_attn.q_a_layernorm", 1536), ("self_attn.kv_a_layernorm", 512)):
        found[f"{layer}{name}.weight"] = "BF16", (n,)
    found[f"{layer}mlp.gate.weight"] = "BF16", (256, h)
    found[f"{layer}mlp.gate.e_score_correction_bias"] = "F32", (256,)
    return found | {"model.norm.weight": ("BF16", (h,)), **{n: ("BF16", (1024, h)) for n in ("model.embed_tokens.weight", "lm_head.weight")}}


def write_sparse(folder: Path) -> Path:
    """The checkpoint as one file with nothing but holes, which read as zeros: memory does not depend on values."""
    folder.mkdir()
    header, end = {}, 0
    for name, (dtype, shape) in shapes().items():
        size = math.prod(shape) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.slow
def test_a_layer_of_deepseek_v3_in_less_than_a_gigabyte(tmp_path):
    source = write_sparse(tmp_path / "m")
    assert (source / "model.safetensors").stat().st_size > 11e9
    assert measured(source, tmp_path / "out", "mxfp4")["peak"] < 1e9
    experts = Artifact(tmp_path / "out").manifest.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert (experts.shape, experts.format.name) == ((256, 4096, 7168), "mxfp4")
