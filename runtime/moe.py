"""The feed-forward blocks a decoder is assembled from: dense, or routed experts."""

from __future__ import annotations

from torch import Tensor

from tutel_pack.kernels.ops import Ops
from tutel_pack.runtime.weights import Weights
from tutel_pack.spec import Moe


class DenseBlock:
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, layer: int, weights: Weights, ops: Ops):
        self._ops = ops
        prefix = f"model.layers.{layer}.mlp."
        self._gate, self._up = weights(prefix + "gate_proj.weight"), weights(prefix + "up_proj.weight")
        self._down = weights(prefix + "down_proj.weight")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H], normed -> [T, H]."""
        ops = self._ops
        return ops.linear(ops.swiglu(ops.linear(x, self._gate), ops.linear(x, self._up)), self._down)


class MoeBlock:
    """A router and the experts that it picks for each token."""

    def __init__(self, spec: Moe, layer: int, weights: Weights, ops: Ops):
        self._spec, self._ops = spec, ops
        prefix = f"model.layers.{layer}.mlp."
        self._router = weights(prefix + "gate.weight")
        self._gate_up, self._down = weights(prefix + "experts.gate_up_proj"), weights(prefix + "experts.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H], normed -> [T, H]."""
        # Routed in float32: a rounded logit picks another expert, and that is no small error.
        ids, weights = self._ops.route(self._ops.linear(x.float(), self._router), self._spec)
        return self._ops.moe(x, ids, weights, self._gate_up, self._down)
