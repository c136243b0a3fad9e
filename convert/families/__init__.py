"""Model families, as data: what a config means and how the maker spells the tensors.

A family is one file here that defines FAMILY; its `model_type` in config.json finds it. Canonical names and shapes
follow from the ModelSpec (tutel_pack/tensors.py), so a family adds only `spec` and the names that differ:

    FAMILY = Family(("my_moe",), spec, renames={r"(.+)\\.experts\\.down_proj": (r"\\1.experts.{expert}.w2.weight",)})
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module

from tutel_pack.convert.dialects import Stored
from tutel_pack.errors import InputError
from tutel_pack.spec import General, ModelSpec
from tutel_pack.tensors import KEEP, TensorSpec, canonical_tensors

MODULES = (
    "qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa",
    "glm4_moe_lite", "kimi_k25", "qwen2_moe", "olmoe", "mixtral", "minimax_m2", "gpt_oss",
    "glm4_moe", "ernie4_5_moe", "granitemoe",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """model_types: values of config.json's model_type.
    spec: config.json as a dict -> ModelSpec; raises InputError for an option that it does not know.
    renames: canonical name (regular expression that matches whole) -> the source names of its segments, templates that
        may use its groups and `{expert}`. Names that no rule matches, or that the source has itself, are taken as they are.
        One name where there are several segments holds them all; without `{expert}` it holds all experts.
    skips: source name (regular expression that matches whole) -> why it is left out.
    interleaved: canonical names (regular expressions) whose segments stand row by row in one source tensor: gate, up, gate, up, ….
    transposed: canonical names (regular expressions) whose experts the source stores as [E, K, N] where it does not quantize them.
    transposable: canonical names (regular expressions) whose experts some checkpoints store so: those that are not [E, N, K].
    prefix: what source names may have where canonical ones have "model.", as where the decoder is part of a larger model.
    tensors: what a model of that spec is made of.
    spell: a source name -> the one that rules here know it by; None goes by `prefix`.
    undone: canonical name (regular expression) -> what its loading would take that is not done here.
    """

    model_types: tuple[str, ...]
    spec: Callable[[dict], ModelSpec | General]
    renames: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)
    interleaved: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    transposable: tuple[str, ...] = ()
    prefix: str = "model."
    tensors: Callable[[ModelSpec | General], dict[str, TensorSpec]] = canonical_tensors
    spell: Callable[[str], str] | None = None
    undone: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """One segment of one expert, or all of a matrix: rows first + offset + i · step, i < rows, of a source weight seen as
    [rows, K]. Pieces that stand interleaved share their `first`, so that what covers them is read once."""

    stored: Stored
    first: int
    rows: int
    step: int = 1
    offset: int = 0


@dataclass(frozen=True)
class Target:
    """A canonical tensor and the pieces it is made of: pieces[expert][segment], one expert for a matrix."""

    name: str
    tensor: TensorSpec
    pieces: tuple[tuple[Piece, ...], ...]


def find_family(config: dict) -> Family:
    """The family of a config.json: a native one, or else the general path by its transformers module. InputError says what
    that one lacks; of a model type that transformers does not know either it lists the known ones and suggests the nearest."""
    families = {t: f for f in (import_module(f"{__name__}.{m}").FAMILY for m in MODULES) for t in f.model_types}
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in families:
        return families[model_type]
    if found := import_module(f"{__name__}.general").find(config):
        return found
    near = difflib.get_close_matches(str(model_type)[:50], families, n=1)
    hint = f" Did the config mean {near[0]!r}?" if near else ""
    raise InputError(f"The model type {model_type!r:.100} is not supported; known are {', '.join(sorted(families))}.{hint}")


def fit(family: Family, spec: ModelSpec | General, weights: Iterable[str]) -> ModelSpec | General:
    """The spec with what the names in a checkpoint tell better than its config.json: whether it has a head of its own,
    and layers of multi-token prediction."""
    held = {_decoder_name(family, name) for name in weights}
    spec = replace(spec, tied_head=spec.tied_head and held.isdisjoint(_templates(family, "lm_head.weight", held)))
    behind = f"model.layers.{spec.depth}."
    if isinstance(spec, General) or any(name.startswith(behind) for name in held):
        return spec
    return replace(spec, mtp=())


def match(family: Family, spec: ModelSpec | General, weights: dict[str, Stored]) -> tuple[list[Target], dict[str, str]]:
    """(targets in canonical order, skipped source name -> reason), proven complete: every canonical tensor has its
    sources, and every source tensor a use or a stated reason. InputError lists what is missing, left over or misshapen.
    """
    tensors = family.tensors(spec)
    weights = _by_decoder_name(family, weights)
    _check_count(family, tensors, weights)
    names = {name: _source_names(family, name, tensor, weights) for name, tensor in tensors.items()}
    wanted = [n for grid in names.values() for row in grid for n in row]
    missing = [n for n in dict.fromkeys(wanted) if n not in weights]
    unused = weights.keys() - set(wanted)
    skipped = {n: weights[n].unused for n in unused if weights[n].unused}
    skipped |= {n: reason for n in unused for p, reason in family.skips.items() if re.fullmatch(p, n)}
    extra = [weights[n].name for n in weights if n in unused and n not in skipped]
    skipped = {weights[n].name: reason for n, reason in sorted(skipped.items())}
    if missing or extra:
        raise InputError(_mismatch(family, missing, extra))
    return [_target(family, name, tensors[name], grid, weights) for name, grid in names.items()], skipped


def _mismatch(family: Family, missing: list[str], extra: list[str]) -> str:
    listed = [
        f"The checkpoint {verb} {len(found)} tensor{'s' * (len(found) > 1)}: {', '.join(found[:5])}{', …' * (len(found) > 5)}."
        for verb, found in (("lacks", missing), ("has unknown", extra))
        if found
    ]
    undone = [reason for n in missing for p, reason in family.undone.items() if re.search(p, n)]
    why = f"{undone[0]}, which is not supported." if undone else (
        "It is incomplete, or a variant of this architecture that is not supported."
    )
    return " ".join([*listed, why])


def _decoder_name(family: Family, name: str) -> str:
    if family.spell:
        return family.spell(name)
    return "model." + name[len(family.prefix) :] if name.startswith(family.prefix) else name


def _by_decoder_name(family: Family, weights: dict[str, Stored]) -> dict[str, Stored]:
    """Weights by the names that rules know, but where several would have the same: then all but one are unknown."""
    found = {}
    for name, stored in weights.items():
        new = _decoder_name(family, name)
        found[name if new in found or (name != new and new in weights) else new] = stored
    return found


def _check_count(family: Family, tensors: dict[str, TensorSpec], weights: dict[str, Stored]) -> None:
    """InputError if there are so many more tensors to find than there are that a list of what is missing helps nobody,
    and might not fit into memory."""
    wanted = sum(_expert_count(_rule(family, name, weights)[1], t) for name, t in tensors.items())
    if wanted > 1000 + 10 * len(weights):
        raise InputError(
            f"config.json describes a model of about {wanted} tensors, and the checkpoint holds {len(weights)}: "
            "they do not belong together."
        )


def _source_names(family: Family, name: str, tensor: TensorSpec, weights: dict[str, Stored]) -> list[list[str]]:
    """[expert][segment] source names; one row where they hold all experts, one name in a row where it holds all segments."""
    templates = _templates(family, name, weights)
    return [[t.replace("{expert}", str(e)) for t in templates] for e in range(_expert_count(templates, tensor))]


def _templates(family: Family, name: str, weights: Collection[str]) -> list[str]:
    found, templates = _rule(family, name, weights)
    return [found.expand(t) for t in templates] if found else [name]


def _rule(family: Family, name: str, weights: Collection[str]) -> tuple[re.Match | None, tuple[str, ...]]:
    """The rename for a canonical name, or (None, itself)."""
    if name not in weights:
        for pattern, templates in family.renames.items():
            if found := re.fullmatch(pattern, name):
                return found, templates
    return None, (name,)


def _expert_count(templates: list[str], tensor: TensorSpec) -> int:
    return tensor.shape[0] if any("{expert}" in t for t in templates) else 1


def _target(family: Family, name: str, tensor: TensorSpec, grid: list[list[str]], weights: dict[str, Stored]) -> Target:
    interleaved = any(re.fullmatch(p, name) for p in family.interleaved)
    tensor = _with_parts(tensor, grid, weights)
    if tensor.role == KEEP and len(tensor.shape) == 2 and (tensor.segments or len(grid) > 1):
        pieces = _bias_pieces(tensor, grid, weights, interleaved)
    elif tensor.role == KEEP and tensor.segments:
        pieces = [[Piece(weights[n], 0, _rows(weights[n])) for n in grid[0]]]
    elif tensor.role == KEEP:
        stored = _checked(_flat(weights[grid[0][0]], tensor.shape), tensor.shape)
        pieces = [_pieces(stored, 0, (math.prod(tensor.shape[:-1] or tensor.shape),), False)]
    else:
        pieces = _matrix_pieces(tensor, grid, weights, interleaved, _is_transposed(family, name, tensor, grid, weights))
    return Target(name, tensor, tuple(map(tuple, pieces)))


def _with_parts(tensor: TensorSpec, grid, weights: dict[str, Stored]) -> TensorSpec:
    """A matrix or convolution that the source holds as several, one below the other, with these for segments."""
    if tensor.segments or len(grid) > 1 or len(grid[0]) == 1:
        return tensor
    parts = [weights[name] for name in grid[0]]
    total = sum(part.shape[0] for part in parts)
    for part in parts:
        _checked(part, (part.shape[0] + tensor.shape[0] - total, *tensor.shape[1:]))
    return replace(tensor, segments=tuple(part.shape[0] for part in parts))


def _is_transposed(family: Family, name: str, tensor: TensorSpec, grid, weights: dict[str, Stored]) -> bool:
    if any(re.fullmatch(p, name) for p in family.transposable):
        return weights[grid[0][0]].shape != tensor.shape
    return any(re.fullmatch(p, name) for p in family.transposed)


def _rows(stored: Stored) -> int:
    return math.prod(stored.shape[:-1])


def _flat(stored: Stored, expected: tuple[int, ...]) -> Stored:
    """The vector that a source holds as a matrix of one row."""
    plain = stored.format is not None and stored.format.block is None
    return replace(stored, shape=expected, format=None) if plain and stored.shape == (1, *expected) else stored


def _matrix_pieces(tensor: TensorSpec, grid, weights: dict[str, Stored], interleaved: bool, transposed: bool) -> list[list[Piece]]:
    *lead, n, k = tensor.shape
    segments = tensor.segments or (n,)
    if lead and len(grid) == 1:  # one source tensor (or one per segment) for all experts
        stored = [_oriented(weights[name], transposed) for name in grid[0]]
        rows = [n] if len(stored) == 1 else segments
        for weight, count in zip(stored, rows, strict=True):
            _checked(weight, (*lead, count, k))
        return [_row(stored, e, segments, interleaved) for e in range(lead[0])]
    pieces = []
    for names in grid:
        rows = [n] if len(names) == 1 else segments
        stored = [_checked(weights[name], (count, k)) for name, count in zip(names, rows, strict=True)]
        pieces.append(_row(stored, 0, segments, interleaved))
    return pieces


def _row(stored: list[Stored], expert: int, segments: tuple[int, ...], interleaved: bool) -> list[Piece]:
    """The pieces of an expert: of one weight that holds all segments, or of one weight each."""
    if len(stored) == 1:
        return _pieces(stored[0], expert * sum(segments), segments, interleaved)
    return [Piece(weight, expert * rows, rows) for weight, rows in zip(stored, segments)]


def _pieces(stored: Stored, first: int, segments: tuple[int, ...], interleaved: bool) -> list[Piece]:
    """The segments that stand in rows first … of one weight."""
    if not interleaved:
        starts = [first + sum(segments[:s]) for s in range(len(segments))]
        return [Piece(stored, start, rows) for start, rows in zip(starts, segments)]
    if stored.format and stored.format.block and stored.format.block[0] > 1:
        raise InputError(f"{stored.name} interleaves rows that share block scales, which is not supported.")
    return [Piece(stored, first, rows, len(segments), s) for s, rows in enumerate(segments)]


def _oriented(stored: Stored, transposed: bool) -> Stored:
    """A weight of all experts in its logical orientation, [E, N, K]."""
    if not transposed or stored.format is None or stored.format.block or len(stored.shape) != 3:
        return stored
    e, k, n = stored.shape
    return replace(stored, shape=(e, n, k), transposed=True)


def _bias_pieces(tensor: TensorSpec, grid, weights: dict[str, Stored], interleaved: bool) -> list[list[Piece]]:
    """Of the biases of experts, [E, N], taken as vectors: a piece is a segment of one expert, or of all where one
    source tensor holds them."""
    e, n = tensor.shape
    segments = tensor.segments or (n,)
    if len(grid) > 1:
        return [[Piece(_checked(weights[s], (rows,)), 0, rows) for s, rows in zip(row, segments, strict=True)] for row in grid]
    stored = _checked(weights[grid[0][0]], tensor.shape)
    flat = replace(stored, shape=(e * n,), format=None)
    if not interleaved:
        return [[Piece(flat, 0, e * n)]]
    return [_pieces(flat, 0, tuple(e * rows for rows in segments), True)]


def _checked(stored: Stored, expected: tuple[int, ...]) -> Stored:
    """The weight. InputError if it has another shape."""
    if stored.shape != expected:
        raise InputError(
            f"{stored.name} has shape {list(stored.shape)} where config.json implies {list(expected)}: "
            "the checkpoint and its config.json do not belong together."
        )
    return stored
