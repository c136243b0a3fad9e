"""Qwen3-Next (Qwen3-Next-80B-A3B, Qwen3-Coder-Next): gated delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Callable

from tutel_pack.convert.families import Family
from tutel_pack.convert.families.config import Config
from tutel_pack.errors import InputError
from tutel_pack.spec import Attention, DeltaNet, Layer, Mlp, ModelSpec, Moe, Router

LINEAR, FULL = "linear_attention", "full_attention"
NAMES = (("shared", "mlp.shared_expert"),)


def spec(config: dict) -> ModelSpec:
    return hybrid_spec("qwen3_next", config, True, _mlp)


def hybrid_spec(family: str, config: dict, grouped: bool, mlp: Callable[[Config, int], Mlp | Moe]) -> ModelSpec:
    """What Qwen3-Next and its successors have in common.

    grouped: see spec.DeltaNet.  mlp: (config, layer) -> its feed-forward part.
    """
    c = Config(config, aliases={"num_local_experts": "num_experts"})
    c.require("hidden_act", "silu")
    c.require("use_sliding_window", False)
    kinds = {FULL: _attention(c), LINEAR: _delta_net(c, grouped)}
    return c.model(
        family,
        tuple(Layer(kinds[kind], mlp(c, i)) for i, kind in enumerate(_layer_types(config, c))),
        norm_offset=1.0,
        names=NAMES,
    )


def _attention(c: Config) -> Attention:
    head_dim = c.size("head_dim", 256)
    return Attention(
        heads=c.size("num_attention_heads"),
        kv_heads=c.size("num_key_value_heads"),
        head_dim=head_dim,
        rope=c.rope(head_dim, partial=0.25),
        qk_norm="head",
        bias="qkvo" if c.flag("attention_bias", False) else "",
        gated=True,
    )


def _delta_net(c: Config, grouped: bool) -> DeltaNet:
    return DeltaNet(
        key_heads=c.size("linear_num_key_heads", 16),
        value_heads=c.size("linear_num_value_heads", 32),
        key_dim=c.size("linear_key_head_dim", 128),
        value_dim=c.size("linear_value_head_dim", 128),
        kernel=c.size("linear_conv_kernel_dim", 4),
        grouped=grouped,
    )


def _layer_types(config: dict, c: Config) -> list[str]:
    count, kinds = c.layers(), config.get("layer_types")
    if kinds is None:
        interval = c.size("full_attention_interval", 4)
        return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in (LINEAR, FULL) for kind in kinds):
        raise InputError(
            f"config.json has layer_types: {kinds!r:.100} where a list of {LINEAR} and {FULL}, one for each of "
            f"{count} layers, is needed: download it again."
        )
    return kinds


def _mlp(c: Config, layer: int) -> Mlp | Moe:
    sparse = (layer + 1) % c.size("decoder_sparse_step", 1) == 0 and c.size("num_experts", least=0) > 0
    if layer in c.indices("mlp_only_layers") or not sparse:
        return Mlp(c.size("intermediate_size"))
    return moe(c, Router(renormalize=c.flag("norm_topk_prob", True)))


def moe(c: Config, router: Router) -> Moe:
    """Routed experts, and a shared one that is gated."""
    return Moe(
        experts=c.size("num_experts"),
        top_k=c.size("num_experts_per_tok"),
        intermediate=c.size("moe_intermediate_size"),
        router=router,
        shared=Mlp(c.size("shared_expert_intermediate_size", 512)),
        shared_gated=True,
    )


_EXPERTS = r"(model\.layers\.\d+\.mlp\.experts)"
RENAMES = {
    _EXPERTS + r"\.gate_up_proj": (r"\1.{expert}.gate_proj.weight", r"\1.{expert}.up_proj.weight"),
    _EXPERTS + r"\.down_proj": (r"\1.{expert}.down_proj.weight",),
}
SKIPS = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "a buffer that follows from the config",
    r"mtp\..+": "multi-token prediction is not used yet",
}

FAMILY = Family(model_types=("qwen3_next",), spec=spec, renames=RENAMES, skips=SKIPS)
