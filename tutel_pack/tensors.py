"""Every tensor a decoder is made of, by its canonical name: what conversion must produce and the runtime loads.

Names are the parameter names of the transformers module for that architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tutel_pack.spec import Attention, Mlp, ModelSpec, Moe

EXPERTS, ATTENTION, MLP, HEAD, KEEP = "experts", "attention", "mlp", "head", "keep"
"""Roles, by which a recipe picks formats. Tensors to KEEP (norms, routers, embeddings, biases) stay as the source has them."""


@dataclass(frozen=True)
class TensorSpec:
    """shape: logical.  segments: row counts of a matrix's parts, where it has more than one (gate rows, up rows)."""

    shape: tuple[int, ...]
    role: str
    segments: tuple[int, ...] = ()


def canonical_tensors(spec: ModelSpec) -> dict[str, TensorSpec]:
    """Canonical name -> TensorSpec, in the order of the layers and then the rest."""
    tensors = {}
    for i, layer in enumerate(spec.layers):
        prefix = f"model.layers.{i}."
        parts = (
            ("input_layernorm.weight", TensorSpec((spec.hidden,), KEEP)),
            *_attention(layer.attention, spec.hidden),
            ("post_attention_layernorm.weight", TensorSpec((spec.hidden,), KEEP)),
            *(_moe if isinstance(layer.mlp, Moe) else _mlp)(layer.mlp, spec.hidden),
        )
        tensors.update((prefix + name, tensor) for name, tensor in parts)
    tensors["model.embed_tokens.weight"] = TensorSpec((spec.vocab, spec.hidden), KEEP)
    tensors["model.norm.weight"] = TensorSpec((spec.hidden,), KEEP)
    if not spec.tied_head:
        tensors["lm_head.weight"] = TensorSpec((spec.vocab, spec.hidden), HEAD)
    return tensors


def _attention(a: Attention, hidden: int) -> Iterator[tuple[str, TensorSpec]]:
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
        yield f"self_attn.{name}_proj.weight", TensorSpec((rows, columns), ATTENTION)
        if a.bias:
            yield f"self_attn.{name}_proj.bias", TensorSpec((rows,), KEEP)
    if a.qk_norm:
        yield "self_attn.q_norm.weight", TensorSpec((a.head_dim,), KEEP)
        yield "self_attn.k_norm.weight", TensorSpec((a.head_dim,), KEEP)


def _mlp(mlp: Mlp, hidden: int) -> Iterator[tuple[str, TensorSpec]]:
    yield "mlp.gate_proj.weight", TensorSpec((mlp.intermediate, hidden), MLP)
    yield "mlp.up_proj.weight", TensorSpec((mlp.intermediate, hidden), MLP)
    yield "mlp.down_proj.weight", TensorSpec((hidden, mlp.intermediate), MLP)


def _moe(moe: Moe, hidden: int) -> Iterator[tuple[str, TensorSpec]]:
    e, i = moe.experts, moe.intermediate
    yield "mlp.gate.weight", TensorSpec((e, hidden), KEEP)
    yield "mlp.experts.gate_up_proj", TensorSpec((e, 2 * i, hidden), EXPERTS, (i, i))
    yield "mlp.experts.down_proj", TensorSpec((e, hidden, i), EXPERTS)
