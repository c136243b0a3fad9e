"""How a checkpoint stores its weights: dialects turn header entries into logical weights that can be read by rows.

A dialect is a module here with `find(index, config) -> dict[str, Stored]`, the weights it recognises by the names and
dtypes in the headers: one tensor at a time, so that a checkpoint may mix them. Block geometry comes from the config or the
dialect's definition, never from ratios of shapes. Each dialect takes what it knows, in order, from what is left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from tutel_pack.artifact import DTYPES
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.convert.source import Source
from tutel_pack.errors import InputError
from tutel_pack.formats import DATA, SCALE, Format, PackedTensor

DIALECTS = (
    "mxfp4_gptoss", "int4_ct", "nvfp4_ct", "mxfp4_ct", "nvfp4_modelopt", "mxfp4_quark", "mxfp4_v4", "mxfp8", "fp8_block",
    "fp8_channel", "unquantized",
)  # fmt: skip
"""In the order in which they take what they know; the last takes the rest."""

REFUSED = {
    "awq": "AWQ", "gptq": "GPTQ", "gptq_v2": "GPTQ", "auto-round": "AutoRound", "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ", "aqlm": "AQLM", "eetq": "EETQ", "exl2": "EXL2", "exl3": "EXL3", "gguf": "GGUF",
}  # fmt: skip
"""Quantization methods that other engines made from an original checkpoint: that one is the better source."""


KNOWN = (None, "fp8", "mxfp4", "compressed-tensors", "modelopt", "quark")
"""Quantization methods whose tensors the dialects know."""

UNUSED = {
    r".*[._]input_(global_)?scale": "a scale of quantized activations, which are not quantized here",
    r".*[._][kvq]_scale": "a scale of a quantized cache, which is not quantized here",
    r".*\.weight_shape": "the shape of a weight, which its packed form tells",
}
"""Tensors beside quantized weights that nothing here needs (regular expressions that match whole), and why."""


def widened(raw: Tensor) -> Tensor:
    """Narrow float scales as float32, exactly; bytes as they are."""
    return raw.float() if raw.dtype in (torch.bfloat16, torch.float16) else raw


def as_bytes(raw: Tensor) -> Tensor:
    """One-byte items by their bits: e8m0 scales are no numbers to convert."""
    return raw.view(torch.uint8)


@dataclass(frozen=True)
class Part:
    """A tensor of the source that holds a part of a format.

    convert: its rows, as [rows, items], to the format's: [rows, columns] of the format's dtype.
    """

    info: TensorInfo
    convert: Callable[[Tensor], Tensor] = widened

    def read(self, source: Source, first: int, last: int, rows: int) -> Tensor:
        """Rows first … last − 1 of the `rows` that the tensor holds, converted."""
        info, row = self.info, (self.info.stop - self.info.start) // max(1, rows)
        data = source.read(info.file, info.start + first * row, info.start + last * row)
        dtype, shape = DTYPES[info.dtype], (last - first, row // DTYPES[info.dtype].itemsize)
        raw = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
        return self.convert(raw.view(shape))


@dataclass(frozen=True)
class Stored:
    """A logical weight of the source.

    shape: logical.  format: how it is stored; None for a tensor of another dtype or fewer than two dimensions.
    parts: suffix (formats.DATA, SCALE, GLOBAL) -> where it lies and what becomes of it.
    unused: why nothing here needs it, if so.
    transposed: the experts of a logical [E, N, K] lie there as [E, K, N].
    """

    name: str
    shape: tuple[int, ...]
    format: Format | None
    parts: dict[str, Part]
    unused: str = ""
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.parts[DATA].info.dtype]

    @property
    def nbytes(self) -> int:
        return sum(part.info.stop - part.info.start for part in self.parts.values())


def find_weights(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """Every logical weight of a checkpoint. InputError for a quantization that no dialect reads."""
    _refuse_foreign(config)
    left, found = dict(index), {}
    for dialect in (import_module(f"{__name__}.{name}") for name in DIALECTS):
        for stored in dialect.find(left, config).values():
            if stored.name in found:
                raise InputError(f"The checkpoint holds {stored.name} twice, in two forms: it is damaged; download it again.")
            found[stored.name] = stored
            if stored.dtype == torch.float8_e5m2 and not stored.unused:
                raise InputError(f"{stored.name} is float8 e5m2, and only e4m3 is supported: convert the original checkpoint instead.")
            for part in stored.parts.values():
                left.pop(part.info.name)
    return found


def unused_reason(name: str) -> str:
    """Why nothing here needs a tensor of that name, empty if it is needed."""
    return next((reason for pattern, reason in UNUSED.items() if re.fullmatch(pattern, name)), "")


def quantization(config: dict) -> dict:
    """The quantization_config of a checkpoint, or of its text model; empty if it has none."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None) or {}
    if not isinstance(found, dict):
        raise InputError(f"config.json has quantization_config: {found!r:.100} where an object is needed: download it again.")
    return found


def config_groups(config: dict) -> list[dict]:
    """How compressed-tensors quantizes weights: the "weights" of each config group that has some."""
    groups = quantization(config).get("config_groups")
    values = groups.values() if isinstance(groups, dict) else ()
    return [g["weights"] for g in values if isinstance(g, dict) and isinstance(g.get("weights"), dict)]


def _refuse_foreign(config: dict) -> None:
    found = quantization(config)
    method = found.get("quant_method")
    if isinstance(method, str) and method in REFUSED:
        raise InputError(f"{REFUSED[method]} checkpoints are not supported: convert the original checkpoint instead.")
    if method not in KNOWN:
        raise InputError(f"This checkpoint's quantization {method!r:.100} is not supported yet: convert its BF16 or block-FP8 form.")
    if isinstance(transform := found.get("transform_config"), dict) and transform.get("config_groups"):
        raise InputError("This checkpoint's weights are rotated (transform_config), which is not supported: convert the original checkpoint instead.")


def companion(index: dict[str, TensorInfo], weight: TensorInfo, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> TensorInfo:
    """What belongs to a weight. InputError if it is missing, or has another type or shape."""
    info = index.get(name)
    if info is None:
        raise InputError(f"{weight.name} is quantized, and its {name} is missing: the checkpoint is incomplete; download it again.")
    # A single number is written with any number of dimensions.
    same = info.shape == shape or (math.prod(shape) == math.prod(info.shape) == 1 and len(shape) == 0)
    if info.dtype not in dtypes or not same:
        raise InputError(
            f"{name} is {info.dtype} {list(info.shape)}, but {weight.name} {list(weight.shape)} needs {' or '.join(dtypes)} "
            f"{list(shape)}: the checkpoint is damaged, or its quantization is not supported."
        )
    return info


def packed(name: str, weight: TensorInfo, per_item: int, fmt: Format, scale: Part, **more: Part) -> Stored:
    """A 2-D sub-byte weight, [N, K / per_item] in whole blocks, whose data are bytes in this package's order already."""
    return Stored(name, (weight.shape[0], weight.shape[1] * per_item), fmt, {DATA: Part(weight, as_bytes), SCALE: scale, **more})


def blocks_of(weight: TensorInfo, k: int, fmt: Format) -> tuple[int, int]:
    """The shape of a weight's block scales, [N, K / block]. InputError if K is not in whole blocks."""
    width = fmt.block[1]
    if len(weight.shape) != 2 or k % width:
        raise InputError(f"{weight.name} {list(weight.shape)} is no matrix of whole blocks of {width}, which {fmt.name} needs.")
    return weight.shape[0], k // width


def read_rows(source: Source, stored: Stored, start: int, stop: int) -> PackedTensor | Tensor:
    """Rows start … stop − 1 of a weight seen as [rows, K] (a vector is one column); start is on a block edge, or inside of
    a block that they do not leave. Of a transposed one, all or part of the rows of one expert.

    A PackedTensor where the weight has a format, else a Tensor [stop − start, …]. The bytes are as in the source.
    """
    if stored.transposed:
        return _read_transposed(source, stored, start, stop)
    *lead, k = stored.shape if len(stored.shape) > 1 else (*stored.shape, 1)
    if stored.format is None:
        data = stored.parts[DATA].read(source, start, stop, math.prod(lead))
        return data if len(stored.shape) > 1 else data.view(-1)
    shape = (stop - start, k)
    rows = stored.format.block[0] if stored.format.block else 1
    parts = {}
    for suffix, (_, found) in stored.format.parts(shape, shape[:1]).items():
        if suffix == DATA:
            part = stored.parts[suffix].read(source, start, stop, math.prod(lead))
        elif suffix == SCALE:
            part = stored.parts[suffix].read(source, start // rows, -(-stop // rows), math.prod(lead[:-1]) * -(-lead[-1] // rows))
        else:
            part = stored.parts[suffix].read(source, 0, 1, 1)
        parts[suffix] = part.view(found)
    return PackedTensor.from_parts(stored.format, shape, shape[:1], parts)


def _read_transposed(source: Source, stored: Stored, start: int, stop: int) -> PackedTensor:
    e, n, k = stored.shape
    expert = start // n
    whole = stored.parts[DATA].read(source, expert * k, (expert + 1) * k, e * k)
    data = whole.T[start - expert * n : stop - expert * n]
    return PackedTensor(stored.format, (stop - start, k), (stop - start,), data)
