"""The attention blocks a decoder is assembled from."""

from __future__ import annotations

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
            self._q_norm, self._k_norm = weights(prefix + "q_norm.weight"), weights(prefix + "k_norm.weight")

    def __call__(
        self, x: Tensor, cache: PagedCache, layout: Layout, rotations: dict[Rope, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [T, H], normed -> [T, H]; stores the new keys and values in the cache.

        rotations: of the batch's positions, for each Rope of the model.
        """
        spec, ops = self._spec, self._ops
        q, k, v = (self._project(name, x).unflatten(1, (-1, spec.head_dim)) for name in "qkv")
        if spec.qk_norm:
            q, k = ops.rms_norm(q, self._q_norm, self._eps), ops.rms_norm(k, self._k_norm, self._eps)
        rotation = rotations[spec.rope]
        cache.append(self._layer, layout, keys=ops.rope(k, rotation), values=v)
        keys, values = cache.tokens[self._layer]["keys"], cache.tokens[self._layer]["values"]
        heads = ops.attention(ops.rope(q, rotation), keys, values, layout, spec.window)
        return self._project("o", heads.flatten(1))

    def _project(self, name: str, x: Tensor) -> Tensor:
        return self._ops.linear(x, *self._projections[name])
