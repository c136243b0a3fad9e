"""Families with latent attention: what their configs mean, and checkpoints in the makers' own layout from end to end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.checkpoints import garbled, spread, to_fp8, values, write_checkpoint
from tests.quant.oracle import decode_matrix
from tests.runtime.test_decoder import greedy, prompts, worst
from tests.runtime.test_families_mla import make_model, tensors
from tutel_pack import load_packed
from tutel_pack.artifact import Artifact
from tutel_pack.convert import pipeline
from tutel_pack.convert.families import find_family
from tutel_pack.errors import InputError
from tutel_pack.formats import PackedTensor
from tutel_pack.spec import Indexer, Layer, Mla, Mlp, ModelSpec, Moe, Rope, Router, Yarn
from tutel_pack.tensors import KEEP, canonical_tensors

YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip


def v3_config(**changes) -> dict:
    """A small model in the words of DeepSeek's own config.json. No size divides by 128, and kv_a_proj_with_mqa has a
    block and a bit, as the real one has (576 rows)."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu", "attention_bias": False,
        "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 160, "intermediate_size": 200,
        "kv_lora_rank": 128, "max_position_embeddings": 163840, "moe_intermediate_size": 96, "moe_layer_freq": 1, "n_group": 4,
        "n_routed_experts": 12, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 3, "num_experts_per_tok": 3,
        "num_hidden_layers": 3, "num_key_value_heads": 3, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 136,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "rms_norm_eps": 1e-6, "rope_scaling": YARN, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 2,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 40, "vocab_size": 211,
    } | changes  # fmt: skip


def dsa_config(model_type: str, **changes) -> dict:
    return v3_config(model_type=model_type, index_head_dim=32, index_n_heads=8, index_topk=9) | changes


def kimi_config(outer: dict | None = None, **changes) -> dict:
    return {
        "model_type": "kimi_k25",
        "text_config": v3_config(model_type="kimi_k2", **changes),
        "tie_word_embeddings": False,
    } | (outer or {})


def spec_of(config: dict) -> ModelSpec:
    return find_family(config).spec(config)


# What a config means


def test_the_spec_of_deepseek_v3():
    rope = Rope(10000.0, 16, interleaved=True, scaling=Yarn(40.0, 4096, 32.0, 1.0, True, 1.0))
    mla = Mla(3, 136, 128, 24, 40, rope, scale=40**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    router = Router("sigmoid", correction=True, groups=4, top_groups=2, scale=2.5)
    moe = Moe(12, 3, 96, router, shared=Mlp(96))
    layers = Layer(mla, Mlp(200)), Layer(mla, moe), Layer(mla, moe)
    assert spec_of(v3_config()) == ModelSpec(
        "deepseek_v3", 160, 211, 163840, 1e-6, False, layers, mtp=(Layer(mla, moe),)
    )


OPTIONS = [
    (v3_config(model_type="kimi_k2"), lambda s: s.family == "deepseek_v3"),
    (v3_config(q_lora_rank=None), lambda s: s.layers[0].attention.q_rank is None),
    (v3_config(rope_interleave=False), lambda s: not s.layers[0].attention.rope.interleaved),
    (v3_config(attention_bias=True), lambda s: s.layers[0].attention.bias),
    (v3_config(rope_scaling=None), lambda s: s.layers[0].attention.scale == 40**-0.5 and s.layers[0].attention.rope.scaling is None),
    (v3_config(rope_scaling=YARN | {"mscale_all_dim": None, "mscale": None}),
     lambda s: s.layers[0].attention.scale == 40**-0.5 and s.layers[0].attention.rope.scaling.magnitude > 1.3),
    (v3_config(rope_scaling=None, rope_parameters=YARN | {"rope_type": "yarn", "mscale_all_dim": 0.5, "rope_theta": 5e4}),
     lambda s: s.layers[0].attention.scale == 40**-0.5 * (0.05 * math.log(40) + 1) ** 2 and s.layers[0].attention.rope.theta == 5e4),
    (v3_config(first_k_dense_replace=0), lambda s: all(isinstance(layer.mlp, Moe) for layer in s.layers)),
    (v3_config(n_shared_experts=0), lambda s: s.layers[1].mlp.shared is None),
    (v3_config(n_shared_experts=2), lambda s: s.layers[1].mlp.shared == Mlp(192)),
    (v3_config(norm_topk_prob=False), lambda s: not s.layers[1].mlp.router.renormalize),
    (v3_config(num_nextn_predict_layers=0), lambda s: s.mtp == ()),
    (v3_config(num_nextn_predict_layers=None, num_mtp_layers=2), lambda s: len(s.mtp) == 2),
    (v3_config(tie_word_embeddings=True), lambda s: s.tied_head),
    (dsa_config("deepseek_v32"),
     lambda s: s.layers[0].attention.indexer == Indexer(8, 32, 9, replace(s.layers[0].attention.rope, interleaved=False))),
    (dsa_config("deepseek_v32", indexer_rope_interleave=True), lambda s: s.layers[0].attention.indexer.rope.interleaved),
    (dsa_config("deepseek_v32", mlp_layer_types=["sparse", "dense", "sparse"]), lambda s: [type(x.mlp) for x in s.layers] == [Moe, Mlp, Moe]),
    (dsa_config("glm_moe_dsa"), lambda s: all(x.attention.indexer.rope.interleaved for x in (*s.layers, *s.mtp))),
    (v3_config(model_type="glm4_moe_lite", first_k_dense_replace=None), lambda s: [type(x.mlp) for x in s.layers] == [Mlp, Moe, Moe]),
    (v3_config(model_type="glm4_moe_lite", mlp_layer_types=["dense", "dense", "sparse"]), lambda s: isinstance(s.layers[1].mlp, Mlp)),
    (kimi_config(), lambda s: s.family == "kimi_k25" and not s.tied_head and s.layers == spec_of(v3_config()).layers),
    (kimi_config({"tie_word_embeddings": None}), lambda s: s.tied_head),
]  # fmt: skip


@pytest.mark.parametrize("config, found", OPTIONS, ids=range(len(OPTIONS)))
def test_options_of_a_config(config, found):
    assert found(spec_of({key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}))


@pytest.mark.parametrize("options, shared", [
    ({}, ""), ({"indexer_types": ["full", "shared", "full", "shared", "shared", "full"]}, "134"),
    # One more than layers: that of multi-token prediction, which otherwise has an indexer of its own.
    ({"indexer_types": ["full", "shared", "full", "full", "full", "full", "shared"]}, "16"),
    ({"index_topk_pattern": "FFSFSS"}, "245"), ({"index_topk_pattern": ["full", "full", "shared", "full", "full", "full"]}, "2"),
    ({"index_topk_freq": 4}, "234"), ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, "35"), ({"index_topk_freq": 0}, ""),
])  # fmt: skip
def test_layers_that_reuse_picks(options, shared):
    import transformers

    spec = spec_of(dsa_config("glm_moe_dsa", num_hidden_layers=6, **options))
    attentions = [layer.attention for layer in (*spec.layers, *spec.mtp)]
    assert [i for i, a in enumerate(attentions) if a.reuse_index] == [int(c) for c in shared]
    assert all((a.indexer is None) == a.reuse_index for a in attentions)
    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=6, **options).indexer_types
    assert [i for i, kind in enumerate(theirs[:6]) if kind == "shared"] == [int(c) for c in shared if c < "6"]


REFUSED = [
    (v3_config(hidden_act="gelu"), "hidden_act"), (v3_config(scoring_func="softmax"), "scoring_func"),
    (v3_config(topk_method="greedy"), "topk_method"), (v3_config(moe_layer_freq=2), "moe_layer_freq"),
    (v3_config(num_key_value_heads=1), "num_key_value_heads"), (v3_config(partial_rotary_factor=0.5), "partial_rotary_factor: 0.5; only 1.0 is supported"),
    (v3_config(topk_group=5), "groups"), (v3_config(n_group=5), "groups"), (v3_config(qk_rope_head_dim=15), "pairs"),
    (v3_config(rope_scaling=YARN | {"type": "longrope"}), "longrope"), (v3_config(rope_scaling=YARN | {"mscale_all_dim": "1"}), "mscale_all_dim"),
    (dsa_config("deepseek_v32", q_lora_rank=None), "q_lora_rank"), (dsa_config("deepseek_v32", rope_interleave=False), "rope_interleave"),
    (dsa_config("deepseek_v32", mlp_layer_types=["dense", "sparse"]), "mlp_layer_types"),
    (dsa_config("deepseek_v32", mlp_layer_types=["dense", "sparse", "moe"]), "mlp_layer_types"),
    (dsa_config("deepseek_v32", index_head_dim=8), "index_head_dim"), (dsa_config("deepseek_v32", mlp_bias=True), "mlp_bias"),
    (dsa_config("glm_moe_dsa", indexer_types=["shared", "full", "full"]), "first layer"),
    (dsa_config("glm_moe_dsa", indexer_types=["full", "none", "full"]), "indexer_types"),
    (dsa_config("glm_moe_dsa", index_topk_pattern="FS"), "index_topk_pattern"),
    (kimi_config() | {"text_config": None}, "text_config"), (kimi_config() | {"text_config": v3_config(model_type="llama")}, "llama"),
]  # fmt: skip


@pytest.mark.parametrize("config, words", REFUSED, ids=range(len(REFUSED)))
def test_options_that_are_refused(config, words):
    with pytest.raises(InputError, match=words):
        spec_of(config)


NEEDED = (
    "hidden_size", "vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
    "num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor", "rms_norm_eps",
)  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
def test_what_is_missing_is_named(key):
    config = v3_config()
    del config[key]
    with pytest.raises(InputError, match=f"no {key}"):
        spec_of(config)


@pytest.mark.parametrize("config", [dsa_config("glm_moe_dsa", index_topk_pattern="FSS", mlp_layer_types=["dense"] * 3), kimi_config()],
                         ids=["glm", "kimi"])  # fmt: skip
def test_garbage_is_refused_or_understood(config):
    for bad in garbled(config):
        try:
            spec_of(bad)
        except InputError as e:
            assert "\n" not in str(e)


# Checkpoints from end to end

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUANTIZED = r"(self_attn|experts(\.\d+)?|shared_experts|mlp)\.(\w+_proj|kv_a_proj_with_mqa|indexer\.(wq_b|wk))\.weight$"


def checkpoint(model, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """A transformers model's weights as makers publish them, in bfloat16 but for the router's correction, with what
    belongs to multi-token prediction behind them."""
    weights = {name.replace("model.language_model.", "model."): t for name, t in tensors(model).items()}
    layers = len(spec.layers)
    mtp = {
        name: values(name, t.shape)
        for name, t in canonical_tensors(spec).items()
        if name.startswith(f"model.layers.{layers}.")
    }
    if mtp:
        mtp |= {f"model.layers.{layers}.embed_tokens.weight": weights["model.embed_tokens.weight"],
                f"model.layers.{layers}.shared_head.head.weight": weights["lm_head.weight"]}  # fmt: skip
    found = {}
    for name, t in (weights | mtp).items():
        for part, value in per_expert(name, t):
            found[part] = value.float() if part.endswith("correction_bias") else value.bfloat16()
    return found


def per_expert(name: str, t: torch.Tensor):
    if name.endswith("experts.gate_up_proj"):
        for e, (gate, up) in enumerate(w.chunk(2) for w in t):
            yield name.replace("gate_up_proj", f"{e}.gate_proj.weight"), gate
            yield name.replace("gate_up_proj", f"{e}.up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        yield from ((name.replace("down_proj", f"{e}.down_proj.weight"), w) for e, w in enumerate(t))
    else:
        yield name, t


def decoded(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's values in float32 without our code: element times the scale of its block."""
    plain = {name: t for name, t in weights.items() if not name.endswith("_scale_inv")}
    return {
        name: t.float() * spread(weights[name + "_scale_inv"], (128, 128), t.shape)
        if name + "_scale_inv" in weights
        else t.float()
        for name, t in plain.items()
    }


def exact(w: torch.Tensor | PackedTensor) -> torch.Tensor:
    """float32 values of an artifact's tensor by the oracle of the codecs' tests."""
    if isinstance(w, torch.Tensor) or w.format.block is None:
        return w.float() if isinstance(w, torch.Tensor) else w.data.float()
    if len(w.shape) == 3:
        return torch.stack([exact(w.expert(e)) for e in range(w.shape[0])])
    return torch.from_numpy(decode_matrix(w)).float()


def fill(model, artifact: Artifact, source: dict[str, torch.Tensor], requantized: bool) -> None:
    """Give the model what the source holds, and where that was quantized anew, what the artifact holds, which must be
    near it in every row: another row would be far."""
    roles = {name: t.role for name, t in canonical_tensors(artifact.spec).items()}
    for name, t in tensors(model).items():
        name = name.replace("model.language_model.", "model.")
        parts = torch.cat([source[part].flatten() for part, _ in per_expert(name, t)]).view(t.shape)
        found = exact(artifact.load(name))
        if requantized and not torch.equal(found, parts):
            rows = (found - parts).norm(dim=-1) / parts.norm(dim=-1)
            assert roles[name] != KEEP and rows.mean() > 0.02 and rows.max() < 0.25, name
            parts = found
        t.copy_(parts)


def converted(folder, weights, config: dict, fmt: str) -> Artifact:
    write_checkpoint(folder / "model", weights, config)
    return Artifact(pipeline.convert_checkpoint(str(folder / "model"), folder / "packed", fmt=fmt))


def check_logits(artifact: Artifact, model, limit: float) -> None:
    ids = torch.tensor(prompts(40, 40))
    got = load_packed(artifact.path, dtype=torch.float32).forward(ids)
    assert worst(got.flatten(0, 1), model(ids).logits.flatten(0, 1)) < limit


def transformers_model(name: str, config: dict):
    options = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    return make_model(name, options | {"attn_implementation": "eager", "experts_implementation": "eager"})


@pytest.mark.parametrize("fmt", ["mxfp4", "source"])
def test_deepseek_v3_in_block_fp8(tmp_path, fmt):
    config = v3_config()
    model = transformers_model("DeepseekV3", config)
    weights = to_fp8(checkpoint(model, spec_of(config)), QUANTIZED)
    # What the case is about: half a block of rows, a packed kv_b_proj, a router and a correction as they are.
    assert weights["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 2)
    assert weights["model.layers.3.mlp.experts.11.down_proj.weight"].dtype == torch.float8_e4m3fn
    artifact = converted(tmp_path, weights, config | {"quantization_config": FP8}, fmt)
    tensors_ = artifact.manifest.tensors
    assert tensors_["model.layers.1.self_attn.kv_b_proj.weight"].format.name == "fp8"
    assert tensors_["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert tensors_["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    # Multi-token prediction is kept, but for the two copies.
    assert len(artifact.spec.mtp) == 1 and "model.layers.3.eh_proj.weight" in tensors_
    assert set(artifact.manifest.skipped) == {
        "model.layers.3.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight",
    }
    source = decoded(weights)
    attention = [name for name in tensors_ if "self_attn" in name]
    assert len(attention) == 4 * 7 and all(torch.equal(exact(artifact.load(name)), source[name]) for name in attention)
    fill(model, artifact, source, fmt != "source")
    check_logits(artifact, model, 1e-4)
    # What the check would not see, it would not prove: the last, partial block of the rotated key, and the correction.
    for tensor in (
        model.model.layers[1].self_attn.kv_a_proj_with_mqa.weight[128:],
        model.model.layers[2].mlp.gate.e_score_correction_bias,
    ):
        before = tensor.clone()
        tensor.mul_(1.1)
        with pytest.raises(AssertionError):
            check_logits(artifact, model, 1e-3)
        tensor.copy_(before)


def test_without_multi_token_prediction(tmp_path):
    """The config speaks of it, as transformers' own default does, and the checkpoint has none."""
    config = v3_config()
    model = transformers_model("DeepseekV3", config)
    weights = checkpoint(model, replace(spec_of(config), mtp=()))
    artifact = converted(tmp_path, weights, config, "bf16")
    assert artifact.spec.mtp == () and artifact.manifest.skipped == {}
    fill(model, artifact, decoded(weights), False)
    check_logits(artifact, model, 1e-4)


@pytest.mark.parametrize("model_type, name, options", [
    ("deepseek_v32", "DeepseekV32", {}), ("glm_moe_dsa", "GlmMoeDsa", {"indexer_types": ["full", "shared", "shared"]}),
])  # fmt: skip
def test_sparse_attention_in_block_fp8(tmp_path, model_type, name, options):
    config = dsa_config(model_type, **options)
    model = transformers_model(name, config)
    weights = checkpoint(model, spec_of(config))
    if options:  # a layer that reuses picks may have an indexer in the checkpoint all the same
        stray = "model.layers.1.self_attn.indexer.k_norm.bias"
        weights[stray] = torch.ones(32).bfloat16()
    weights = to_fp8(weights, QUANTIZED)
    artifact = converted(tmp_path, weights, config | {"quantization_config": FP8}, "source")
    assert artifact.manifest.tensors["model.layers.0.self_attn.indexer.wq_b.weight"].format.name == "fp8"
    assert artifact.manifest.tensors["model.layers.0.self_attn.indexer.weights_proj.weight"].dtype == torch.bfloat16
    assert (
        not options or artifact.manifest.skipped[stray] == "an indexer in a layer that takes the picks of one before it"
    )
    fill(model, artifact, decoded(weights), False)
    check_logits(artifact, model, 1e-3)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_glm_4_7_flash_in_bf16(tmp_path, fmt):
    config = v3_config(model_type="glm4_moe_lite", n_group=1, topk_group=1)
    model = transformers_model("Glm4MoeLite", config)
    weights = checkpoint(model, spec_of(config))
    artifact = converted(tmp_path, weights, config, fmt)
    assert artifact.manifest.tensors["model.layers.1.mlp.shared_experts.up_proj.weight"].format.name == fmt
    fill(model, artifact, decoded(weights), True)
    check_logits(artifact, model, 1e-4)
    prompt = prompts(11)[0]
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    assert greedy(load_packed(artifact.path, dtype=torch.float32).decoder, [prompt], 24) == [expected]


INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}}},
}  # fmt: skip


def to_int4(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(a checkpoint with its routed experts in INT4 as Kimi-K2-Thinking has them, its values in float32)."""
    found, decoded_ = {}, {name: w.float() for name, w in weights.items()}
    for name, w in weights.items():
        if ".experts." not in name:
            found[name] = w
            continue
        groups = w.float().unflatten(1, (-1, 32))
        scale = (groups.abs().amax(-1) / 7).bfloat16()
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7)
        decoded_[name] = (codes * scale.float()[..., None]).flatten(1)
        nibbles = (codes.flatten(1) + 8).to(torch.int64).unflatten(1, (-1, 8)) << (4 * torch.arange(8))
        found[f"{name}_packed"] = nibbles.sum(-1).to(torch.uint32).view(torch.int32)
        found[f"{name}_scale"], found[f"{name}_shape"] = scale, torch.tensor(w.shape, dtype=torch.int32)
    return found, decoded_


@pytest.mark.parametrize("fmt", ["mxfp4", "source"])
def test_kimi_k25_in_int4(tmp_path, fmt):
    config = kimi_config({"tie_word_embeddings": None}, num_nextn_predict_layers=0, quantization_config=INT4)
    model = transformers_model(
        "Kimi_K25", {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
    )
    weights, source = to_int4(checkpoint(model, spec_of(config)))
    weights = {f"language_model.{name}": t for name, t in weights.items()}
    weights |= {"vision_tower.patch_embed.proj.weight": torch.ones(4, 4), "mm_projector.proj.0.bias": torch.ones(4)}
    artifact = converted(tmp_path, weights, config, fmt)
    assert [n for n, why in artifact.manifest.skipped.items() if why == "vision part"] == [
        "mm_projector.proj.0.bias",
        "vision_tower.patch_embed.proj.weight",
    ]
    # transformers' default ties the head, and the checkpoint has one of its own.
    assert not artifact.spec.tied_head and "lm_head.weight" in artifact.manifest.tensors
    assert (artifact.manifest.tensors["model.layers.1.mlp.experts.down_proj"].format.name == "int4") == (
        fmt == "source"
    )
    fill(model, artifact, source, fmt != "source")
    check_logits(artifact, model, 1e-4)


def test_an_unknown_tensor_is_not_skipped(tmp_path):
    config = v3_config(num_nextn_predict_layers=0)
    weights = checkpoint(transformers_model("DeepseekV3", config), spec_of(config))
    write_checkpoint(tmp_path / "model", weights | {"model.layers.3.enorm.weight": torch.ones(160)}, config)
    with pytest.raises(InputError, match=r"unknown 1 tensor: model\.layers\.3\.enorm\.weight"):
        pipeline.convert_checkpoint(str(tmp_path / "model"), tmp_path / "packed")
