"""The choice of the triton backend, and of its tiles."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.kernels.test_products import x_of
from torch._subclasses.fake_tensor import FakeTensorMode

from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.kernels import ops, torch_backend
from tutel_pack.kernels.triton import backend, tiles
from tutel_pack.kernels.triton.chips import CHIPS, Chip
from tutel_pack.kernels.triton.launch import Launch
from tutel_pack.kernels.triton.matmul import is_served, operand, problem_of
from tutel_pack.kernels.triton.tiles import Problem, Tile, tile_for

H100 = CHIPS["sm_90"]
EXPERTS = Problem("mxfp4", 128, 1536, 2048, 8, 128)


def test_gpus_take_it_by_default():
    assert ops.get_ops("auto", "cuda").name == "triton"
    assert ops.get_ops("auto", "cpu").name != "triton"


def test_a_cpu_takes_it_in_the_interpreter_only(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match="runs on GPUs; on a CPU choose another"):
        ops.get_ops("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ops.get_ops("triton", "cpu").name == "triton"


def test_without_triton_torch_serves(monkeypatch):
    monkeypatch.setattr(ops, "find_spec", lambda name: None)
    assert ops.get_ops("auto", "cuda").name == "torch"
    with pytest.raises(InputError, match=r"needs the package triton: pip install 'tutel-pack\[triton\]'"):
        ops.get_ops("triton", "cuda")


@pytest.mark.parametrize("device, expected", [("cuda:1", "cuda:1"), ("cpu", None)])
def test_kernels_run_where_their_tensors_are(device, expected, monkeypatch):
    """Triton launches on the current device, whatever the tensors'."""
    current, launched = [None], []

    @contextmanager
    def entered(device):
        current.append(str(device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    with FakeTensorMode():
        x = torch.empty(2, device=device)
    monkeypatch.setattr(Launch, "options", {})
    kernel = {(1,): lambda n, x: launched.append(current[-1])}
    Launch(kernel, (1,), {"n": 3, "x": x}).run()
    assert launched == [expected] and current == [None]


def test_it_has_every_operation():
    names = [name for name in vars(ops.Ops) if not name.startswith("_") and name not in ops.FUSED]
    assert len(names) > 10 and all(callable(getattr(backend, name)) for name in names)


@pytest.mark.parametrize(
    "rows, bm",
    [(8, 16), (128 * 16, 16), (128 * 16 + 1, 32), (128 * 100, 128), (1 << 20, 128)],
)
def test_a_tile_has_about_an_experts_tokens(rows, bm):
    assert tile_for(H100, replace(EXPERTS, rows=rows)).bm == bm


def test_few_programs_share_k():
    """A single token and a matrix of 576 rows leave most of a chip idle; a wide one does not."""
    narrow, wide = Problem("fp8", 1, 576, 7168, 1, 64), Problem("fp8", 1, 32768, 7168, 1, 64)
    assert tile_for(H100, narrow).split == tiles.MOST_PARTS and tile_for(H100, wide).split == 1
    assert tile_for(H100, replace(narrow, k=256)).split == 1, "there is nothing to share"


def test_narrow_blocks_make_narrow_steps():
    steps = {}
    for block in ((128, 128), (32, 32), (1, 96)):
        w = PackedTensor.empty(FORMATS["fp8"].with_block(block), (64, 96), (64,), "meta")
        steps[block] = tile_for(H100, problem_of(operand(w), 1, torch.bfloat16)).bk
    assert steps == {(128, 128): 64, (32, 32): 32, (1, 96): 64}


def test_float32_tokens_have_tiles_of_their_own():
    """Where they are no parts: on NVIDIA's chips; AMD's matrix units multiply them."""
    wide = replace(EXPERTS, float32=True)
    assert tile_for(H100, wide) == Tile(16, **tiles.FLOAT32)
    assert tile_for(CHIPS["gfx942"], wide) == tile_for(CHIPS["gfx942"], EXPERTS)
    parts = replace(wide, in_parts=True)
    assert tile_for(H100, parts) == replace(tile_for(H100, EXPERTS), bk=tiles.WIDE_COLUMNS)
    assert tile_for(H100, replace(parts, rows=1 << 20)).bm == tile_for(H100, replace(wide, rows=1 << 20)).bm == 32


@pytest.mark.parametrize("fmt, in_parts", [("fp8", True), ("mxfp4", True), ("nvfp4", True), ("int4", False)])
def test_decoded_weights_that_are_bfloat16_take_parts(fmt, in_parts):
    w = operand(PackedTensor.empty(FORMATS[fmt], (64, 96), (64,), "meta"))
    assert problem_of(w, 1, torch.float32).in_parts == in_parts
    assert not problem_of(w, 1, torch.bfloat16).in_parts


def test_an_unknown_chip_takes_its_vendors_tiles():
    assert tile_for(Chip("sm_86", "cuda", 84, 99 << 10, 255, 32), EXPERTS).stages == 2
    assert tile_for(Chip("gfx90a", "hip", 104, 64 << 10, 512, 64), EXPERTS).instruction.startswith("v_mfma")


@pytest.mark.parametrize(
    "fmt, shape, segments",
    [
        (FORMATS["fp8"], (20, 98), (20,)),  # a row is no whole number of words
        (FORMATS["fp8"].with_block((24, 24)), (20, 96), (20,)),  # blocks are not made of steps
        (FORMATS["nvfp4"], (30, 96), (10, 10, 10)),
    ],
    ids=["odd rows", "odd blocks", "three segments"],
)
def test_what_is_not_served_is_torch_s(fmt, shape, segments):
    w = PackedTensor.empty(fmt, shape, segments)
    assert not is_served(w)
    for part in w.parts().values():
        if part is not None:
            part.view(torch.uint8).zero_()
    x = x_of(2, shape[1], dtype=torch.float32)
    assert torch.equal(backend.linear(x, w, None), torch_backend.linear(x, w, None))


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_plain_weight_is_read_where_it_is(dtype, of_x, monkeypatch):
    """By one kernel: nothing is converted, which would read it, write more, and read that. In x's dtype, by torch."""
    launched, torchs = [], []
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch.arguments["w"]))
    monkeypatch.setattr(torch_backend, "linear", lambda *a: torchs.append(a))
    w = torch.zeros(20, 96, dtype=dtype)
    weights = [w]
    if dtype == torch.bfloat16:
        weights.append(PackedTensor(FORMATS["bf16"], (20, 96), (20,), w))
    for weight in weights:
        backend.linear(torch.zeros(2, 96, dtype=of_x), weight, None)
    if dtype == of_x:
        assert not launched and len(torchs) == len(weights)
    else:
        assert len(launched) == len(weights) and not torchs
        assert all(read.data_ptr() == w.data_ptr() and read.dtype == dtype for read in launched)


def test_a_plain_weight_with_gaps_is_torch_s():
    x, w = x_of(2, 48, dtype=torch.float32), x_of(20, 96, dtype=torch.bfloat16)[:, :48]
    assert torch.equal(backend.linear(x, w, None), torch_backend.linear(x, w, None))
