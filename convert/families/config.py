"""Reading a config.json: every value that a family relies on is looked up, and refused where it is not what it assumes."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from tutel_pack.errors import InputError
from tutel_pack.spec import Rope

MOST_LAYERS = 10_000
"""No decoder comes near; a damaged config.json must not make us plan for billions."""


class Config:
    """config.json with errors that name the key. aliases: other spellings, other name -> the one that is asked for.

    A key that is absent or null takes the default, which is what transformers takes; without one it must be there.
    """

    def __init__(self, data: dict, aliases: dict[str, str] | None = None):
        self._data = {(aliases or {}).get(key, key): value for key, value in data.items()}

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

    def layers(self) -> int:
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    def require(self, key: str, value: Any) -> None:
        """InputError unless the key is absent or has that value."""
        if self._get(key, value) != value:
            raise InputError(f"config.json has {key}: {self._data[key]!r:.100}; only {value!r} is supported.")

    def rope(self, head_dim: int) -> Rope:
        """Plain rotary embedding, in transformers 5's spelling (rope_parameters) or the older one (rope_theta)."""
        theta = self.number("rope_theta", 10000.0)
        for key in ("rope_scaling", "rope_parameters"):
            parameters = self._get(key, {})
            if not isinstance(parameters, dict):
                self._refuse(key, "an object or null")
            kind = parameters.get("rope_type", parameters.get("type", "default"))
            if kind != "default":
                raise InputError(f"config.json asks for {kind!r:.100} rope scaling, which is not supported yet.")
            theta = parameters.get("rope_theta", theta)
            if not _is_positive(theta):
                self._refuse(key, "a positive rope_theta")
        if head_dim % 2:
            raise InputError(f"config.json implies heads of {head_dim} dimensions, which rotary embedding cannot pair.")
        return Rope(theta=float(theta), dim=head_dim)

    def _get(self, key: str, default: Any) -> Any:
        value = self._data.get(key)
        return default if value is None else value

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        found = f"{key}: {self._data[key]!r:.100}" if key in self._data else f"no {key}"
        raise InputError(f"config.json has {found} where {wanted} is needed: download it again.")


def _is_positive(value: Any) -> bool:
    # A whole number may be too large for a float.
    return type(value) in (int, float) and 0 < value < 1e300 and math.isfinite(value)
