"""Reading a config.json: every value that a family relies on is looked up, and refused where it is not what it assumes."""

from __future__ import annotations

from typing import Any

from tutel_pack.errors import InputError
from tutel_pack.spec import Rope


class Config:
    """config.json with errors that name the key. aliases: other spellings, other name -> the one that is asked for."""

    def __init__(self, data: dict, aliases: dict[str, str] | None = None):
        self._data = {(aliases or {}).get(key, key): value for key, value in data.items()}

    def __getitem__(self, key: str) -> Any:
        """A value that must be there; sizes must be whole numbers that are not negative."""
        value = self._data.get(key)
        if not isinstance(value, int) or value < 0:
            raise InputError(f"config.json has {key}: {value!r} where a whole number is needed: download it again.")
        return value

    def get(self, key: str, default: Any) -> Any:
        """A value, or what transformers takes where the key is absent or null."""
        value = self._data.get(key)
        return default if value is None else value

    def require(self, key: str, value: Any) -> None:
        """InputError unless the key is absent or has that value."""
        if self.get(key, value) != value:
            raise InputError(f"config.json has {key}: {self._data[key]!r}; only {value!r} is supported.")

    def rope(self, head_dim: int) -> Rope:
        """Plain rotary embedding, in transformers 5's spelling (rope_parameters) or the older one (rope_theta)."""
        parameters = self.get("rope_parameters", None) or {**self.get("rope_scaling", {}), "rope_theta": self.get("rope_theta", 10000.0)}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise InputError(f"config.json asks for {kind!r} rope scaling, which is not supported yet.")
        return Rope(theta=float(parameters["rope_theta"]), dim=head_dim)
