"""The decoder: assembled from a ModelSpec out of attention and feed-forward blocks, run on ragged batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutel_pack.kernels.ops import Layout, Ops, Weight, get_ops
from tutel_pack.runtime.attention import GroupedQueryAttention
from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.cache import PagedCache
from tutel_pack.runtime.moe import DenseBlock, MoeBlock
from tutel_pack.runtime.weights import Weights
from tutel_pack.spec import Attention, ModelSpec, Moe, Rope


ATTENTION = {Attention: GroupedQueryAttention}
"""Which block runs which kind of attention."""


class Decoder:
    """A model with its weights, packed as they come.

    weights: canonical name (the parameter names of transformers' Qwen3MoeForCausalLM) -> Tensor or PackedTensor.
    dtype: of activations and the cache.  backend: see kernels.ops.get_ops.
    InputError if a weight's shape is not what the spec says.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Callable[[str], Weight],
        device: torch.device | str,
        dtype: torch.dtype,
        backend: str = "auto",
    ):
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        self._ops = get_ops(backend)
        take = Weights(weights, spec, self.device)
        self._embedding = take("model.embed_tokens.weight")
        self._layers = [_DecoderLayer(spec, i, take, self._ops) for i in range(len(spec.layers))]
        self._norm = take("model.norm.weight")
        self._head = self._embedding if spec.tied_head else take("lm_head.weight")

    def new_cache(self, blocks: int, block_size: int = 64) -> PagedCache:
        """An empty cache for blocks · block_size tokens. ResourceError if the device lacks the memory."""
        shapes = [ATTENTION[type(layer.attention)].cached(layer.attention) for layer in self.spec.layers]
        return PagedCache(shapes, blocks, block_size, self.device, self.dtype)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: PagedCache, hidden: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Run the batch's new tokens, and keep their keys and values in the cache.

        Returns float32 logits [R, vocab] of batch.rows; with `hidden`, a pair of these and the states [T, H] after the
        last norm, of every token. Token ids must be in 0 … vocab − 1.
        """
        layout = cache.layout(batch)
        ropes = {layer.attention.rope for layer in self.spec.layers}
        rotations = {rope: self._ops.rotation(batch.positions, rope) for rope in ropes}
        x = self._ops.embedding(batch.tokens, self._embedding, self.dtype)
        for layer in self._layers:
            x = layer(x, cache, layout, rotations)
        x = self._ops.rms_norm(x, self._norm, self.spec.norm_eps)
        # In float32: among logits rounded to bfloat16 the largest is often shared, and the choice then arbitrary.
        logits = self._ops.linear(x[batch.rows].float(), self._head)
        return (logits, x) if hidden else logits


class _DecoderLayer:
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, model: ModelSpec, index: int, weights: Weights, ops: Ops):
        self._ops, self._eps = ops, model.norm_eps
        spec, prefix = model.layers[index], f"model.layers.{index}."
        self._input_norm = weights(prefix + "input_layernorm.weight")
        self._attention = ATTENTION[type(spec.attention)](spec.attention, index, model.norm_eps, weights, ops)
        self._post_norm = weights(prefix + "post_attention_layernorm.weight")
        routed = isinstance(spec.mlp, Moe)
        self._mlp = MoeBlock(spec.mlp, index, weights, ops) if routed else DenseBlock(index, weights, ops)

    def __call__(
        self, x: Tensor, cache: PagedCache, layout: Layout, rotations: dict[Rope, tuple[Tensor, Tensor]]
    ) -> Tensor:
        x = x + self._attention(self._ops.rms_norm(x, self._input_norm, self._eps), cache, layout, rotations)
        return x + self._mlp(self._ops.rms_norm(x, self._post_norm, self._eps))
