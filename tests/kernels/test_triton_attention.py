"""Attention of one new token by the triton backend, in the interpreter: the worst head of the worst sequence against
float64, in pools that are NaN wherever no token is, with outputs that are NaN before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import interpreted
from tests.kernels.latents import Latents
from tests.kernels.reference import DTYPES, UNIT, tolerance, worst_tile
from tests.kernels.test_attention import D, Case
from tests.kernels.test_fused import normal
from tests.kernels.test_options import expected_attention
from tests.kernels.test_small_ops import assert_rounded_once, x_of

from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.ops import Layout, Ops
from tutel_pack.spec import Rope

WIDE_AND_NARROW = [torch.float32, torch.bfloat16]


def attend(q, keys, values, layout, window=None, scale=None, sinks=None, heads=16, parts=3, spoil=False):
    """Run by a worker: steps of 16 positions, and so many parts. spoil: their sums change places before the merge."""
    from tutel_pack.kernels.triton.attention import Queries, Tile, attending
    from tutel_pack.kernels.triton.chips import INTERPRETER

    out, tile = torch.full_like(q, torch.nan), Tile(heads, 16, 4, 1)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    launches = attending(
        INTERPRETER, Queries(q), keys, values, layout.flat, out, factor, window, sinks, tile=tile, parts=parts
    )
    for launch in launches:
        if spoil and "stats" in launch.arguments and launch is launches[-1]:
            launch.arguments["stats"].copy_(launch.arguments["stats"].flip(2))
        launch.run()
    return out


def submit(case: Case, **options):
    layout, window = options.pop("layout", case.layout), options.pop("window", case.window)
    pools = options.pop("keys", case.keys), options.pop("values", case.values)
    return interpreted.submit("tests.kernels.test_triton_attention:attend", case.q, *pools, layout, window, **options)


DECODE = {
    "ragged": (Case([0, 3, 40], [1, 1, 1]), {}),  # one key; less than a step; all parts in use
    "a part without positions": (Case([17], [1]), {"parts": 4}),
    "one part": (Case([7, 31], [1, 1]), {"parts": 1}),
    "block ends": (Case([4, 5, 15], [1, 1, 1]), {}),
    "multi-head": (Case([20], [1], heads=3, kv_heads=3), {}),
    "several tiles of heads": (Case([35], [1], heads=40, kv_heads=2), {}),  # 20 to a key head, in tiles of 16
    "a wide tile": (Case([35], [1], heads=40, kv_heads=2), {"heads": 32}),
    "window": (Case([2, 30, 9], [1, 1, 1], window=20), {"parts": 2}),
    "steps within blocks": (Case([15, 70], [1, 1], block=32), {}),
    "a window that begins within a step": (Case([60, 33], [1, 1], window=30, block=16), {"parts": 2}),
    "more parts than are joined at once": (Case([1200, 3], [1, 1]), {"parts": 70}),  # of which 37 are empty
    "window of one": (Case([0, 9], [1, 1], window=1), {"parts": 1}),
}


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW, ids=str)
@pytest.mark.parametrize("name", DECODE)
def test_decode(name, dtype):
    case, options = DECODE[name]
    case = case.build(dtype)
    got = submit(case, **options).result()
    assert got.dtype == dtype and case.error(got) < case.limit()


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW, ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_sinks_and_a_scale(parts, dtype):
    case = Case([0, 30], [1, 1], window=20).build(dtype)
    sinks = x_of(case.heads, dtype=torch.bfloat16, scale=2)
    expected = expected_attention(case, 0.1, sinks.double().numpy())
    groups = [np.array([i]) for i in range(len(expected))]
    wrong = {"sinks": None}, {"sinks": sinks.flip(0)}, {"scale": None}
    runs = [submit(case, **({"scale": 0.1, "sinks": sinks, "parts": parts} | w)) for w in ({}, *wrong)]
    right, *others = (worst_tile(run.result().flatten(0, 1), expected, groups) for run in runs)
    assert right < case.limit() and all(error > case.limit() for error in others)


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW, ids=str)
def test_the_check_sees(dtype):
    case = Case([30, 44], [1, 1], window=21).build(dtype)
    first, second = case.layout.tables
    swapped = torch.cat([first[:-1], second[-1:]])  # the block that holds the first sequence's newest tokens
    wrong = [
        {"window": 20},
        {"window": 22},
        {"layout": replace(case.layout, tables=[first.flip(0), second])},
        {"layout": replace(case.layout, tables=[swapped, second])},
        {"layout": replace(case.layout, lengths=[30, 45])},  # the new token is not seen
        {"keys": case.keys.flip(2)},
        {"values": case.values.flip(2)},
        {"spoil": True},
    ]
    right, *others = [submit(case, parts=2, **w) for w in ({}, *wrong)]
    assert case.error(right.result()) < case.limit()
    for w, run in zip(wrong, others):
        assert case.error(run.result()) > case.limit(), w
    assert case.error(torch.zeros_like(case.q)) > case.limit()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batches_are_shared_with_torch(dtype):
    """Sequences that wait, decode, and prefill; sinks and windows reach both."""
    case = Case([0, 7, 4, 30, 12], [3, 1, 0, 6, 1], window=9).build(dtype)
    sinks = x_of(case.heads, dtype=torch.bfloat16)
    got = interpreted.op("attention", case.q, case.keys, case.values, case.layout, 9, 0.2, sinks).result()
    expected = expected_attention(case, 0.2, sinks.double().numpy())
    assert worst_tile(got.flatten(0, 1), expected, [np.array([i]) for i in range(len(expected))]) < case.limit()


def merge(parts, stats, sinks, dtype, damage="") -> torch.Tensor:
    """Run by a worker: [S, heads, D] of parts [S, heads, count, D] and stats [S, heads, count, 2]."""
    from tutel_pack.kernels.triton.attention import joining

    if damage == "a part is left out":
        stats = stats.clone()
        stats[..., -1, 0] = -torch.inf
    if damage == "parts are swapped":
        parts = parts[:, :, [1, 0, *range(2, parts.shape[2])]].contiguous()
    sequences, heads, _, d = parts.shape
    out = torch.full((sequences, heads, d), torch.nan, dtype=dtype)
    joining(parts, stats, torch.arange(sequences + 1), sinks, out).run()
    return out


def merge64(parts, stats, sinks) -> np.ndarray:
    """[S · heads, D]"""
    parts, best, total = (t.double().numpy() for t in (parts, stats[..., 0], stats[..., 1]))
    powers = 2.0 ** (best - best.max(2, keepdims=True))
    added = (parts * powers[..., None]).sum(2)
    below = (total * powers).sum(2)
    if sinks is not None:
        below += np.exp(sinks.double().numpy()[None] - best.max(2) * np.log(2))
    return (added / below[..., None]).reshape(-1, parts.shape[3])


def parts_of(count: int, d: int, sequences: int = 2, heads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits that differ by many powers of two; the second of five is empty."""
    best, total = (normal(sequences, heads, count, seed=s) for s in (1, 2))
    stats = torch.stack([6 * best, total.abs() + 0.5], dim=-1)
    stats[:, :, 1::5] = torch.tensor([-torch.inf, 0])
    return normal(sequences, heads, count, d) * stats[..., 1:], stats


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("count, d", [(2, 128), (63, 20), (64, 64), (65, 512), (200, 100)])
def test_parts_are_joined(count, d, sinks):
    parts, stats = parts_of(count, d)
    sinks = x_of(3, dtype=torch.float32, scale=4) if sinks else None
    function = "tests.kernels.test_triton_attention:merge"
    runs = [
        interpreted.submit(function, parts, stats, sinks, torch.float32, damage)
        for damage in ("", "", "a part is left out", "parts are swapped")
    ]
    once, twice, *wrong = (run.result().flatten(0, 1) for run in runs)
    expected = merge64(parts, stats, sinks)
    rows = [np.array([i]) for i in range(len(expected))]
    limit = tolerance(torch.float32, count) + 16 * UNIT[torch.float32]  # a power's, for exponents below 32 are rounded
    assert torch.equal(once, twice) and worst_tile(once, expected, rows) < limit
    for got in wrong if count > 2 else wrong[1:]:
        assert worst_tile(got, expected, rows) > limit


def test_prefill_is_torch_s():
    case = Case([0, 7], [3, 2]).build(torch.float32)
    arguments = case.q, case.keys, case.values, case.layout, None
    got = interpreted.op("attention", *arguments).result()
    assert torch.equal(got, torch_backend.attention(*arguments, None, None))


def test_queries_with_gaps():
    case = Case([7, 31], [1, 1]).build(torch.float32)
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    got = interpreted.op("attention", case.q, case.keys, case.values, case.layout).result()
    assert case.error(got) < case.limit()
    apart = torch.cat([case.values, case.values], dim=1)[:, : case.block]
    with pytest.raises(ValueError, match="laid out alike"):
        interpreted.op("attention", case.q, case.keys, apart, case.layout).result()


def far(path: str, q, rows: torch.Tensor, blocks: int):
    """Run by a worker: the last block of a pool of more than 2³¹ elements, a file that has no others on the disk."""
    pool = torch.from_file(path, shared=True, size=blocks * rows.numel(), dtype=rows.dtype).view(blocks, *rows.shape)
    pool[-1] = rows
    layout = Layout([0, 1], [len(rows)], [torch.tensor([blocks - 1])], torch.empty(0))
    return attend(q, pool, pool, layout, parts=1)


def test_pools_beyond_two_to_the_31(tmp_path):
    q, rows = x_of(1, 2, D, dtype=torch.float16), x_of(4, 2, D, dtype=torch.float16)
    blocks = 2**31 // rows.numel() + 2
    file, function = str(tmp_path / "pool"), "tests.kernels.test_triton_attention:far"
    got = interpreted.submit(function, file, q, rows, blocks).result()
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.double().transpose(0, 1) for t in (q, rows, rows)))
    assert worst_tile(got[0], expected[:, 0].numpy()) < tolerance(torch.float16, 4)


# Latents


def submit_latents(case: Latents, **changes):
    given = {name: getattr(case, name) for name in ("q", "entries", "up", "layout", "scale", "picks")} | changes
    return interpreted.op("latent_attention", *given.values())


LATENTS = {
    "ragged": Latents([1, 6, 70]),
    "two tiles of heads": Latents([12], heads=20),
    "powers of two": Latents([33, 2], rank=32, shared=16),
    "nothing shared": Latents([9], shared=0),
    "picked": Latents([40, 5, 8, 7], picked=7),  # longer than that, shorter, and just as long
}


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW, ids=str)
@pytest.mark.parametrize("name", LATENTS)
def test_latents(name, dtype):
    case = LATENTS[name].build(dtype)
    got = submit_latents(case).result()
    assert got.dtype == dtype and got.shape == (len(case.lengths), case.heads, case.v)
    assert case.error(got) < case.limit()


@pytest.mark.parametrize("dtype", WIDE_AND_NARROW, ids=str)
def test_the_check_of_latents_sees(dtype):
    case = Latents([40, 12], picked=9).build(dtype)
    without = case.q.clone()
    without[..., case.nope :] = 0
    shifted = [p - 1 for p in case.picks]
    table, other = case.layout.tables
    wrong = [
        {"picks": None},
        {"picks": shifted},
        {"q": without},
        {"q": case.q.flip(1)},
        {"up": case.up.flip(0)},
        {"scale": 2 * case.scale},
        {"layout": replace(case.layout, tables=[torch.cat([table[:-1], other[:1]]), other])},
    ]
    right, *others = [submit_latents(case, **w) for w in ({}, *wrong)]
    assert case.error(right.result()) < case.limit()
    for w, run in zip(wrong, others):
        assert case.error(run.result()) > case.limit(), w


def test_mixed_batches_of_latents():
    """Two sequences decode, the one between them prefills; each sees picks of its own."""
    one = Latents([40, 4, 30], picked=7).build(torch.float32)
    g = torch.Generator().manual_seed(5)
    q = torch.cat([one.q[:1], torch.randn(3, *one.q.shape[1:], generator=g), one.q[2:]])
    layout = replace(one.layout, starts=[0, 1, 4, 5])
    got = submit_latents(one, q=q, layout=layout).result()
    expected = torch_backend.latent_attention(q, one.entries, one.up, layout, one.scale, one.picks)
    assert worst_tile(got.flatten(0, 1), expected.double().flatten(0, 1).numpy()) < one.limit()
    assert one.error(torch.cat([got[:1], submit_latents(one).result()[1:2], got[4:]])) < one.limit()


# Norms and rotations


def assert_right(op: str, x: torch.Tensor, expected: np.ndarray, size: np.ndarray, *rest) -> None:
    """Rounded once; in bfloat16, what float32 gives when rounded."""
    runs = {dtype: interpreted.op(op, x.to(dtype), *rest) for dtype in DTYPES}
    for dtype in (torch.float32, torch.float16):
        assert_rounded_once(runs[dtype].result(), expected, dtype, size)
    exact = interpreted.op(op, x.bfloat16().float(), *rest).result()
    assert torch.equal(runs[torch.bfloat16].result(), exact.bfloat16())


def halves(*shape: int) -> torch.Tensor:
    """Of numbers that float16 has, and none so small that what is made of it has fewer digits."""
    x = x_of(*shape, dtype=torch.float16, scale=3).float()
    return torch.where(x.abs() < 0.05, 0.5, x)


def test_rms_norm_of_a_sum():
    """Whose parts are rows apart; the norm is of the sum as it is rounded."""
    whole, weight = halves(40, 250), 1 + x_of(72, dtype=torch.bfloat16, scale=0.3)
    x, added = whole[:, :72], whole[:, 100:172]
    for dtype in DTYPES:
        function = "tests.kernels.test_triton_attention:norm_of_a_sum"
        total, normed = interpreted.submit(function, x.to(dtype), added.to(dtype), weight).result()
        exact = x.to(dtype).double() + added.to(dtype).double()
        assert torch.equal(total, exact.to(dtype)) and not torch.equal(total, x.to(dtype))
        assert torch.equal(normed, interpreted.op("rms_norm", total, weight, 1e-5).result())
        assert not torch.equal(normed, interpreted.op("rms_norm", x.to(dtype), weight, 1e-5).result())


def norm_of_a_sum(x, added, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Run by a worker."""
    ops = Ops("triton")
    assert ops._fused["add_norm"]
    return ops.add_norm(x, added, weight, 1e-5)


def test_rms_norm():
    whole, weight = halves(40, 3, 100), 1 + x_of(72, dtype=torch.bfloat16, scale=0.3)
    whole[0] = 0  # nothing but eps under the root
    x = whole[..., :72]  # rows are apart
    x64 = x.double().numpy()
    expected = x64 / np.sqrt(np.square(x64).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    assert_right("rms_norm", x, expected, np.abs(expected), weight, 1e-5)
    assert_right("rms_norm", x[:, 0], expected[:, 0], np.abs(expected[:, 0]), weight, 1e-5)
    for wrong in ((weight.flip(0), 1e-5), (weight, 1e-3)):
        with pytest.raises(AssertionError):
            assert_right("rms_norm", x, expected, np.abs(expected), *wrong)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("dim", [32, 20], ids=["all dimensions", "the first 20 of 32"])
def test_rope(dim, interleaved):
    """Against torch's, which is proven by itself."""
    rotation = torch_backend.rotation(torch.tensor([0, 1, 50, 3]), Rope(1e4, dim), None)
    x = halves(4, 3, 40)[..., 8:]  # heads are apart
    expected = torch_backend.rope(x, rotation, interleaved).double().numpy()
    size = np.full(expected.shape, x.abs().max().item())
    assert_right("rope", x, expected, size, rotation, interleaved)
    with pytest.raises(AssertionError):
        assert_right("rope", x, expected, size, rotation, not interleaved)
