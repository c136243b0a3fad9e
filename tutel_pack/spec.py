"""One canonical description of a decoder: what a family derives from a config, and all that the runtime knows.

Families fill it in, the manifest stores it as JSON, the runtime assembles the decoder from it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

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
            fields = {k: v for k, v in data.items() if k not in ("layers", "layer_kinds")}
            return cls(**fields, layers=tuple(kinds[i] for i in data["layers"]))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            raise InputError(
                f"The artifact's model description cannot be read ({e}): it is damaged or from a newer version; "
                "upgrade tutel-pack or convert again."
            ) from e


def _layer(kind: dict) -> Layer:
    attention = dict(kind.pop("attention"))
    (name, mlp), = kind.items()
    return Layer(Attention(**{**attention, "rope": Rope(**attention["rope"])}), {"mlp": Mlp, "moe": Moe}[name](**mlp))
