"""How a checkpoint stores its weights: dialects turn header entries into logical weights that can be read by rows.

A dialect is a module here with `find(index, config) -> dict[str, Stored]`, the weights it recognises by the names and
dtypes in the headers. DIALECTS lists them; each takes what it knows, in order, from what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutel_pack.artifact import DTYPES
from tutel_pack.convert.headers import TensorInfo
from tutel_pack.convert.source import Source
from tutel_pack.errors import InputError
from tutel_pack.formats import Format, PackedTensor

REFUSED = {
    "awq": "AWQ", "gptq": "GPTQ", "gptq_v2": "GPTQ", "auto-round": "AutoRound", "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ", "aqlm": "AQLM", "eetq": "EETQ", "exl2": "EXL2", "exl3": "EXL3", "gguf": "GGUF",
}  # fmt: skip
"""Quantization methods that other engines made from an original checkpoint: that one is the better source."""


@dataclass(frozen=True)
class Stored:
    """A logical weight of the source.

    shape: logical.  format: how it is stored; None for a tensor of another dtype or fewer than two dimensions.
    parts: suffix (formats.DATA, SCALE, GLOBAL) -> where it lies in which file.
    """

    name: str
    shape: tuple[int, ...]
    format: Format | None
    parts: dict[str, TensorInfo]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.parts[""].dtype]

    @property
    def nbytes(self) -> int:
        return sum(info.stop - info.start for info in self.parts.values())


def find_weights(index: dict[str, TensorInfo], config: dict) -> dict[str, Stored]:
    """Every logical weight of a checkpoint. InputError for a quantization that no dialect reads."""
    from tutel_pack.convert.dialects import fp8_block, unquantized

    _refuse_foreign(config)
    left, found = dict(index), {}
    for dialect in (fp8_block, unquantized):
        for name, stored in dialect.find(left, config).items():
            found[name] = stored
            for part in stored.parts.values():
                left.pop(part.name)
    return found


def quantization(config: dict) -> dict:
    """The quantization_config of a checkpoint, empty if it has none."""
    found = config.get("quantization_config") or {}
    if not isinstance(found, dict):
        raise InputError(f"config.json has quantization_config: {found!r:.100} where an object is needed: download it again.")
    return found


def _refuse_foreign(config: dict) -> None:
    method = quantization(config).get("quant_method")
    if isinstance(method, str) and method in REFUSED:
        raise InputError(f"{REFUSED[method]} checkpoints are not supported: convert the original checkpoint instead.")
    if method not in (None, "fp8"):
        raise InputError(f"This checkpoint's quantization {method!r:.100} is not supported yet: convert its BF16 or block-FP8 form.")


def read_rows(source: Source, stored: Stored, start: int, stop: int) -> PackedTensor | Tensor:
    """Rows start … stop − 1 of a weight seen as [rows, K] (a vector is one column); start is on a block edge.

    A PackedTensor where the weight has a format, else a Tensor [stop − start, …]. The bytes are as in the source.
    """
    if stored.format is None:
        return _read(source, stored.parts[""], start, stop)
    shape = (stop - start, stored.shape[-1])
    rows = stored.format.block[0] if stored.format.block else 1
    parts = {}
    for suffix, (dtype, _) in stored.format.parts(shape, (shape[0],)).items():
        first, last = (start, stop) if suffix == "" else (start // rows, -(-stop // rows))
        # Only BF16 block scales are stored narrower than the format has them: widening them is exact.
        parts[suffix] = _read(source, stored.parts[suffix], first, last).to(dtype)
    return PackedTensor.from_parts(stored.format, shape, (shape[0],), parts)


def _read(source: Source, info: TensorInfo, start: int, stop: int) -> Tensor:
    dtype = DTYPES[info.dtype]
    columns = info.shape[-1] if len(info.shape) > 1 else 1
    row = columns * dtype.itemsize
    data = source.read(info.file, info.start + start * row, info.start + stop * row)
    shape = (stop - start, columns) if len(info.shape) > 1 else (stop - start,)
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)
