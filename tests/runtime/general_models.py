"""Small random models of architectures that no native family covers, as checkpoints in their makers' spelling."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.checkpoints import write_checkpoint
from tutel_pack.artifact import Artifact
from tutel_pack.formats import PackedTensor
from tutel_pack.quant.codec import decode

COMMON = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    # Groups of experts, a correction that is stored as a buffer, shared experts, a dense layer first.
    "dots1": {
        "moe_intermediate_size": 40, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    # States of a Mamba beside keys and values; weights that its code looks at; routers that are plain linear layers.
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 6, "num_experts_per_tok": 2, "use_mamba_kernels": False,
        "mamba_d_state": 8, "mamba_expand": 2, "mamba_dt_rank": 8,
    },
    # Experts without gates and an activation of their own, another prefix, blocks that are one thing each.
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 48, "use_mamba_kernels": False,
    },
    # Names of its own for experts and router, norms with biases, a head with a bias or none.
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": True},
    # Experts that the module and the checkpoint have transposed.
    "aria_text": {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1},
    # A tied head, and convolutions with states.
    "lfm2_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    # A cache of its own, a table of experts by token, linear layers in groups, clamped experts.
    "deepseek_v4": {
        "num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2,
        "o_lora_rank": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "index_n_heads": 2,
        "index_head_dim": 16, "index_topk": 8, "sliding_window": 16,
    },
    # A convolution that the checkpoint has in three parts, states of its own, latent attention without rope.
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"], "linear_head_dim": 16,
        "linear_num_heads": 4, "n_routed_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
    # A model that sees, whose decoder alone is converted; its checkpoint has the experts transposed, its module has not.
    "qwen3_vl_moe": {
        "text_config": {
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    # One that sees, whose decoder is a causal model within it; experts that take rows for every expert in turn.
    "llama4": {
        "text_config": {
            "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40, "intermediate_size_mlp": 80,
            "attention_chunk_size": 16, "moe_layers": [1], "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128},
    },
    # One that sees, with clamped experts, and shared ones that the checkpoint has in two parts.
    "minimax_m3_vl": {
        "text_config": {
            "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_intermediate_size": 48,
        },
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    },
}  # fmt: skip
PER_EXPERT = {
    "dots1": ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    "jamba": ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    "nemotron_h": ("up_proj.weight", "down_proj.weight"),
    "phimoe": ("w1.weight", "w3.weight", "w2.weight"),
    "lfm2_moe": ("w1.weight", "w3.weight", "w2.weight"),
    "deepseek_v4": ("w1.weight", "w3.weight", "w2.weight"),
    "kimi_linear": ("w1.weight", "w3.weight", "w2.weight"),
    "minimax_m3_vl": ("w1.weight", "w3.weight", "w2.weight"),
}
"""How the parts of experts are spelled, gate, up and down; the others are fused in the checkpoint too."""
IN_PARTS = {
    "kimi_linear": (r"\.conv1d\.weight$", (".q_conv1d.weight", ".k_conv1d.weight", ".v_conv1d.weight")),
    "minimax_m3_vl": (r"\.gate_up_proj\.weight$", (".gate_proj.weight", ".up_proj.weight")),
}
"""Weights that the checkpoint has in parts of as many rows each."""
TRANSPOSED = {"qwen3_vl_moe"}
"""Checkpoints that have the experts the other way round than the module."""
RENAMED = {
    "kimi_linear": ((r"layers\.1\.mlp\.", "layers.1.block_sparse_moe."), (r"\.forget_gate\.", ".")),
    "minimax_m3_vl": (
        (r"^model\.language_model\.", "language_model.model."), (r"^lm_head", "language_model.lm_head"),
        (r"^model\.vision_tower\.layers\.", "vision_tower.vision_model.encoder.layers."),
        (r"^model\.vision_tower\.pre_layrnorm\.", "vision_tower.vision_model.pre_layrnorm."),
        (r"^model\.vision_tower\.embeddings\.proj\.", "vision_tower.vision_model.embeddings.patch_embedding."),
        (r"^model\.multi_modal_projector\.merge_linear", "patch_merge_mlp.linear"),
        (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
        (r"\.mlp\.gate\.e_score", ".block_sparse_moe.e_score"), (r"\.self_attn\.indexer\.", ".self_attn.index_"),
        (r"(language_model.*)\.mlp\.(experts|gate|shared_experts)\.", r"\1.block_sparse_moe.\2."),
    ),
    "phimoe": ((r"\.mlp\.", ".block_sparse_moe."), (r"\.router\.weight", ".gate.weight")),
    "nemotron_h": ((r"^model\.", "backbone."),),
    "aria_text": ((r"experts\.gate_up_proj$", "experts.fc1.weight"), (r"experts\.down_proj$", "experts.fc2.weight")),
    "deepseek_v4": (
        (r"^model\.", ""), (r"^embed_tokens", "embed"), (r"^lm_head", "head"), (r"hc_head\.hc_", "hc_head_"),
        (r"\.compressor\.indexer\.scorer\.weights_proj", ".indexer.weights_proj"), (r"compressor\.kv_norm", "compressor.norm"),
        (r"\.compressor\.indexer\.q_b_proj", ".indexer.wq_b"), (r"\.compressor\.indexer\.kv_norm", ".compressor.indexer.norm"),
        (r"\.compressor\.indexer\.", ".indexer.compressor."), (r"compressor\.kv_proj", "compressor.wkv"),
        (r"compressor\.gate_proj", "compressor.wgate"), (r"position_bias", "ape"), (r"self_attn\.q_a_norm", "self_attn.q_norm"),
        (r"q_a_proj", "wq_a"), (r"q_b_proj", "wq_b"), (r"self_attn\.kv_proj", "self_attn.wkv"), (r"o_a_proj", "wo_a"),
        (r"o_b_proj", "wo_b"), (r"self_attn\.sinks", "self_attn.attn_sink"), (r"\.self_attn\.", ".attn."),
        (r"shared_experts\.gate_proj", "shared_experts.w1"), (r"shared_experts\.up_proj", "shared_experts.w3"),
        (r"shared_experts\.down_proj", "shared_experts.w2"), (r"gate\.e_score_correction_bias", "gate.bias"), (r"\.mlp\.", ".ffn."),
        (r"input_layernorm", "attn_norm"), (r"post_attention_layernorm", "ffn_norm"), (r"attn_hc\.", "hc_attn_"),
        (r"ffn_hc\.", "hc_ffn_"),
    ),
}  # fmt: skip


def make_config(model_type: str, **changes) -> AutoConfig:
    values = {**MODELS.get(model_type, {}), **changes}
    if "text_config" in values:
        values["text_config"] = {**COMMON, **values["text_config"]}
        return AutoConfig.for_model(model_type, **values)
    return AutoConfig.for_model(model_type, **{**COMMON, **values})


def make_model(model_type: str, **changes) -> nn.Module:
    """Random weights, large enough that every part matters; norms and biases away from 1 and 0."""
    torch.manual_seed(7)
    config = make_config(model_type, **changes)
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    model = auto.from_config(config).eval().requires_grad_(False)
    model.config._experts_implementation = "eager"  # the others do not take float64
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if p.dtype == torch.int64:
            p.random_(0, 6)  # a table of experts by token
        if not p.is_floating_point():
            continue
        if name.endswith("correction_bias") or name.endswith("expert_bias"):
            p.uniform_(-0.2, 0.2)
        elif "norm" in name and p.ndim == 1:
            p.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            p.normal_(std=0.3)
        elif p.ndim > 1 and "A_log" not in name:
            columns = p.shape[-2] if model_type == "aria_text" and p.ndim == 3 and "expert" in name else p.shape[-1]
            p.normal_(std=1.0 if "embed" in name else 1.5 * columns**-0.5)
    return model


def spelled(model_type: str, model: nn.Module) -> dict[str, Tensor]:
    """The model's weights, in bfloat16 but for corrections, as a checkpoint of that architecture names them."""
    found = {}
    tied = model.config.tie_word_embeddings
    for name, w in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        kept = not w.is_floating_point() or ("_bias" in name and ("correction" in name or "expert" in name))
        w = w if kept else w.bfloat16()
        for name, w in _parts(model_type, name, w):
            for pattern, new in RENAMED.get(model_type, ()):
                name = re.sub(pattern, new, name)
            found[name] = w
    return found


def _parts(model_type: str, name: str, w: Tensor):
    pattern, names = IN_PARTS.get(model_type, ("$^", ()))
    if re.search(pattern, name):
        yield from ((re.sub(pattern, new, name), rows.contiguous()) for new, rows in zip(names, w.chunk(len(names))))
        return
    if model_type in TRANSPOSED and ".experts." in name:
        w = w.transpose(1, 2).contiguous()
    if not name.endswith((".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")) or model_type not in PER_EXPERT:
        yield name, w
        return
    *inner, down = PER_EXPERT[model_type]
    at = name.rpartition(".")[0]
    for e, expert in enumerate(w):
        parts = [(down, expert)] if name.endswith("down_proj") else zip(inner, expert.chunk(len(inner)))
        yield from ((f"{at}.{e}.{part}", rows.contiguous()) for part, rows in parts)


def write(folder: Path, model_type: str, model: nn.Module | None = None) -> Path:
    """A checkpoint of two shards, without a tokenizer."""
    model = model or make_model(model_type)
    write_checkpoint(folder, spelled(model_type, model), {**model.config.to_dict(), "model_type": model_type})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return folder


def takes_text(model: nn.Module) -> nn.Module:
    """The module to call. transformers 5.24's Llama4ForConditionalGeneration fails where there are no images."""
    return model.language_model if model.config.model_type == "llama4" else model


def hold_decoded(model: nn.Module, artifact: Path) -> nn.Module:
    """Give transformers' model the values that an artifact's weights decode to."""
    opened = Artifact(artifact)
    held = dict((*model.named_parameters(), *model.named_buffers()))
    for name in opened.manifest.tensors:
        w = opened.load(name)
        value = decode(w) if isinstance(w, PackedTensor) else w.float()
        p = held[name]
        p.copy_(value if value.shape == p.shape else value.transpose(1, 2))
    return model
