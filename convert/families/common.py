"""What several families share: how a maker spells experts one by one, and what no artifact needs."""

from __future__ import annotations

from tutel_pack.convert.families.config import Config

BUFFERS = {r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "a buffer that follows from the config"}
"""Skips."""

_EXPERTS = r"(model\.layers\.\d+\.mlp\.experts)"

PER_EXPERT = {
    _EXPERTS + r"\.gate_up_proj": (r"\1.{expert}.gate_proj.weight", r"\1.{expert}.up_proj.weight"),
    _EXPERTS + r"\.down_proj": (r"\1.{expert}.down_proj.weight",),
}
"""Renames: one tensor for each projection of each expert."""

_BLOCK = r"(model\.layers\.\d+)\.mlp\."

MIXTRAL_EXPERTS = {
    _BLOCK + r"experts\.gate_up_proj": (
        r"\1.block_sparse_moe.experts.{expert}.w1.weight",
        r"\1.block_sparse_moe.experts.{expert}.w3.weight",
    ),
    _BLOCK + r"experts\.down_proj": (r"\1.block_sparse_moe.experts.{expert}.w2.weight",),
    _BLOCK + r"gate\.weight": (r"\1.block_sparse_moe.gate.weight",),
}
"""Renames: as Mixtral spells them, w1 the gate, w3 up, w2 down."""


def heads(c: Config) -> tuple[int, int, int]:
    """(heads, key-value heads, dimensions of a head)."""
    count = c.size("num_attention_heads")
    return count, c.size("num_key_value_heads", count), c.size("head_dim", c.size("hidden_size") // count)


def is_sparse(c: Config, layer: int) -> bool:
    """Whether a layer has routed experts, as the Qwen families say it."""
    sparse = c.size("num_experts", least=0) > 0 and (layer + 1) % c.size("decoder_sparse_step", 1) == 0
    return sparse and layer not in c.indices("mlp_only_layers")
