"""What the configs of families with grouped-query attention mean: published ones, and options one by one."""

from __future__ import annotations

import math
from importlib import import_module

import pytest

from tests.checkpoints import garbled
from tutel_pack.convert.families.config import Config
from tutel_pack.errors import InputError
from tutel_pack.spec import Attention, ClampedSwiglu, Dynamic, Layer, Linear, Llama3, Mlp, Moe, ModelSpec, Rope, Router, Yarn

SIZES = {"hidden_size": 64, "vocab_size": 100, "max_position_embeddings": 4096, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 2, "intermediate_size": 96, "num_experts_per_tok": 2}  # fmt: skip
CONFIGS = {
    "qwen2_moe": SIZES | {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "olmoe": SIZES | {"num_experts": 8},
    "mixtral": SIZES | {"num_local_experts": 8},
    "minimax_m2": SIZES | {"num_local_experts": 8},
    "gpt_oss": SIZES | {"num_local_experts": 8},
    "glm4_moe": SIZES | {"n_routed_experts": 8, "moe_intermediate_size": 32},
    "ernie4_5_moe": SIZES | {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32},
    "granitemoe": SIZES | {"num_local_experts": 8},
}


def spec_of(family: str, **changes) -> ModelSpec:
    return import_module(f"tutel_pack.convert.families.{family}").spec(CONFIGS[family] | {"model_type": family} | changes)


def test_gpt_oss_as_published():
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}
    spec = spec_of("gpt_oss", hidden_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64, sliding_window=128,
                   max_position_embeddings=131072, rope_theta=150000, rope_scaling=yarn, swiglu_limit=7.0, intermediate_size=2880,
                   num_local_experts=32, num_experts_per_tok=4, layer_types=["sliding_attention", "full_attention"] * 2)  # fmt: skip
    rope = Rope(150000.0, 64, False, Yarn(32.0, 4096, 32.0, 1.0, False, 0.1 * math.log(32) + 1))
    moe = Moe(32, 4, 2880, Router("softmax_chosen", bias=True, renormalize=False), activation=ClampedSwiglu(7.0, 1.702, 1.0), bias=True)
    layers = [Layer(Attention(64, 8, 64, rope, bias="qkvo", window=w, sinks=True), moe) for w in (128, None)]
    assert spec.layers == tuple(layers * 2)
    assert spec_of("gpt_oss", head_dim=64, max_position_embeddings=131072).layers[0].attention.rope == rope  # the default


def test_glm_as_published():
    spec = spec_of("glm4_moe", hidden_size=4096, num_attention_heads=96, num_key_value_heads=8, head_dim=128, partial_rotary_factor=0.5,
                   attention_bias=True, use_qk_norm=False, rope_theta=1000000, rope_scaling=None, first_k_dense_replace=1, n_group=1,
                   topk_group=1, n_routed_experts=128, n_shared_experts=1, moe_intermediate_size=1408, intermediate_size=10944,
                   num_experts_per_tok=8, norm_topk_prob=True, routed_scaling_factor=1.0, num_nextn_predict_layers=1)  # fmt: skip
    attention = Attention(96, 8, 128, Rope(1e6, 64), bias="qkv")
    routed = Layer(attention, Moe(128, 8, 1408, Router("sigmoid", correction=True), Mlp(1408)))
    assert spec.layers == (Layer(attention, Mlp(10944)), routed, routed, routed) and spec.mtp == (routed,)


def test_minimax_as_published():
    spec = spec_of("minimax_m2", hidden_size=3072, num_attention_heads=48, num_key_value_heads=8, head_dim=128, rotary_dim=64,
                   rope_theta=5000000, intermediate_size=1536, num_local_experts=256, num_experts_per_tok=8, attn_type_list=[1] * 4,
                   scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer",
                   shared_intermediate_size=0, use_mtp=True, num_mtp_modules=3)  # fmt: skip
    attention = Attention(48, 8, 128, Rope(5e6, 64), qk_norm="whole")
    assert spec.layers == (Layer(attention, Moe(256, 8, 1536, Router("sigmoid", correction=True))),) * 4


def attention(spec: ModelSpec) -> Attention:
    return spec.layers[0].attention


def moe(spec: ModelSpec) -> Moe:
    return spec.layers[-1].mlp


@pytest.mark.parametrize("family, changes, found", [
    ("qwen2_moe", {}, lambda s: attention(s).bias == "qkv" and moe(s).shared == Mlp(48) and moe(s).shared_gated),
    ("qwen2_moe", {"qkv_bias": False}, lambda s: attention(s).bias == ""),
    ("qwen2_moe", {"sliding_window": 9}, lambda s: attention(s).window is None),
    ("qwen2_moe", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
     lambda s: [x.attention.window for x in s.layers] == [9, None, 9, None]),
    ("qwen2_moe", {"sliding_window": 9, "use_sliding_window": True, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
     lambda s: [x.attention.window for x in s.layers] == [None, None, None, 9]),
    ("qwen2_moe", {"decoder_sparse_step": 2}, lambda s: [type(x.mlp) for x in s.layers] == [Mlp, Moe] * 2),
    ("olmoe", {}, lambda s: attention(s).qk_norm == "whole" and attention(s).clip is None and not moe(s).router.renormalize),
    ("olmoe", {"clip_qkv": 8.0, "num_key_value_heads": None}, lambda s: attention(s).clip == 8.0 and attention(s).kv_heads == 8),
    ("mixtral", {}, lambda s: attention(s).rope.theta == 1e6 and attention(s).window is None and moe(s).router == Router()),
    ("mixtral", {"sliding_window": 5, "rope_theta": 7e5}, lambda s: attention(s).window == 5 and attention(s).rope.theta == 7e5),
    ("minimax_m2", {"rotary_dim": 64, "partial_rotary_factor": 0.25}, lambda s: attention(s).rope.dim == 32),
    ("gpt_oss", {"sliding_window": None}, lambda s: [x.attention.window for x in s.layers] == [128, None] * 2),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default"}}, lambda s: attention(s).rope == Rope(150000.0, 64)),
    ("gpt_oss", {"swiglu_alpha": 2.0, "swiglu_limit": 3}, lambda s: moe(s).activation == ClampedSwiglu(3.0, 2.0, 1.0)),
    ("glm4_moe", {}, lambda s: attention(s).rope.dim == 4 and attention(s).qk_norm is None and len(s.mtp) == 1),
    ("glm4_moe", {"num_nextn_predict_layers": 0, "n_shared_experts": 0, "first_k_dense_replace": 2},
     lambda s: not s.mtp and moe(s).shared is None and [type(x.mlp) for x in s.layers] == [Mlp, Mlp, Moe, Moe]),
    ("glm4_moe", {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
     lambda s: moe(s).router == Router("sigmoid", correction=True, groups=4, top_groups=2, renormalize=False, scale=2.5)),
    ("ernie4_5_moe", {}, lambda s: s.tied_head and attention(s).rope == Rope(500000.0, 8, interleaved=True) and moe(s).shared == Mlp(64)),
    ("ernie4_5_moe", {"moe_norm_min": 1e-6, "moe_layer_start_index": 2, "moe_layer_end_index": 2, "moe_num_shared_experts": 0},
     lambda s: [type(x.mlp) for x in s.layers] == [Mlp, Mlp, Moe, Mlp] and s.layers[2].mlp.router.epsilon == 1e-6),
    ("ernie4_5_moe", {"moe_layer_interval": 2}, lambda s: [type(x.mlp) for x in s.layers] == [Mlp, Moe, Mlp, Moe]),
    ("granitemoe", {}, lambda s: attention(s).scale == 1.0 and s.logit_scale == 1.0 and moe(s).router.score == "softmax_chosen"),
    ("granitemoe", {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
     lambda s: (attention(s).scale, s.embedding_scale, s.residual_scale, s.logit_scale) == (0.015625, 12.0, 0.22, 0.125)),
])  # fmt: skip
def test_options(family, changes, found):
    spec = spec_of(family, **changes)
    assert found(spec)
    assert ModelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("family, changes, name", [
    *((family, {"hidden_act": "gelu"}, "hidden_act") for family in CONFIGS),
    *((family, {"rope_scaling": {"rope_type": "longrope"}}, "longrope") for family in CONFIGS),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("qwen2_moe", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("qwen2_moe", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
    ("olmoe", {"head_dim": 16}, "head_dim"),
    ("olmoe", {"clip_qkv": -1}, "clip_qkv"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
    ("minimax_m2", {"rotary_dim": 130}, "rotated"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("glm4_moe", {"topk_method": "greedy"}, "topk_method"),
    ("glm4_moe", {"n_group": 3}, "groups"),
    ("glm4_moe", {"partial_rotary_factor": 2.0}, "rotated"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    ("ernie4_5_moe", {"moe_num_experts": [8, 8]}, "moe_num_experts"),
    ("granitemoe", {"logits_scaling": 0}, "logits_scaling"),
    ("mixtral", {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "no bands"),
    ("mixtral", {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "no bands"),
])  # fmt: skip
def test_what_is_not_supported_is_named(family, changes, name):
    with pytest.raises(InputError, match=name):
        spec_of(family, **changes)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("config, expected", [
    ({"rope_theta": 5e5}, Rope(5e5, 32)),
    ({}, Rope(1e4, 32)),
    ({"rope_theta": 3e4, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 9e9}}, Rope(3e4, 32, False, Linear(2.0))),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}}, Rope(1e4, 32, False, Dynamic(2.0, 4096))),
    ({"rope_scaling": YARN}, Rope(1e4, 32, False, Yarn(4.0, 1024, 32.0, 1.0, True, 0.1 * math.log(4) + 1))),
    # DeepSeek-V3's: both multipliers alike leave cosines and sines as they are.
    ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16, "factor": None}},
     Rope(1e4, 32, False, Yarn(4.0, 1024, 16.0, 1.0, True, 1.0))),
    ({"rope_scaling": YARN | {"mscale": 2.0}}, Rope(1e4, 32, False, Yarn(4.0, 1024, 32.0, 1.0, True, 0.1 * math.log(4) + 1))),
    ({"rope_scaling": YARN | {"attention_factor": 1.5}}, Rope(1e4, 32, False, Yarn(4.0, 1024, 32.0, 1.0, True, 1.5))),
    ({"rope_scaling": YARN, "original_max_position_embeddings": 512}, Rope(1e4, 32, False, Yarn(4.0, 512, 32.0, 1.0, True, 0.1 * math.log(4) + 1))),
    ({"rope_scaling": YARN | {"factor": 0.5}}, Rope(1e4, 32, False, Yarn(0.5, 1024, 32.0, 1.0, True, 1.0))),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
     Rope(1e4, 32, False, Llama3(8.0, 4096, 1.0, 4.0))),
])  # fmt: skip
def test_every_spelling_of_rope(config, expected):
    assert Config({"max_position_embeddings": 4096} | config).rope(32) == expected


def test_part_of_a_head_is_rotated_where_the_architecture_can():
    config = {"rope_parameters": {"rope_theta": 2e4, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5}
    assert Config(config).rope(32, partial=1.0) == Rope(2e4, 8)
    for one in (config, {"partial_rotary_factor": 0.5}):
        with pytest.raises(InputError, match="partial_rotary_factor: 0.(25|5); only 1.0 is supported"):
            Config(one).rope(32)


@pytest.mark.parametrize("scaling, context", [
    (YARN, 4096),
    (YARN | {"factor": 8.0}, 8192),  # max_position_embeddings left as it was
    ({"rope_type": "dynamic", "factor": 2.0}, 8192),
    ({"rope_type": "linear", "factor": 2.0}, 4096),
    (None, 4096),
])  # fmt: skip
def test_a_stretched_rope_reaches_its_end(scaling, context):
    assert spec_of("mixtral", max_position_embeddings=4096, rope_scaling=scaling).context == context


@pytest.mark.parametrize("family", CONFIGS)
def test_garbage_in_any_place_of_a_config(family):
    """Understood, or refused in one sentence: nothing else."""
    config = CONFIGS[family] | {"model_type": family, "rope_scaling": YARN, "layer_types": None, "sliding_window": 9}
    refused = 0
    for bad in garbled(config):
        try:
            import_module(f"tutel_pack.convert.families.{family}").spec(bad)
        except InputError as e:
            refused += 1
            assert "\n" not in str(e) and len(str(e)) <= 1000
    assert refused > 50
