"""The artifact: a folder of plain safetensors files and one packed.json, written last.

Writer and reader of both. Files are laid out from names, dtypes and shapes alone, so that any worker can write any
part in place, in any order; the reader maps them and copies nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tutel_pack.errors import InputError
from tutel_pack.formats import PackedTensor, Format, get_format
from tutel_pack.spec import General, ModelSpec, spec_from_json

MANIFEST = "packed.json"
SCHEMA = 1
DATA_ALIGN, TENSOR_ALIGN, EXPERT_ALIGN = 4096, 256, 4096
"""Bytes: where a file's data starts, where a tensor starts, where a tensor of three or more dimensions starts."""

_LARGEST_MANIFEST = 1 << 28

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
        block = {}
        if self.format.block:
            block = {"block": list(self.format.block), "scale_dtype": DTYPE_NAMES[self.format.scale_dtype]}
        packed = {"file": self.file, "format": self.format.name, **block, "shape": list(self.shape)}
        return {**packed, "segments": list(self.segments)}

    @classmethod
    def from_json(cls, data: dict) -> Entry:
        """The inverse of to_json. InputError or ValueError if it describes no tensor."""
        file, shape = data["file"], _sizes(data["shape"])
        if data["format"] == "plain":
            return cls(file, shape, dtype=DTYPES[data["dtype"]])
        fmt, segments = get_format(data["format"]), _sizes(data["segments"])
        if len(shape) not in (2, 3) or not segments or sum(segments) != shape[-2]:
            raise ValueError(f"segments {segments} do not add up to the rows of {shape}")
        return cls(file, shape, _with_scale(fmt, shape, data.get("block"), data.get("scale_dtype")), segments)


def _sizes(values: list) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 2**48 for v in values):
        raise ValueError(f"{values!r:.100} is no list of sizes")
    return tuple(values)


def _with_scale(fmt: Format, shape: tuple[int, ...], block: list | None, scale_dtype: str | None) -> Format:
    """Only fp8 has other geometries and scales than its own, and no block reaches far beyond its matrix."""
    edges = _sizes(block) if block is not None else None
    dtype = fmt.scale_dtype if scale_dtype is None else DTYPES[scale_dtype]
    if (edges, dtype) == (fmt.block, fmt.scale_dtype):
        return fmt
    if fmt.name != "fp8" or dtype not in (torch.float32, torch.uint8):
        raise ValueError(f"{fmt.name} has no scales of type {scale_dtype!r:.50} and blocks of {block!r:.50}")
    if edges is None or len(edges) != 2 or not all(1 <= b <= max(128, n) for b, n in zip(edges, shape[-2:])):
        raise ValueError(f"{fmt.name} of shape {shape} has no blocks of {block!r:.50}")
    return fmt.with_scale(edges, dtype)


@dataclass(frozen=True)
class Manifest:
    """packed.json as an object.

    source: {"repo", "commit"}.  recipe: what chose the formats, as the user asked for it.
    tensors: canonical name -> Entry.  files: name -> {"size", "sha256"} of every file beside packed.json.
    errors: tensor -> {"rms"}, the relative root-mean-square error of what was quantized here; for experts also
        {"worst_expert", "worst_rms"}. {"rms": 0.0, "exact": true} of what was cast without loss from another format.
    skipped: source tensor -> why it is not in the artifact.
    """

    source: dict
    spec: ModelSpec | General
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
            tensors = {name: Entry.from_json(entry) for name, entry in data["tensors"].items()}
            found = {k: data[k] for k in ("source", "recipe", "files", "errors", "skipped")}
            manifest = cls(spec=spec_from_json(data["spec"]), tensors=tensors, **found)
            _check_fields(manifest)
            return manifest
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise InputError(f"{MANIFEST} is damaged ({type(e).__name__}: {e}): convert again.") from e


def _check_fields(manifest: Manifest) -> None:
    """ValueError or another for what the readers of a manifest could stumble over. Digests are compared, never used."""
    for name, facts in manifest.files.items():
        _sizes([facts["size"]])
        # Written by us or copied by us: nothing that leaves the folder, hides or breaks a line.
        if {"", ".", ".."} & set(name.split("/")) or "\\" in name or not name.isprintable():
            raise ValueError(f"the file name {name!r} leaves the folder")
    for name, error in manifest.errors.items():
        if manifest.tensors[name].format is None or not _is_error(error):
            raise ValueError(f"the error of {name} is {error!r:.100}")
    if not all(type(text) is str for text in (manifest.source["repo"], manifest.source["commit"] or "", *manifest.skipped.values())):
        raise ValueError("source and skipped must be texts")
    if type(manifest.recipe) is not dict or not all(name.isprintable() for name in manifest.tensors):
        raise ValueError("the recipe is no object, or a tensor has an impossible name")
    if stray := {e.file for e in manifest.tensors.values()} - set(manifest.files):
        raise ValueError(f"tensors are in the file {min(map(str, stray))!r}, which is not listed")


def _is_error(error: dict) -> bool:
    if "exact" in error:
        return error["exact"] is True and error["rms"] == 0
    return "rms" in error and all(type(v) in (int, float) for v in error.values())


class FileWriter:
    """One safetensors file, laid out at once and then written in place, in any order, by any thread.

    tensors: stored name -> (dtype, shape), in file order. Errors of the file system come as OSError.
    As a context it is closed at the end, and flushed to the disk if nothing failed.
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

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, failure, *_) -> None:
        self.close() if failure is None else os.close(self._fd)

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
        self._files: dict[str, safe_open] = {}

    @property
    def spec(self) -> ModelSpec | General:
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
        except (SafetensorError, OSError, ValueError) as e:
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
    file = folder / MANIFEST
    try:
        if file.stat().st_size > _LARGEST_MANIFEST:
            raise InputError(f"{file} is too big for a manifest: convert again.")
        data = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(_not_an_artifact(folder)) from None
    except OSError as e:
        raise InputError(f"{file} cannot be read ({e.strerror}): name a folder that tutel-convert wrote.") from None
    except (ValueError, RecursionError) as e:  # not UTF-8, not JSON, or a number of thousands of digits
        raise InputError(f"{file} is damaged ({e}): convert again.") from e
    if not isinstance(data, dict):
        raise InputError(f"{file} is damaged (not a JSON object): convert again.")
    return data


def _not_an_artifact(folder: Path) -> str:
    if (folder / "config.json").exists():
        return f"{folder} is a checkpoint, not a packed artifact: convert it first with `tutel-convert {folder}`."
    if folder.exists():
        return f"{folder} is not a packed artifact (it has no {MANIFEST}): name a folder that tutel-convert wrote."
    return f"No packed artifact at {folder}: name a folder that tutel-convert wrote."


def _check_file(folder: Path, name: str, size: int) -> None:
    file = folder / name
    try:
        found = file.stat().st_size if file.is_file() else None
    except OSError:
        found = None
    if found is None:
        raise InputError(f"The artifact {folder} lacks its file {name}: copy or convert it again.")
    if found != size:
        raise InputError(
            f"{folder / name} has {found} bytes where {MANIFEST} says {size}: the copy is incomplete; copy or convert it again."
        )
