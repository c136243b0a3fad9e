"""The attention blocks a decoder is assembled from."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.kernels.ops import Grouped, Heads, Layout, Ops
from tutel_pack.runtime.cache import PagedCache
from tutel_pack.runtime.weights import Weights
from tutel_pack.spec import Attention, Rope


class GroupedQueryAttention:
    """Softmax attention whose query heads share fewer key and value heads, with the options of `spec.Attention`."""

    @staticmethod
    def cached(spec: Attention) -> dict[str, tuple[int, ...]]:
        """What it keeps of every token."""
        return {"keys": (spec.kv_heads, spec.head_dim), "values": (spec.kv_heads, spec.head_dim)}

    def __init__(self, spec: Attention, layer: int, eps: float, weights: Weights, ops: Ops):
        self._spec, self._layer, self._eps, self._ops = spec, layer, eps, ops
        prefix = f"model.layers.{layer}.self_attn."
        *qkv, output = (
            (weights(f"{prefix}{name}_proj.weight"), weights(f"{prefix}{name}_proj.bias") if name in spec.bias else None)
            for name in "qkvo"
        )
        norms = [weights.norm(f"{prefix}{name}_norm.weight") if spec.qk_norm else None for name in "qk"]
        # `attend` norms single heads. Norms of all together, and those before a clip (OLMoE has both), come before it.
        before = spec.qk_norm == "whole" or spec.clip is not None
        before, norms = (norms, (None, None)) if before else ((None, None), norms)
        sinks = weights(prefix + "sinks") if spec.sinks else None
        heads = Heads(*norms, eps, bool(spec.rope and spec.rope.interleaved), spec.window, spec.scale, sinks)
        self.whole = Grouped(qkv, output, heads, spec.gated, tuple(before), spec.clip)

    def __call__(
        self, x: Tensor, cache: PagedCache, layout: Layout, rotations: dict[Rope, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [T, H], normed -> [T, H]; stores the new keys and values in the cache.

        rotations: of the batch's positions, for each Rope of the model.
        """
        spec, ops, parts = self._spec, self._ops, self.whole
        q, k, v = ops.linears(x, parts.qkv)
        if parts.gated:
            q, gate = (part.flatten(1) for part in q.unflatten(1, (spec.heads, -1)).chunk(2, dim=-1))
        if parts.norms[0] is not None:
            q, k = (self._normed(part, norm) for part, norm in zip((q, k), parts.norms))
        if parts.clip is not None:
            q, k, v = (part.clamp(-parts.clip, parts.clip) for part in (q, k, v))
        pools, rotation = cache.tokens[self._layer], rotations[spec.rope] if spec.rope else None
        heads = ops.attend(q, k, v, pools["keys"], pools["values"], layout, rotation, parts.heads)
        return ops.linear(heads * torch.sigmoid(gate) if parts.gated else heads, *parts.output)

    def _normed(self, x: Tensor, norm: Tensor) -> Tensor:
        """A projection [T, heads · D], normed as a whole or by heads."""
        return self._ops.rms_norm(x.unflatten(1, (-1, len(norm))), norm, self._eps).flatten(1)
