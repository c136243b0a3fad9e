"""Model families, as data: what a config means and how the maker spells the tensors.

A family is one file here that defines FAMILY; its `model_type` in config.json finds it. Canonical names and shapes
follow from the ModelSpec (tutel_pack/tensors.py), so a family adds only `spec` and the names that differ:

    FAMILY = Family(("my_moe",), spec, renames={r"(.+)\\.experts\\.down_proj": (r"\\1.experts.{expert}.w2.weight",)})
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

from tutel_pack.convert.dialects import Stored
from tutel_pack.errors import InputError
from tutel_pack.spec import ModelSpec
from tutel_pack.tensors import EXPERTS, TensorSpec, canonical_tensors

MODULES = ("qwen3_moe",)


@dataclass(frozen=True)
class Family:
    """model_types: values of config.json's model_type.
    spec: config.json as a dict -> ModelSpec; raises InputError for an option that it does not know.
    renames: canonical name (regular expression that matches whole) -> the source names of its segments, templates that
        may use its groups and `{expert}`. Names that no rule matches, or that the source has itself, are taken as they are.
    skips: source name (regular expression that matches whole) -> why it is left out.
    """

    model_types: tuple[str, ...]
    spec: Callable[[dict], ModelSpec]
    renames: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """Rows first … first + rows − 1 of a source weight (seen as [rows, K]): one segment of one expert, or all of a matrix."""

    stored: Stored
    first: int
    rows: int


@dataclass(frozen=True)
class Target:
    """A canonical tensor and the pieces it is made of: pieces[expert][segment], one expert for a matrix."""

    name: str
    tensor: TensorSpec
    pieces: tuple[tuple[Piece, ...], ...]


def find_family(config: dict) -> Family:
    """The family of a config.json. InputError lists the known ones and suggests the nearest."""
    families = {t: f for f in (import_module(f"{__name__}.{m}").FAMILY for m in MODULES) for t in f.model_types}
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in families:
        return families[model_type]
    near = difflib.get_close_matches(str(model_type)[:50], families, n=1)
    hint = f" Did the config mean {near[0]!r}?" if near else ""
    raise InputError(f"The model type {model_type!r:.100} is not supported; known are {', '.join(sorted(families))}.{hint}")


def match(family: Family, spec: ModelSpec, weights: dict[str, Stored]) -> tuple[list[Target], dict[str, str]]:
    """(targets in canonical order, skipped source name -> reason), proven complete: every canonical tensor has its
    sources, and every source tensor a use or a stated reason. InputError lists what is missing, left over or misshapen.
    """
    tensors = canonical_tensors(spec)
    _check_count(tensors, weights)
    names = {name: _source_names(family, name, tensor, weights) for name, tensor in tensors.items()}
    wanted = [n for grid in names.values() for row in grid for n in row]
    missing = [n for n in dict.fromkeys(wanted) if n not in weights]
    unused = weights.keys() - set(wanted)
    skipped = {n: reason for n in unused for p, reason in family.skips.items() if re.fullmatch(p, n)}
    extra = [n for n in weights if n in unused and n not in skipped]
    if missing or extra:
        raise InputError(
            " ".join(
                f"The checkpoint {verb} {len(found)} tensors: {', '.join(found[:5])}{', …' * (len(found) > 5)}."
                for verb, found in (("lacks", missing), ("has unknown", extra))
                if found
            )
            + " It is incomplete, or a variant of this architecture that is not supported."
        )
    return [_target(name, tensors[name], grid, weights) for name, grid in names.items()], dict(sorted(skipped.items()))


def _check_count(tensors: dict[str, TensorSpec], weights: dict[str, Stored]) -> None:
    """InputError if there are so many more tensors to find than there are that a list of what is missing helps nobody,
    and might not fit into memory."""
    wanted = sum(t.shape[0] if t.role == EXPERTS and name not in weights else 1 for name, t in tensors.items())
    if wanted > 1000 + 10 * len(weights):
        raise InputError(
            f"config.json describes a model of about {wanted} tensors, and the checkpoint holds {len(weights)}: "
            "they do not belong together."
        )


def _source_names(family: Family, name: str, tensor: TensorSpec, weights: dict[str, Stored]) -> list[list[str]]:
    if name in weights:
        return [[name]]
    for pattern, templates in family.renames.items():
        if found := re.fullmatch(pattern, name):
            experts = range(tensor.shape[0] if tensor.role == EXPERTS else 1)
            return [[found.expand(t.replace("{expert}", str(e))) for t in templates] for e in experts]
    return [[name]]


def _target(name: str, tensor: TensorSpec, grid: list[list[str]], weights: dict[str, Stored]) -> Target:
    fused = len(tensor.shape) == 3 and grid == [[name]]
    *lead, n = tensor.shape[:-1] if len(tensor.shape) > 1 else tensor.shape
    segments = tensor.segments or (n,)
    if fused:
        _check_shape(weights[name], tensor.shape)
        starts = [sum(segments[:s]) for s in range(len(segments))]
        pieces = [[Piece(weights[name], e * n + start, rows) for start, rows in zip(starts, segments)] for e in range(lead[0])]
    else:
        tail = tensor.shape[-1:] if len(tensor.shape) > 1 else ()
        pieces = [[Piece(weights[s], 0, rows) for s, rows in zip(row, segments, strict=True)] for row in grid]
        for piece in (p for row in pieces for p in row):
            _check_shape(piece.stored, (piece.rows, *tail))
    return Target(name, tensor, tuple(map(tuple, pieces)))


def _check_shape(stored: Stored, expected: tuple[int, ...]) -> None:
    if stored.shape != expected:
        raise InputError(
            f"{stored.name} has shape {list(stored.shape)} where config.json implies {list(expected)}: "
            "the checkpoint and its config.json do not belong together."
        )
