"""Native attention of many tokens: every instruction set, widths of heads, threads, and what must not be read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import test_attention
from tests.kernels.latents import Latents
from tests.kernels.reference import WITH_TILES, worst_tile
from tests.kernels.test_attention import Case
from tests.kernels.test_cpu_attention import instruction_set, threads  # noqa: F401

from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.cpu import backend, native
from tutel_pack.kernels.ops import Layout, get_ops

if not native.LIBRARY.exists():
    pytest.skip("the native kernels were not built: there was no compiler", allow_module_level=True)

CASES = {
    "eight query heads to a head": (128, Case([0], [150], heads=16, kv_heads=2, block=64)),
    "as many heads of keys": (64, Case([0], [75], heads=3, kv_heads=3, block=16)),
    "three query heads to a head": (48, Case([5], [61], heads=6, block=7)),  # half a tile of columns, ragged pairs
    "wide": (512, Case([3], [40], heads=2, kv_heads=1)),
    "more keys than are packed at a time": (64, Case([1000], [100], heads=4, kv_heads=1, block=64)),
    "ends where keys are packed anew": (32, Case([481, 480], [32, 32], block=32)),  # lengths of 513 and 512
    "all kinds of sequences": (64, Case([0, 600, 30, 0, 9], [12, 1, 60, 0, 200], block=16)),
    "window": (64, Case([0, 700], [300, 50], window=70, block=16)),
    "window of one": (32, Case([40], [80], window=1)),
    "window as wide as a step": (32, Case([100], [90], window=32)),
    "window over packed keys": (32, Case([10], [700], window=600)),
}
GROWTH = {"none": 0.0, "slow": 0.05, "fast": 1.0}


@pytest.fixture(params=WITH_TILES)
def tiles(request):
    if request.param not in native.available():
        pytest.skip(f"this processor has no {request.param}")
    native.select(request.param)
    yield
    native.select(None)


@pytest.fixture
def build(monkeypatch):
    def built(width: int, case: Case) -> Case:
        monkeypatch.setattr(test_attention, "D", width)
        return replace(case).build(torch.bfloat16)

    return built


def expected(
    case: Case, window: int | None, scale: float | None = None, sinks: torch.Tensor | None = None
) -> np.ndarray:  # fmt: skip
    """float64 [T · heads, D]"""
    out, shared = [], case.heads // case.kv_heads
    scale = case.q.shape[2] ** -0.5 if scale is None else scale
    for s, (past, new) in enumerate(zip(case.past, case.new)):
        q = case.q[case.layout.starts[s] : case.layout.starts[s + 1]].double()
        k, v = (t[s].double().repeat_interleave(shared, 1) for t in (case.k, case.v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * scale
        query, key = torch.arange(past, past + new)[:, None], torch.arange(past + new)
        logits[:, (key > query) | (key <= query - (window or past + new))] = -torch.inf
        if sinks is not None:
            logits = torch.cat([sinks.double()[:, None, None].expand(-1, new, 1), logits], 2)
        weights = logits.softmax(2)[..., 0 if sinks is None else 1 :]
        out.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(0, 1))
    return torch.cat(out).numpy()


def error(got: torch.Tensor, want: np.ndarray) -> float:
    """Of the worst head of the worst query."""
    got = got.flatten(0, 1)
    return worst_tile(got, want, [np.array([i]) for i in range(len(got))])


def attention(case: Case, **changes) -> torch.Tensor:
    given = {"q": case.q, "keys": case.keys, "values": case.values, "layout": case.layout, "window": case.window}
    return get_ops("cpu").attention(**{**given, **changes})


@pytest.mark.parametrize("name", CASES)
def test_many_tokens(name, build, instruction_set, threads):
    case = build(*CASES[name])
    want, got = expected(case, case.window), attention(case)
    assert got.dtype == torch.bfloat16
    assert error(got, want) < case.limit()
    one_dead = got.clone()
    one_dead[len(got) // 2, -1] = 0
    for wrong in (one_dead, got.flip(1), got.flip(0), attention(case, keys=case.values, values=case.keys)):
        assert error(wrong, want) > case.limit()


@pytest.mark.parametrize("window", [None, 70])
def test_sinks_and_scale(window, build, instruction_set, threads):
    case = build(64, Case([600, 0], [40, 90], heads=8, kv_heads=2, block=16, window=window))
    sinks = torch.tensor([-torch.inf, -50.0, -3.0, 0.0, 1.5, 4.0, 8.0, 2.0]).bfloat16()
    want = expected(case, window, 0.2, sinks)
    assert error(attention(case, scale=0.2, sinks=sinks), want) < case.limit()
    assert error(attention(case, scale=0.2), want) > case.limit()
    assert error(attention(case, scale=0.2, sinks=sinks.flip(0)), want) > case.limit()
    assert error(attention(case, sinks=sinks), want) > case.limit()


def test_logits_that_outgrow_their_sinks(build, instruction_set):
    """Softmax starts from the sink, and from there goes up again and again."""
    case = build(64, Case([0], [300], heads=8, kv_heads=2, block=16))
    case.q *= 12
    sinks = torch.tensor([0.3, -0.7, 1.1, 2.6, -1.9, 0.45, 3.3, -2.2])
    want = expected(case, None, sinks=sinks)
    assert error(attention(case, sinks=sinks), want) < case.limit()
    assert error(attention(case, sinks=sinks + 1), want) > case.limit()


@pytest.mark.parametrize("window", [69, 70, 71])
def test_the_check_sees_a_window(window, build, instruction_set):
    case = build(32, Case([30], [150], window=70, block=16))
    assert (error(attention(case, window=window), expected(case, 70)) < case.limit()) == (window == 70)


@pytest.mark.parametrize("growth", GROWTH)
def test_logits_that_grow(growth, build, instruction_set):
    """By far more than a weight could hold, within keys that are packed together and from these to the next."""
    case = build(64, Case([700], [64], heads=2, kv_heads=1, block=64))
    factor = 1 + GROWTH[growth] * torch.arange(764)[:, None, None]
    case.k[0] = (case.k[0] * factor).bfloat16()
    for position, row in enumerate(case.k[0]):
        case.keys[case.layout.tables[0][position // 64], position % 64] = row
    largest = torch.einsum("qhd,kd->hqk", case.q.double(), case.k[0][:, 0].double()).div(8).cummax(2).values
    assert growth != "fast" or ((largest[:, :, 500] - largest[:, :, 30]) > 200).all()
    assert error(attention(case), expected(case, None)) < case.limit()


def test_chunks_are_all_at_once(build, instruction_set):
    case = build(64, Case([0], [600], heads=8, kv_heads=2, block=16))
    whole, parts = attention(case), []
    for first, last in ((0, 9), (9, 100), (100, 533), (533, 600)):
        layout = Layout([0, last - first], [last], case.layout.tables, torch.empty(0))
        parts.append(attention(case, q=case.q[first:last], layout=layout))
    assert error(torch.cat(parts), whole.double().flatten(0, 1).numpy()) < case.limit()
    assert error(torch.cat(parts[::-1]), whole.double().flatten(0, 1).numpy()) > case.limit()


def test_what_lies_outside_is_not_read(build, tiles):
    """Neither behind a sequence, nor before its first query's window: there the system may have taken blocks away."""
    case = build(64, Case([300], [80], window=50, block=16))
    tables = [case.layout.tables[0].clone()]
    case.keys[tables[0][: 251 // 16]] = case.values[tables[0][: 251 // 16]] = torch.nan
    tables[0][: 251 // 16] = 1 << 40
    got = attention(case, layout=replace(case.layout, tables=tables))
    assert error(got, expected(case, 50)) < case.limit()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_reaches_those_who_see_it(bad, build, tiles):
    case = build(64, Case([0], [200], heads=2, kv_heads=1, block=16))
    case.keys[case.layout.tables[0][6], 4, 0, 0] = bad  # position 100
    got = attention(case)
    assert got[100:].isnan().any() and not got[:100].isnan().any()


def test_who_is_asked(build, instruction_set, monkeypatch):
    asked = []
    monkeypatch.setattr(torch_backend, "attention", lambda q, *_: asked.append(q.dtype) or q)
    case = build(64, Case([3], [9]))
    attention(case)
    attention(case, scale=-1.0)  # the largest product would be the smallest logit
    attention(case, q=case.q.float(), keys=case.keys.float(), values=case.values.float())
    both = [torch.bfloat16, torch.float32]
    assert asked == (both if instruction_set in WITH_TILES else [torch.bfloat16, *both])


LATENTS = {
    "as wide as their values": Latents([70, 33], rank=32, shared=16, nope=16, v=32, new=[70, 33]),
    "wider than their values": Latents([90], heads=5, rank=32, shared=16, nope=32, v=20, new=[90]),
    "narrower than their values": Latents([130, 7], rank=48, shared=16, nope=16, v=48, block=16, new=[40, 7]),
    "with a token of another": Latents([41, 200, 64], rank=32, shared=16, nope=16, v=32, new=[41, 1, 0]),
}


@pytest.mark.parametrize("name", LATENTS)
def test_latents(name, tiles, threads, monkeypatch):  # noqa: F811
    """Of many tokens: as attention to the keys and values of every head."""

    def refuse(*_):
        raise AssertionError("torch was asked")

    monkeypatch.setattr(backend, "attend_heads", refuse)
    case = replace(LATENTS[name]).build(torch.bfloat16)
    got = get_ops("cpu").latent_attention(case.q, case.entries, case.up, case.layout, case.scale, None)
    assert case.error(got) < 2 * case.limit()
    assert case.error(got.flip(1)) > 4 * case.limit()
    theirs = torch_backend.latent_attention(case.q, case.entries, case.up, case.layout, case.scale, None)
    assert case.error(got) < 1.5 * case.error(theirs)


def test_latents_of_picked_positions_are_left_to_torch(tiles):
    case = Latents([90], rank=32, shared=16, nope=16, v=32, picked=30, new=[60]).build(torch.bfloat16)
    got = get_ops("cpu").latent_attention(case.q, case.entries, case.up, case.layout, case.scale, case.picks)
    assert case.error(got) < 2 * case.limit()
