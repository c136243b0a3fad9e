"""The feed-forward blocks a decoder is assembled from: dense, or routed experts."""

from __future__ import annotations

from torch import Tensor

from tutel_pack.kernels.ops import Dense, Experts, Ops
from tutel_pack.runtime.weights import Weights
from tutel_pack.spec import Mlp, Moe


class DenseBlock:
    """A gated MLP, of the weights `prefix`.gate_proj, up_proj and down_proj."""

    def __init__(self, spec: Mlp, prefix: str, weights: Weights, ops: Ops):
        self._ops = ops
        parts = (
            (weights(f"{prefix}.{name}_proj.weight"), weights(f"{prefix}.{name}_proj.bias") if spec.bias else None)
            for name in ("gate", "up", "down")
        )
        self.mlp = Dense(*parts, spec.activation)

    def __call__(self, x: Tensor, unused: object = None) -> Tensor:
        """x [T, H], normed -> [T, H].  unused: for experts, not for this one."""
        return self._ops.dense(x, self.mlp)


class MoeBlock:
    """A router, the experts that it picks for each token, and those that every token passes.

    prefix: of the layer's weights.  names: see tensors.layer_names.
    """

    def __init__(self, spec: Moe, prefix: str, names: dict[str, str], weights: Weights, ops: Ops):
        self._ops = ops
        names = {part: prefix + name for part, name in names.items()}
        experts = names["experts"]
        biases = [weights(experts + part) if spec.bias else None for part in (".gate_up_proj_bias", ".down_proj_bias")]
        self.mlp = Experts(
            spec, weights(names["router"] + ".weight"), weights(experts + ".gate_up_proj"), weights(experts + ".down_proj"),
            weights(names["router"] + ".bias") if spec.router.bias else None,
            weights(names["correction"]) if spec.router.correction else None, *biases,
            DenseBlock(spec.shared, names["shared"], weights, ops).mlp if spec.shared else None,
            weights(names["shared_gate"] + ".weight") if spec.shared_gated else None,
        )  # fmt: skip

    def __call__(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        """x [T, H], normed -> [T, H].  unused: see Ops.routed."""
        return self._ops.routed(x, self.mlp, unused)
