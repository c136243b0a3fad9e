"""One canonical description of a decoder: what a family derives from a config, and all that the runtime knows.

Families fill it in, the manifest stores it as JSON, the runtime assembles the decoder from it. H is the hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from tutel_pack.errors import InputError


SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "softmax_chosen")
GENERAL = "general"
"""The family of models that run as their transformers module."""


def _refuse(reason: str) -> None:
    raise InputError(f"A model cannot be like this: {reason}; its config is damaged.")


@dataclass(frozen=True)
class Linear:
    """Rope scaling: frequencies divided by factor."""

    factor: float


@dataclass(frozen=True)
class Dynamic:
    """Rope scaling that grows theta with the length L of the sequence beyond `original` positions (NTK):
    theta · (factor · L/original − (factor − 1))^(dim/(dim−2))."""

    factor: float
    original: int


@dataclass(frozen=True)
class Yarn:
    """Rope scaling by frequency bands (YaRN): dimensions that turn more than beta_fast times over `original` positions
    stay, those that turn less than beta_slow times are divided by factor, a linear ramp lies between (its ends rounded
    outwards if `truncate`). Cosines and sines are multiplied by `magnitude`."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    magnitude: float


@dataclass(frozen=True)
class Llama3:
    """Rope scaling by wavelength: shorter than original/high stay, longer than original/low are divided by factor,
    smooth between."""

    factor: float
    original: int
    low: float
    high: float


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `dim` of each head's dimensions: inv_freq[j] = theta^(−2j/dim), before scaling.

    interleaved: pairs are (2j, 2j + 1); otherwise (j, j + dim/2).
    """

    theta: float
    dim: int
    interleaved: bool = False
    scaling: Linear | Dynamic | Yarn | Llama3 | None = None

    def __post_init__(self):
        if self.theta <= 0:
            _refuse(f"a rope theta of {self.theta} gives no frequencies")
        if self.dim % 2:
            _refuse(f"rotary embedding of {self.dim} dimensions makes no pairs")


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention.

    rope: None for a layer without positions.
    qk_norm: RMSNorm of queries and keys before the rotation: "head" of every head, "whole" of the projection.
    bias: the projections that carry one, as letters of "qkvo".
    window: a query sees itself and the window − 1 keys before it; None sees all.
    sinks: one more logit per head in the softmax, whose share is dropped.
    gated: q_proj gives [query | gate] per head, and the heads' output is multiplied by sigmoid(gate).
    clip: queries, keys and values are clamped to ±clip after their projections and norms.
    scale: of the logits; None is head_dim^−½.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    qk_norm: str | None = None
    bias: str = ""
    window: int | None = None
    sinks: bool = False
    gated: bool = False
    clip: float | None = None
    scale: float | None = None

    def __post_init__(self):
        if self.heads % self.kv_heads:
            _refuse(f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly")
        if self.rope and self.rope.dim > self.head_dim:
            _refuse(f"rotary embedding of {self.rope.dim} dimensions is more than a head's {self.head_dim}")
        if self.qk_norm not in (None, "head", "whole"):
            _refuse(f"there is no qk_norm {self.qk_norm!r}")
        if not set(self.bias) <= set("qkvo"):
            _refuse(f"there is no projection {self.bias!r} to bias")


@dataclass(frozen=True)
class Indexer:
    """Picks the top_k past positions that a query attends to (DeepSeek sparse attention).

    score = Σ_h w_h · heads^−½ · relu(q_h · k · dim^−½); q from the compressed query, k = LayerNorm(wk x), both rotated in
    their first rope.dim dimensions.
    """

    heads: int
    dim: int
    top_k: int
    rope: Rope


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: keys and values are up-projections of one latent of kv_rank per token, and one rotated
    key of rope.dim is shared by all heads. q has nope_dim + rope.dim per head, v has v_dim.

    q_rank: of the compressed query; None projects directly.
    bias: the down-projections and the output carry one.
    scale: of the logits.
    indexer: None attends to all; reuse_index takes the positions that the nearest layer before it picked.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    v_dim: int
    rope: Rope
    scale: float
    bias: bool = False
    indexer: Indexer | None = None
    reuse_index: bool = False


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net: a causal convolution over q, k, v, then a linear recurrence with a decay and a write strength.

    grouped: one projection gives q, k, v, z (and one b, a) grouped per key head; otherwise they are separate.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    grouped: bool

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            _refuse(f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly")


@dataclass(frozen=True)
class Swiglu:
    """silu(gate) · up."""


@dataclass(frozen=True)
class ClampedSwiglu:
    """g · sigmoid(alpha · g) · (u + shift) with g = min(gate, limit), u = clamp(up, ±limit)."""

    limit: float
    alpha: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class Mlp:
    """Dense gated MLP: down(activation(gate(x), up(x)))."""

    intermediate: int
    bias: bool = False
    activation: Swiglu | ClampedSwiglu = Swiglu()


@dataclass(frozen=True)
class Router:
    """From logits in float32 to top_k experts and their weights.

    score: "softmax" over all, "sigmoid", "sqrtsoftplus"; "softmax_chosen" picks by logit and takes the softmax of those.
    bias: of the logits.
    correction: a bias added to the scores for the choice only.
    groups, top_groups: only experts of the groups with the largest sums of their two best scores are chosen from.
    renormalize: weights are divided by max(their sum, epsilon).
    scale: of the weights, in the end.
    """

    score: str = "softmax"
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    epsilon: float = 1e-20
    scale: float = 1.0

    def __post_init__(self):
        if self.score not in SCORES:
            _refuse(f"there is no router score {self.score!r}")


@dataclass(frozen=True)
class Moe:
    """Routed experts, and shared ones that every token passes.

    shared: the shared experts as one MLP.  shared_gated: its output is multiplied by sigmoid(shared_expert_gate(x)).
    bias: the experts' projections carry one.
    """

    experts: int
    top_k: int
    intermediate: int
    router: Router = Router()
    shared: Mlp | None = None
    shared_gated: bool = False
    activation: Swiglu | ClampedSwiglu = Swiglu()
    bias: bool = False

    def __post_init__(self):
        if self.top_k > self.experts:
            _refuse(f"{self.top_k} experts per token cannot be chosen from {self.experts}")
        if self.experts % self.router.groups or self.router.top_groups > self.router.groups:
            _refuse(f"{self.experts} experts do not fall into {self.router.groups} groups of which {self.router.top_groups} are chosen")


@dataclass(frozen=True)
class Layer:
    attention: Attention | Mla | DeltaNet
    mlp: Mlp | Moe


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model with pre-norm residual layers.

    family: the name of the family that wrote it.  context: positions the model was trained for.
    tied_head: logits come from the embedding matrix.
    mtp: multi-token-prediction layers behind the last one, kept in the artifact.
    norm_offset: is added to the weight of every RMSNorm but a delta net's own.
    embedding_scale, residual_scale, logit_scale: factors of embeddings, of what a block adds, of logits.
    names: where this architecture has other names than the default ones of tensors.NAMES.
    """

    family: str
    hidden: int
    vocab: int
    context: int
    norm_eps: float
    tied_head: bool
    layers: tuple[Layer, ...]
    mtp: tuple[Layer, ...] = ()
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    names: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        if self.norm_eps <= 0:
            _refuse(f"a norm's epsilon is {self.norm_eps}")

    @property
    def depth(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def to_json(self) -> dict:
        """Plain JSON types; layers that are alike are written once."""
        kinds = list(dict.fromkeys((*self.layers, *self.mtp)))
        data = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in ("layers", "mtp")}
        data["layer_kinds"] = [_plain(kind) for kind in kinds]
        return {**data, **{name: [kinds.index(layer) for layer in getattr(self, name)] for name in ("layers", "mtp")}}

    @classmethod
    def from_json(cls, data: dict) -> ModelSpec:
        """The inverse of to_json. InputError if it is damaged, or if a newer version wrote it."""
        try:
            kinds = [_made(kind) for kind in data["layer_kinds"]]
            rest = {name: value for name, value in data.items() if name != "layer_kinds"}
            for name in ("layers", "mtp"):
                if not all(type(i) is int and 0 <= i < len(kinds) for i in data[name]):
                    raise ValueError(f"{name} must be places in the list of {len(kinds)} layer kinds")
                rest[name] = tuple(kinds[i] for i in data[name])
            rest["names"] = tuple((str(a), str(b)) for a, b in data["names"])
            return _make(cls, rest)
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as e:
            raise InputError(
                f"The artifact's model description cannot be read ({e}): it is damaged or from a newer version; "
                "upgrade tutel-pack or convert again."
            ) from e


@dataclass(frozen=True)
class General:
    """A model without a description here: it runs as its transformers module, built from the config.json beside it, with
    packed weights put in (see tutel_pack.general).

    model_type: of its config.json.  depth: decoder layers.  The rest is as in a ModelSpec.
    """

    model_type: str
    depth: int
    hidden: int
    vocab: int
    context: int
    tied_head: bool
    family: str = GENERAL

    def to_json(self) -> dict:
        """Plain JSON types."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, data: dict) -> General:
        """The inverse of to_json. InputError if it is damaged."""
        try:
            return _make(cls, dict(data))
        except (TypeError, ValueError) as e:
            raise InputError(f"The artifact's model description cannot be read ({e}): convert again.") from e


def spec_from_json(data: dict) -> ModelSpec | General:
    """What a manifest says of its model. InputError if it is damaged."""
    return (General if data.get("family") == GENERAL else ModelSpec).from_json(data)


_KINDS = {
    kind.__name__: kind
    for kind in (Linear, Dynamic, Yarn, Llama3, Rope, Attention, Indexer, Mla, DeltaNet, Swiglu, ClampedSwiglu, Mlp, Router, Moe, Layer)
}


def _plain(value: Any) -> Any:
    """A dataclass as {"kind": its class, …fields}; the rest as it is."""
    if is_dataclass(value):
        return {"kind": type(value).__name__, **{f.name: _plain(getattr(value, f.name)) for f in fields(value)}}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _made(data: Any) -> Any:
    """The inverse of _plain."""
    if not isinstance(data, dict):
        return data
    return _make(_KINDS[data["kind"]], {name: _made(value) for name, value in data.items() if name != "kind"})


def _make(kind: type, values: dict) -> Any:
    """A dataclass whose fields must all be there, and of their types."""
    for f in fields(kind):
        if f.name not in values or not _fits(values[f.name], f.type):
            raise ValueError(f"{kind.__name__} has {f.name} {values.get(f.name)!r:.50}")
    return kind(**values)


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value is of a field's type, which is text here: alternatives of names."""
    return any(_CHECKS[name](value) if name in _CHECKS else type(value).__name__ == name for name in annotation.split(" | "))


_CHECKS = {
    "int": lambda v: type(v) is int and 0 < v < 2**48,
    "float": lambda v: type(v) in (int, float) and 0 <= v < 1e300 and math.isfinite(v),
    "bool": lambda v: type(v) is bool,
    "str": lambda v: type(v) is str,
    "None": lambda v: v is None,
    "tuple[Layer, ...]": lambda v: all(type(layer) is Layer for layer in v),
    "tuple[tuple[str, str], ...]": lambda v: True,
}
