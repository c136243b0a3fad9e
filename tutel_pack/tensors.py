"""Every tensor a decoder is made of, by its canonical name: what conversion must produce and the runtime loads.

Names are the parameter names of the transformers module for that architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tutel_pack.spec import Attention, DeltaNet, Layer, Mla, Mlp, ModelSpec, Moe

EXPERTS, SHARED, ATTENTION, MLP, HEAD, KEEP = "experts", "shared", "attention", "mlp", "head", "keep"
"""Roles, by which a recipe picks formats. Tensors to KEEP (norms, routers, embeddings, biases, …) stay as the source has
them, a quantized one in its format."""

NAMES = {
    "router": "mlp.gate",
    "correction": "mlp.gate.e_score_correction_bias",
    "experts": "mlp.experts",
    "shared": "mlp.shared_experts",
    "shared_gate": "mlp.shared_expert_gate",
}
"""Names within a layer that differ between architectures; ModelSpec.names has what is other than here."""

Named = Iterator[tuple[str, "TensorSpec"]]


@dataclass(frozen=True)
class TensorSpec:
    """shape: logical.  segments: row counts of a matrix's parts, where it has more than one (gate rows, up rows); of a
    bias of experts, [E, 2·I], the parts of its last dimension.  whole: it holds whole numbers, such as ids of experts."""

    shape: tuple[int, ...]
    role: str
    segments: tuple[int, ...] = ()
    whole: bool = False


def layer_of(name: str) -> int | None:
    """The decoder layer that a canonical tensor belongs to, None if to none."""
    found = re.match(r"(?:[a-z_]+\.)*?layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def layer_names(spec: ModelSpec) -> dict[str, str]:
    """NAMES as this architecture has them."""
    return {**NAMES, **dict(spec.names)}


def canonical_tensors(spec: ModelSpec) -> dict[str, TensorSpec]:
    """Canonical name -> TensorSpec, in the order of the layers and then the rest."""
    tensors = {}
    for i, layer in enumerate(spec.layers):
        tensors.update((f"model.layers.{i}.{name}", tensor) for name, tensor in _layer(layer, spec))
    for i, layer in enumerate(spec.mtp, start=len(spec.layers)):
        tensors.update((f"model.layers.{i}.{name}", tensor) for name, tensor in (*_layer(layer, spec), *_mtp(spec)))
    tensors["model.embed_tokens.weight"] = TensorSpec((spec.vocab, spec.hidden), KEEP)
    tensors["model.norm.weight"] = _vector(spec.hidden)
    if not spec.tied_head:
        tensors["lm_head.weight"] = TensorSpec((spec.vocab, spec.hidden), HEAD)
    return tensors


def _vector(n: int) -> TensorSpec:
    return TensorSpec((n,), KEEP)


def _layer(layer: Layer, spec: ModelSpec) -> Named:
    yield "input_layernorm.weight", _vector(spec.hidden)
    attention = {Attention: _attention, Mla: _mla, DeltaNet: _delta_net}[type(layer.attention)]
    yield from attention(layer.attention, spec.hidden)
    yield "post_attention_layernorm.weight", _vector(spec.hidden)
    if isinstance(layer.mlp, Moe):
        yield from _moe(layer.mlp, spec.hidden, layer_names(spec))
    else:
        yield from _mlp("mlp", layer.mlp, spec.hidden, MLP)


def _mtp(spec: ModelSpec) -> Named:
    """What a multi-token-prediction layer has beyond a decoder layer, as DeepSeek and GLM name it."""
    yield "enorm.weight", _vector(spec.hidden)
    yield "hnorm.weight", _vector(spec.hidden)
    yield "eh_proj.weight", TensorSpec((spec.hidden, 2 * spec.hidden), KEEP)
    yield "shared_head.norm.weight", _vector(spec.hidden)


def _attention(a: Attention, hidden: int) -> Named:
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    rows = {"q": q * (2 if a.gated else 1), "k": kv, "v": kv, "o": hidden}
    for name in "qkvo":
        yield f"self_attn.{name}_proj.weight", TensorSpec((rows[name], q if name == "o" else hidden), ATTENTION)
        if name in a.bias:
            yield f"self_attn.{name}_proj.bias", _vector(rows[name])
    if a.qk_norm:
        yield "self_attn.q_norm.weight", _vector(q if a.qk_norm == "whole" else a.head_dim)
        yield "self_attn.k_norm.weight", _vector(kv if a.qk_norm == "whole" else a.head_dim)
    if a.sinks:
        yield "self_attn.sinks", _vector(a.heads)


def _mla(a: Mla, hidden: int) -> Named:
    q = a.heads * (a.nope_dim + a.rope.dim)
    if a.q_rank:
        yield from _linear("self_attn.q_a_proj", a.q_rank, hidden, a.bias)
        yield "self_attn.q_a_layernorm.weight", _vector(a.q_rank)
        yield from _linear("self_attn.q_b_proj", q, a.q_rank, False)
    else:
        yield from _linear("self_attn.q_proj", q, hidden, False)
    yield from _linear("self_attn.kv_a_proj_with_mqa", a.kv_rank + a.rope.dim, hidden, a.bias)
    yield "self_attn.kv_a_layernorm.weight", _vector(a.kv_rank)
    yield "self_attn.kv_b_proj.weight", TensorSpec((a.heads * (a.nope_dim + a.v_dim), a.kv_rank), KEEP)
    yield from _linear("self_attn.o_proj", hidden, a.heads * a.v_dim, a.bias)
    if x := a.indexer:
        yield "self_attn.indexer.wq_b.weight", TensorSpec((x.heads * x.dim, a.q_rank), KEEP)
        yield "self_attn.indexer.wk.weight", TensorSpec((x.dim, hidden), KEEP)
        yield "self_attn.indexer.k_norm.weight", _vector(x.dim)
        yield "self_attn.indexer.k_norm.bias", _vector(x.dim)
        yield "self_attn.indexer.weights_proj.weight", TensorSpec((x.heads, hidden), KEEP)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Named:
    yield f"{name}.weight", TensorSpec((rows, columns), ATTENTION)
    if bias:
        yield f"{name}.bias", _vector(rows)


def _delta_net(a: DeltaNet, hidden: int) -> Named:
    keys, values = a.key_heads * a.key_dim, a.value_heads * a.value_dim
    if a.grouped:
        yield "linear_attn.in_proj_qkvz.weight", TensorSpec((2 * keys + 2 * values, hidden), ATTENTION)
        yield "linear_attn.in_proj_ba.weight", TensorSpec((2 * a.value_heads, hidden), KEEP)
    else:
        yield "linear_attn.in_proj_qkv.weight", TensorSpec((2 * keys + values, hidden), ATTENTION)
        yield "linear_attn.in_proj_z.weight", TensorSpec((values, hidden), ATTENTION)
        yield "linear_attn.in_proj_b.weight", TensorSpec((a.value_heads, hidden), KEEP)
        yield "linear_attn.in_proj_a.weight", TensorSpec((a.value_heads, hidden), KEEP)
    yield "linear_attn.conv1d.weight", TensorSpec((2 * keys + values, 1, a.kernel), KEEP)
    yield "linear_attn.A_log", _vector(a.value_heads)
    yield "linear_attn.dt_bias", _vector(a.value_heads)
    yield "linear_attn.norm.weight", _vector(a.value_dim)
    yield "linear_attn.out_proj.weight", TensorSpec((hidden, values), ATTENTION)


def _mlp(prefix: str, mlp: Mlp, hidden: int, role: str) -> Named:
    for name, rows, columns in (
        ("gate", mlp.intermediate, hidden), ("up", mlp.intermediate, hidden), ("down", hidden, mlp.intermediate)
    ):  # fmt: skip
        yield f"{prefix}.{name}_proj.weight", TensorSpec((rows, columns), role)
        if mlp.bias:
            yield f"{prefix}.{name}_proj.bias", _vector(rows)


def _moe(moe: Moe, hidden: int, names: dict[str, str]) -> Named:
    e, i = moe.experts, moe.intermediate
    yield f"{names['router']}.weight", TensorSpec((e, hidden), KEEP)
    if moe.router.bias:
        yield f"{names['router']}.bias", _vector(e)
    if moe.router.correction:
        yield names["correction"], _vector(e)
    yield f"{names['experts']}.gate_up_proj", TensorSpec((e, 2 * i, hidden), EXPERTS, (i, i))
    yield f"{names['experts']}.down_proj", TensorSpec((e, hidden, i), EXPERTS)
    if moe.bias:
        yield f"{names['experts']}.gate_up_proj_bias", TensorSpec((e, 2 * i), KEEP, (i, i))
        yield f"{names['experts']}.down_proj_bias", TensorSpec((e, hidden), KEEP)
    if moe.shared:
        yield from _mlp(names["shared"], moe.shared, hidden, SHARED)
    if moe.shared_gated:
        yield f"{names['shared_gate']}.weight", TensorSpec((1, hidden), KEEP)
