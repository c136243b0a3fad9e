"""Gated delta nets: the rule against a float64 loop, the models that have it against transformers, and states that are
handed on from step to step and to nobody else."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

from tests.checkpoints import fp8_config, garbled, spread, to_fp8, write_checkpoint
from tests.kernels.reference import ON_A_CPU
from tutel_pack.artifact import Artifact
from tutel_pack.convert.families import qwen3_5_moe, qwen3_next
from tutel_pack.convert.pipeline import convert_checkpoint
from tutel_pack.errors import InputError
from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import Layout
from tutel_pack.quant.codec import decode, encode
from tutel_pack.runtime import delta_net
from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.decoder import Decoder
from tutel_pack.runtime.delta_net import convolve, delta_rule
from tutel_pack.runtime.engine import Engine
from tutel_pack.runtime.loader import load_packed
from tutel_pack.runtime.sampling import SamplingParams
from tutel_pack.runtime.weights import Weights
from tutel_pack.spec import Attention, DeltaNet, Mlp, Rope

LIMIT = 1e-4
CONFIG = {
    # Two value heads for each key head, and no two of the sizes that belong together alike.
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attn_implementation": "eager", "experts_implementation": "eager",
}  # fmt: skip
FORMATS_HERE = [name for name in FORMATS if name != "int4"]
"""All that we pack into; int4 is only passed through."""
PACKED = (
    "experts.gate_up_proj", "experts.down_proj", "_proj.weight", "_qkvz.weight", "_qkv.weight", "_z.weight", "lm_head.weight",
)  # fmt: skip
MODELS = {
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, qwen3_next),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, qwen3_5_moe),
}
VARIANTS = {
    "next": ("qwen3_next", {}),
    # A dense layer, weights that do not sum to one, another rhythm, biases, no heads in common, no decoupled rope.
    "next-options": ("qwen3_next", {
        "mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True, "num_key_value_heads": 4,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
        "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
    }),
    "next-yarn": ("qwen3_next", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.5,
    }}),
    "next-step": ("qwen3_next", {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "3.5": ("qwen3_5_moe", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }}),
    "3.5-bias": ("qwen3_5_moe", {"attention_bias": True}),
}  # fmt: skip


def make_model(kind: str, seed: int = 5, **options):
    """Random weights, large enough that every part matters; norms away from 1, memories that last for many tokens."""
    torch.manual_seed(seed)
    model_class, config_class, _ = MODELS[kind]
    model = model_class(config_class(**copy.deepcopy({**CONFIG, **options}))).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if name.endswith("linear_attn.norm.weight"):
            p.uniform_(0.5, 1.5)
        elif "norm" in name:
            p.uniform_(-0.5, 0.5)
        elif name.endswith("A_log"):
            p.uniform_(0.02, 0.4).log_()
        elif name.endswith(("bias", "dt_bias")):
            p.normal_(std=0.5)
        else:
            p.normal_(std=1.0 if "embed" in name else 1.5 * p.shape[-1] ** -0.5)
    return model


class Pair:
    """transformers' model and ours on the same weights, projections packed."""

    def __init__(self, variant: str, fmt: str = "mxfp4", backend: str = "torch", **options):
        kind, changes = VARIANTS[variant]
        self.backend = backend
        self.theirs = make_model(kind, **{**changes, **options})
        self.spec = MODELS[kind][2].spec(json.loads(json.dumps(self.theirs.config.to_dict())))
        self.weights = {}
        for name, p in self.theirs.named_parameters():
            if backend == "cpu":  # plain ones as checkpoints have them, for which it has kernels of its own
                p.data.copy_(p.data.bfloat16())
            self.weights[name] = p.data.bfloat16() if backend == "cpu" else p.data
            if name.endswith(PACKED):
                segments = (p.shape[1] // 2,) * 2 if name.endswith("gate_up_proj") else p.shape[-2:-1]
                self.weights[name] = encode(p.data, FORMATS[fmt], tuple(segments)).tensor
                p.data.copy_(decode(self.weights[name]))

    def decoder(self, dtype=torch.float32, **changed) -> Decoder:
        """changed: weights, dots in their names as __."""
        weights = self.weights | {name.replace("__", "."): w for name, w in changed.items()}
        return Decoder(self.spec, weights.__getitem__, "cpu", dtype, self.backend)

    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.theirs(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module", params=[(v, b) for b in ON_A_CPU for v in ("next", "3.5")], ids="-".join)
def pair(request) -> Pair:
    variant, backend = request.param
    if backend == "cpu" and not native.LIBRARY.exists():
        pytest.skip("the native kernels were not built: there was no compiler")
    return Pair(variant, backend=backend)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(CONFIG["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def generated(theirs, ids: list[int], count: int) -> list[int]:
    """The tokens that transformers continues with, greedily and with its cache."""
    prompt = torch.tensor([ids])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # Without a mask it would take every 0 for padding.
    return theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, len(ids) :].tolist()


class Run:
    """Sequences in one cache, in slots that held rubbish before."""

    def __init__(self, decoder: Decoder, count: int, room: int = 256, block_size: int = 16):
        self.decoder, self.cache = decoder, decoder.new_cache(count * room // block_size, block_size)
        for slot in [self.cache.allocate_slot() for _ in range(count)]:
            for pool in (pool for layer in self.cache.sequences for pool in layer.values()):
                pool[slot] = torch.nan
            self.cache.free_slot(slot)
        for pool in (pool for layer in self.cache.tokens for pool in layer.values()):
            pool.fill_(torch.nan)
        self.tables = [self.cache.allocate(room // block_size) for _ in range(count)]
        self.slots = [self.cache.allocate_slot() for _ in range(count)]
        self.past = [0] * count

    def __call__(self, new: list[list[int]], all_rows: bool = True) -> list[torch.Tensor]:
        batch = Batch.build(new, self.past, self.tables, all_rows=all_rows, slots=self.slots)
        logits = self.decoder.forward(batch, self.cache)
        self.past = [p + len(ids) for p, ids in zip(self.past, new)]
        return list(logits.split([len(ids) for ids in new] if all_rows else 1))


def errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Per position: the largest error of a logit, relative to the largest logit."""
    return ((got.double() - expected).abs().amax(-1) / expected.abs().amax(-1)).nan_to_num(torch.inf)


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    return errors(got, expected).max().item()


# The rule alone


def rule_inputs(counts: list[int], heads=(2, 3), dims=(8, 5)) -> tuple[list[torch.Tensor], Layout]:
    (g, r), (k, v), t = heads, dims, sum(counts)
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.rand(shape, generator=generator) * 2 - 1

    keys = torch.nn.functional.normalize(random(t, g, k), dim=-1)
    inputs = [random(t, g, k), keys, random(t, g, r, v), -random(t, g, r).abs(), random(t, g, r).abs()]
    slots = torch.arange(len(counts)).flip(0) * 2  # not in order, and others between
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    return [*inputs, random(2 * len(counts), g, r, k, v)], Layout(starts, [], [], torch.empty(0), slots)


def rule_by_hand(inputs: list[torch.Tensor], layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token and head by head, in float64."""
    q, k, v, decay, beta, memories = (t.double() for t in inputs)
    out = torch.empty_like(v)
    for slot, start, stop in zip(layout.states.tolist(), layout.starts, layout.starts[1:]):
        for t in range(start, stop):
            for g, r in [(g, r) for g in range(v.shape[1]) for r in range(v.shape[2])]:
                m = memories[slot, g, r] * decay[t, g, r].exp()
                m += torch.outer(k[t, g], beta[t, g, r] * (v[t, g, r] - m.T @ k[t, g]))
                memories[slot, g, r], out[t, g, r] = m, m.T @ q[t, g]
    return out, memories


@pytest.mark.parametrize(
    "counts",
    [[1], [2], [63], [64], [65], [130, 0, 1, 64, 7, 1, 65], [1, 1, 1], [0, 0], []],
    ids=["token", "two", "chunk less one", "chunk", "chunk and one", "all kinds", "tokens", "nothing new", "none"],
)
def test_the_rule_is_that_of_a_loop_over_tokens(counts):
    inputs, layout = rule_inputs(counts)
    expected, memories = rule_by_hand(inputs, layout)
    out = delta_rule(*inputs, layout)
    assert out.dtype == torch.float32 and out.shape == expected.shape
    assert torch.allclose(out.double(), expected, atol=1e-5, rtol=0)
    assert torch.allclose(inputs[-1].double(), memories, atol=1e-5, rtol=0)
    touched = {slot for slot, count in zip(layout.states.tolist(), counts) if count}
    untouched = [slot for slot in range(len(memories)) if slot not in touched]
    assert torch.equal(inputs[-1][untouched].double(), memories[untouched]), "memories of others stay bit for bit"


def test_the_rule_stays_exact_for_decays_that_leave_nothing():
    """Quotients of vanished decays would be 0 / 0."""
    inputs, layout = rule_inputs([150, 1])
    inputs[3][::7] = -200.0
    inputs[3][::11] = -1e-6
    expected, memories = rule_by_hand(inputs, layout)
    assert torch.allclose(delta_rule(*inputs, layout).double(), expected, atol=1e-5, rtol=0)
    assert torch.allclose(inputs[-1].double(), memories, atol=1e-5, rtol=0)


def test_a_sequence_that_is_not_finite_spoils_no_other():
    inputs, layout = rule_inputs([5, 66, 3])
    expected, _ = rule_by_hand(inputs, layout)
    inputs[2][-1] = torch.nan
    out = delta_rule(*inputs, layout)
    assert torch.allclose(out[:71].double(), expected[:71], atol=1e-5, rtol=0) and out[-1].isnan().all()


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_the_convolution_goes_on_where_it_stopped(kernel):
    generator = torch.Generator().manual_seed(2)
    counts = [5, 0, 1, 2, 70]
    x, weight = torch.randn(78, 6, generator=generator), torch.randn(6, kernel, generator=generator)
    tails = torch.randn(7, kernel - 1, 6, generator=generator)
    slots, starts, before = torch.tensor([6, 0, 3, 1, 4]), torch.tensor([0, *counts]).cumsum(0).tolist(), tails.clone()
    y = convolve(x, weight, tails, Layout(starts, [], [], torch.empty(0), slots))
    for slot, start, stop in zip(slots.tolist(), starts, starts[1:]):
        whole = torch.cat([before[slot], x[start:stop]]).double()
        expected = [(whole[t : t + kernel] * weight.T).sum(0) for t in range(stop - start)]
        assert torch.allclose(y[start:stop].double(), torch.stack(expected) if expected else y[:0].double(), atol=1e-5)
        assert torch.equal(tails[slot], whole[len(whole) - kernel + 1 :].float())
    assert torch.equal(tails[[2, 5]], before[[2, 5]])


# Models against transformers


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_at_every_position(variant):
    pair = Pair(variant)
    # 12 and 3: padding, were there any, would show. 1: a single token. 150: more than two chunks, the last not full.
    new = prompts(12, 3, 1, 150)
    for ids, logits in zip(new, Run(pair.decoder(), 4)(new)):
        assert logits.dtype == torch.float32 and worst(logits, pair.logits(ids)) < LIMIT


@pytest.mark.parametrize("fmt", FORMATS_HERE)
def test_logits_agree_in_every_format(fmt):
    pair = Pair("next", fmt)
    ids, = prompts(40)
    assert worst(Run(pair.decoder(), 1)([ids])[0], pair.logits(ids)) < LIMIT


def test_greedy_tokens_are_those_of_transformers_alone_and_batched(pair):
    start = prompts(12, 3, 1, 66)
    expected = [generated(pair.theirs, ids, 24) for ids in start]

    def greedy(prompts: list[list[int]]) -> list[list[int]]:
        run, new, done = Run(pair.decoder(), len(prompts)), prompts, [[] for _ in prompts]
        for _ in range(24):
            new = [[logits.argmax().item()] for logits in run(new, all_rows=False)]
            for ids, token in zip(done, new):
                ids += token
        return done

    assert greedy(start) == expected and greedy(start[:1]) == expected[:1]
    assert len({tuple(ids) for ids in expected}) == len(start) and min(len(set(ids)) for ids in expected) > 3


def test_the_native_kernels_leave_nothing_to_torch(pair, monkeypatch):
    """Otherwise the tests here would say nothing about them."""
    monkeypatch.setattr(delta_net, "delta_rule", None)
    ids, = prompts(30)
    run = Run(pair.decoder(), 1)
    if pair.backend == "torch":
        with pytest.raises(TypeError):
            run([ids])
    else:
        assert worst(run([ids])[0], pair.logits(ids)) < LIMIT


@pytest.mark.parametrize("chunk", [1, 3, 63, 64, 65])
def test_chunked_prefill_is_prefill(pair, chunk):
    ids, = prompts(140 if chunk > 3 else 70)
    once, = Run(pair.decoder(), 1)([ids])
    run = Run(pair.decoder(), 1)
    chunked = torch.cat([run([ids[i : i + chunk]])[0] for i in range(0, len(ids), chunk)])
    assert worst(chunked, once.double()) < LIMIT and worst(chunked, pair.logits(ids)) < LIMIT


def test_unequal_steps_of_a_batch_are_those_of_each_sequence_alone(pair):
    """Prompts in parts, single tokens and sequences without new tokens, in one batch and in changing roles."""
    sequences, steps = prompts(90, 75, 70), [(1, 66, 0), (65, 1, 3), (0, 1, 1), (1, 0, 64), (23, 7, 2)]
    run, at, found = Run(pair.decoder(), 3), [0, 0, 0], [[], [], []]
    for step in steps:
        for s, logits in enumerate(run([ids[a : a + n] for ids, a, n in zip(sequences, at, step)])):
            found[s].append(logits)
        at = [a + n for a, n in zip(at, step)]
    assert at == [90, 75, 70]
    for ids, pieces in zip(sequences, found):
        assert worst(torch.cat(pieces), pair.logits(ids)) < LIMIT


def test_a_slot_that_is_taken_again_starts_from_nothing(pair):
    first, second = prompts(70, 30)
    run = Run(pair.decoder(), 1)
    run([first])
    run.cache.free_slot(run.slots[0])
    run.slots, run.past = [run.cache.allocate_slot()], [0]
    assert worst(run([second])[0], pair.logits(second)) < LIMIT


def test_a_restored_slot_forgets_what_came_since(pair):
    """What speculative decoding needs when a draft is refused; and a second sequence may go on from the same past."""
    ids, wrong = prompts(80, 9)
    run = Run(pair.decoder(), 1)
    run([ids[:70]])
    kept, past = run.cache.snapshot(run.slots[0]), run.past
    run([wrong])
    run.past = past
    run.cache.restore(run.slots[0], kept)
    assert worst(run([ids[70:]])[0], pair.logits(ids)[70:]) < LIMIT
    run.cache.restore(run.cache.allocate_slot(), kept)


# Controls: what these limits would not let pass


def test_a_state_that_is_not_zeroed_is_seen(pair):
    first, second = prompts(70, 30)
    run = Run(pair.decoder(), 1)
    run([first])
    run.past = [0]
    assert worst(run([second])[0], pair.logits(second)) > 10 * LIMIT


@pytest.mark.parametrize("state", ["tail", "memory"])
def test_a_state_that_is_lost_is_seen(pair, state):
    ids, = prompts(80)
    run = Run(pair.decoder(), 1)
    run([ids[:64]])
    for layer in run.cache.sequences:
        if layer:
            layer[state].zero_()
    assert worst(run([ids[64:]])[0], pair.logits(ids)[64:]) > 10 * LIMIT


def test_a_slot_of_another_is_seen(pair):
    new = prompts(40, 40)
    run = Run(pair.decoder(), 2)
    run([ids[:30] for ids in new])
    run.slots = run.slots[::-1]
    assert all(worst(logits, pair.logits(ids)[30:]) > 10 * LIMIT for ids, logits in zip(new, run([ids[30:] for ids in new])))


@pytest.mark.parametrize("weight, value", [("A_log", -100.0), ("dt_bias", 0.0), ("norm.weight", 1.0), ("conv1d.weight", 0.5)])
def test_every_small_weight_matters(pair, weight, value):
    """A_log of −100 is no decay at all."""
    ids, = prompts(40)
    name = f"model.layers.1.linear_attn.{weight}"
    decoder = pair.decoder(**{name: torch.full_like(pair.weights[name], value)})
    assert worst(Run(decoder, 1)([ids])[0], pair.logits(ids)) > 10 * LIMIT


@pytest.mark.parametrize("variant", ["next", "3.5"])
def test_the_epsilon_of_short_queries_and_keys_matters(monkeypatch, variant):
    """Where they are nearly as short as its square root; a tenth of it is seen."""
    pair, (ids,) = Pair(variant), prompts(40)
    shared = CONFIG["linear_num_key_heads"] * CONFIG["linear_key_head_dim"]
    for name, w in pair.weights.items():
        if name.endswith("conv1d.weight"):
            w[: 2 * shared] *= 2e-3
    expected = pair.logits(ids)
    assert worst(Run(pair.decoder(), 1)([ids])[0], expected) < LIMIT
    for wrong in (0.9e-6, 1.1e-6):
        monkeypatch.setattr(delta_net, "_L2_EPS", wrong)
        assert worst(Run(pair.decoder(), 1)([ids])[0], expected) > 10 * LIMIT


def test_batches_without_slots_are_refused(pair):
    run = Run(pair.decoder(), 2)
    for slots in ((), (0,), (1, 1), (0, 2), (-1, 1)):  # of two that are taken
        run.slots = slots
        with pytest.raises(ValueError, match="2 sequences need a state slot each"):
            run([[1], [2]])


# Exactness


def bfloat16_errors(
    variant: str, fmt: str, count: int, length: int, step: int | None = None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, theirs): errors in bfloat16 against float64 at each position of prompts, of which ours runs `step` tokens at
    a time. Every token goes to all experts here: nothing but rounding differs."""
    pair = Pair(variant, fmt, num_experts_per_tok=CONFIG["num_experts"], **options)
    # Plain weights are bfloat16 in a checkpoint, and no error of either.
    for w in pair.weights.values():
        if isinstance(w, torch.Tensor):
            w.copy_(w.bfloat16())
    new, run, step = prompts(*[length] * count), Run(pair.decoder(torch.bfloat16), count, room=96), step or length
    steps = [run([ids[at : at + step] for ids in new]) for at in range(0, length, step)]
    ours = torch.cat([logits for pieces in zip(*steps) for logits in pieces])
    exact = pair.theirs.double()(torch.tensor(new)).logits.flatten(0, 1)
    return errors(ours, exact), errors(pair.theirs.bfloat16()(torch.tensor(new)).logits.flatten(0, 1), exact)


@pytest.mark.parametrize("variant", ["next", "3.5"])
@pytest.mark.parametrize("fmt", FORMATS_HERE)
def test_bfloat16_is_as_exact_as_that_of_transformers(variant, fmt):
    """With an epsilon that is not nothing beside a memory's first answers: what is left of a vanishing product is rounding,
    and to norm that to 1 makes errors of any size in either model, such as another sign."""
    ours, theirs = bfloat16_errors(variant, fmt, 4, 80, rms_norm_eps=1e-3)
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native kernels were not built: there was no compiler")
@pytest.mark.parametrize("step", [1, 8, 80])
@pytest.mark.parametrize("variant", ["next", "3.5"])
@pytest.mark.parametrize("fmt", FORMATS_HERE)
def test_bfloat16_is_as_exact_by_native_kernels(variant, fmt, step):
    ours, theirs = bfloat16_errors(variant, fmt, 4, 80, step, backend="cpu", rms_norm_eps=1e-3)
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()


def test_bfloat16_is_as_exact_at_the_epsilon_of_real_models():
    """Where a vanishing product is normed, the errors are of any size in either model, and go on in the states: which
    model has the worst of a sequence is chance (over 40 seeds ours in 16), so distributions are compared."""
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "rms_norm_eps": 1e-6}
    pairs = [bfloat16_errors(variant, "bf16", 16, 24, seed=seed, **kinds) for seed in range(6) for variant in ("next", "3.5")]
    ours, theirs = (torch.cat(e) for e in zip(*pairs))
    for share in (0.5, 0.9, 0.97, 0.99):
        assert ours.quantile(share) <= 1.5 * theirs.quantile(share), share


@pytest.mark.parametrize("variant", ["next", "3.5"])
def test_gates_are_not_rounded(monkeypatch, variant):
    """What decides how much a token changes a memory is float32 in a bfloat16 model, and more than bfloat16 could hold."""
    found, rule = [], delta_net.delta_rule
    monkeypatch.setattr(delta_net, "delta_rule", lambda *args: found.append(args[4]) or rule(*args))
    Run(Pair(variant).decoder(torch.bfloat16), 1)(prompts(40))
    gates = torch.cat([beta.double().logit() for beta in found])
    assert [beta.dtype for beta in found] == [torch.float32] * 3
    assert ((gates - gates.bfloat16()).abs() > 1e-4 * gates.abs()).double().mean() > 0.9


def test_the_offset_of_norms_is_added_in_float32():
    w = torch.linspace(-0.01, 0.01, 64).bfloat16()
    weights = Weights(lambda name: w, qwen3_next.spec(config_of("qwen3_next")), torch.device("cpu"), torch.bfloat16)
    assert torch.equal(weights.norm("model.norm.weight"), 1 + w.float())


# The engine, and the way from a checkpoint


def test_the_engine_gives_what_transformers_gives(pair):
    """Prompts in parts, sequences that wait, a slot that is used twice, one that is put back and computed again."""
    start = prompts(70, 9, 30, 5)
    engine = Engine(pair.decoder(), max_active=2, step_tokens=33, block_size=8)
    for ids in start:
        engine.add(ids, SamplingParams(max_new_tokens=20))
    events = [engine.step() for _ in range(6)]
    engine._put_back(engine._active[-1:])
    events += [engine.step() for _ in range(2)]
    results = {e.index: e.result.tokens for e in [*(e for step in events for e in step), *engine.run()] if e.result}
    expected = [generated(pair.theirs, ids, 20) for ids in start]
    assert [results[i] for i in range(4)] == expected
    assert len(engine._cache.sequences[0]["memory"]) == 2, "no more slots than sequences at once"


def as_made(name: str, p: torch.Tensor, per_expert: bool, prefix: str) -> dict[str, torch.Tensor]:
    """The views of a parameter by the names that its maker gives them."""
    name = prefix + name.removeprefix("model.") if name.startswith("model.") else name
    at, _, projection = name.rpartition(".")
    if per_expert and projection == "gate_up_proj":
        halves = [(e, part, half) for e, rows in enumerate(p) for part, half in zip(("gate", "up"), rows.chunk(2))]
        return {f"{at}.{e}.{part}_proj.weight": half for e, part, half in halves}
    if per_expert and projection == "down_proj":
        return {f"{at}.{e}.down_proj.weight": rows for e, rows in enumerate(p)}
    return {name: p}


QUANTIZED = r"(experts\.\d+\.\w+_proj|self_attn\.\w_proj|in_proj_qkvz?|in_proj_z|out_proj)\.weight"


def checkpoint(folder, theirs, per_expert: bool, prefix: str = "model.", quantize: bool = False):
    """A checkpoint as the maker lays it out, and its config. The model is given the values that it means."""
    made, weights = {}, {}
    for name, p in theirs.named_parameters():
        made |= as_made(name, p.data, per_expert, prefix)
    for name, w in made.items():
        weights[name] = w.clone() if name.endswith("A_log") else w.bfloat16()
    config = json.loads(json.dumps(theirs.config.to_dict()))
    weights["mtp.layers.0.mlp.gate.weight"], weights["mtp.fc.weight"] = torch.ones(8, 64), torch.ones(64, 128)
    if prefix != "model.":
        weights |= {f"model.visual.blocks.{i}.attn.qkv.weight": torch.ones(6, 2) for i in range(2)}
        config = {"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {"depth": 2}, "tie_word_embeddings": False}
    if quantize:
        weights = to_fp8(weights, pattern=QUANTIZED)
        config["quantization_config"] = fp8_config()["quantization_config"]
    for name, w in made.items():
        scale = weights.get(name + "_scale_inv")
        w.copy_(weights[name] if scale is None else weights[name].float() * spread(scale, (128, 128), w.shape))
    folder = write_checkpoint(folder, weights, config)
    (folder / "tokenizer.json").unlink()  # it is none
    return folder


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each row, relative to its length."""
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.parametrize(
    "variant, options, skipped, fmt",
    [
        ("next-options", {"per_expert": True}, 2, "bf16"),
        ("next", {"per_expert": True, "quantize": True}, 2, "source"),
        ("next", {"per_expert": True}, 2, "nvfp4"),
        ("3.5", {"per_expert": False, "prefix": "model.language_model."}, 4, "bf16"),
        ("3.5", {"per_expert": True, "prefix": "model.language_model.", "quantize": True}, 4, "source"),
        ("3.5", {"per_expert": False}, 2, "nvfp4"),
    ],
    ids=["next", "next fp8", "next nvfp4", "3.5", "3.5 fp8", "3.5 text nvfp4"],
)
def test_from_a_checkpoint_to_tokens(tmp_path, variant, options, skipped, fmt):
    """transformers' model holds what the checkpoint means. Only where packing rounds does it get what became of that,
    and every row must be near what it was: another row would be far."""
    kind, changes = VARIANTS[variant]
    theirs = make_model(kind, **changes)
    source = checkpoint(tmp_path / "source", theirs, **options)
    artifact = Artifact(convert_checkpoint(str(source), tmp_path / "packed", fmt=fmt))
    assert artifact.spec.family == kind and len(artifact.manifest.skipped) == skipped
    assert artifact.manifest.skipped["mtp.fc.weight"] == "multi-token prediction is not used yet"
    parameters = dict(theirs.named_parameters())
    assert set(artifact.manifest.tensors) == set(parameters)
    for name, p in parameters.items():
        if fmt == "nvfp4" and isinstance(stored := artifact.load(name), PackedTensor):
            assert 0.01 < row_errors(decode(stored), p).max() < 0.25, name
            p.data.copy_(decode(stored))
    model = load_packed(tmp_path / "packed", "cpu", torch.float32)
    ids = prompts(90, 90)
    # In float64: where a vanishing product is normed, their float32 is off by as much as the limit.
    logits, expected = model.forward(torch.tensor(ids)), copy.deepcopy(theirs).double()(torch.tensor(ids)).logits
    assert worst(logits.flatten(0, 1), expected.flatten(0, 1)) < LIMIT
    assert model.generate(ids[0], max_new_tokens=8).tokens == generated(theirs, ids[0], 8)


# What a config means


def config_of(kind: str, **changes) -> dict:
    return json.loads(json.dumps(MODELS[kind][1](**copy.deepcopy(CONFIG)).to_dict())) | changes


def test_the_spec_of_a_config():
    found = qwen3_next.spec(config_of("qwen3_next"))
    delta, full = found.layers[0].attention, found.layers[3].attention
    assert [type(layer.attention) for layer in found.layers] == [DeltaNet] * 3 + [Attention] and found.norm_offset == 1
    assert delta == DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=24, kernel=4, grouped=True)
    assert full == Attention(4, 2, 32, Rope(10000.0, 8), qk_norm="head", gated=True)
    assert found.layers[0].mlp.shared == Mlp(80) and found.layers[0].mlp.shared_gated
    other = qwen3_5_moe.spec(config_of("qwen3_5_moe"))
    assert not other.layers[0].attention.grouped and other.layers[3] == found.layers[3] and other.norm_offset == 1


@pytest.mark.parametrize("changes, found", [
    ({"layer_types": None, "full_attention_interval": 2}, lambda s: [type(x.attention) for x in s.layers] == [DeltaNet, Attention] * 2),
    ({"layer_types": None}, lambda s: type(s.layers[3].attention) is Attention),
    ({"rope_parameters": None, "rope_theta": 5e6, "partial_rotary_factor": 0.5}, lambda s: s.layers[3].attention.rope == Rope(5e6, 16)),
    ({"rope_parameters": None}, lambda s: s.layers[3].attention.rope == Rope(1e4, 8)),
    ({"attention_bias": True}, lambda s: s.layers[3].attention.bias == "qkvo"),
    ({"linear_conv_kernel_dim": 3}, lambda s: s.layers[0].attention.kernel == 3),
])  # fmt: skip
@pytest.mark.parametrize("kind", MODELS)
def test_options_of_a_config(kind, changes, found):
    assert found(MODELS[kind][2].spec(config_of(kind, **changes)))


@pytest.mark.parametrize("kind, changes", [
    *((kind, changes) for kind in MODELS for changes in (
        {"hidden_act": "gelu"}, {"layer_types": ["linear_attention"] * 3}, {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
        {"layer_types": "linear_attention"}, {"layer_types": [["linear_attention"]] * 4}, {"use_sliding_window": True},
        {"linear_num_value_heads": 3}, {"linear_key_head_dim": "16"}, {"rope_parameters": {"rope_type": "mrope"}}, {"num_experts": None})),
    ("qwen3_5_moe", {"attn_output_gate": False}), ("qwen3_5_moe", {"norm_topk_prob": False}), ("qwen3_5_moe", {"mlp_only_layers": [1]}),
    ("qwen3_5_moe", {"text_config": None}), ("qwen3_5_moe", {"text_config": []}),
])  # fmt: skip
def test_what_is_not_understood_is_refused(kind, changes):
    with pytest.raises(InputError):
        MODELS[kind][2].spec(config_of(kind, **changes))


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe", "whole"])
def test_garbage_in_any_place_of_a_config(kind):
    """Understood, or refused in one sentence: nothing else."""
    config = config_of("qwen3_5_moe" if kind == "whole" else kind)
    config = {"model_type": "qwen3_5_moe", "text_config": config} if kind == "whole" else config
    tried = refused = 0
    for bad in garbled(config):
        tried += 1
        try:
            (qwen3_next if kind == "qwen3_next" else qwen3_5_moe).spec(bad)
        except InputError as e:
            refused += 1
            assert "\n" not in str(e) and len(str(e)) <= 1000
    assert tried - 100 > refused > 200


def test_tying_is_what_the_whole_model_says():
    text = config_of("qwen3_5_moe", tie_word_embeddings=True)
    assert not qwen3_5_moe.spec({"model_type": "qwen3_5_moe", "text_config": text}).tied_head
    assert qwen3_5_moe.spec({"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": True}).tied_head
    assert qwen3_5_moe.spec(text).tied_head


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path):
    theirs = make_model(*VARIANTS["3.5"][:1])
    source = checkpoint(tmp_path / "source", theirs, False, "model.language_model.")
    from safetensors.torch import load_file, save_file

    file = source / "model-00001-of-00002.safetensors"
    name = "model.norm.weight"
    save_file({**load_file(file), name: torch.ones(64)}, file)
    index = source / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"][name] = file.name
    index.write_text(json.dumps(places))
    with pytest.raises(InputError, match=r"has unknown 1 tensor: model\.language_model\.norm\.weight"):
        convert_checkpoint(str(source), tmp_path / "out")
