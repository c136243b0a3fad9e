"""The decoder: assembled from a ModelSpec out of attention and feed-forward blocks, run on ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tutel_pack.kernels.ops import Layer, Layout, Ops, PlacedLayers, Weight, get_ops
from tutel_pack.runtime.attention import GroupedQueryAttention
from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.cache import PagedCache
from tutel_pack.runtime.delta_net import GatedDeltaNet
from tutel_pack.runtime.mla import LatentAttention
from tutel_pack.runtime.moe import DenseBlock, MoeBlock
from tutel_pack.runtime.shared import Shared
from tutel_pack.runtime.weights import Weights
from tutel_pack.spec import Attention, DeltaNet, Mla, ModelSpec, Moe
from tutel_pack.tensors import layer_names


ATTENTION = {Attention: GroupedQueryAttention, Mla: LatentAttention, DeltaNet: GatedDeltaNet}
"""Which block runs which kind of attention."""


class Decoder:
    """A model with its weights, packed as they come.

    weights: canonical name (see tutel_pack.tensors) -> Tensor or PackedTensor.
    dtype: of activations and the cache.  backend, act: see kernels.ops.get_ops.
    InputError if a weight's shape is not what the spec says.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Callable[[str], Weight],
        device: torch.device | str,
        dtype: torch.dtype,
        backend: str = "auto",
        act: str | None = None,
    ):
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        self._ops = get_ops(backend, self.device, act)
        take = Weights(weights, spec, self.device, dtype)
        self._embedding = take("model.embed_tokens.weight")
        layers = [_DecoderLayer(spec, i, take, self._ops) for i in range(len(spec.layers))]
        self._layers = _Layers(layers, self._ops)
        self._norm = take.norm("model.norm.weight")
        self._head = self._embedding if spec.tied_head else take("lm_head.weight")

    def new_cache(self, blocks: int, block_size: int = 64) -> PagedCache:
        """An empty cache for blocks · block_size tokens. ResourceError if the device lacks the memory."""
        kinds = [layer.attention for layer in self.spec.layers]
        shapes = [ATTENTION[type(kind)].cached(kind) for kind in kinds]
        states = [GatedDeltaNet.states(kind, self.dtype) if isinstance(kind, DeltaNet) else {} for kind in kinds]
        return PagedCache(shapes, blocks, block_size, self.device, self.dtype, states)

    @property
    def backend(self) -> str:
        """The name of the kernels that it runs with."""
        return self._ops.name

    @property
    def stateful(self) -> bool:
        """Whether it keeps states of sequences, beside entries of tokens."""
        return any(isinstance(layer.attention, DeltaNet) for layer in self.spec.layers)

    @torch.no_grad()
    def forward(self, batch: Batch, cache: PagedCache, hidden: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Run the batch's new tokens, and keep their keys and values in the cache.

        Returns float32 logits [R, vocab] of batch.rows; with `hidden`, a pair of these and the states [T, H] after the
        last norm, of every token. Token ids must be in 0 … vocab − 1.
        """
        x, added = self._hidden(batch.tokens, batch.positions, cache.layout(batch), cache)
        logits = self._logits(*(part if part is None else part.index_select(0, batch.rows) for part in (x, added)))
        return (logits, self._ops.add_norm(x, added, self._norm, self.spec.norm_eps)[1]) if hidden else logits

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, layout: Layout, cache: PagedCache) -> Tensor:
        """`forward` by a Layout that was made elsewhere: float32 logits [T, vocab] of every token.

        tokens, positions: int64 [T], as of Batch.
        """
        return self._logits(*self._hidden(tokens, positions, layout, cache))

    def _hidden(
        self, tokens: Tensor, positions: Tensor, layout: Layout, cache: PagedCache
    ) -> tuple[Tensor, Tensor | None]:
        """What the last norm takes the sum of, both [T, H]; the second may be left out."""
        rotations = Shared(positions, layout, self._ops)
        x = _scaled(self._ops.embedding(tokens, self._embedding, self.dtype), self.spec.embedding_scale)
        return self._layers(x, cache, layout, rotations)

    def _logits(self, x: Tensor, added: Tensor | None) -> Tensor:
        logits = self._ops.logits(x, added, self._norm, self.spec.norm_eps, self._head)
        return _scaled(logits, self.spec.logit_scale)


class _Layers:
    """All layers: at once if they can be."""

    def __init__(self, layers: list[_DecoderLayer], ops: Ops):
        self._layers, self._ops = layers, ops
        self._ropes = list(dict.fromkeys(rope for layer in layers for rope in layer.ropes if rope))
        self._placed: WeakKeyDictionary[PagedCache, tuple[list, PlacedLayers]] = WeakKeyDictionary()

    def __call__(
        self, x: Tensor, cache: PagedCache, layout: Layout, rotations: Shared
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """What the last norm takes the sum of; the second may be left out."""
        if self._ops.whole_layers:
            done = self._ops.layers(x, self._place(cache), [rotations[rope] for rope in self._ropes], layout)
            if done is not None:
                return done, None
        added = None
        for layer in self._layers:
            x, added = layer(x, added, cache, layout, rotations)
        return x, added

    def _place(self, cache: PagedCache) -> PlacedLayers:
        states, placed = self._placed.get(cache, (None, None))
        if states is not cache.sequences:  # which is another list when its pools have moved
            indices = [layer.index for layer in self._layers]
            pools = [[*cache.tokens[i].values(), *cache.sequences[i].values()] for i in indices]
            which = [[self._ropes.index(rope) if rope else None for rope in layer.ropes] for layer in self._layers]
            placed = PlacedLayers([layer.whole for layer in self._layers], pools, *zip(*which))
            self._placed[cache] = cache.sequences, placed
        return placed


class _DecoderLayer:
    """x + scale · attention(norm(x)), then x + scale · feed-forward(norm(x)).

    ropes: of its attention and of that one's index, None where there is none.  whole: all of it for `Ops.layers`.
    """

    def __init__(self, model: ModelSpec, index: int, weights: Weights, ops: Ops):
        self._ops, self._eps, self._scale = ops, model.norm_eps, model.residual_scale
        spec, prefix = model.layers[index], f"model.layers.{index}."
        self._input_norm = weights.norm(prefix + "input_layernorm.weight")
        self._attention = ATTENTION[type(spec.attention)](spec.attention, index, model.norm_eps, weights, ops)
        self._post_norm = weights.norm(prefix + "post_attention_layernorm.weight")
        if isinstance(spec.mlp, Moe):
            self._mlp = MoeBlock(spec.mlp, prefix, layer_names(model), weights, ops)
        else:
            self._mlp = DenseBlock(spec.mlp, prefix + "mlp", weights, ops)
        indexer = getattr(spec.attention, "indexer", None)
        self.index, self.ropes = index, (getattr(spec.attention, "rope", None), indexer and indexer.rope)
        parts = self._attention.whole, self._mlp.mlp, self._scale
        self.whole = Layer(self._input_norm, self._post_norm, self._eps, *parts)

    def __call__(
        self, x: Tensor, added: Tensor | None, cache: PagedCache, layout: Layout, rotations: Shared
    ) -> tuple[Tensor, Tensor | None]:
        """Of x + added, or of x alone; the last sum is left to who norms it next, in the same form."""
        x, normed = self._ops.add_norm(x, added, self._input_norm, self._eps)
        attended = self._attention(normed, cache, layout, rotations)
        x, normed = self._ops.add_norm(x, _scaled(attended, self._scale), self._post_norm, self._eps)
        return x, _scaled(self._mlp(normed, layout.unused), self._scale)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale
