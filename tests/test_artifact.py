"""Artifacts: plain aligned safetensors files that anybody can read, mapped without a copy, and never trusted."""

import json
import os
import re
import shutil
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoints import garbled, qwen3_config, qwen3_weights, read_stored, tree, write_checkpoint
from tutel_pack.artifact import MANIFEST, Artifact, Entry, FileWriter, Manifest, describe_file, lay_out
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.quant.codec import decode

GATE_UP, EMBED = "model.layers.0.mlp.experts.gate_up_proj", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One artifact, which no test may change."""
    folder, config = tmp_path_factory.mktemp("artifact"), qwen3_config(num_hidden_layers=2)
    source = write_checkpoint(folder / "model", qwen3_weights(config), config)
    return convert_checkpoint(str(source), folder / "out", fmt="nvfp4")


@pytest.fixture
def artifact(made, tmp_path):
    """A copy to break."""
    return shutil.copytree(made, tmp_path / "out")


def refusal(call) -> str:
    started = time.process_time()
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert time.process_time() - started < 2 and "\n" not in text and len(text) <= 1000
    return text


def read_all(folder) -> None:
    """What a command does with an artifact: open it, load everything, decode it."""
    found = Artifact(folder)
    for name in found.manifest.tensors:
        loaded = found.load(name)
        if isinstance(loaded, PackedTensor):
            decode(loaded)


# Reading


def test_the_files_are_readable_without_this_package(made):
    stored, found = read_stored(made), Artifact(made)
    expected = [part for name, entry in found.manifest.tensors.items() for part in entry.stored(name)]
    assert sorted(stored) == sorted(expected)
    packed = found.load(GATE_UP)
    for suffix, part in packed.parts().items():
        assert torch.equal(stored[GATE_UP + suffix].view(torch.uint8), part.view(torch.uint8))
    assert torch.equal(stored[EMBED], found.load(EMBED))
    with safe_open(made / "base.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_everything_is_aligned(made):
    seen = set()
    for path in made.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        assert start % 4096 == 0
        header = json.loads(data[8:start])
        header.pop("__metadata__")
        for name, tensor in header.items():
            if not name.startswith("__pad."):
                assert (start + tensor["data_offsets"][0]) % (4096 if len(tensor["shape"]) == 3 else 256) == 0, name
                seen.add(len(tensor["shape"]))
        assert max(tensor["data_offsets"][1] for tensor in header.values()) == len(data) - start
        pads = [data[start + t["data_offsets"][0] : start + t["data_offsets"][1]] for n, t in header.items() if n.startswith("__pad.")]
        assert pads and not any(map(any, pads))
    assert seen == {1, 2, 3}


def test_loading_copies_nothing(made):
    found, mapped = Artifact(made), []
    for name in found.manifest.tensors:
        loaded = found.load(name)
        mapped += [loaded] if isinstance(loaded, torch.Tensor) else [part for part in loaded.parts().values() if part is not None]
    ranges = []
    for line in open("/proc/self/maps"):
        if str(made) in line:
            ranges.append([int(end, 16) for end in line.split()[0].split("-")])
    for part in mapped:
        assert any(start <= part.data_ptr() and part.data_ptr() + part.nbytes <= stop for start, stop in ranges)
        assert part.data_ptr() % 256 == 0
    assert not any(start <= torch.ones(64).data_ptr() < stop for start, stop in ranges)  # what a copy would look like


def resident() -> int:
    """Bytes of memory that are this process's own, mapped files not counted."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024


def test_loading_a_large_file_takes_no_memory(tmp_path):
    entry = Entry("base.safetensors", (64, 1024, 1024), FORMATS["fp8"], (1024,))
    with FileWriter(tmp_path / "base.safetensors", entry.stored("w")) as writer:
        writer.write("w", (0,), torch.zeros(1, 1024, 1024).to(torch.float8_e4m3fn))
    spec = _spec()
    (tmp_path / MANIFEST).write_text(json.dumps(Manifest(
        {"repo": "x", "commit": None}, spec, {}, {"w": entry}, {"base.safetensors": describe_file(tmp_path / "base.safetensors")},
    ).to_json()))  # fmt: skip
    before = resident()
    loaded = Artifact(tmp_path).load("w")
    views = [loaded.expert(e) for e in range(64)]
    assert resident() - before < 8 << 20 < loaded.nbytes
    # The measure does see a copy: in one piece, which the allocator cannot put where something was freed before.
    copy = loaded.data.clone()
    assert resident() - before > 32 << 20 and len(copy) == len(views)


def _spec():
    from tutel_pack.convert.families import qwen3_moe

    return qwen3_moe.spec(qwen3_config())


def test_a_tensor_that_is_not_there(made):
    assert "lacks the tensor nothing" in refusal(lambda: Artifact(made).load("nothing"))


@pytest.mark.parametrize("make, part", [
    (lambda p: p, "No packed artifact at"), (lambda p: p.mkdir(), "it has no packed.json"), (lambda p: p.write_text("x"), "not a packed artifact"),
    (lambda p: (p.mkdir(), (p / "config.json").write_text("{}")), "convert it first with `tutel-convert"),
    (lambda p: (p.mkdir(), (p / MANIFEST).mkdir()), "cannot be read"), (lambda p: p.symlink_to(p), "cannot be read"),
])  # fmt: skip
def test_paths_that_hold_no_artifact(tmp_path, make, part):
    make(tmp_path / "out")
    assert part in refusal(lambda: Artifact(tmp_path / "out"))


def test_a_path_that_is_too_long(tmp_path):
    refusal(lambda: Artifact(tmp_path / ("n" * 300)))


# Digests


def test_verify_finds_one_flipped_byte(artifact):
    found = Artifact(artifact)
    assert found.verify() == []
    for name in found.manifest.files:
        data = bytearray((artifact / name).read_bytes())
        data[-1] ^= 1
        (artifact / name).write_bytes(data)
        assert found.verify() == [name] and Artifact(artifact).verify() == [name]
        data[-1] ^= 1
        (artifact / name).write_bytes(data)


def test_files_that_are_missing_short_or_long(artifact):
    for path in (artifact / "layers-00000.safetensors", artifact / "tokenizer.json"):
        whole = path.read_bytes()
        for data in (whole[:-1], whole + b"\0", b""):
            path.write_bytes(data)
            assert path.name in refusal(lambda: Artifact(artifact)) and "incomplete" in refusal(lambda: Artifact(artifact))
        path.unlink()
        assert "lacks its file " + path.name in refusal(lambda: Artifact(artifact))
        path.mkdir()
        assert "lacks its file " + path.name in refusal(lambda: Artifact(artifact))
        path.rmdir()
        path.write_bytes(whole)
    read_all(artifact)


def test_a_file_of_the_right_size_that_is_no_safetensors(artifact):
    path = artifact / "layers-00000.safetensors"
    for data in (b"\0" * path.stat().st_size, b"\xff" * path.stat().st_size):
        path.write_bytes(data)
        assert "cannot be read" in refusal(lambda: read_all(artifact))


def test_a_file_that_holds_something_else(artifact):
    """Sizes agree, shapes do not: layer 1 is copied over layer 0, padded to its size."""
    manifest = json.loads((artifact / MANIFEST).read_text())
    manifest["tensors"]["model.norm.weight"]["shape"] = [161]
    (artifact / MANIFEST).write_text(json.dumps(manifest))
    assert "model.norm.weight" in refusal(lambda: read_all(artifact))
    manifest["tensors"]["model.norm.weight"] |= {"shape": [160], "file": "layers-00001.safetensors"}
    (artifact / MANIFEST).write_text(json.dumps(manifest))
    assert "model.norm.weight" in refusal(lambda: read_all(artifact))


# packed.json


def test_a_manifest_comes_back_as_it_was(made):
    manifest = Artifact(made).manifest
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert manifest.to_json() == json.loads((made / MANIFEST).read_text())
    blocks = Entry("f", (3, 64, 64), FORMATS["fp8"].with_block((32, 32)), (32, 32))
    assert Entry.from_json(json.loads(json.dumps(blocks.to_json()))) == blocks
    assert manifest.errors[GATE_UP]["rms"] > 0 and set(manifest.errors[GATE_UP]) == {"rms", "worst_expert", "worst_rms"}


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b'{"schema": 1}',
                                  b"{}", b'{"schema": 2}', b'{"schema": "1"}', b'{"schema": null}', b'{"schema": [1]}'])  # fmt: skip
def test_manifests_that_are_none(artifact, text):
    (artifact / MANIFEST).write_bytes(text)
    assert "convert again" in refusal(lambda: Artifact(artifact))


def test_a_manifest_of_a_gigabyte_is_not_read(artifact):
    os.truncate(artifact / MANIFEST, 1 << 30)
    assert "too big" in refusal(lambda: Artifact(artifact))


def test_garbage_in_any_place_of_a_manifest(artifact):
    """Opened and read as before, or refused in one sentence: nothing else."""
    good = json.loads((artifact / MANIFEST).read_text()) | {"skipped": {"a": "b"}}
    good["tensors"] = {name: good["tensors"][name] for name in (GATE_UP, EMBED)}
    good["errors"] = {GATE_UP: good["errors"][GATE_UP]}
    tried = refused = 0
    for bad in garbled(good):
        (artifact / MANIFEST).write_text(json.dumps(bad))
        tried += 1
        try:
            read_all(artifact)
            Artifact(artifact).verify()
        except InputError as e:
            refused += 1
            assert "\n" not in str(e) and len(str(e)) <= 1000
    assert refused > 0.7 * tried > 600


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "..", ".", "", "a//b", "./a", "a\\..\\b", "a\nb", "a\0b"])
def test_file_names_that_leave_the_folder(artifact, name):
    (artifact.parent / "secret").write_text("x")
    good = json.loads((artifact / MANIFEST).read_text())
    good["files"][name] = {"size": 1, "sha256": "0" * 64}
    (artifact / MANIFEST).write_text(json.dumps(good))
    assert "leaves the folder" in refusal(lambda: Artifact(artifact))
    del good["files"][name]
    good["tensors"][EMBED]["file"] = name
    (artifact / MANIFEST).write_text(json.dumps(good))
    assert "not listed" in refusal(lambda: Artifact(artifact))


@pytest.mark.parametrize("changes", [
    {"shape": [12, 192]}, {"shape": [12, 10**30, 160]}, {"shape": [12, -192, 160]}, {"shape": [12.0, 192, 160]}, {"shape": []},
    {"shape": [True, 192, 160]}, {"shape": ["12", 192, 160]}, {"shape": [1, 12, 192, 160]}, {"shape": [192]}, {"shape": 12},
    {"shape": [2**47, 192, 160]}, {"segments": [96, 95]}, {"segments": [96, 97]}, {"segments": [-1, 193]}, {"segments": []},
    {"segments": [192]}, {"segments": [96.0, 96]}, {"segments": "xy"}, {"segments": [96] * 4}, {"segments": [1] * 192},
    {"format": "int3"}, {"format": "plain"}, {"format": "mxfp4"}, {"format": "fp8"}, {"format": ["nvfp4"]}, {"block": [1, 32]},
    {"block": None}, {"block": [1]}, {"block": [0, 16]}, {"format": "fp8", "block": [10**12, 128]}, {"format": "fp8", "block": [128, 1000]},
    {"format": "fp8", "block": [0, 0]}, {"format": "plain", "dtype": "F4"}, {"format": "plain", "dtype": None},
    {"format": "plain", "dtype": "U8"}, {"file": None}, {"file": "base.safetensors"}, {"file": "config.json"},
])  # fmt: skip
def test_entries_that_lie(artifact, changes):
    good = json.loads((artifact / MANIFEST).read_text())
    good["tensors"][GATE_UP] |= changes
    (artifact / MANIFEST).write_text(json.dumps(good))
    refusal(lambda: read_all(artifact))


# Writing


def test_parts_are_written_in_place_in_any_order(tmp_path):
    tensors = {"a": (torch.float32, (3,)), "b": (torch.bfloat16, (4, 2, 3)), "c": (torch.uint8, (5, 7)), "empty": (torch.float32, (0, 2))}
    b, c = torch.randn(4, 2, 3).bfloat16(), torch.arange(35, dtype=torch.uint8).view(5, 7)
    with FileWriter(tmp_path / "f.safetensors", tensors) as writer:
        for e in (3, 0, 2, 1):
            writer.write("b", (e, 1), b[e, 1:])
            writer.write("b", (e, 0), b[e, :1])
        writer.write("c", (2,), c[2:])
        writer.write("a", (0,), torch.tensor([1.0, 2.0, 3.0]))
        writer.write("c", (), c[:2].T.contiguous().T)  # not contiguous
    found = load_file(tmp_path / "f.safetensors")
    assert torch.equal(found["b"], b) and torch.equal(found["c"], c) and found["a"].tolist() == [1, 2, 3] and found["empty"].numel() == 0
    assert list(lay_out(tensors)[1]) == list(tensors)


def test_a_part_that_does_not_fit_is_a_bug(tmp_path):
    with FileWriter(tmp_path / "f.safetensors", {"a": (torch.float32, (3,)), "b": (torch.float32, (3,))}) as writer:
        for index, part in (((1,), torch.ones(3)), ((0,), torch.ones(3).half())):
            with pytest.raises(AssertionError):
                writer.write("a", index, part)


def test_a_failed_file_is_closed_too(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(KeyError), FileWriter(tmp_path / "f.safetensors", {"a": (torch.float32, (3,))}) as writer:
            writer.write("b", (), torch.ones(3))
    assert len(os.listdir("/proc/self/fd")) == before


def test_layout_depends_on_names_and_sizes_alone(tmp_path):
    tensors = {f"t{i}": (torch.uint8, (i + 1,)) for i in range(40)}
    files = []
    for i in range(2):
        FileWriter(tmp_path / f"{i}", tensors).close()
        files.append((tmp_path / f"{i}").read_bytes())
    assert files[0] == files[1] and tree(tmp_path)
