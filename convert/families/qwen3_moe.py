"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder)."""

from __future__ import annotations

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.config import Config
from tutel_pack.spec import Attention, Layer, Mlp, ModelSpec, Moe


def spec(config: dict) -> ModelSpec:
    c = Config(config, aliases={"num_local_experts": "num_experts"})
    c.require("hidden_act", "silu")
    head_dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    layers = []
    for i in range(c["num_hidden_layers"]):
        attention = Attention(
            heads=c["num_attention_heads"],
            kv_heads=c["num_key_value_heads"],
            head_dim=head_dim,
            rope=c.rope(head_dim),
            qk_norm=True,
            bias=c.get("attention_bias", False),
            # As transformers does it, max_window_layers has no say here.
            window=c.get("sliding_window", None) if c.get("use_sliding_window", False) else None,
        )
        layers.append(Layer(attention, _mlp(c, i)))
    return ModelSpec(
        family="qwen3_moe",
        hidden=c["hidden_size"],
        vocab=c["vocab_size"],
        context=c["max_position_embeddings"],
        norm_eps=c.get("rms_norm_eps", 1e-6),
        tied_head=c.get("tie_word_embeddings", False),
        layers=tuple(layers),
    )


def _mlp(c: Config, layer: int) -> Mlp | Moe:
    sparse = c["num_experts"] > 0 and (layer + 1) % c.get("decoder_sparse_step", 1) == 0
    if layer in (c.get("mlp_only_layers", None) or ()) or not sparse:
        return Mlp(c["intermediate_size"])
    return Moe(c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"], c.get("norm_topk_prob", False))


_EXPERTS = r"(model\.layers\.\d+\.mlp\.experts)"

FAMILY = Family(
    model_types=("qwen3_moe",),
    spec=spec,
    renames={
        _EXPERTS + r"\.gate_up_proj": (r"\1.{expert}.gate_proj.weight", r"\1.{expert}.up_proj.weight"),
        _EXPERTS + r"\.down_proj": (r"\1.{expert}.down_proj.weight",),
    },
    skips={r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "a buffer that follows from the config"},
)
