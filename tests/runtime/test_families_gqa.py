"""Families with grouped-query attention against their transformers modules, both holding the same decoded weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime.families import Pair
from tests.runtime.test_decoder import FLOAT32_LIMIT, errors, greedy, run, worst
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import Ops
from tutel_pack.runtime.decoder import Decoder
from tutel_pack.spec import ClampedSwiglu, Moe, ModelSpec, Swiglu

STEPS = 24

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 80}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80, "intermediate_size": 160, "head_dim": 32}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3, "logits_scaling": 2.5}
CASES = {
    # Shared experts behind a gate, biases of q, k and v, a dense layer by list.
    "qwen2_moe": ("qwen2_moe", ROUTED | {"shared_expert_intermediate_size": 112, "intermediate_size": 160, "mlp_only_layers": [1]}),
    # Every other of the first two layers slides; the window is shorter than the prompts.
    "qwen2_moe-windows": (
        "qwen2_moe",
        ROUTED | {"shared_expert_intermediate_size": 112, "intermediate_size": 160, "decoder_sparse_step": 2, "norm_topk_prob": True,
                  "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "qkv_bias": False},
    ),
    # A clip that cuts many values off.
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 80, "clip_qkv": 0.8}),
    "olmoe-plain": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 80, "attention_bias": True, "norm_topk_prob": True}),
    "mixtral": ("mixtral", LOCAL),
    "mixtral-window": ("mixtral", LOCAL | {"sliding_window": 7, "head_dim": 32}),
    # 20 of 32 dimensions rotated.
    "minimax_m2": ("minimax_m2", LOCAL | {"head_dim": 32, "rotary_dim": 20}),
    # Windows in every other layer, and yarn whose context is shorter than the prompts.
    "gpt_oss": (
        "gpt_oss",
        LOCAL | {"head_dim": 32, "sliding_window": 6, "swiglu_limit": 1.5,
                 "rope_parameters": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 150000.0}},
    ),
    "glm4_moe": ("glm4_moe", GLM | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-plain": ("glm4_moe", GLM | {"n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 0}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 80, "intermediate_size": 160, "moe_num_shared_experts": 2},
    ),
    "granitemoe": ("granitemoe", LOCAL | GRANITE),
    # Every rope scaling, with prompts longer than the original context.
    "linear": ("mixtral", LOCAL | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "yarn": ("mixtral", LOCAL | {"head_dim": 32, "rope_parameters": YARN}),
    "yarn-mscale": ("mixtral", LOCAL | {"head_dim": 32, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 4}}),
    "llama3": (
        "mixtral",
        LOCAL | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                     "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "dynamic": ("mixtral", LOCAL | {"head_dim": 32, "max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
}  # fmt: skip
FAMILIES = ["qwen2_moe", "olmoe", "mixtral", "minimax_m2", "gpt_oss", "glm4_moe", "ernie4_5_moe", "granitemoe"]


def pair_of(case: str, fmt: str | None = None, **options) -> Pair:
    model_type, configured = CASES[case]
    return Pair(model_type, fmt, **{**configured, **options})


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(131, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_at_every_position(case):
    pair = pair_of(case, "mxfp4")
    new = prompts(12, 1, 40)
    for ids, logits in zip(new, run(pair.decoder(), new)):
        assert worst(logits, pair.logits(ids)) < FLOAT32_LIMIT


@pytest.mark.parametrize("fmt", [None, "fp8", "nvfp4"])
def test_logits_agree_in_every_format(fmt):
    """gpt-oss has the most that formats and biases could spoil."""
    pair = pair_of("gpt_oss", fmt)
    new, = prompts(40)
    assert worst(run(pair.decoder(), [new])[0], pair.logits(new)) < FLOAT32_LIMIT


def theirs(pair: Pair, ids: list[int]) -> list[int]:
    # Without a mask, tokens of the prompt that happen to be the padding's would be masked.
    options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones(1, len(ids))}
    return pair.theirs.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize("case", [c for c in CASES if c in FAMILIES or "window" in c])
def test_greedy_tokens_are_those_of_transformers(case):
    pair = pair_of(case, "fp8")
    start = prompts(12, 3, seed=3)  # which leave margins between the two likeliest tokens
    expected = [theirs(pair, ids) for ids in start]
    for ids, chosen in zip(start, expected):
        top = pair.logits(ids + chosen)[len(ids) - 1 : -1].topk(2).values
        assert ((top[:, 0] - top[:, 1]) > 5 * FLOAT32_LIMIT * top[:, 0].abs()).all()  # no choice that rounding makes
    assert greedy(pair.decoder(), start, STEPS) == expected
    assert len({tuple(ids) for ids in expected}) == 2 and min(len(set(ids)) for ids in expected) > 3


@pytest.mark.parametrize("case", [c for c in CASES if c in FAMILIES or "window" in c])
def test_chunked_prefill_is_prefill(case):
    decoder = pair_of(case).decoder()
    new = prompts(40, 12)
    for once, chunked in zip(run(decoder, new), run(decoder, new, 7)):
        assert worst(chunked, once) < 1e-5


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native kernels were not built: there was no compiler")
@pytest.mark.parametrize("plain", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_steps_by_whole_layers(case, plain, monkeypatch):
    """Native kernels do all layers of few tokens in one call, whatever the family, and the type of routers and norms."""
    done, layers = [], Ops.layers
    monkeypatch.setattr(Ops, "layers", lambda *given: done.append(layers(*given)) or done[-1])
    pair = pair_of(case, "mxfp4")
    pair.round_plain(plain)
    weights = {name: w.to(plain) if isinstance(w, torch.Tensor) else w for name, w in pair.weights.items()}
    decoder = Decoder(pair.spec, weights.__getitem__, "cpu", torch.float32, "cpu")
    new = prompts(16, 1, 9)
    for chunk in (1, 5):
        for ids, logits in zip(new, run(decoder, new, chunk)):
            assert worst(logits, pair.logits(ids)) < FLOAT32_LIMIT
    assert len(done) == 20 and all(x is not None for x in done)


def bfloat16_errors(case: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors of ours and of transformers' own bfloat16 at every position, against float64 on the same values."""
    pair = pair_of(case, "fp8", **options)
    pair.round_plain(torch.bfloat16)
    ours, new = pair.decoder(torch.bfloat16), prompts(40, 40, 40)
    got = torch.cat(run(ours, new))
    exact = pair.theirs.double()(torch.tensor(new)).logits.flatten(0, 1)
    return errors(got, exact), errors(pair.theirs.bfloat16()(torch.tensor(new)).logits.flatten(0, 1), exact)


@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_is_as_exact_as_that_of_transformers(case):
    """Every token goes to all experts: nothing but rounding differs."""
    key = {"ernie4_5_moe": "moe_k"}.get(case, "num_experts_per_tok")
    groups = {"n_group": 1, "topk_group": 1} if case == "glm4_moe" else {}
    ours, theirs = bfloat16_errors(case, **{key: 8}, **groups)
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()


def test_bfloat16_with_routing_is_as_exact_as_that_of_transformers():
    """A rounding that tips a router's choice makes an error of any size, in either model: those are counted over all
    families, the others are compared by the median of each."""
    tipped = torch.zeros(2)
    for case in FAMILIES:
        ours, theirs = bfloat16_errors(case)
        assert ours.median() <= 1.5 * theirs.median(), case
        limit = 4 * theirs.median()
        tipped += torch.tensor([(ours > limit).sum(), (theirs > limit).sum()])
    assert tipped[0] <= 1.5 * tipped[1]


@pytest.mark.parametrize("case", ["minimax_m2", "glm4_moe", "ernie4_5_moe"])
def test_corrections_choose_by_less_than_a_step_of_bfloat16(case):
    """Which is 0.5 at 64: corrections that were rounded to it would be alike, and other experts chosen."""
    pair, new = pair_of(case, "fp8"), prompts(40, 40)
    generator = torch.Generator().manual_seed(0)
    theirs = dict((*pair.theirs.named_parameters(), *pair.theirs.named_buffers()))
    corrections = [name for name in pair.weights if name.endswith("e_score_correction_bias")]
    for name in corrections:
        pair.weights[name] = 64 + 0.2 * torch.randn(pair.weights[name].shape, generator=generator)
        theirs[name].copy_(pair.weights[name].view(theirs[name].shape))
    exact = torch.cat([pair.logits(ids) for ids in new])
    assert worst(torch.cat(run(pair.decoder(), new)), exact) < FLOAT32_LIMIT
    kept = errors(torch.cat(run(pair.decoder(torch.bfloat16), new)), exact).median()
    for name in corrections:
        pair.weights[name] = pair.weights[name].bfloat16()
    assert worst(torch.cat(run(pair.decoder(), new)), exact) > 1000 * FLOAT32_LIMIT
    assert errors(torch.cat(run(pair.decoder(torch.bfloat16), new)), exact).median() > 3 * kept


# Negative controls: options that matter


def change(spec: ModelSpec, part: str, **values) -> ModelSpec:
    """The spec with fields of every layer's "attention", "moe" or "router" replaced, or of the model itself."""
    if part == "model":
        return replace(spec, **values)
    return replace(spec, layers=tuple(_changed(layer, part, values) for layer in spec.layers))


def _changed(layer, part, values):
    if part == "attention":
        return replace(layer, attention=replace(layer.attention, **values))
    if part == "rope":
        return replace(layer, attention=replace(layer.attention, rope=replace(layer.attention.rope, **values)))
    if not isinstance(layer.mlp, Moe):
        return layer
    if part == "router":
        return replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, **values)))
    return replace(layer, mlp=replace(layer.mlp, **values))


@pytest.mark.parametrize("case, part, values", [
    ("qwen2_moe", "attention", {"bias": ""}),
    ("qwen2_moe", "moe", {"shared_gated": False}),
    ("qwen2_moe", "moe", {"shared": None, "shared_gated": False}),
    ("qwen2_moe", "router", {"renormalize": True}),
    ("qwen2_moe-windows", "attention", {"window": None}),
    ("olmoe", "attention", {"clip": None}),
    ("olmoe", "attention", {"qk_norm": None}),
    ("mixtral", "rope", {"theta": 1e4}),
    ("mixtral", "rope", {"interleaved": True}),
    ("mixtral", "router", {"renormalize": False}),
    ("mixtral", "router", {"score": "sigmoid"}),
    ("mixtral", "attention", {"rope": None}),
    ("mixtral-window", "attention", {"window": 8}),
    ("minimax_m2", "rope", {"dim": 32}),
    ("minimax_m2", "router", {"correction": False}),
    ("minimax_m2", "router", {"score": "softmax"}),
    ("gpt_oss", "attention", {"sinks": False}),
    ("gpt_oss", "attention", {"bias": "qkv"}),
    ("gpt_oss", "attention", {"window": 6}),
    ("gpt_oss", "router", {"bias": False}),
    ("gpt_oss", "router", {"score": "softmax"}),
    ("gpt_oss", "moe", {"bias": False}),
    ("gpt_oss", "moe", {"activation": Swiglu()}),
    ("gpt_oss", "moe", {"activation": ClampedSwiglu(1.5, 1.702, 0.0)}),
    ("gpt_oss", "moe", {"activation": ClampedSwiglu(1.5, 1.0, 1.0)}),
    ("gpt_oss", "moe", {"activation": ClampedSwiglu(1.6, 1.702, 1.0)}),
    ("gpt_oss", "rope", {"scaling": None}),
    ("glm4_moe", "router", {"groups": 1, "top_groups": 1}),
    ("glm4_moe", "router", {"correction": False}),
    ("glm4_moe", "router", {"scale": 1.0}),
    ("glm4_moe", "router", {"renormalize": False}),
    ("glm4_moe", "attention", {"qk_norm": None}),
    ("glm4_moe", "moe", {"shared": None}),
    ("ernie4_5_moe", "rope", {"interleaved": False}),
    ("ernie4_5_moe", "router", {"correction": False}),
    ("ernie4_5_moe", "router", {"epsilon": 2.0}),
    ("granitemoe", "model", {"embedding_scale": 1.0}),
    ("granitemoe", "model", {"residual_scale": 1.0}),
    ("granitemoe", "model", {"logit_scale": 1.0}),
    ("granitemoe", "attention", {"scale": None}),
    ("granitemoe", "model", {"norm_offset": 0.1}),
    ("linear", "rope", {"scaling": None}),
    ("yarn", "rope", {"scaling": None}),
    ("yarn-mscale", "rope", {"scaling": None}),
    ("llama3", "rope", {"scaling": None}),
    ("dynamic", "rope", {"scaling": None}),
])  # fmt: skip
def test_an_option_switched_off_is_seen(case, part, values):
    pair = pair_of(case)
    new, = prompts(40)
    spec = change(pair.spec, part, **values)
    assert spec != pair.spec
    assert worst(run(pair.decoder(spec=spec), [new])[0], pair.logits(new)) > 10 * FLOAT32_LIMIT
