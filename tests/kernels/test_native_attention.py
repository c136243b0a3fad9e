"""Native attention of few tokens: every instruction set, contexts that threads share, and what is left to torch."""

from __future__ import annotations

import pytest
import torch
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
    "window": Case([300], [2], window=70),
}


@pytest.fixture(params=native.available())
def instruction_set(request):
    native.select(request.param)
    yield
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_few_tokens(name, dtype, instruction_set, threads, torch_is_not_asked):
    case = CASES[name].build(dtype)
    got = get_ops("cpu").attention(case.q, case.keys, case.values, case.layout, case.window)
    assert case.error(got) < case.limit()
    assert case.error(got.flip(1)) > case.limit()


def test_many_tokens_are_a_product_of_matrices(torch_is_not_asked):
    case = Case([3], [9]).build(torch.float32)
    with pytest.raises(AssertionError, match="torch was asked"):
        get_ops("cpu").attention(case.q, case.keys, case.values, case.layout)
