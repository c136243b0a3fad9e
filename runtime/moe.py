"""The feed-forward blocks a decoder is assembled from: dense, or routed experts."""

from __future__ import annotations

import torch
from torch import Tensor

from tutel_pack.kernels.ops import Experts, Ops
from tutel_pack.runtime.weights import Weights
from tutel_pack.spec import Mlp, Moe


class DenseBlock:
    """down(activation(gate(x), up(x))), of the weights `prefix`.gate_proj, up_proj and down_proj."""

    def __init__(self, spec: Mlp, prefix: str, weights: Weights, ops: Ops):
        self._ops, self._activation = ops, spec.activation
        self._gate, self._up, self._down = (
            (weights(f"{prefix}.{name}_proj.weight"), weights(f"{prefix}.{name}_proj.bias") if spec.bias else None)
            for name in ("gate", "up", "down")
        )

    def __call__(self, x: Tensor, used: object = None) -> Tensor:
        """x [T, H], normed -> [T, H].  used: for experts, not for this one."""
        ops = self._ops
        gate, up = ops.linear(x, *self._gate), ops.linear(x, *self._up)
        return ops.linear(ops.swiglu(gate, up, self._activation), *self._down)


class MoeBlock:
    """A router, the experts that it picks for each token, and those that every token passes.

    prefix: of the layer's weights.  names: see tensors.layer_names.
    """

    def __init__(self, spec: Moe, prefix: str, names: dict[str, str], weights: Weights, ops: Ops):
        self._ops = ops
        names = {part: prefix + name for part, name in names.items()}
        experts = names["experts"]
        biases = [weights(experts + part) if spec.bias else None for part in (".gate_up_proj_bias", ".down_proj_bias")]
        self.experts = Experts(
            spec, weights(names["router"] + ".weight"), weights(experts + ".gate_up_proj"), weights(experts + ".down_proj"),
            weights(names["router"] + ".bias") if spec.router.bias else None,
            weights(names["correction"]) if spec.router.correction else None, *biases,
        )  # fmt: skip
        self._shared = DenseBlock(spec.shared, names["shared"], weights, ops) if spec.shared else None
        self._shared_gate = weights(names["shared_gate"] + ".weight") if spec.shared_gated else None

    @property
    def plain(self) -> bool:
        """Whether it is nothing but `experts`."""
        return self._shared is None

    def __call__(self, x: Tensor, used: Tensor | None = None) -> Tensor:
        """x [T, H], normed -> [T, H].  used: see Ops.routed."""
        routed = self._ops.routed(x, self.experts, used)
        return routed if self._shared is None else routed + self._shared_part(x)

    def _shared_part(self, x: Tensor) -> Tensor:
        shared = self._shared(x)
        if self._shared_gate is None:
            return shared
        return shared * torch.sigmoid(self._ops.linear(x, self._shared_gate))
