"""The decoder against transformers' Qwen3MoeForCausalLM, both holding the same decoded weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime.models import CONFIG, Pair
from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS
from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.decoder import Decoder
from tutel_pack.spec import Layer, Rope, Router

VARIANTS = {
    "plain": {},
    # Which layers are dense: by list, and every other one.
    "dense-by-list": {"mlp_only_layers": [0]},
    "dense-by-step": {"decoder_sparse_step": 2},
    "bias": {"attention_bias": True},
    # Shorter than the prompts, so that keys are left out.
    "window": {"use_sliding_window": True, "sliding_window": 7},
    "tied": {"tie_word_embeddings": True},
    # Router weights as the softmax gives them.
    "not-renormalised": {"norm_topk_prob": False},
    # Every head with keys of its own, and one for all.
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
}
FLOAT32_LIMIT = 1e-4
PACKED_TO = [name for name in FORMATS if name != "int4"]
"""int4 is kept where a source has it, and nothing is packed to it."""
GREEDY = 64


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair("nvfp4")


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(CONFIG["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def run(decoder: Decoder, new: list[list[int]], chunk: int | None = None, block_size: int = 5) -> list[torch.Tensor]:
    """Logits at every position of each sequence, all in one ragged batch or `chunk` tokens of each at a time."""
    longest = max(map(len, new))
    cache = decoder.new_cache(len(new) * -(-longest // block_size), block_size)
    poison(cache)
    tables = [cache.allocate(-(-len(ids) // block_size)) for ids in new]
    pieces = [[] for _ in new]
    for start in range(0, longest, chunk or longest):
        parts = [ids[start : start + (chunk or longest)] for ids in new]
        batch = Batch.build(parts, [start] * len(new), tables, all_rows=True)
        for piece, logits in zip(pieces, decoder.forward(batch, cache).split([len(p) for p in parts])):
            piece.append(logits)
    return [torch.cat(p) for p in pieces]


def poison(cache) -> None:
    for pool in (p for layer in cache.tokens for p in layer.values()):
        pool.fill_(torch.nan)


def greedy(decoder: Decoder, start: list[list[int]], steps: int, block_size: int = 16) -> list[list[int]]:
    """`steps` tokens for each sequence, all decoded in one batch through one cache."""
    need = [-(-(len(ids) + steps) // block_size) for ids in start]
    cache = decoder.new_cache(sum(need), block_size)
    poison(cache)
    # Blocks of different sequences interleave, as they do after some coming and going.
    tables = [[] for _ in start]
    for i in range(max(need)):
        for table, n in zip(tables, need):
            table.extend(cache.allocate(1 if i < n else 0))
    new, past, done = start, [0] * len(start), [[] for _ in start]
    for _ in range(steps):
        choice = decoder.forward(Batch.build(new, past, tables), cache).argmax(-1).tolist()
        past = [p + len(ids) for p, ids in zip(past, new)]
        new = [[c] for c in choice]
        for ids, c in zip(done, choice):
            ids.append(c)
    return done


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    return errors(got, expected).max().item()


def errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Per position: the largest error of a logit, relative to the largest logit."""
    return ((got.double() - expected).abs().amax(-1) / expected.abs().amax(-1)).nan_to_num(torch.inf)


# What a variant changes does not depend on the format.
@pytest.mark.parametrize("variant,fmt", [*(("plain", f) for f in PACKED_TO), *((v, "mxfp4") for v in list(VARIANTS)[1:])])
def test_logits_agree_at_every_position(variant, fmt):
    pair = Pair(fmt, **VARIANTS[variant])
    # 12 and 3: padding, were there any, would show. 1: a sequence of one token. 40: several blocks.
    new = prompts(12, 3, 1, 40)
    for ids, logits in zip(new, run(pair.decoder(), new)):
        assert logits.dtype == torch.float32
        assert worst(logits, pair.theirs(torch.tensor([ids])).logits[0]) < FLOAT32_LIMIT


@pytest.mark.parametrize("break_it", ["eps", "theta", "window", "top_k", "qk_norm", "renormalize"])
def test_a_wrong_spec_is_seen(pair, break_it):
    """The limit is tight enough that each field of the description matters."""
    (layer, *_), eps = pair.spec.layers, pair.spec.norm_eps
    attention, moe = layer.attention, layer.mlp
    if break_it == "eps":
        eps = 1e-3
    elif break_it == "theta":
        attention = replace(attention, rope=Rope(10100.0, 32))
    elif break_it == "window":
        attention = replace(attention, window=39)
    elif break_it == "qk_norm":
        attention = replace(attention, qk_norm=None)
    elif break_it == "top_k":
        moe = replace(moe, top_k=2)
    else:
        moe = replace(moe, router=Router(renormalize=False))
    spec = replace(pair.spec, norm_eps=eps, layers=(Layer(attention, moe),) * 2)
    new = prompts(40)
    logits, = run(Decoder(spec, pair.weights.__getitem__, "cpu", torch.float32), new)
    assert worst(logits, pair.theirs(torch.tensor(new)).logits[0]) > FLOAT32_LIMIT


@pytest.mark.parametrize("variant", ["plain", "window"])
def test_greedy_tokens_are_those_of_transformers_alone_and_batched(variant):
    pair = Pair("mxfp4", **VARIANTS[variant])
    decoder = pair.decoder()
    start = prompts(12, 3, 1, 33, 16)
    options = {"max_new_tokens": GREEDY, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [pair.theirs.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in start]
    assert greedy(decoder, start, GREEDY) == expected
    assert [greedy(decoder, [ids], GREEDY)[0] for ids in start[:2]] == expected[:2]
    # A model that says one thing whatever it is given would prove nothing.
    assert len({tuple(ids) for ids in expected}) == len(start) and min(len(set(ids)) for ids in expected) > 3


@pytest.mark.parametrize("chunk", [1, 4, 5, 39], ids=["a token", "within a block", "a block", "all but the last token"])
@pytest.mark.parametrize("variant", ["plain", "window"])
def test_chunked_prefill_is_prefill(variant, chunk):
    decoder = Pair("fp8", **VARIANTS[variant]).decoder()
    new = prompts(40, 12, 3)
    for once, chunked in zip(run(decoder, new), run(decoder, new, chunk)):
        assert worst(chunked, once) < 1e-5


def test_rows_and_hidden(pair):
    decoder, new = pair.decoder(), prompts(6, 4)
    cache = decoder.new_cache(2)
    tables = [cache.allocate(1), cache.allocate(1)]
    every, hidden = decoder.forward(Batch.build(new, [0, 0], tables, all_rows=True), cache, hidden=True)
    last = decoder.forward(Batch.build(new, [0, 0], tables), cache)
    assert torch.allclose(last, every[[5, 9]], atol=1e-5)
    expected = pair.theirs.model(torch.tensor(new[:1])).last_hidden_state[0]
    assert hidden.shape == (10, CONFIG["hidden_size"]) and torch.allclose(hidden[:6], expected, atol=1e-4)


def test_sequences_without_new_tokens(pair):
    """Which have a row all the same, as many as there are tokens."""
    decoder, (new,) = pair.decoder(), prompts(2)
    cache = decoder.new_cache(3)
    tables = [cache.allocate(1) for _ in range(3)]
    alone = decoder.forward(Batch.build([new], [0], tables[:1]), cache)[0]
    assert torch.allclose(decoder.forward(Batch.build([new, []], [0, 0], tables[1:]), cache)[0], alone, atol=1e-5)


def bfloat16_errors(fmt: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, theirs): errors in bfloat16 against float64 at each of 160 positions."""
    pair = Pair(fmt, **options)
    # Plain weights are bfloat16 in a checkpoint, and no error of either.
    for w in pair.weights.values():
        if isinstance(w, torch.Tensor):
            w.copy_(w.bfloat16())
    ours, new = pair.decoder(torch.bfloat16), prompts(*[40] * 4)
    exact = pair.theirs.double()(torch.tensor(new)).logits.flatten(0, 1)
    theirs = pair.theirs.bfloat16()(torch.tensor(new)).logits.flatten(0, 1)
    return errors(torch.cat(run(ours, new)), exact), errors(theirs, exact)


@pytest.mark.parametrize("fmt", PACKED_TO)
def test_bfloat16_is_as_exact_as_that_of_transformers(fmt):
    """Every token goes to all experts here: nothing but rounding differs, and the worst position means something."""
    ours, theirs = bfloat16_errors(fmt, num_experts_per_tok=CONFIG["num_experts"])
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()


def test_bfloat16_with_routing_is_as_exact_as_that_of_transformers():
    """A rounding that tips a router's choice makes an error of any size, in either model: those are counted, the others
    are compared by their median."""
    pairs = [bfloat16_errors(fmt) for fmt in PACKED_TO]
    ours, theirs = (torch.cat(e) for e in zip(*pairs))
    assert ours.median() <= 1.5 * theirs.median()
    tipped = 4 * theirs.median()
    assert (ours > tipped).sum() <= 1.5 * (theirs > tipped).sum()


def test_a_weight_of_another_shape_is_named(pair):
    weights = {**pair.weights, "model.layers.1.mlp.gate.weight": torch.zeros(9, 96)}
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.gate\.weight has shape \(9, 96\) where .* \(8, 96\)"):
        Decoder(pair.spec, weights.__getitem__, "cpu", torch.float32)


def test_an_unknown_backend_lists_the_known_ones(pair):
    with pytest.raises(InputError, match="auto, cpu, triton, torch"):
        Decoder(pair.spec, pair.weights.__getitem__, "cpu", torch.float32, "cuda")
