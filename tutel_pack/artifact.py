"""The artifact: a folder of plain safetensors files and one packed.json, written last.

Writer and reader of both. Files are laid out from names, dtypes and shapes alone, so that any worker can write any
part in place, in any order; the reader maps them and copies nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tutel_pack.errors import InputError
from tutel_pack.formats import PackedTensor, Format, get_format
from tutel_pack.spec import ModelSpec

MANIFEST = "packed.json"
SCHEMA = 1
DATA_ALIGN, TENSOR_ALIGN, EXPERT_ALIGN = 4096, 256, 4096
"""Bytes: where a file's data starts, where a tensor starts, where a tensor of three or more dimensions starts."""

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """One canonical tensor of an artifact.

    format None: stored plainly with `dtype`, as the source had it. Otherwise packed, rows in `segments`.
    """

    file: str
    shape: tuple[int, ...]
    format: Format | None = None
    segments: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def stored(self, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What the safetensors file holds for it: stored name -> (dtype, shape)."""
        if self.format is None:
            return {name: (self.dtype, self.shape)}
        return {name + suffix: part for suffix, part in self.format.parts(self.shape, self.segments).items()}

    @property
    def nbytes(self) -> int:
        return sum(math.prod(s) * d.itemsize for d, s in self.stored("").values())

    def to_json(self) -> dict:
        if self.format is None:
            return {"file": self.file, "format": "plain", "dtype": DTYPE_NAMES[self.dtype], "shape": list(self.shape)}
        block = {"block": list(self.format.block)} if self.format.block else {}
        packed = {"file": self.file, "format": self.format.name, **block, "shape": list(self.shape)}
        return {**packed, "segments": list(self.segments)}

    @classmethod
    def from_json(cls, data: dict) -> Entry:
        file, shape = data["file"], tuple(data["shape"])
        if data["format"] == "plain":
            return cls(file, shape, dtype=DTYPES[data["dtype"]])
        fmt = get_format(data["format"])
        if fmt.block:
            fmt = fmt.with_block(tuple(data["block"]))
        return cls(file, shape, fmt, tuple(data["segments"]))


@dataclass(frozen=True)
class Manifest:
    """packed.json as an object.

    source: {"repo", "commit"}.  recipe: what chose the formats, as the user asked for it.
    tensors: canonical name -> Entry.  files: name -> {"size", "sha256"} of every file beside packed.json.
    errors: tensor -> {"rms"}, the relative root-mean-square error of what was quantized here; for experts also
        {"worst_expert", "worst_rms"}.
    skipped: source tensor -> why it is not in the artifact.
    """

    source: dict
    spec: ModelSpec
    recipe: dict
    tensors: dict[str, Entry]
    files: dict[str, dict] = field(default_factory=dict)
    errors: dict[str, dict] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict:
        data = {"schema": SCHEMA, **vars(self), "spec": self.spec.to_json()}
        return {**data, "tensors": {name: entry.to_json() for name, entry in self.tensors.items()}}

    @classmethod
    def from_json(cls, data: dict) -> Manifest:
        """InputError if it is damaged or of another schema."""
        if data.get("schema") != SCHEMA:
            raise InputError(
                f"This artifact has schema {data.get('schema')!r}, this tutel-pack reads schema {SCHEMA}: "
                "use the matching version or convert again."
            )
        try:
            fields = {k: data[k] for k in ("source", "recipe", "files", "errors", "skipped")}
            tensors = {name: Entry.from_json(entry) for name, entry in data["tensors"].items()}
            return cls(spec=ModelSpec.from_json(data["spec"]), tensors=tensors, **fields)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise InputError(f"{MANIFEST} is damaged ({type(e).__name__}: {e}): convert again.") from e


class FileWriter:
    """One safetensors file, laid out at once and then written in place, in any order, by any thread.

    tensors: stored name -> (dtype, shape), in file order. Errors of the file system come as OSError.
    """

    def __init__(self, path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]):
        self.path = path
        header, self._places, self.size = lay_out(tensors)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._fd, self.size)
        self._pwrite(header, 0)

    def write(self, name: str, index: tuple[int, ...], part: Tensor) -> None:
        """Put a contiguous part of a stored tensor where it belongs: `index` is the position of its first item."""
        offset, dtype, shape = self._places[name]
        assert part.dtype == dtype, f"{name} is {dtype}, its part is {part.dtype}"
        items = sum(i * math.prod(shape[d + 1 :]) for d, i in enumerate(index))
        assert items + part.numel() <= math.prod(shape), f"a part of {name} at {index} runs over its end"
        self._pwrite(part.contiguous().reshape(-1).view(torch.uint8).numpy(), offset + items * dtype.itemsize)

    def _pwrite(self, data, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def close(self) -> None:
        """Flush to the disk."""
        os.fsync(self._fd)
        os.close(self._fd)


def lay_out(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, tuple], int]:
    """(header bytes, name -> (file offset, dtype, shape), file size) of a safetensors file with aligned tensors.

    safetensors allows no gap between tensors, so gaps are U8 tensors `__pad.N`; spaces fill up the header.
    """
    header, places, end = {"__metadata__": {"format": "pt"}}, {}, 0
    for name, (dtype, shape) in tensors.items():
        gap = -end % (EXPERT_ALIGN if len(shape) > 2 else TENSOR_ALIGN)
        if gap:
            header[f"__pad.{len(places)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
        start, end = end + gap, end + gap + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        places[name] = start, dtype, shape
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGN)
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: (base + o, d, s) for n, (o, d, s) in places.items()}, base + end


def describe_file(path: Path) -> dict:
    """{"size": bytes, "sha256": hex digest} of a file, by reading it."""
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        return {"size": f.tell(), "sha256": digest}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write packed.json, which makes the folder an artifact, and flush it to the disk."""
    with open(folder / MANIFEST, "w", encoding="utf-8") as f:
        json.dump(manifest.to_json(), f, indent=1)
        f.flush()
        os.fsync(f.fileno())


class Artifact:
    """A packed artifact opened for reading. Tensors are views of the mapped files: nothing is copied.

    InputError if `path` holds none, if a file is missing or has another size than the manifest says, or if what a
    file holds is not what the manifest says.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.manifest = Manifest.from_json(_read_manifest(self.path))
        for name, facts in self.manifest.files.items():
            _check_file(self.path, name, facts["size"])
        if stray := {e.file for e in self.manifest.tensors.values()} - set(self.manifest.files):
            raise InputError(f"{MANIFEST} in {self.path} uses files that it does not list ({min(stray)!r}): convert again.")
        self._files: dict[str, safe_open] = {}

    @property
    def spec(self) -> ModelSpec:
        return self.manifest.spec

    @property
    def nbytes(self) -> int:
        """Bytes of all listed files."""
        return sum(f["size"] for f in self.manifest.files.values())

    def load(self, name: str) -> Tensor | PackedTensor:
        """The tensor of that canonical name: a plain Tensor, or a PackedTensor."""
        try:
            entry = self.manifest.tensors[name]
        except KeyError:
            raise InputError(f"The artifact {self.path} lacks the tensor {name}: convert again.") from None
        parts = {n: self._stored(entry.file, n, *part) for n, part in entry.stored(name).items()}
        if entry.format is None:
            return parts[name]
        parts = {n.removeprefix(name): part for n, part in parts.items()}
        return PackedTensor.from_parts(entry.format, entry.shape, entry.segments, parts)

    def _stored(self, file: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        try:
            if file not in self._files:
                self._files[file] = safe_open(self.path / file, "pt")
            tensor = self._files[file].get_tensor(name)
        except SafetensorError as e:
            raise InputError(f"{self.path / file} cannot be read ({e}): convert again.") from e
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise InputError(
                f"{name} in {self.path / file} is {tensor.dtype} {tuple(tensor.shape)} where {MANIFEST} says "
                f"{dtype} {shape}: convert again."
            )
        return tensor

    def verify(self, progress: Callable[[Iterable], Iterable] = iter) -> list[str]:
        """Names of the files whose bytes are not those that were written, by their digests."""
        files = self.manifest.files
        return [name for name in progress(files) if describe_file(self.path / name) != files[name]]


def _read_manifest(folder: Path) -> dict:
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(_not_an_artifact(folder)) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise InputError(f"{folder / MANIFEST} is damaged ({e}): convert again.") from e
    if not isinstance(data, dict):
        raise InputError(f"{folder / MANIFEST} is damaged (not a JSON object): convert again.")
    return data


def _not_an_artifact(folder: Path) -> str:
    if (folder / "config.json").exists():
        return f"{folder} is a checkpoint, not a packed artifact: convert it first with `tutel-convert {folder}`."
    if folder.exists():
        return f"{folder} is not a packed artifact (it has no {MANIFEST}): name a folder that tutel-convert wrote."
    return f"No packed artifact at {folder}: name a folder that tutel-convert wrote."


def _check_file(folder: Path, name: str, size: int) -> None:
    if not re.fullmatch(r"[\w][\w.+-]*(/[\w][\w.+-]*)*", name):
        raise InputError(f"{MANIFEST} in {folder} names the file {name!r}, which leaves the folder: convert again.")
    try:
        found = (folder / name).stat().st_size
    except FileNotFoundError:
        raise InputError(f"The artifact {folder} lacks its file {name}: copy or convert it again.") from None
    if found != size:
        raise InputError(
            f"{folder / name} has {found} bytes where {MANIFEST} says {size}: the copy is incomplete; copy or convert it again."
        )
