"""Sampled tokens against exact probabilities on small vocabularies, and the limits of every parameter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.runtime.fake_model import write_json
from transformers.generation import logits_process as hf

from tutel_pack.errors import InputError
from tutel_pack.runtime.defaults import end_tokens, sampling_params
from tutel_pack.runtime.sampling import NUCLEUS, Sampler, SamplingParams, sample

DRAWS = 8_000
LOGITS = torch.tensor([1.0, 3.0, -1.0, 2.5, 0.0, 2.0, -4.0, 3.2])


def draw(logits: torch.Tensor, prompt=(), rows=DRAWS, **params) -> list[int]:
    """One token of each of many sequences with the same logits and the seeds 0, 1, 2, …"""
    samplers = [Sampler(SamplingParams(seed=seed, **params), prompt, len(logits)) for seed in range(rows)]
    return sample(logits.expand(rows, -1).clone(), samplers)


def surprise(tokens: list[int], probs: torch.Tensor) -> float:
    """Standard deviations (Wilson-Hilferty) by which a chi-square test says that tokens were not drawn by probs."""
    counts = np.bincount(tokens, minlength=len(probs))
    expected = probs.double().numpy() * len(tokens)
    if counts[expected == 0].any():
        return math.inf
    common = expected > 5
    degrees = common.sum() - 1
    ratio = ((counts - expected)[common] ** 2 / expected[common]).sum() / degrees
    return (ratio ** (1 / 3) - 1 + 2 / (9 * degrees)) / math.sqrt(2 / (9 * degrees))


def by_transformers(
    logits: torch.Tensor, prompt=(), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0
):
    """The exact distribution by transformers' own processors, in its order."""
    steps = [hf.RepetitionPenaltyLogitsProcessor(repetition_penalty)] if prompt else []
    steps += [hf.TemperatureLogitsWarper(temperature)]
    steps += [hf.TopKLogitsWarper(top_k)] if top_k else []
    steps += [hf.TopPLogitsWarper(top_p), hf.MinPLogitsWarper(min_p)]
    scores = logits[None]
    for step in steps:
        scores = step(torch.tensor([list(prompt)]), scores)
    return scores[0].softmax(-1)


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 100},  # more than the vocabulary has
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.3},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.7},  # top-p of what top-k left
    {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.2, "repetition_penalty": 1.7, "prompt": (1, 6, 1)},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_come_with_their_exact_probabilities(params):
    probs = by_transformers(LOGITS, **params)
    assert surprise(draw(LOGITS, **params), probs) < 4


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.1},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.1, "prompt": (1,)},
    ],
    ids=str,
)
def test_the_distribution_test_sees_other_parameters(params):
    assert surprise(draw(LOGITS, **params), by_transformers(LOGITS)) > 6


@pytest.mark.parametrize("vocab", [NUCLEUS // 2, NUCLEUS, 4 * NUCLEUS])
@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_top_p_of_a_large_vocabulary_keeps_the_tokens_that_transformers_keeps(vocab, top_p):
    """Flat logits, so that at 0.999 the nucleus is larger than what is ranked first."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 0.5
    kept = by_transformers(logits, top_p=top_p) > 0
    tokens = draw(logits, temperature=1.0, top_p=top_p, rows=500)
    assert kept[tokens].all()
    outside = draw(logits, temperature=1.0, rows=500)
    assert top_p > 0.9 or not kept[outside].all()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1e-4}, {"temperature": 5.0, "top_p": 0.0}, {"temperature": 5.0, "top_k": 1}], ids=str
)
def test_greedy_takes_the_top_token(params):
    assert set(draw(LOGITS, rows=200, **params)) == {7}


def test_greedy_among_equals_takes_one_token():
    assert len(set(draw(torch.tensor([2.0, 2.0, 1.0]), rows=200, temperature=1.0, top_p=0.0))) == 1


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-4, 1e-3, 1.0, 1e300])
def test_no_temperature_gives_a_token_outside_the_vocabulary(scale, temperature):
    tokens = draw(LOGITS * scale, rows=50, temperature=temperature, top_p=0.9)
    assert all(0 <= t < len(LOGITS) for t in tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_told_from_tokens(bad, temperature):
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = bad
    samplers = [Sampler(SamplingParams(temperature=temperature), (), len(LOGITS)) for _ in range(3)]
    tokens = sample(logits, samplers)
    assert tokens[1] == -1 and min(tokens[0], tokens[2]) >= 0


def test_tokens_with_logit_minus_infinity_are_never_drawn():
    logits = LOGITS.clone()
    logits[7] = -math.inf
    assert 7 not in draw(logits, temperature=50.0, rows=2000)


def test_a_row_does_not_depend_on_its_company():
    """Every kind of parameters alone and among all the others, over 12 tokens."""
    kinds = [{k: v for k, v in f.items() if k != "prompt"} for f in FILTERS] + [{}, {"repetition_penalty": 2.0}]
    kinds = [SamplingParams(**kind, seed=i) for i, kind in enumerate(kinds)]
    vocab = NUCLEUS + 500
    steps = [
        torch.randn(len(kinds), vocab, generator=torch.Generator().manual_seed(i)).bfloat16().float() for i in range(12)
    ]
    together = [Sampler(kind, (1, 2), vocab) for kind in kinds]
    batched = [sample(logits, together) for logits in steps]
    for row, kind in enumerate(kinds):
        alone = Sampler(kind, (1, 2), vocab)
        assert [sample(logits[row : row + 1], [alone])[0] for logits in steps] == [tokens[row] for tokens in batched], (
            kind
        )


def test_seeds_repeat_and_differ():
    def text(seed):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), (), len(LOGITS))
        return [sample(LOGITS[None], [sampler])[0] for _ in range(40)]

    assert text(5) == text(5)
    assert text(5) != text(6)
    assert text(None) != text(None)


def test_the_penalty_reaches_generated_tokens_too():
    sampler = Sampler(SamplingParams(repetition_penalty=100.0), (3,), len(LOGITS))
    assert [sample(LOGITS[None], [sampler])[0] for _ in range(3)] == [7, 1, 5]


def test_the_penalty_lowers_negative_logits_too():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), (0,), 2)
    assert sample(torch.tensor([[-1.0, -1.5]]), [sampler]) == [1]


@pytest.mark.parametrize("point, token", [(0.0, 1), (1 - 2**-53, 2)])
def test_the_ends_of_the_distribution_are_tokens_that_have_a_probability(point, token):
    sampler = Sampler(SamplingParams(temperature=1.0), (), 4)
    sampler.random.random = lambda: point
    assert sample(torch.tensor([[-math.inf, 1.0, 1.0, -math.inf]]), [sampler]) == [token]


def test_the_logits_stay_as_they_were():
    logits = LOGITS[None].clone()
    sample(logits, [Sampler(SamplingParams(temperature=1.0, repetition_penalty=2.0, top_k=2), (1,), len(LOGITS))])
    assert torch.equal(logits, LOGITS[None])


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("temperature", True), ("top_k", -1), ("top_k", 2.5), ("top_p", 1.01), ("top_p", -0.1), ("top_p", math.nan),
        ("min_p", 2), ("repetition_penalty", 0), ("repetition_penalty", math.inf), ("seed", -1), ("seed", 1.5),
        ("max_new_tokens", 0), ("stop", ("a", "")), ("stop", ("a", 1)),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named(name, value):
    with pytest.raises(InputError, match=f"^{name} must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "config, options, temperature",
    [
        ({}, {}, 0.0),
        ({"do_sample": True}, {}, 1.0),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, {}, 0.6),
        ({"temperature": 0.7}, {}, 0.7),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, {}, 0.0),
        ({"temperature": 0.7}, {"temperature": 0.0}, 0.0),
        ({"do_sample": True}, {"temperature": None}, 1.0),
        ({}, {"top_p": 0.9}, 1.0),
        ({"do_sample": False}, {"top_k": 5}, 1.0),
    ],
)
def test_the_temperature_comes_from_the_caller_or_the_checkpoint(tmp_path, config, options, temperature):
    params = sampling_params(write_json(tmp_path, generation_config=config), **options)
    assert params.temperature == temperature


def test_the_checkpoint_sets_what_the_caller_leaves_open(tmp_path):
    config = {
        "do_sample": True,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": None,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "pad_token_id": 0,
    }
    params = sampling_params(write_json(tmp_path, generation_config=config), top_p=0.5, stop="END")
    assert params == SamplingParams(1.0, 20, 0.5, 0.0, 1.05, max_new_tokens=2048, stop=("END",))


def test_without_sampling_the_checkpoints_filters_do_not_count(tmp_path):
    params = sampling_params(write_json(tmp_path, generation_config={"do_sample": False, "top_k": 3}), temperature=1.0)
    assert params == SamplingParams(temperature=1.0)


def test_a_wrong_value_in_the_checkpoint_names_the_file(tmp_path):
    with pytest.raises(InputError, match=r"generation_config\.json: top_p must be"):
        sampling_params(write_json(tmp_path, generation_config={"top_p": 7}))


class Tokenizer:
    eos_token_id = 2


@pytest.mark.parametrize(
    "config, generation, tokenizer, expected",
    [
        ({"eos_token_id": [1, 106]}, None, Tokenizer, {1, 2, 106}),
        ({"eos_token_id": 1}, {"eos_token_id": [106, 7]}, Tokenizer, {1, 2, 7, 106}),
        ({"text_config": {"eos_token_id": 5}, "eos_token_id": None}, {}, None, {5}),
        ({}, None, None, set()),
    ],
)
def test_end_tokens_of_all_sources_count(tmp_path, config, generation, tokenizer, expected):
    write_json(tmp_path, config=config)
    if generation is not None:
        write_json(tmp_path, generation_config=generation)
    assert end_tokens(tmp_path, tokenizer and tokenizer()) == expected


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"eos_token_id": "</s>"}'])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"generation_config\.json"):
        end_tokens(tmp_path)
