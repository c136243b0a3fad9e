"""Latent attention, dense and sparse: its operations against loops in float64, its models against transformers'."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import transformers

from tests.kernels.reference import ON_A_CPU
from tests.runtime.test_decoder import errors, greedy, prompts, run, worst
from tutel_pack.convert.families import deepseek_v3, deepseek_v32, glm4_moe_lite, glm_moe_dsa, kimi_k25
from tutel_pack.formats import FORMATS
from tutel_pack.kernels import torch_latent
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import Layout, Ops, get_ops
from tutel_pack.quant.codec import decode, encode
from tutel_pack.runtime import mla
from tutel_pack.runtime.decoder import Decoder

# Every width of a head differs from the others; 48 + 16 rows of kv_a_proj_with_mqa are half a block, 56 no whole
# number of them. Groups of four experts, two of which are left out.
CONFIG = {
    "vocab_size": 211, "hidden_size": 96, "intermediate_size": 224, "moe_intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 56, "kv_lora_rank": 48, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24, "v_head_dim": 44, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "max_position_embeddings": 512,
    "attn_implementation": "eager", "experts_implementation": "eager",
}  # fmt: skip
# The original context is shorter than the prompts, and mscale is not mscale_all_dim: cosines and scores are both scaled.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
# top_k is less than all prompts but the shortest have. With 8 heads hardly any score is 0, which would tie.
INDEX = {"index_topk": 8, "index_head_dim": 24, "index_n_heads": 8}
VARIANTS = {
    "v3": (deepseek_v3, "DeepseekV3", {"first_k_dense_replace": 1}),
    "v3-yarn": (deepseek_v3, "DeepseekV3", {"rope_parameters": YARN, "first_k_dense_replace": 0}),
    "v3-direct-queries": (deepseek_v3, "DeepseekV3", {"q_lora_rank": None, "first_k_dense_replace": 2}),
    "v3-bias": (deepseek_v3, "DeepseekV3", {"attention_bias": True, "n_group": 1, "topk_group": 1}),
    "v3-half-split": (deepseek_v3, "DeepseekV3", {"rope_interleave": False, "norm_topk_prob": False}),
    # Values no wider than a head's part of the scores.
    "v3-narrow-values": (deepseek_v3, "DeepseekV3", {"v_head_dim": 20, "rms_norm_eps": 1e-3, "first_k_dense_replace": 0}),
    "kimi": (kimi_k25, "Kimi_K25", {"rope_parameters": YARN, "first_k_dense_replace": 1}),
    "lite": (glm4_moe_lite, "Glm4MoeLite", {"n_group": 1, "topk_group": 1}),
    "v32": (deepseek_v32, "DeepseekV32", {**INDEX, "first_k_dense_replace": 1, "rope_parameters": YARN}),
    "glm-dsa": (glm_moe_dsa, "GlmMoeDsa", {**INDEX, "first_k_dense_replace": 1}),
    # Layers 1 and 2 reuse the picks of layer 0, layer 4 those of layer 3.
    "glm-dsa-shared": (
        glm_moe_dsa, "GlmMoeDsa",
        {**INDEX, "num_hidden_layers": 5, "indexer_types": ["full", "shared", "shared", "full", "shared"]},
    ),
}  # fmt: skip
SPARSE = ("v32", "glm-dsa", "glm-dsa-shared")
PACKED = ("experts.gate_up_proj", "experts.down_proj", "_proj.weight", "lm_head.weight", "kv_a_proj_with_mqa.weight")
# What a source has in block-FP8 and the recipe keeps.
KEPT = ("kv_b_proj.weight", "indexer.wq_b.weight", "indexer.wk.weight")
GREEDY = 16


class Pair:
    """transformers' model, and the description and weights of ours. The model holds what the packed weights decode to."""

    def __init__(self, variant: str, **changes):
        family, name, options = VARIANTS[variant]
        options = {**CONFIG, **options, **changes}
        self.theirs = make_model(name, options)
        self.spec = family.spec(self.theirs.config.to_dict())
        self.weights = {}
        for name, value in tensors(self.theirs).items():
            name = name.replace("model.language_model.", "model.")
            if name.endswith(KEPT) or name.endswith(PACKED):
                n = value.shape[-2]
                segments = (n // 2, n // 2) if name.endswith("gate_up_proj") else (n,)
                packed = encode(value, FORMATS["fp8" if name.endswith(KEPT) else "mxfp4"], segments).tensor
                value.copy_(decode(packed))
                value = packed
            self.weights[name] = value

    def decoder(self, dtype=torch.float32, spec=None, backend="torch") -> Decoder:
        return Decoder(spec or self.spec, self.weights.__getitem__, "cpu", dtype, backend)


def make_model(name: str, options: dict):
    """Random weights, large enough that every part matters; norms, biases and corrections away from 1 and 0."""
    torch.manual_seed(7)
    if name == "Kimi_K25":
        vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "pos_emb_height": 4,
                  "pos_emb_width": 4}  # fmt: skip
        text = {"model_type": "deepseek_v3", **options}
        config = transformers.Kimi_K25Config(
            text_config=text,
            vision_config=vision,
            projection_hidden_size=32,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        model = transformers.Kimi_K25ForConditionalGeneration(config)
    else:
        model = getattr(transformers, name + "ForCausalLM")(getattr(transformers, name + "Config")(**options))
    model = model.eval().requires_grad_(False)
    for key, p in tensors(model).items():
        if "norm" in key and key.endswith("weight"):
            p.uniform_(0.5, 1.5)
        elif key.endswith("bias"):
            p.normal_(std=0.3)
        else:
            p.normal_(std=1.0 if "embed" in name else 1.5 * p.shape[-1] ** -0.5)
    return model


def tensors(model) -> dict[str, torch.Tensor]:
    """What a checkpoint of the model's language part holds."""
    named = {
        **dict(model.named_parameters()),
        **{n: b for n, b in model.named_buffers() if n.endswith("correction_bias")},
    }
    return {n: t.data for n, t in named.items() if "vision_tower" not in n and "mm_projector" not in n}


@pytest.fixture(scope="module")
def pairs():
    return functools.cache(Pair)


def limit(variant: str) -> float:
    return 1e-3 if variant in SPARSE else 1e-4


# The models


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_at_every_position(pairs, variant):
    pair = pairs(variant)
    # 12 and 3: padding, were there any, would show. 1: a sequence of one token. 40: several blocks.
    new = prompts(12, 3, 1, 40)
    alone = [run(pair.decoder(), [ids])[0] for ids in new]
    for ids, logits, single in zip(new, run(pair.decoder(), new), alone):
        assert worst(logits, pair.theirs(torch.tensor([ids])).logits[0]) < limit(variant)
        assert worst(logits, single) < 1e-5


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native kernels were not built: there was no compiler")
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_by_whole_layers(variant, monkeypatch):
    """Native kernels do all layers of few tokens in one call."""
    wide = {"index_head_dim": 32} if variant in SPARSE else {}  # which they want to be a multiple of 16
    done, layers, pair = [], Ops.layers, Pair(variant, **wide)
    monkeypatch.setattr(Ops, "layers", lambda *given: done.append(layers(*given)) or done[-1])
    decoder = pair.decoder(backend="cpu")
    new = prompts(40, 12, 3, 1)
    for chunk in (1, 8):
        for ids, logits in zip(new, run(decoder, new, chunk)):
            assert worst(logits, pair.theirs(torch.tensor([ids])).logits[0]) < limit(variant)
    assert len(done) == 45 and all(x is not None for x in done)


def broken(spec, what: str):
    """The spec with one thing wrong in every layer that has it."""

    def attention(a):
        if what == "scale":
            return replace(a, scale=a.scale * 1.02)
        if what == "interleave":
            return replace(a, rope=replace(a.rope, interleaved=not a.rope.interleaved))
        if what == "yarn":
            return replace(a, rope=replace(a.rope, scaling=None))
        if what == "indexer":
            return replace(a, indexer=None, reuse_index=False)
        if what == "reuse":
            return replace(a, reuse_index=False)
        if what == "top_k" and a.indexer:
            return replace(a, indexer=replace(a.indexer, top_k=9))
        if what == "index interleave" and a.indexer:
            return replace(
                a, indexer=replace(a.indexer, rope=replace(a.indexer.rope, interleaved=not a.indexer.rope.interleaved))
            )
        return a

    def mlp(m):
        if what == "groups" and hasattr(m, "router"):
            return replace(m, router=replace(m.router, groups=1, top_groups=1))
        if what == "routed scale" and hasattr(m, "router"):
            return replace(m, router=replace(m.router, scale=1.0))
        return m

    return replace(
        spec,
        layers=tuple(replace(layer, attention=attention(layer.attention), mlp=mlp(layer.mlp)) for layer in spec.layers),
    )


CONTROLS = [
    ("v3", "scale"), ("v3", "interleave"), ("v3", "groups"), ("v3", "routed scale"), ("v3-yarn", "yarn"), ("v3-half-split", "interleave"),
    ("v32", "indexer"), ("v32", "top_k"), ("v32", "index interleave"), ("glm-dsa", "index interleave"), ("glm-dsa-shared", "reuse"),
]  # fmt: skip


@pytest.mark.parametrize("variant, what", CONTROLS)
def test_a_wrong_spec_is_seen(pairs, variant, what):
    """The limits are tight enough that each of these fields matters."""
    pair, new = pairs(variant), prompts(40)
    wrong = pair.decoder(spec=broken(pair.spec, what))
    assert worst(run(wrong, new)[0], pair.theirs(torch.tensor(new)).logits[0]) > 10 * limit(variant)


@pytest.mark.parametrize("variant", ["v3-yarn", "v3-direct-queries", "kimi", "lite", *SPARSE])
def test_greedy_tokens_are_those_of_transformers(pairs, variant):
    pair, start = pairs(variant), prompts(12, 3, 1, 33)
    options = {"max_new_tokens": GREEDY, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [pair.theirs.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in start]
    assert greedy(pair.decoder(), start, GREEDY) == expected
    # A model that says one thing whatever it is given would prove nothing.
    assert len({tuple(ids) for ids in expected}) == len(start) and min(len(set(ids)) for ids in expected) > 3


@pytest.mark.parametrize(
    "chunk", [1, 4, 7, 39], ids=["a token", "within a block", "across blocks", "all but the last token"]
)
@pytest.mark.parametrize("variant", ["v3", "v32", "glm-dsa-shared"])
def test_chunked_prefill_is_prefill(pairs, variant, chunk):
    decoder, new = pairs(variant).decoder(), prompts(40, 12, 3)
    for once, chunked in zip(run(decoder, new), run(decoder, new, chunk)):
        assert worst(chunked, once) < 1e-5


@pytest.fixture(params=ON_A_CPU)
def backend(request) -> str:
    if request.param == "cpu" and not native.LIBRARY.exists():
        pytest.skip("the native kernels were not built: there was no compiler")
    return request.param


def bfloat16_errors(
    variant: str, backend: str, chunk: int | None, **changes
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(ours, theirs): errors in bfloat16 against float64 at each of 160 positions. Every token goes to all experts: no
    rounding tips a router's choice."""
    pair = Pair(variant, n_group=1, topk_group=1, num_experts_per_tok=16, **changes)
    # Plain weights are bfloat16 in a checkpoint, and no error of either.
    for w in pair.weights.values():
        if isinstance(w, torch.Tensor):
            w.copy_(w.bfloat16())
    decoder, new = pair.decoder(torch.bfloat16, backend=backend), prompts(*[40] * 4)
    exact = pair.theirs.double()(torch.tensor(new)).logits.flatten(0, 1)
    theirs = pair.theirs.bfloat16()(torch.tensor(new)).logits.flatten(0, 1)
    return errors(torch.cat(run(decoder, new, chunk)), exact), errors(theirs, exact)


@pytest.mark.parametrize("chunk", [None, 4], ids=["expanded", "absorbed"])
@pytest.mark.parametrize(
    "variant, changes",
    [("v3", {}), ("v3-direct-queries", {}), ("v32", {"index_topk": 40})],
    ids=["v3", "direct", "v32"],
)
def test_bfloat16_is_as_exact_as_that_of_transformers(variant, changes, chunk, backend):
    """All positions are seen: nothing but rounding differs, and the worst position means something."""
    ours, theirs = bfloat16_errors(variant, backend, chunk, **changes)
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()


@pytest.mark.parametrize("chunk", [None, 8])
def test_bfloat16_with_picks_is_as_exact_as_that_of_transformers(chunk, backend):
    """A rounding that tips an indexer's pick makes an error of any size, in either model: those are counted, the others
    are compared by their median."""
    wide = {"index_head_dim": 32}  # which native kernels want to be a multiple of 16
    found = [bfloat16_errors(variant, backend, chunk, **wide) for variant in SPARSE]
    ours, theirs = (torch.cat(e) for e in zip(*found))
    assert ours.median() <= 1.5 * theirs.median()
    tipped = 4 * theirs.median()
    assert (ours > tipped).sum() <= 1.5 * (theirs > tipped).sum()


@pytest.mark.parametrize("variant", ["v3", "v32"])
def test_the_epsilon_of_short_latents_matters(monkeypatch, variant):
    """Where norms see inputs nearly as short as its square root, index keys among them; a tenth of it is seen."""
    pair, new = Pair(variant), prompts(40)
    for name, w in pair.weights.items():
        if name.endswith("input_layernorm.weight"):
            w *= 1e-3
    expected = pair.theirs(torch.tensor(new)).logits[0]
    assert worst(run(pair.decoder(), new)[0], expected) < limit(variant)
    for wrong in (0.9e-6, 1.1e-6):
        monkeypatch.setattr(mla, "_LATENT_EPS", wrong)
        assert worst(run(pair.decoder(), new)[0], expected) > 10 * limit(variant)


def test_what_chooses_is_not_rounded(monkeypatch):
    """In a bfloat16 model router logits, weights of index heads and the logits of tokens are float32, and hold more than
    bfloat16 could. With 8 heads of 32 the weights' constant is a power of two and takes nothing away."""
    found = {"route": [], "top_positions": []}

    def watch(operation: str, place: int) -> None:
        plain = getattr(Ops, operation)
        monkeypatch.setattr(Ops, operation, lambda ops, *args: found[operation].append(args[place]) or plain(ops, *args))

    watch("route", 0)
    watch("top_positions", 1)
    found["logits"] = run(Pair("v32", index_head_dim=32).decoder(torch.bfloat16), prompts(40))
    for values in (value for group in found.values() for value in group):
        assert values.dtype == torch.float32 and (values != values.bfloat16()).float().mean() > 0.9
    assert [len(group) for group in found.values()] == [2, 3, 1]


def test_only_latents_are_cached(pairs):
    """64 numbers a token where keys and values of four heads would be 336, and an index key in the layers that pick."""
    shapes = [
        {name: pool.shape[2:] for name, pool in layer.items()}
        for layer in pairs("glm-dsa-shared").decoder().new_cache(1).tokens
    ]
    picks, reuses = {"latents": (48 + 16,), "index_keys": (24,)}, {"latents": (48 + 16,)}
    assert shapes == [picks, reuses, reuses, picks, reuses]


# The operations

# (new tokens, past) of two sequences: a prefill, decoding, and chunks of both.
STEPS = [((9, 4), (0, 0)), ((1, 1), (20, 3)), ((5, 1), (8, 30)), ((0, 3), (0, 1))]
HEADS, NOPE, ROTATED, RANK, VALUE, BLOCK = 3, 6, 4, 10, 5, 4


def paged(new, past, width: int, generator) -> tuple[torch.Tensor, Layout, list[torch.Tensor]]:
    """A pool with NaN where nothing is stored, its layout, and the entries of each sequence."""
    lengths = [p + n if n else 0 for n, p in zip(new, past)]
    blocks = torch.randperm(32, generator=generator)
    pool, tables, entries = torch.full((32, BLOCK, width), torch.nan), [], []
    for length in lengths:
        table, blocks = blocks[: -(-length // BLOCK)], blocks[-(-length // BLOCK) :]
        values = torch.randn(length, width, generator=generator)
        for i, value in enumerate(values):
            pool[table[i // BLOCK], i % BLOCK] = value
        tables.append(table)
        entries.append(values)
    starts = torch.tensor([0, *new]).cumsum(0).tolist()
    return pool, Layout(starts, lengths, tables, torch.zeros(0, dtype=torch.int64)), entries


def attention_by_loops(q, entries, up, past, seen) -> torch.Tensor:
    """One query of one sequence in float64: expanded, head by head; `seen` are the positions it looks at."""
    out = []
    for head in range(HEADS):
        latents, rotated = entries[seen].double().split([RANK, ROTATED], dim=-1)
        keys, values = (latents @ up[head].double().T).split([NOPE, VALUE], dim=-1)
        scores = q[head].double() @ torch.cat([keys, rotated], dim=-1).T
        out.append(torch.softmax(0.3 * scores, dim=-1) @ values)
    return torch.stack(out)


@pytest.mark.parametrize("way", ["absorbed", "expanded"])
@pytest.mark.parametrize("tiles", ["one", "many"])
@pytest.mark.parametrize("new, past", STEPS)
@pytest.mark.parametrize("top_k", [None, 3])
def test_latent_attention(monkeypatch, way, tiles, new, past, top_k):
    monkeypatch.setattr(torch_latent, "_absorbing_is_cheaper", lambda *_: way == "absorbed")
    if tiles == "many":
        monkeypatch.setattr(torch_latent, "_QUERIES", 6)
        monkeypatch.setattr(torch_latent, "_EXPANDED", 1)
    generator = torch.Generator().manual_seed(3)
    pool, layout, entries = paged(new, past, RANK + ROTATED, generator)
    q = torch.randn(sum(new), HEADS, NOPE + ROTATED, generator=generator)
    up = torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator)
    picks = None
    if top_k:
        picks = [torch.stack([torch.randperm(n, generator=generator)[:top_k] for _ in range(c)]) if c and n > top_k else None
                 for c, n in zip(new, layout.lengths)]  # fmt: skip
        for rows, p in zip(picks, past):
            for i, row in enumerate(rows if rows is not None else ()):
                if row.min() > p + i:  # a query picks itself, at least
                    row[0] = p + i
    got = get_ops("torch").latent_attention(q, pool, up, layout, 0.3, picks)
    assert got.shape == (sum(new), HEADS, VALUE)
    for s, (count, p) in enumerate(zip(new, past)):
        for i in range(count):
            seen = [j for j in range(p + i + 1) if not picks or picks[s] is None or j in picks[s][i]]
            expected = attention_by_loops(q[layout.starts[s] + i], entries[s], up, p, seen)
            assert (got[layout.starts[s] + i] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("tile", [1, 1 << 22])
@pytest.mark.parametrize("new, past", STEPS)
def test_top_positions(monkeypatch, tile, new, past):
    monkeypatch.setattr(torch_latent, "_SCORES", tile)
    generator = torch.Generator().manual_seed(4)
    pool, layout, keys = paged(new, past, 7, generator)
    q, weights = torch.randn(sum(new), 6, 7, generator=generator), torch.randn(sum(new), 6, generator=generator)
    picks = get_ops("torch").top_positions(q, weights, pool, layout, top_k=4)
    for s, (count, p) in enumerate(zip(new, past)):
        if layout.lengths[s] <= 4:
            assert picks[s] is None
            continue
        assert picks[s].shape == (count, 4)
        for i, row in enumerate(picks[s].tolist()):
            t = layout.starts[s] + i
            scores = [(weights[t] * torch.relu(keys[s][j] @ q[t].T)).sum().item() for j in range(p + i + 1)]
            best = sorted(range(p + i + 1), key=lambda j: -scores[j])[:4]
            assert sorted(j for j in row if j <= p + i) == sorted(best) and len(set(row)) == 4


@pytest.mark.parametrize("shapes", [
    ((5, 2, 10), (3, 11, 10), (4, BLOCK, 14)), ((5, 3, 4), (3, 11, 10), (4, BLOCK, 14)), ((5, 3, 15), (3, 11, 10), (4, BLOCK, 14)),
    ((5, 3, 10), (3, 11, 10), (4, BLOCK, 9)), ((4, 3, 10), (3, 11, 10), (4, BLOCK, 14)),
], ids=["heads", "no part for latents", "no values", "latents wider than entries", "tokens"])  # fmt: skip
def test_misshapen_arguments(shapes):
    q, up, entries = (torch.zeros(shape) for shape in shapes)
    layout = Layout([0, 5], [5], [torch.tensor([0, 1])], torch.arange(5))
    with pytest.raises(ValueError, match="latent_attention cannot take"):
        get_ops("torch").latent_attention(q, entries, up, layout, 1.0)


def test_nothing_to_do():
    layout, up = (
        Layout([0, 0], [0], [torch.zeros(0, dtype=torch.int64)], torch.zeros(0, dtype=torch.int64)),
        torch.zeros(3, 11, 10),
    )
    ops = get_ops("torch")
    assert ops.latent_attention(torch.zeros(0, 3, 10), torch.zeros(4, BLOCK, 14), up, layout, 1.0).shape == (0, 3, 5)
    assert ops.top_positions(torch.zeros(0, 6, 7), torch.zeros(0, 6), torch.zeros(4, BLOCK, 7), layout, 2) == [None]
