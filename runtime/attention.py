"""The attention blocks a decoder is assembled from."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.kernels.ops import Layout, Ops
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
        self._projections = {
            name: (weights(f"{prefix}{name}_proj.weight"), weights(f"{prefix}{name}_proj.bias") if name in spec.bias else None)
            for name in "qkvo"
        }
        if spec.qk_norm:
            self._norms = {name: weights.norm(f"{prefix}{name}_norm.weight") for name in "qk"}
        self._sinks = weights(prefix + "sinks") if spec.sinks else None

    def __call__(
        self, x: Tensor, cache: PagedCache, layout: Layout, rotations: dict[Rope, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [T, H], normed -> [T, H]; stores the new keys and values in the cache.

        rotations: of the batch's positions, for each Rope of the model.
        """
        spec, ops = self._spec, self._ops
        q, k, v = (self._project(name, x) for name in "qkv")
        if spec.gated:
            q, gate = (part.flatten(1) for part in q.unflatten(1, (spec.heads, -1)).chunk(2, dim=-1))
        q, k, v = self._heads(q, "q"), self._heads(k, "k"), self._heads(v)
        if spec.rope:
            rotation, interleaved = rotations[spec.rope], spec.rope.interleaved
            q, k = ops.rope(q, rotation, interleaved), ops.rope(k, rotation, interleaved)
        cache.append(self._layer, layout, keys=k, values=v)
        keys, values = cache.tokens[self._layer]["keys"], cache.tokens[self._layer]["values"]
        heads = ops.attention(q, keys, values, layout, spec.window, spec.scale, self._sinks).flatten(1)
        return self._project("o", heads * torch.sigmoid(gate) if spec.gated else heads)

    def _heads(self, x: Tensor, norm: str | None = None) -> Tensor:
        """A projection [T, heads · D], normed where the model does that and clipped, as [T, heads, D]."""
        spec, ops = self._spec, self._ops
        if norm and spec.qk_norm == "whole":
            x = ops.rms_norm(x, self._norms[norm], self._eps)
        x = x.unflatten(1, (-1, spec.head_dim))
        if norm and spec.qk_norm == "head":
            x = ops.rms_norm(x, self._norms[norm], self._eps)
        # After the norm: that is where OLMoE, the one that has both, clips.
        return x if spec.clip is None else x.clamp(-spec.clip, spec.clip)

    def _project(self, name: str, x: Tensor) -> Tensor:
        return self._ops.linear(x, *self._projections[name])
