"""Which format each tensor gets. Formats follow from names, roles and what the source is, never from the data."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tutel_pack.errors import InputError
from tutel_pack.formats import Format, get_format
from tutel_pack.quant.codec import CODECS, scale_rule
from tutel_pack.tensors import EXPERTS, KEEP, SHARED

SOURCE = "source"
FORMAT_CHOICES = ("fp8", "mxfp4", "nvfp4", "bf16", SOURCE)


@dataclass(frozen=True)
class Recipe:
    """What the user asked for.

    fmt: format of the experts; "source" keeps every tensor in the format it came in.
    rest: format of attention, dense MLPs and head; None: fp8, or bf16 and source where fmt is that.
    overrides: (regular expression searched in canonical names, format); the last that matches decides.
    scales: a scale rule by name, for the formats that know it; None takes each format's default.
    """

    fmt: str = "mxfp4"
    rest: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    scales: str | None = None

    def __post_init__(self):
        for name in (self.fmt, self.rest, *(fmt for _, fmt in self.overrides)):
            if name is not None and name not in FORMAT_CHOICES:
                raise InputError(f"Unknown format {name!r}: choose one of {', '.join(FORMAT_CHOICES)}.")
        for pattern, _ in self.overrides:
            _compile(pattern)
        if self.scales is not None and self.fmt == SOURCE:
            raise InputError(f"--fmt source chooses no scales: leave --scales {self.scales} out.")
        if self.scales is not None:
            scale_rule(get_format(self.fmt), self.scales)

    def format_for(self, name: str, role: str, source: Format) -> Format | None:
        """The format of a canonical tensor that the source stores as `source`; None keeps it plain."""
        if role == KEEP:
            return None
        wanted = next((fmt for pattern, fmt in reversed(self.overrides) if re.search(pattern, name)), None)
        wanted = wanted or (self.fmt if role in (EXPERTS, SHARED) else self._rest())
        # What is in the wanted format already is passed through, in its own block geometry.
        return source if wanted in (SOURCE, source.name) else get_format(wanted)

    def rule_for(self, fmt: Format) -> str | None:
        """The scale rule to encode with; None is the format's default."""
        return self.scales if self.scales in CODECS[fmt.name].RULES else None

    def check_overrides(self, roles: dict[str, str]) -> None:
        """InputError for an override that changes nothing. roles: canonical name -> role."""
        for pattern, _ in self.overrides:
            matched = [name for name in roles if re.search(pattern, name)]
            if not matched:
                sample = next((name for name, role in roles.items() if role != KEEP), next(iter(roles)))
                raise InputError(f"--override '{pattern}' matches no tensor: names look like {sample}.")
            if all(roles[name] == KEEP for name in matched):
                raise InputError(f"--override '{pattern}' matches only tensors that stay as they are, such as {matched[0]}.")

    def _rest(self) -> str:
        return self.rest or (self.fmt if self.fmt in ("bf16", SOURCE) else "fp8")

    def to_json(self) -> dict:
        return {"fmt": self.fmt, "rest": self._rest(), "overrides": [list(o) for o in self.overrides], "scales": self.scales}


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        raise InputError(f"--override {pattern!r} is not a regular expression ({e}).") from None
