"""Which tensors a checkpoint holds and where their bytes lie, from its index and its safetensors headers alone.

Nothing that a file says about itself is trusted: names, shapes and offsets must agree with each other, with the index
and with the size of the file before any of them is used.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch

from tutel_pack.convert.source import MAX_TEXT, Source, is_inside, parse_json
from tutel_pack.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
LFS_POINTER = b"version "  # how the text begins that stands in for a file in a clone made without Git LFS
HEADER_READERS = 8  # a header is two small requests, so waiting dominates


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place: bytes [start, stop) of `file` hold `shape` values of the safetensors type `dtype`."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Broken(Exception):
    """What is wrong with one file."""


def read_index(source: Source) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by name, in the order of the index.

    The index decides: files and tensors that it does not name are ignored. Raises InputError, which lists what is
    missing, broken or contradictory, and ResourceError if the source cannot be reached.
    """
    if INDEX not in source.files:
        file = _only_file(source)
        return _read_headers(source, [file])[file]
    places = _read_weight_map(source)
    headers = _read_headers(source, list(dict.fromkeys(places.values())))
    _refuse(source, "the index names tensors that are not in their files",
            [f"{name!r} in {file!r}" for name, file in places.items() if name not in headers[file]])
    holders = Counter(name for header in headers.values() for name in header)
    _refuse(source, "tensors stand in more than one file", [repr(name) for name in places if holders[name] > 1])
    return {name: headers[file][name] for name, file in places.items()}


def _refuse(source: Source, kind: str, problems: list[str]) -> None:
    """One InputError for all problems of a kind, if there are any: the first five and how many more."""
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InputError(f"{source.name}: {kind}: {', '.join(problems[:5])}{more}: {source.remedy}")


def _only_file(source: Source) -> str:
    """The safetensors file of a checkpoint without an index."""
    top = [file for file in source.files if "/" not in file]
    found = [file for file in top if file.endswith(".safetensors")]
    if SINGLE in found or len(found) == 1:
        return SINGLE if SINGLE in found else found[0]
    if found:
        raise InputError(f"{source.name} has {len(found)} safetensors files and no {INDEX}: add the index")
    if pickles := [file for file in top if any(fnmatch(file, pattern) for pattern in PICKLES)]:
        raise InputError(
            f"{source.name} holds its weights only as pickles ({pickles[0]!r}), which can run code when loaded: use a "
            "revision with safetensors, such as the refs/pr/N that the Hub's safetensors/convert space opens"
        )
    if any(file.endswith(".gguf") for file in source.files):
        raise InputError(f"{source.name} holds only GGUF files, which are quantized already: "
                         "give the original checkpoint, which a model card names as base_model")
    raise InputError(f"{source.name} holds no weights: there is no *.safetensors file at its top level")


def _read_weight_map(source: Source) -> dict[str, str]:
    """Tensor name -> file by the index, all files being there."""
    index = source.read_json(INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise InputError(f"{INDEX!r} in {source.name} has no weight_map of tensor names to files: {source.remedy}")
    files = list(dict.fromkeys(places.values()))
    _refuse(source, "the index names paths outside the checkpoint",
            [repr(file) for file in files if not is_inside(file)])
    _refuse(source, "the index names files that are not safetensors",
            [repr(file) for file in files if not file.endswith(".safetensors")])
    _refuse(source, "files that the index names are missing",
            [repr(file) for file in files if file not in source.files])
    return places


def _read_headers(source: Source, files: list[str]) -> dict[str, dict[str, TensorInfo]]:
    """File -> its tensors. All broken files are found before one error names them."""

    def attempt(file):
        try:
            return _read_header(source, file)
        except _Broken as broken:
            return broken

    with ThreadPoolExecutor(HEADER_READERS) as pool:
        headers = dict(zip(files, pool.map(attempt, files), strict=True))
    _refuse(source, "files are broken", [str(found) for found in headers.values() if isinstance(found, _Broken)])
    return headers


def _read_header(source: Source, file: str) -> dict[str, TensorInfo]:
    size = source.files[file]
    if size < 8:
        raise _Broken(f"{file!r} is empty" if size == 0 else f"{file!r} is cut off after {size} bytes")
    prefix = source.read(file, 0, 8)
    if prefix == LFS_POINTER:
        raise _Broken(f"{file!r} is a Git LFS pointer (`git lfs pull` fetches the file)")
    length = int.from_bytes(prefix, "little")
    if length > MAX_TEXT:
        raise _Broken(f"{file!r} is not a safetensors file (it claims a header of {length} bytes)")
    data_start = 8 + length
    if data_start > size:
        raise _Broken(f"{file!r} is cut off in its header, after {size} of {data_start} bytes")
    try:
        text = source.read(file, 8, data_start).decode("utf-8")
        header = parse_json(text)
    except UnicodeDecodeError:
        raise _Broken(f"the header of {file!r} is not UTF-8") from None
    except ValueError as error:
        raise _Broken(f"the header of {file!r} {error}") from None
    if not isinstance(header, dict):
        raise _Broken(f"the header of {file!r} is not an object")
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(name, file, entry, data_start) for name, entry in header.items()}
    _check_layout(file, tensors, data_start, size)
    return tensors


def _parse_entry(name: str, file: str, entry, data_start: int) -> TensorInfo:
    """One header entry, whose byte count must be that of its type and shape."""
    where = f"tensor {name!r} in {file!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _Broken(f"{where} has no plain dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _Broken(f"{where} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape):
        raise _Broken(f"{where} has the impossible shape {shape!r:.100}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Broken(f"{where} has the impossible data_offsets {offsets!r:.100}")
    count = 1
    for extent in shape:
        count *= extent
        if count >= 1 << 63:
            raise _Broken(f"{where} has the impossible shape {shape!r:.100}")
    begin, end = offsets
    if (end - begin) * 8 != count * BITS[dtype]:
        raise _Broken(f"{where} has {end - begin} bytes, which is not {dtype} of shape {shape!r:.100}")
    return TensorInfo(name, file, dtype, tuple(shape), data_start + begin, data_start + end)


def _are_sizes(value) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(file: str, tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """The tensors must cover the file's data exactly, without gaps or overlaps."""
    needed = max((tensor.stop for tensor in tensors.values()), default=data_start)
    if needed > size:
        raise _Broken(f"{file!r} is cut off after {size} of {needed} bytes")
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != position:
            fault = "overlaps the one before it" if tensor.start < position else "leaves a gap before it"
            raise _Broken(f"tensor {tensor.name!r} in {file!r} {fault}")
        position = tensor.stop
    if needed < size:
        raise _Broken(f"{file!r} is longer than its header says: {size} bytes in place of {needed}")
