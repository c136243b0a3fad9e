"""The index and the headers: what a checkpoint holds, and one sentence for each way in which they can lie."""

import json
import os

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from tests.hub_server import HubServer
from tutel_pack.convert import source as source_module
from tutel_pack.convert.headers import BITS, INDEX, TensorInfo, read_index
from tutel_pack.convert.source import open_source
from tutel_pack.errors import InputError

F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path, header, data=b"", length=None):
    """A safetensors file with any header: a dictionary, or the bytes of one."""
    raw = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def write_index(folder, weight_map):
    raw = weight_map if isinstance(weight_map, bytes) else json.dumps({"weight_map": weight_map}).encode()
    (folder / INDEX).write_bytes(raw)


@pytest.fixture
def sharded(tmp_path):
    """Two shards and their index: a and c in the first, b in the second."""
    save_file({"a": torch.ones(4), "c": torch.zeros(2, 2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.full((3,), 7.0)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"b": "two.safetensors", "a": "one.safetensors", "c": "one.safetensors"})
    return tmp_path


def refusal(folder, *parts):
    """The InputError that reading the folder gives: one sentence with all the parts."""
    with pytest.raises(InputError) as caught:
        read_index(open_source(str(folder)))
    text = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in text
    assert [part for part in parts if part not in text] == [], text
    return text


# What is read


def test_all_types_agree_with_safetensors(tmp_path):
    types = {torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
             torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
             torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
             torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
             torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
             torch.float4_e2m1fn_x2: "F4"}  # fmt: skip
    # Three rows of four bytes each or a multiple: every byte differs, so a wrong place shows.
    tensors = {name: torch.arange(3 * 4 * type.itemsize, dtype=torch.uint8).reshape(3, -1).view(type)
               for type, name in types.items() if type is not torch.bool}
    tensors |= {"BOOL": torch.tensor([True, False]), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 5)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = open_source(str(tmp_path))
    found = read_index(source)
    assert found.keys() == tensors.keys()
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as reference:
        for name, info in found.items():
            slice_ = reference.get_slice(name)
            assert (info.dtype, list(info.shape)) == (slice_.get_dtype(), slice_.get_shape())
            assert info.dtype == name or name in ("scalar", "empty")
            data = tensors[name].contiguous().reshape(-1).view(torch.uint8)
            assert bytes(source.read(info.file, info.start, info.stop)) == bytes(data.tolist())
    assert set(types.values()) | {"F6_E2M3", "F6_E3M2"} == BITS.keys()


def test_types_below_a_byte(tmp_path):
    write(tmp_path / "x.safetensors", {"four": {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]},
                                       "six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [3, 6]}}, b"x" * 6)
    found = read_index(open_source(str(tmp_path)))
    assert found["four"].stop == found["six"].start == found["six"].stop - 3
    write(tmp_path / "x.safetensors", {"odd": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"xx")
    refusal(tmp_path, "'odd'", "2 bytes", "F4 of shape [3]")


def test_the_index_gives_the_order_and_the_place(sharded):
    found = read_index(open_source(str(sharded)))
    assert list(found) == ["b", "a", "c"]
    header = (sharded / "two.safetensors").stat().st_size - 12
    assert found["b"] == TensorInfo("b", "two.safetensors", "F32", (3,), header, header + 12)


def test_a_hub_source_reads_headers_only(sharded, monkeypatch):
    save_file({"big": torch.zeros(1_000_000)}, sharded / "big.safetensors")
    write_index(sharded, {"b": "two.safetensors", "a": "one.safetensors", "big": "big.safetensors"})
    commit = "c" * 40
    with HubServer({"org/model": {commit: sharded}}) as hub:
        hub.use(monkeypatch)
        assert read_index(open_source("org/model")) == read_index(open_source(str(sharded)))
        assert sum(request.sent for request in hub.requests("http://localhost")) < 1000
        (sharded / "two.safetensors").write_bytes((sharded / "two.safetensors").read_bytes()[:-1])
        with pytest.raises(InputError, match="'two.safetensors' is cut off .*: use another revision$"):
            read_index(open_source("org/model"))


def test_stray_files_and_tensors_are_ignored(sharded):
    expected = read_index(open_source(str(sharded)))
    save_file({"a": torch.full((4,), 9.0)}, sharded / "model.safetensors")  # the stray file that must not win
    (sharded / "three.safetensors").write_bytes(b"broken")
    (sharded / "pytorch_model.bin").write_bytes(b"pickle")
    save_file({"a": torch.ones(4), "c": torch.zeros(2, 2), "unnamed": torch.ones(1)}, sharded / "one.safetensors")
    found = read_index(open_source(str(sharded)))
    assert [(info.name, info.file, info.shape) for info in found.values()] == [
        (info.name, info.file, info.shape) for info in expected.values()]


@pytest.mark.parametrize("others", [[], ["consolidated.safetensors"], ["sub/other.safetensors"]])
def test_a_single_file_needs_no_index(tmp_path, others):
    (tmp_path / "sub").mkdir()
    for other in others:
        (tmp_path / other).write_bytes(b"broken")
    write(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, "w": F32}, b"x" * 24)
    assert list(read_index(open_source(str(tmp_path)))) == ["w"]
    (tmp_path / "consolidated.safetensors").unlink(missing_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert read_index(open_source(str(tmp_path)))["w"].file == "weights.safetensors"


def test_padded_headers_are_read(tmp_path):
    write(tmp_path / "model.safetensors", json.dumps({"w": F32}).encode() + b"   ", b"x" * 24)
    info = read_index(open_source(str(tmp_path)))["w"]
    assert info.stop == (tmp_path / "model.safetensors").stat().st_size


# No weights that can be read


@pytest.mark.parametrize("files, parts", [
    ([], ["no weights", "*.safetensors"]),
    (["config.json", "sub/model.safetensors"], ["no weights"]),
    (["pytorch_model.bin"], ["only as pickles", "'pytorch_model.bin'", "refs/pr", "safetensors"]),
    (["pytorch_model-00001-of-00002.bin", "x.gguf"], ["only as pickles"]),
    (["consolidated.00.pth"], ["only as pickles"]),
    (["model.pt"], ["only as pickles"]),
    (["model-Q4_K_M.gguf"], ["GGUF", "original checkpoint", "base_model"]),
    (["Q4/model.gguf"], ["GGUF"]),
    (["a.safetensors", "b.safetensors", "c.pt"], ["2 safetensors files", "no model.safetensors.index.json"]),
])  # fmt: skip
def test_no_weights(tmp_path, files, parts):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"\x80\x04.")
    refusal(tmp_path, tmp_path.name, *parts)


# Files that are cut off or are something else


@pytest.mark.parametrize("size, parts", [
    (0, ["'two.safetensors' is empty"]),
    (7, ["'two.safetensors' is cut off after 7 bytes"]),
    (8, ["cut off in its header"]),
    (20, ["cut off in its header, after 20 of"]),
    (-12, ["cut off after"]),
    (-1, ["cut off after"]),
])
def test_truncated_shards(sharded, size, parts):
    whole = (sharded / "two.safetensors").stat().st_size
    os.truncate(sharded / "two.safetensors", size if size >= 0 else whole + size)
    refusal(sharded, *parts, "'two.safetensors'", "download it again")


def test_a_shard_that_is_one_byte_too_long(sharded):
    with open(sharded / "two.safetensors", "ab") as file:
        file.write(b"x")
    refusal(sharded, "'two.safetensors'", "longer than its header says", "download it again")


def test_all_broken_files_are_named_together(sharded):
    os.truncate(sharded / "one.safetensors", 0)
    os.truncate(sharded / "two.safetensors", 5)
    refusal(sharded, "'one.safetensors' is empty", "'two.safetensors' is cut off", "download it again")


@pytest.mark.parametrize("data, part", [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    (b"<!DOCTYPE html><html>Sign in</html>", "not a safetensors file"),
    ((source_module.MAX_TEXT + 1).to_bytes(8, "little") + b"{}", "header of 100000001 bytes"),
    (b"\xff" * 64, "not a safetensors file"),
])  # fmt: skip
def test_other_files_under_the_name(tmp_path, data, part):
    (tmp_path / "model.safetensors").write_bytes(data)
    refusal(tmp_path, "'model.safetensors'", part, "download it again")


# Headers that lie


@pytest.mark.parametrize("header, parts", [
    (b'{"w": {"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}, "w": {"dtype":"F32","shape":[6],'
     b'"data_offsets":[0,24]}}', ["the key 'w' twice"]),
    (b'{"w": {"dtype":"F32","dtype":"I32","shape":[6],"data_offsets":[0,24]}}', ["the key 'dtype' twice"]),
    (b'{"w": ', ["not valid JSON"]),
    (b"[" * 50_000, ["not valid JSON"]),
    (b"[]", ["not an object"]),
    (b"", ["not valid JSON"]),
    (b'{"\xff": 1}', ["not UTF-8"]),
    (b'{"w": {"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,24]}}', ["digits"]),
    ({"w": 5}, ["tensor 'w'", "no plain dtype"]),
    ({"w": F32 | {"extra": 1}}, ["tensor 'w'", "no plain dtype"]),
    ({"w": F32 | {"dtype": "F33"}}, ["tensor 'w'", "unknown dtype 'F33'"]),
    ({"w": F32 | {"dtype": ["F32"]}}, ["unknown dtype"]),
    ({"w": F32 | {"shape": [-2, -3]}}, ["impossible shape [-2, -3]"]),
    ({"w": F32 | {"shape": [2.0, 3]}}, ["impossible shape"]),
    ({"w": F32 | {"shape": [True, 6]}}, ["impossible shape"]),
    ({"w": F32 | {"shape": "23"}}, ["impossible shape"]),
    ({"w": F32 | {"shape": [1 << 40, 1 << 40]}}, ["impossible shape"]),
    ({"w": F32 | {"shape": [1 << 62, 4, 0], "data_offsets": [0, 0]}}, ["impossible shape"]),
    ({"w": F32 | {"shape": [2, 4]}}, ["24 bytes, which is not F32 of shape [2, 4]"]),
    ({"w": F32 | {"dtype": "BF16"}}, ["24 bytes, which is not BF16 of shape [2, 3]"]),
    ({"w": F32 | {"data_offsets": [0, 23]}}, ["23 bytes"]),
    ({"w": F32 | {"data_offsets": [24, 0]}}, ["impossible data_offsets [24, 0]"]),
    ({"w": F32 | {"data_offsets": [-24, 0]}}, ["impossible data_offsets"]),
    ({"w": F32 | {"data_offsets": [0, 24, 48]}}, ["impossible data_offsets"]),
    ({"w": F32 | {"data_offsets": [1 << 50, (1 << 50) + 24]}}, ["is cut off"]),
    ({"w": F32, "v": F32}, ["tensor 'v'", "overlaps"]),
    ({"w": F32 | {"shape": [3], "data_offsets": [0, 12]}, "v": F32 | {"shape": [4], "data_offsets": [8, 24]}},
     ["tensor 'v'", "overlaps"]),
    ({"w": F32 | {"shape": [5], "data_offsets": [4, 24]}}, ["tensor 'w'", "a gap"]),
    ({"w": F32 | {"shape": [2], "data_offsets": [0, 8]}, "v": F32 | {"shape": [2], "data_offsets": [16, 24]}},
     ["tensor 'v'", "a gap"]),
    ({"w": F32 | {"shape": [5], "data_offsets": [0, 20]}}, ["longer than its header says"]),
    ({"w\n\x1b[2J": F32 | {"shape": [5]}}, [r"'w\n\x1b[2J'"]),
])  # fmt: skip
def test_headers_that_lie(tmp_path, header, parts):
    write(tmp_path / "model.safetensors", {"w": F32}, b"x" * 24)
    assert list(read_index(open_source(str(tmp_path)))) == ["w"], "control: the same file with an honest header"
    write(tmp_path / "model.safetensors", header, b"x" * 24)
    refusal(tmp_path, "'model.safetensors'", "download it again", *parts)


def test_a_header_length_that_lies(tmp_path):
    raw = json.dumps({"w": F32}).encode()
    for length in (len(raw) - 1, len(raw) + 24, len(raw) + 25):
        write(tmp_path / "model.safetensors", raw, b"x" * 24, length=length)
        refusal(tmp_path, "'model.safetensors'", "download it again")


# An index that lies


@pytest.mark.parametrize("path", ["../one.safetensors", "/etc/x.safetensors", "sub\\one.safetensors",
                                  "sub/../../one.safetensors", "./one.safetensors", "", "sub//one.safetensors"])
def test_index_paths_stay_inside(sharded, path):
    write_index(sharded, {"a": "one.safetensors", "b": path})
    refusal(sharded, "paths outside the checkpoint", repr(path))


def test_an_index_may_name_a_subfolder(sharded):
    (sharded / "sub").mkdir()
    (sharded / "two.safetensors").rename(sharded / "sub" / "two.safetensors")
    write_index(sharded, {"b": "sub/two.safetensors"})
    assert read_index(open_source(str(sharded)))["b"].file == "sub/two.safetensors"


def test_a_shard_may_not_be_a_link_out_of_the_folder(sharded, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "two.safetensors"
    (sharded / "two.safetensors").rename(outside)
    (sharded / "two.safetensors").symlink_to(outside)
    refusal(sharded, "'two.safetensors'", "leaves the folder")


def test_missing_files_are_listed(sharded):
    write_index(sharded, {f"t{i}": f"shard-{i}.safetensors" for i in range(8)} | {"a": "one.safetensors"})
    text = refusal(sharded, "missing", "'shard-0.safetensors'", "'shard-4.safetensors' and 3 more", "download it again")
    assert "shard-5" not in text and "one.safetensors" not in text


def test_tensors_absent_from_their_shard_are_listed(sharded):
    write_index(sharded, {"a": "one.safetensors", "b": "one.safetensors", "x": "two.safetensors"})
    text = refusal(sharded, "not in their files", "'b' in 'one.safetensors'", "'x' in 'two.safetensors'")
    assert "'a'" not in text


def test_a_tensor_in_two_shards(sharded):
    save_file({"b": torch.full((3,), 7.0), "a": torch.ones(4)}, sharded / "two.safetensors")
    text = refusal(sharded, "more than one file", "'a'")
    assert "'b'" not in text and "'c'" not in text


@pytest.mark.parametrize("raw, parts", [
    (b'{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', ["the key 'a' twice"]),
    (b'{"weight_map": {"a": "one.safetensors"}, "weight_map": {}}', ["the key 'weight_map' twice"]),
    (b'{"weight_map": {"a": "one.safetens', ["not valid JSON"]),
    (b'{"weight_map": {"\xff": "one.safetensors"}}', ["not UTF-8"]),
    (b"", ["not valid JSON"]),
    (b"[]", ["no weight_map"]),
    (b"{}", ["no weight_map"]),
    (b'{"weight_map": {}}', ["no weight_map"]),
    (b'{"weight_map": {"a": 1}}', ["no weight_map"]),
    (b'{"weight_map": ["a"]}', ["no weight_map"]),
])  # fmt: skip
def test_broken_indexes(sharded, raw, parts):
    write_index(sharded, raw)
    refusal(sharded, f"'{INDEX}'", "download it again", *parts)


def test_an_index_of_pickles(sharded):
    write_index(sharded, {"a": "pytorch_model.bin"})
    (sharded / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refusal(sharded, "not safetensors", "'pytorch_model.bin'")
