"""Reading a config.json: every value that a family relies on is looked up, and refused where it is not what it assumes."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from tutel_pack.errors import InputError
from tutel_pack.spec import Dynamic, Layer, Linear, Llama3, ModelSpec, Rope, Yarn

MOST_LAYERS = 10_000
"""No decoder comes near; a damaged config.json must not make us plan for billions."""


class Config:
    """config.json with errors that name the key. aliases: other spellings, other name -> the one that is asked for.
    within: where in config.json an object inside it stands, as "rope_parameters.".

    A key that is absent or null takes the default, which is what transformers takes; without one it must be there.
    """

    def __init__(self, data: dict, aliases: dict[str, str] | None = None, within: str = ""):
        self._data = {(aliases or {}).get(key, key): value for key, value in data.items()}
        self._within = within

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._data.get(key) is not None

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            self._refuse(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        if not _is_positive(value):
            self._refuse(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            self._refuse(key, "true or false")
        return value

    def indices(self, key: str) -> list[int]:
        """A list of whole numbers, empty by default."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            self._refuse(key, "a list of whole numbers")
        return value

    def names(self, key: str, known: tuple[str, ...], default: list[str]) -> list[str]:
        """One of the known names for every layer."""
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) and item in known for item in value):
            self._refuse(key, f"a list of {', '.join(known)}")
        if len(value) != self.layers():
            self._refuse(key, f"one name for each of {self.layers()} layers")
        return value

    def layers(self) -> int:
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    def require(self, key: str, value: Any) -> None:
        """InputError unless the key is absent or has that value."""
        if self._get(key, value) != value:
            found = f"{self._within}{key}: {self._data[key]!r:.100}"
            raise InputError(f"config.json has {found}; only {value!r} is supported.")

    def object(self, key: str) -> Config:
        """An object inside config.json, empty by default."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            self._refuse(key, "an object or null")
        return Config(value, within=f"{self._within}{key}.")

    def model(
        self, family: str, layers: tuple[Layer, ...], norm_eps: float | None = 1e-6, tied_head: bool = False,
        context: int | None = None, **others: Any,
    ) -> ModelSpec:  # fmt: skip
        """The ModelSpec of these layers, with the sizes that every config.json spells alike.

        norm_eps, tied_head, context: what this architecture takes where config.json says nothing; without a default it
        must be there.  others: see ModelSpec.
        """
        positions = self.size("max_position_embeddings", context)
        scalings = [layer.attention.rope.scaling for layer in layers if getattr(layer.attention, "rope", None)]
        return ModelSpec(
            family=family,
            hidden=self.size("hidden_size"),
            vocab=self.size("vocab_size"),
            # Who stretches a rope by hand often leaves max_position_embeddings as it was.
            context=max([positions, *(int(s.factor * s.original) for s in scalings if isinstance(s, (Yarn, Dynamic)))]),
            norm_eps=self.number("rms_norm_eps", norm_eps),
            tied_head=self.flag("tie_word_embeddings", tied_head),
            layers=layers,
            **others,
        )

    def rope(self, head_dim: int, interleaved: bool = False, theta: float = 10000.0, partial: float | None = None) -> Rope:
        """Rotary embedding of heads of head_dim, in transformers 5's spelling (rope_parameters) or the older ones
        (rope_theta, rope_scaling, partial_rotary_factor).

        theta, partial: what this architecture takes where config.json says nothing; partial is the share of a head's
        dimensions that are rotated, None for an architecture that always rotates all.
        """
        newer, older = self.object("rope_parameters"), self.object("rope_scaling")
        parameters = older if older._data else newer
        for key, value in parameters._data.items():
            if isinstance(value, dict):
                name = f"{parameters._within}{key!s:.50}"
                raise InputError(f"config.json has {name}: rope by layer type is not supported.")
        kind = parameters._get("rope_type", parameters._get("type", "default"))
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise InputError(f"config.json asks for {kind!r:.100} rope scaling, which is not supported.")
        theta = parameters.number("rope_theta", self.number("rope_theta", theta))
        if partial is None:
            for where in (parameters, self):
                where.require("partial_rotary_factor", 1.0)
        partial = parameters.number("partial_rotary_factor", self.number("partial_rotary_factor", partial or 1.0))
        dim = int(head_dim * partial)
        if dim < 2 or dim % 2 or dim > head_dim:
            raise InputError(
                f"config.json implies heads of {head_dim} dimensions, {dim} of them rotated: they make no pairs."
            )
        scaling = _SCALINGS[kind](parameters, self)
        if scaling and (theta <= 1 or dim < 4):
            raise InputError(f"config.json scales a rope of {dim} dimensions and theta {theta}, which has no bands to scale.")
        return Rope(theta, dim, interleaved, scaling)

    def original_context(self, parameters: Config) -> int:
        """Positions before a rope scaling stretched them. A value beside the parameters wins, as in transformers."""
        inside = parameters.size("original_max_position_embeddings", self.size("max_position_embeddings"))
        return self.size("original_max_position_embeddings", inside)

    def _get(self, key: str, default: Any) -> Any:
        value = self._data.get(key)
        return default if value is None else value

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        name = self._within + key
        found = f"{name}: {self._data[key]!r:.100}" if key in self._data else f"no {name}"
        raise InputError(f"config.json has {found} where {wanted} is needed: download it again.")


def _is_positive(value: Any) -> bool:
    # A whole number may be too large for a float.
    return type(value) in (int, float) and 0 < value < 1e300 and math.isfinite(value)


def _dynamic(parameters: Config, config: Config) -> Dynamic:
    # transformers measures by max_position_embeddings here, whatever the parameters call original.
    return Dynamic(parameters.number("factor"), config.size("max_position_embeddings"))


def _yarn(parameters: Config, config: Config) -> Yarn:
    original = config.original_context(parameters)
    factor = parameters.number("factor", config.size("max_position_embeddings") / original)
    return Yarn(
        factor=factor,
        original=original,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
        magnitude=parameters.number("attention_factor", _yarn_magnitude(parameters, factor)),
    )


def _yarn_magnitude(parameters: Config, factor: float) -> float:
    """0.1 · ln(factor) + 1 (the paper's, arXiv 2309.00071 §3.4), or DeepSeek's quotient of two of these."""
    if parameters.has("mscale") and parameters.has("mscale_all_dim"):
        scales = parameters.number("mscale"), parameters.number("mscale_all_dim")
    else:
        scales = 1.0, 0.0
    above, below = (0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0 for scale in scales)
    return above / below


def _llama3(parameters: Config, config: Config) -> Llama3:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise InputError(f"config.json has a high_freq_factor of {high}, not above its low_freq_factor of {low}.")
    return Llama3(parameters.number("factor"), config.original_context(parameters), low, high)


_SCALINGS = {
    "default": lambda parameters, config: None,
    "linear": lambda parameters, config: Linear(parameters.number("factor")),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
"""rope_type -> the scaling that its parameters describe."""
