"""Native attention of few tokens: every instruction set, contexts that threads share, and what is left to torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.latents import Latents
from tests.kernels.test_attention import Case

from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import get_ops

if not native.LIBRARY.exists():
    pytest.skip("the native kernels were not built: there was no compiler", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16]
CASES = {
    "long": Case([700], [1]),  # one token, two heads of keys: threads share its positions
    "long, few queries": Case([300, 0], [3, 2], block=16),
    "many heads": Case([40, 9, 33], [1, 1, 2], heads=24, kv_heads=8),
    "nine queries to a head": Case([65], [2], heads=9, kv_heads=1),  # two fours and one
    "forty queries to a head": Case([65], [2], heads=80, kv_heads=2),  # more than are taken together
    "window": Case([300], [2], window=70),
}


@pytest.fixture(params=native.available())
def instruction_set(request):
    native.select(request.param)
    yield request.param
    native.select(None)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = native.threads()
    native.set_threads(request.param)
    yield
    native.set_threads(before)


@pytest.fixture
def torch_is_not_asked(monkeypatch):
    def refuse(*_):
        raise AssertionError("torch was asked")

    monkeypatch.setattr(torch_backend, "attention", refuse)
    monkeypatch.setattr(torch_backend, "latent_attention", refuse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_few_tokens(name, dtype, instruction_set, threads, torch_is_not_asked):
    case = CASES[name].build(dtype)
    got = get_ops("cpu").attention(case.q, case.keys, case.values, case.layout, case.window)
    assert case.error(got) < case.limit()
    assert case.error(got.flip(1)) > case.limit()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_that_overflow_weigh_nothing(dtype, instruction_set, threads, torch_is_not_asked):
    """Below all numbers, those of the first 48 positions: as if they had not been there."""
    case = Case([99], [1], heads=2, kv_heads=1, block=16).build(dtype)
    case.q[:] = case.q.abs() + 1
    case.keys[case.layout.tables[0][:3]] = -1e38
    got = get_ops("cpu").attention(case.q, case.keys, case.values, case.layout)
    seen = get_ops("cpu").attention(case.q, case.keys, case.values, case.layout, 100 - 48)
    assert not seen.isnan().any() and torch.allclose(got.float(), seen.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("broken", ["query", "first keys"])
def test_what_is_no_number_is_not_passed_over(broken, dtype, instruction_set, threads, torch_is_not_asked):
    case = Case([99], [1], heads=2, kv_heads=1, block=16).build(dtype)
    case.q[:] = case.q.abs() + 1
    sound = get_ops("cpu").attention(case.q, case.keys, case.values, case.layout, None, None, torch.zeros(2))
    if broken == "query":
        case.q[:] = torch.nan
    else:
        case.keys[case.layout.tables[0][:3]] = torch.nan
    got = get_ops("cpu").attention(case.q, case.keys, case.values, case.layout, None, None, torch.zeros(2))
    assert got.isnan().all() and not sound.isnan().any()


def test_many_tokens_are_a_product_of_matrices(torch_is_not_asked):
    case = Case([3], [9]).build(torch.float32)
    with pytest.raises(AssertionError, match="torch was asked"):
        get_ops("cpu").attention(case.q, case.keys, case.values, case.layout)


SMALL = {"rank": 48, "shared": 16}
LATENTS = {
    "ragged": Latents([1, 6, 70], **SMALL),
    "long": Latents([700], **SMALL),  # threads share its positions
    "few new tokens": Latents([300, 9, 4], new=[3, 0, 4], block=16, **SMALL),
    "nothing shared": Latents([9], rank=16, shared=0),
    "more heads than are taken together": Latents([40], heads=37, **SMALL),
    "more tokens than are taken together": Latents([3] * 37, **SMALL),
    "more rows than are taken together": Latents([12], nope=70, v=48, **SMALL),
    "picked": Latents([90, 5, 41, 40], picked=40, **SMALL),  # longer than that, shorter, and just as long
    "picked by few tokens": Latents([200, 60], new=[5, 8], picked=50, **SMALL),
    "DeepSeek-V3": Latents([100], 5, 512, 64, 128, 128, block=64),
}


def latents_of(case: Latents, **changes) -> torch.Tensor:
    given = {name: getattr(case, name) for name in ("q", "entries", "up", "layout", "scale", "picks")} | changes
    return get_ops("cpu").latent_attention(*given.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LATENTS)
def test_latents(name, dtype, instruction_set, threads, torch_is_not_asked):
    case = LATENTS[name].build(dtype)
    got = latents_of(case)
    assert got.dtype == dtype and got.shape == (len(case.q), case.heads, case.v)
    assert case.error(got) < case.limit()
    assert case.error(got.flip(1)) > case.limit()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_of_latents_sees(dtype, instruction_set):
    case = Latents([60, 32], new=[3, 2], picked=20, **SMALL).build(dtype)
    without, one_dead = case.q.clone(), case.up.clone()
    without[..., case.nope :] = 0
    one_dead[1] = 0
    table, other = case.layout.tables
    wrong = [
        {"picks": None},
        {"picks": [(p - 1).clamp(min=0) for p in case.picks]},
        {"q": without},
        {"q": case.q.flip(0)},
        {"up": one_dead},
        {"up": case.up.roll(1, 1)},  # rows of the key's part and of the value's
        {"scale": 1.1 * case.scale},
        {"layout": replace(case.layout, tables=[torch.cat([table[:-1], other[:1]]), other])},
    ]
    assert case.error(latents_of(case)) < case.limit()
    assert case.error(torch.zeros(5, 3, 20)) > case.limit()
    for changes in wrong:
        assert not case.error(latents_of(case, **changes)) <= case.limit(), changes


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, not one after another."""
    return torch.stack([x, torch.full_like(x, 1)], dim=-1)[..., 0]


def test_latents_may_be_strided(torch_is_not_asked):
    case = Latents([60, 32], new=[3, 2], picked=20, **SMALL).build(torch.bfloat16)
    got = latents_of(case, q=strided(case.q), up=strided(case.up), picks=[strided(p) for p in case.picks])
    assert torch.equal(got, latents_of(case))


@pytest.mark.parametrize(
    "case, dtype",
    [
        (Latents([12], new=[9], **SMALL), torch.float32),  # so many new tokens that matrices are multiplied
        (Latents([12]), torch.float32),  # a rank that fills no registers
        (Latents([12], rank=576, shared=16), torch.float32),  # wider than there is room for
        (Latents([12], **SMALL), torch.float16),
    ],
    ids=["many tokens", "rank", "wide", "dtype"],
)
def test_what_is_left_to_torch(case, dtype, monkeypatch):
    case, asked = case.build(dtype), []
    theirs = torch_backend.latent_attention
    monkeypatch.setattr(torch_backend, "latent_attention", lambda *given: asked.append(1) or theirs(*given))
    assert case.error(latents_of(case)) < case.limit() and asked
