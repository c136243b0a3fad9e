"""One canonical description of a decoder: what a family derives from a config, and all that the runtime knows.

Families fill it in, the manifest stores it as JSON, the runtime assembles the decoder from it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from tutel_pack.errors import InputError


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `dim` of each head's dimensions, in half-split pairs (i, i + dim/2).

    inv_freq[j] = theta^(−2j/dim), angle = position × inv_freq.
    """

    theta: float
    dim: int


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with softmax scale head_dim^−½.

    qk_norm: RMSNorm of every head's query and key before the rotation.
    bias: q, k, v and o projections carry one.
    window: a query sees itself and the window − 1 keys before it; None sees all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: bool = False
    bias: bool = False
    window: int | None = None

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly: the model's config is damaged.")
        if self.rope.dim % 2 or self.rope.dim > self.head_dim:
            raise InputError(f"Rotary embedding of {self.rope.dim} of a head's {self.head_dim} dimensions makes no pairs: the model's config is damaged.")


@dataclass(frozen=True)
class Mlp:
    """Dense gated MLP: down(silu(gate(x)) · up(x))."""

    intermediate: int


@dataclass(frozen=True)
class Moe:
    """Routed experts: softmax over all logits in float32, the top_k largest, renormalised to sum 1 if asked."""

    experts: int
    top_k: int
    intermediate: int
    renormalize: bool

    def __post_init__(self):
        if self.top_k > self.experts:
            raise InputError(f"{self.top_k} experts per token cannot be chosen from {self.experts}: the model's config is damaged.")


@dataclass(frozen=True)
class Layer:
    attention: Attention
    mlp: Mlp | Moe


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model with pre-norm residual layers.

    family: the name of the family that wrote it.  context: positions the model was trained for.
    tied_head: logits come from the embedding matrix.
    """

    family: str
    hidden: int
    vocab: int
    context: int
    norm_eps: float
    tied_head: bool
    layers: tuple[Layer, ...]

    def to_json(self) -> dict:
        """Plain JSON types; layers that are alike are written once."""
        kinds = list(dict.fromkeys(self.layers))
        data = {k: v for k, v in vars(self).items() if k != "layers"}
        data["layer_kinds"] = [{"attention": asdict(k.attention), type(k.mlp).__name__.lower(): asdict(k.mlp)} for k in kinds]
        data["layers"] = [kinds.index(layer) for layer in self.layers]
        return data

    @classmethod
    def from_json(cls, data: dict) -> ModelSpec:
        """The inverse of to_json. InputError if a newer version wrote fields that this one does not know."""
        try:
            kinds = [_layer(dict(k)) for k in data["layer_kinds"]]
            if not all(type(i) is int and 0 <= i < len(kinds) for i in data["layers"]):
                raise ValueError(f"layers must be places in the list of {len(kinds)} layer kinds")
            found = {k: v for k, v in data.items() if k not in ("layers", "layer_kinds")}
            return _make(cls, {**found, "layers": tuple(kinds[i] for i in data["layers"])})
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            raise InputError(
                f"The artifact's model description cannot be read ({e}): it is damaged or from a newer version; "
                "upgrade tutel-pack or convert again."
            ) from e


def _layer(kind: dict) -> Layer:
    attention = dict(kind.pop("attention"))
    (name, mlp), = kind.items()
    attention["rope"] = _make(Rope, attention["rope"])
    return Layer(_make(Attention, attention), _make({"mlp": Mlp, "moe": Moe}[name], mlp))


def _make(kind: type, data: dict):
    """A dataclass from JSON, whose plain fields must be of their types and whose numbers must be positive."""
    for field in fields(kind):
        if field.name in data and not _CHECKS.get(field.type, lambda value: True)(data[field.name]):
            raise ValueError(f"{kind.__name__} has {field.name} {data[field.name]!r:.50}")
    return kind(**data)


def _is_count(value) -> bool:
    return type(value) is int and 0 < value < 2**48


_CHECKS = {
    "int": _is_count,
    "int | None": lambda value: value is None or _is_count(value),
    "float": lambda value: type(value) in (int, float) and 0 < value < 1e300 and math.isfinite(value),
    "bool": lambda value: type(value) is bool,
    "str": lambda value: type(value) is str,
}
"""By a field's annotation, which is text here."""
