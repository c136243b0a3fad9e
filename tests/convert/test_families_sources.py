"""Every native family from its maker's names to the artifact, tensor by tensor: what belongs where is put together
here, from the checkpoint alone."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.checkpoints import LAYOUTS, make_layout, values, write_checkpoint
from tests.convert.layouts_oracle import meaning
from tutel_pack.artifact import Artifact
from tutel_pack.convert.families import MODULES
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.formats import PackedTensor
from tutel_pack.quant.codec import decode

EXPERTS = 12
"""As text, 10 sorts before 2."""
INNER, SHARED, DENSE = 32, 96, 80
"""Inner sizes of a routed expert, of three that are shared, and of a dense layer."""

# What makers' checkpoints hold: names within a layer -> shapes

Shapes = dict[str, tuple[int, ...]]


def named(block: str, **shapes: tuple[int, ...]) -> Shapes:
    return {f"{block}.{name}.weight": shape for name, shape in shapes.items()}


def gated(block: str, inner: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Shapes:
    return named(block, **{gate: (inner, 64), up: (inner, 64), down: (64, inner)})


def one_by_one(block: str, *names: str) -> Shapes:
    return {name: shape for e in range(EXPERTS) for name, shape in gated(f"{block}.{e}", INNER, *names).items()}


NORMS = {"input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,)}
ATTENTION = NORMS | named("self_attn", q_proj=(64, 64), k_proj=(32, 64), v_proj=(32, 64), o_proj=(64, 64))
QKV_BIAS = {"self_attn.q_proj.bias": (64,), "self_attn.k_proj.bias": (32,), "self_attn.v_proj.bias": (32,)}
HEAD_NORMS = named("self_attn", q_norm=(16,), k_norm=(16,))
WHOLE_NORMS = named("self_attn", q_norm=(64,), k_norm=(32,))
INV_FREQ = {"self_attn.rotary_emb.inv_freq": (8,)}

DENSE_MLP = gated("mlp", DENSE)
ROUTER = named("mlp", gate=(EXPERTS, 64))
ROUTED = ROUTER | one_by_one("mlp.experts")
FUSED = {"mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, 64), "mlp.experts.down_proj": (EXPERTS, 64, INNER)}
QWEN_SHARED = gated("mlp.shared_expert", SHARED) | named("mlp", shared_expert_gate=(1, 64))
MIXTRAL = named("block_sparse_moe", gate=(EXPERTS, 64)) | one_by_one("block_sparse_moe.experts", "w1", "w3", "w2")
MINIMAX = MIXTRAL | {"block_sparse_moe.e_score_correction_bias": (EXPERTS,)}
GLM = ROUTED | gated("mlp.shared_experts", SHARED) | {"mlp.gate.e_score_correction_bias": (EXPERTS,)}
ERNIE = ROUTED | gated("mlp.shared_experts", SHARED) | {"mlp.moe_statics.e_score_correction_bias": (1, EXPERTS)}
GRANITE = named("block_sparse_moe.router", layer=(EXPERTS, 64)) | named(
    "block_sparse_moe", input_linear=(EXPERTS, 2 * INNER, 64), output_linear=(EXPERTS, 64, INNER)
)
OSS = named("mlp", router=(EXPERTS, 64)) | {
    "self_attn.o_proj.bias": (64,),
    "self_attn.sinks": (4,),
    "mlp.router.bias": (EXPERTS,),
    "mlp.experts.gate_up_proj": (EXPERTS, 64, 2 * INNER),
    "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * INNER),
    "mlp.experts.down_proj": (EXPERTS, INNER, 64),
    "mlp.experts.down_proj_bias": (EXPERTS, 64),
}

LATENT = NORMS | named(
    "self_attn", q_a_proj=(48, 64), q_a_layernorm=(48,), q_b_proj=(4 * 24, 48), kv_a_proj_with_mqa=(48, 64),
    kv_a_layernorm=(40,), kv_b_proj=(4 * 36, 40), o_proj=(64, 4 * 20),
)  # fmt: skip
INDEXER = named("self_attn.indexer", wq_b=(4 * 16, 48), wk=(16, 64), k_norm=(16,), weights_proj=(4, 64)) | {
    "self_attn.indexer.k_norm.bias": (16,)
}
COPIES = {"embed_tokens.weight": (70, 64), "shared_head.head.weight": (70, 64)}
PREDICTION = COPIES | {
    "enorm.weight": (64,), "hnorm.weight": (64,), "eh_proj.weight": (64, 128), "shared_head.norm.weight": (64,)
}  # fmt: skip

DELTA = NORMS | named("linear_attn", conv1d=(96, 1, 4), norm=(8,), out_proj=(64, 32)) | {
    "linear_attn.A_log": (4,), "linear_attn.dt_bias": (4,)
}  # fmt: skip
GROUPED_DELTA = DELTA | named("linear_attn", in_proj_qkvz=(128, 64), in_proj_ba=(8, 64))
SEPARATE_DELTA = DELTA | named(
    "linear_attn", in_proj_qkv=(96, 64), in_proj_z=(32, 64), in_proj_b=(4, 64), in_proj_a=(4, 64)
)
GATED_ATTENTION = ATTENTION | HEAD_NORMS | named("self_attn", q_proj=(2 * 64, 64))

# What their configs say

CONFIG = {
    "hidden_size": 64, "vocab_size": 70, "max_position_embeddings": 512, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 3, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {"moe_intermediate_size": INNER, "intermediate_size": DENSE}
QWEN_CONFIG = SIZES | {"num_experts": EXPERTS, "mlp_only_layers": [0], "shared_expert_intermediate_size": SHARED}
HYBRID_CONFIG = SIZES | {
    "num_experts": EXPERTS, "shared_expert_intermediate_size": SHARED, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LOCAL_CONFIG = {"num_local_experts": EXPERTS, "intermediate_size": INNER}
GLM_CONFIG = SIZES | {
    "n_routed_experts": EXPERTS, "n_shared_experts": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
MLA_CONFIG = GLM_CONFIG | {
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
ERNIE_CONFIG = SIZES | {"moe_num_experts": EXPERTS, "moe_k": 3, "moe_num_shared_experts": 3}


@dataclass(frozen=True)
class Maker:
    """layers: what a checkpoint holds of each layer.  config: beyond CONFIG.  layout: of quantized checkpoints.
    renamed: pattern -> replacement, from the maker's names to canonical ones.  prefix: of layers, embedding, last norm.
    outer: what else the checkpoint holds.  skipped: pattern of the names that are left out."""

    layers: tuple[Shapes, ...]
    config: dict
    layout: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    prefix: str = "model."
    head: str = "lm_head.weight"
    outer: tuple[tuple[str, tuple[int, ...]], ...] = ()
    skipped: str = r".*inv_freq"


def with_prediction(attention: Shapes, layout: str, config: dict = MLA_CONFIG, **options) -> Maker:
    """A dense layer, a routed one, and one of multi-token prediction behind them, which repeats two tensors."""
    layers = attention | DENSE_MLP, attention | GLM, attention | GLM | PREDICTION
    skipped = r".*layers\.2\.(embed_tokens|shared_head\.head)\..*|vision_tower\..*"
    return Maker(layers, config, layout, skipped=skipped, **options)


def qwen35(routed: Shapes, layout: str | None = None) -> Maker:
    """Within a model that sees."""
    layers, outer = (SEPARATE_DELTA | routed | QWEN_SHARED, GATED_ATTENTION | routed | QWEN_SHARED), (PREDICTED, SEEN)
    renamed, skipped = ((r"^model\.language_model\.", "model."),), r"(mtp|model\.visual)\..*"
    return Maker(layers, HYBRID_CONFIG, layout, renamed, "model.language_model.", outer=outer, skipped=skipped)


PREDICTED, SEEN = ("mtp.fc.weight", (64, 128)), ("model.visual.blocks.0.attn.qkv.weight", (6, 2))
BLOCK_FP8 = "fp8-block-scale_inv"
AS_MLP = ((r"\.block_sparse_moe\.", ".mlp."),)
QWEN3, OLMOE = ATTENTION | HEAD_NORMS, ATTENTION | WHOLE_NORMS | ROUTED
MAKERS = {
    "qwen3_moe": Maker((QWEN3 | DENSE_MLP, QWEN3 | ROUTED), QWEN_CONFIG, BLOCK_FP8),
    "qwen3_next": Maker(
        (GROUPED_DELTA | ROUTED | QWEN_SHARED, GATED_ATTENTION | ROUTED | QWEN_SHARED),
        HYBRID_CONFIG,
        BLOCK_FP8,
        outer=(PREDICTED,),
        skipped=r"mtp\..*",
    ),
    # All experts in one tensor where it is published in bfloat16, one by one in block-FP8.
    "qwen3_5_moe": qwen35(ROUTER | FUSED),
    "qwen3_5_moe-fp8": qwen35(ROUTED, BLOCK_FP8),
    "deepseek_v3": with_prediction(LATENT, BLOCK_FP8),
    "deepseek_v3-nvfp4": with_prediction(LATENT, "nvfp4-modelopt"),
    "deepseek_v32": with_prediction(LATENT | INDEXER, BLOCK_FP8),
    "glm_moe_dsa": with_prediction(LATENT | INDEXER, BLOCK_FP8),
    "glm4_moe_lite": with_prediction(LATENT, "nvfp4-ct"),
    "kimi_k25": with_prediction(
        LATENT,
        "int4-ct",
        MLA_CONFIG | {"model_type": "kimi_k2"},
        prefix="language_model.model.",
        head="language_model.lm_head.weight",
        outer=(("vision_tower.proj.weight", (4, 4)),),
        renamed=((r"^language_model\.", ""),),
    ),
    "qwen2_moe": Maker(
        (ATTENTION | QKV_BIAS | DENSE_MLP, ATTENTION | QKV_BIAS | ROUTED | QWEN_SHARED), QWEN_CONFIG, "fp8-channel"
    ),
    "olmoe": Maker((OLMOE, OLMOE | INV_FREQ), {"num_experts": EXPERTS, "intermediate_size": INNER}, "mxfp4-quark"),
    "mixtral": Maker((ATTENTION | MIXTRAL,) * 2, LOCAL_CONFIG, "fp8-tensor", AS_MLP),
    "minimax_m2": Maker((ATTENTION | WHOLE_NORMS | MINIMAX,) * 2, LOCAL_CONFIG, BLOCK_FP8, AS_MLP),
    "gpt_oss": Maker((ATTENTION | QKV_BIAS | OSS,) * 2, LOCAL_CONFIG, "mxfp4-gptoss"),
    "glm4_moe": with_prediction(ATTENTION | QKV_BIAS, "fp8-channel", GLM_CONFIG | {"attention_bias": True}),
    "ernie4_5_moe": Maker(
        (ATTENTION | DENSE_MLP, ATTENTION | ERNIE),
        ERNIE_CONFIG,
        "mxfp4-ct",
        ((r"\.mlp\.moe_statics\.", ".mlp.gate.moe_statics."),),
        outer=(("model.mtp_emb_norm.0.weight", (64,)),),
        skipped=r"model\.mtp_.*",
    ),
    "granitemoe": Maker(
        (ATTENTION | GRANITE,) * 2,
        LOCAL_CONFIG,
        renamed=(
            (r"\.input_linear\.weight", ".experts.gate_up_proj"),
            (r"\.output_linear\.weight", ".experts.down_proj"),
            (r"\.router\.layer\.", ".router."),
        ),
    ),
}


def checkpoint(case: str) -> tuple[dict[str, Tensor], dict]:
    """(a checkpoint by its maker's names, config.json). Values follow from names: no two tensors are alike."""
    maker, family = MAKERS[case], case.split("-")[0]
    shapes = {f"{maker.prefix}layers.{i}.{name}": layer[name] for i, layer in enumerate(maker.layers) for name in layer}
    shapes |= {f"{maker.prefix}embed_tokens.weight": (70, 64), f"{maker.prefix}norm.weight": (64,)}
    shapes |= {maker.head: (70, 64), **dict(maker.outer)}
    exact = r".*(e_score_correction_bias|A_log|inv_freq)"
    weights = {name: values(name, shape) for name, shape in shapes.items()}
    weights = {name: w if re.fullmatch(exact, name) else w.bfloat16() for name, w in weights.items()}
    config = {**CONFIG, "model_type": family, **maker.config}
    if family in ("kimi_k25", "qwen3_5_moe"):
        config = {"model_type": family, "text_config": config, "tie_word_embeddings": False}
    return weights, config


QUANTIZED = (
    r".*\.(self_attn|mlp|shared_experts?)\.(\w+_proj|kv_a_proj_with_mqa)\.weight"
    r"|.*\.(indexer\.(wq_b|wk)|in_proj_(qkvz?|z)|out_proj)\.weight"
)
ROUTED_EXPERTS = r".*\.experts\.\d+\.\w+\.weight"


def quantized(layout: str, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the checkpoint in a layout, with random bytes in it, and what it means in float32 by the names from before)."""
    if layout == "mxfp4-gptoss":
        return quantized_gpt_oss(weights)
    pattern = f"{QUANTIZED}|{ROUTED_EXPERTS}" if layout.startswith("fp8") else ROUTED_EXPERTS
    stored, meant = {}, dict(weights)
    for name, w in weights.items():
        if not re.fullmatch(pattern, name):
            stored[name] = w
            continue
        base = name.removesuffix(".weight")
        parts = make_layout(layout, base, tuple(w.shape))
        stored |= parts
        meant[name] = torch.from_numpy(meaning(layout, parts, base))
    return stored, meant


def quantized_gpt_oss(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Bytes [E, N, K / 32, 16] and scales [E, N, K / 32] for each [E, K, N] of its bfloat16 experts."""
    stored, meant = dict(weights), dict(weights)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        _, k, n = stored.pop(name).shape
        found = [make_layout("mxfp4-ct", f"{name}.{e}", (n, k)) for e in range(EXPERTS)]
        blocks = torch.stack([w[f"{name}.{e}.weight_packed"] for e, w in enumerate(found)])
        stored[name + "_blocks"] = blocks.view(EXPERTS, n, k // 32, 16)
        stored[name + "_scales"] = torch.stack([w[f"{name}.{e}.weight_scale"] for e, w in enumerate(found)])
        decoded = [meaning("mxfp4-ct", w, f"{name}.{e}") for e, w in enumerate(found)]
        meant[name] = torch.stack([torch.from_numpy(w.T) for w in decoded])
    return stored, meant


# What the artifact must hold

GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def arranged(case: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Canonical names -> values: experts stacked by number, gate rows above up rows, everything else as it is under its
    canonical name, and gpt-oss's experts as [E, N, K] with gate and up rows no longer in turns."""
    maker, found, experts = MAKERS[case], {}, defaultdict(dict)
    for name, w in weights.items():
        if re.fullmatch(maker.skipped, name):
            continue
        for pattern, replacement in maker.renamed:
            name = re.sub(pattern, replacement, name)
        if parts := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts[parts[1]][int(parts[2]), parts[3]] = w
        else:
            found[name] = w
    for block, parts in experts.items():
        numbered = [(e, name) for e in range(EXPERTS) for name in (*GATE, *UP, *DOWN) if (e, name) in parts]
        gate, up, down = (torch.stack([parts[at] for at in numbered if at[1] in names]) for names in (GATE, UP, DOWN))
        found |= {f"{block}.gate_up_proj": torch.cat([gate, up], dim=1), f"{block}.down_proj": down}
    if case == "gpt_oss":
        found = {name: of_gpt_oss(name, w) for name, w in found.items()}
    if case == "ernie4_5_moe":
        found = {name: w[0] if name.endswith("correction_bias") else w for name, w in found.items()}
    return found


def of_gpt_oss(name: str, w: Tensor) -> Tensor:
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        w = w.transpose(1, 2)
    return torch.cat([w[:, 0::2], w[:, 1::2]], dim=1) if "gate_up_proj" in name else w


def misplaced(artifact: Artifact, expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors that hold anything else than expected, or plain ones in another type."""
    assert artifact.manifest.tensors.keys() == expected.keys()
    return [name for name, w in expected.items() if not same(artifact.load(name), w)]


def same(found: Tensor | PackedTensor, expected: Tensor) -> bool:
    if isinstance(found, PackedTensor):
        return torch.equal(decode(found), expected.float())
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("case", [case for case in MAKERS if "-" not in case])
def test_every_tensor_of_a_bf16_checkpoint_is_in_its_place(tmp_path, case):
    """Bit for bit, in the formats that round nothing."""
    weights, config = checkpoint(case)
    source, expected = write_checkpoint(tmp_path / "model", weights, config), arranged(case, weights)
    for fmt in ("bf16", "source"):
        artifact = Artifact(convert_checkpoint(str(source), tmp_path / fmt, fmt=fmt))
        assert misplaced(artifact, expected) == []
        assert artifact.manifest.skipped.keys() == {n for n in weights if re.fullmatch(MAKERS[case].skipped, n)}
    for name in [name for name in expected if "gate_up_proj" in name]:
        assert all(misplaced(artifact, expected | {name: w}) == [name] for w in disarranged(expected[name]))


def disarranged(w: Tensor) -> list[Tensor]:
    """Gate and up swapped, in turns, and experts in the order of their numbers as text."""
    gate, up = w.chunk(2, dim=1)
    by_text = sorted(range(EXPERTS), key=str)
    return [torch.cat([up, gate], dim=1), torch.stack([gate, up], dim=2).flatten(1, 2), w[by_text]]


@pytest.mark.parametrize("case", [case for case in MAKERS if MAKERS[case].layout])
def test_every_tensor_of_a_quantized_checkpoint_is_in_its_place(tmp_path, case):
    layout, (weights, config) = MAKERS[case].layout, checkpoint(case)
    stored, meant = quantized(layout, weights)
    method = {"quant_method": "mxfp4"} if layout == "mxfp4-gptoss" else LAYOUTS[layout][0]
    source = write_checkpoint(tmp_path / "model", stored, config | {"quantization_config": method})
    artifact = Artifact(convert_checkpoint(str(source), tmp_path / "packed", fmt="source"))
    assert misplaced(artifact, arranged(case, meant)) == [] and artifact.manifest.errors == {}
    entries = artifact.manifest.tensors.items()
    formats = {entry.format.name for name, entry in entries if ".experts." in name and entry.format}
    assert formats == {layout.split("-")[0]}


def test_every_native_family_is_here():
    assert {case.split("-")[0] for case in MAKERS} == set(MODULES)
