"""The kernels' tests once more, on Arm: by each of its instruction sets, under emulation."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.emulated import Arm, compile_for_arm
from tests.kernels.reference import random_packed
from tests.kernels.test_attention import Case
from tests.kernels.test_cpu_attention import test_few_tokens, threads, torch_is_not_asked  # noqa: F401
from tests.kernels.test_cpu_int8 import (  # noqa: F401
    test_every_code_of_an_element as test_every_code_of_an_element_in_int8,
    test_moe as test_moe_in_int8,
    test_others_change_nothing,
    test_product,
    test_the_activations_themselves,
    test_the_check_of_products_sees,
    test_the_largest_sums,
    test_what_is_not_finite_stays_so,
)
from tests.kernels.test_cpu_products import (  # noqa: F401  they take the fixtures of this file
    test_a_dropped_token_s_weight_does_not_matter,
    test_a_vector_that_is_not_finite_gives_nothing_finite,
    test_a_vector_with_outliers,
    test_an_expert_that_does_not_exist_is_an_error,
    test_every_code_of_an_element,
    test_every_scale_of_mxfp4,
    test_linear,
    test_moe,
    test_moe_with_biases_and_a_clamped_activation,
    test_the_check_of_linear_sees_one_block,
    test_the_check_of_moe_sees,
    test_threads_change_nothing,
    three_threads,
)
from tests.kernels.test_products import MOE_CASES, x_of

from tutel_pack.kernels.cpu import backend
from tutel_pack.kernels.ops import get_ops
from tutel_pack.spec import Swiglu

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_for_arm(tmp_path_factory.mktemp("arm"))


@pytest.fixture(scope="module", params=["neon", "portable"])
def arm(request, program):
    arm = Arm(program, request.param)
    yield arm
    arm.close()


@pytest.fixture
def isa(arm, monkeypatch):
    """The operations by one instruction set of Arm."""
    for name in ("linear", "moe", "attend"):
        monkeypatch.setattr(backend, f"_{name}", getattr(arm, name))
    return get_ops("cpu")


@pytest.fixture
def instruction_set(isa):
    return isa


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "int4", "fp8", "bf16"])
def test_no_token(isa, fmt):
    """What operations never ask of a kernel."""
    x = x_of(0, 96, dtype=torch.float32)
    assert backend.linear(x, random_packed(fmt, (17, 96)), None).shape == (0, 17)
    arguments = MOE_CASES["no token"].arguments(fmt, torch.float32)
    assert backend.moe(*arguments, Swiglu(), None, None).shape == (0, 96)


def test_nothing_is_computed_here(isa, monkeypatch):
    def refuse(self, function, *_):
        raise AssertionError(f"{function} on Arm")

    monkeypatch.setattr(Arm, "_call", refuse)
    case = Case([7], [1]).build(torch.float32)
    with pytest.raises(AssertionError, match="attend on Arm"):
        isa.attention(case.q, case.keys, case.values, case.layout)
    with pytest.raises(AssertionError, match="linear on Arm"):
        isa.linear(x_of(2, 96, dtype=torch.bfloat16), random_packed("fp8", (17, 96)))
    with pytest.raises(AssertionError, match="moe on Arm"):
        isa.moe(*MOE_CASES["ragged"].arguments("mxfp4", torch.bfloat16))
