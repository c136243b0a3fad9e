"""Multi-head latent attention, and its sparse form with an indexer (DeepSeek sparse attention)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tutel_pack.kernels.ops import Index, Latent, Layout, Ops, Projection
from tutel_pack.runtime.cache import PagedCache
from tutel_pack.runtime.shared import Shared
from tutel_pack.runtime.weights import Weights
from tutel_pack.spec import Indexer, Mla

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents and of index keys, whatever that of the model's other norms is: so it is in every
model of this kind (transformers' modeling_deepseek_v3.py and those after it)."""


class LatentAttention:
    """Softmax attention over one latent and one rotated key per token, with the options of `spec.Mla`."""

    @staticmethod
    def cached(spec: Mla) -> dict[str, tuple[int, ...]]:
        """What it keeps of every token: the normed latent and behind it the rotated key; the indexer's key."""
        index = {"index_keys": (spec.indexer.dim,)} if spec.indexer else {}
        return {"latents": (spec.kv_rank + spec.rope.dim,), **index}

    def __init__(self, spec: Mla, layer: int, eps: float, weights: Weights, ops: Ops):
        self._spec, self._layer, self._ops = spec, layer, ops
        prefix = f"model.layers.{layer}.self_attn."
        biased = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if spec.bias else ()

        def projection(name: str) -> Projection:
            return weights(f"{prefix}{name}.weight"), weights(f"{prefix}{name}.bias") if name in biased else None

        self.whole = Latent(
            projection("q_a_proj") if spec.q_rank else None,
            weights(prefix + "q_a_layernorm.weight") if spec.q_rank else None,
            projection("q_b_proj" if spec.q_rank else "q_proj"), projection("kv_a_proj_with_mqa"),
            weights(prefix + "kv_a_layernorm.weight"),
            weights.decoded(prefix + "kv_b_proj.weight").view(spec.heads, -1, spec.kv_rank), projection("o_proj"),
            spec.scale, _LATENT_EPS, spec.rope.interleaved, _index(spec.indexer, prefix, weights), spec.reuse_index,
        )  # fmt: skip

    def __call__(self, x: Tensor, cache: PagedCache, layout: Layout, rotations: Shared) -> Tensor:
        """x [T, H], normed -> [T, H]; stores the new latents in the cache.

        rotations: of the batch's positions, for each Rope of the model; also carries an indexer's picks to the layers
        that reuse them.
        """
        spec, ops, parts = self._spec, self._ops, self.whole
        compressed, kv = self._down(x)
        if parts.index:
            rotations.picks = self._picks(x, compressed, cache, layout, rotations)
        picks = rotations.picks if parts.index or parts.reuses else None
        q = ops.linear(compressed, *parts.q_up)
        entries = cache.tokens[self._layer]["latents"]
        heads = ops.attend_latents(q, kv, entries, layout, rotations[spec.rope], parts, picks)
        return ops.linear(heads, *parts.output)

    def _down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(compressed queries [T, q_rank], x itself where they are not compressed; latents and keys, as projected)."""
        ops, parts = self._ops, self.whole
        if not parts.q_down:
            return x, ops.linear(x, *parts.kv_down)
        compressed, kv = ops.linears(x, (parts.q_down, parts.kv_down))
        return ops.rms_norm(compressed, parts.q_norm, parts.eps), kv

    def _picks(
        self, x: Tensor, compressed: Tensor, cache: PagedCache, layout: Layout, rotations: Shared
    ) -> list[Tensor | None]:
        """x [T, H], normed, and compressed queries [T, q_rank] -> picks, see Ops.top_positions; stores the new keys."""
        ops, index, spec = self._ops, self.whole.index, self._spec.indexer

        def rotated(x: Tensor) -> Tensor:
            return ops.rope(x, rotations[spec.rope], spec.rope.interleaved)

        key = F.layer_norm(ops.linear(x, index.k).float(), (spec.dim,), index.norm, index.bias, index.eps).to(x.dtype)
        cache.append(self._layer, layout, index_keys=rotated(key[:, None])[:, 0])
        q = rotated(ops.linear(compressed, index.q).unflatten(1, (spec.heads, spec.dim)))
        # In float32, as a router is: a rounded weight picks other positions.
        weights = ops.linear(x.float(), index.weights) * (spec.heads * spec.dim) ** -0.5
        return ops.top_positions(q, weights, cache.tokens[self._layer]["index_keys"], layout, spec.top_k)


def _index(spec: Indexer | None, prefix: str, weights: Weights) -> Index | None:
    if spec is None:
        return None
    names = ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias")
    *projections, norm, bias = (weights(f"{prefix}indexer.{name}") for name in names)
    return Index(spec, *projections, norm.float(), bias.float(), _LATENT_EPS)
