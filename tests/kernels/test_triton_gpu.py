"""What is proven in the interpreter, on the GPU that is here; bench/gpu.sh runs it first."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.latents import Latents
from tests.kernels.reference import (
    DTYPES,
    UNIT,
    decode64,
    linear64,
    moe64,
    random_packed,
    tokens_of_experts,
    tolerance,
    worst_tile,
)
from tests.kernels.test_attention import Case
from tests.kernels.test_fused import Attention, normal
from tests.kernels.test_products import MoeCase, x_of
from tests.kernels.test_triton_act import SHAPES, act64, expected, stored64, unusual
from tests.kernels.test_triton_attention import DECODE, LATENTS, merge64, parts_of
from tests.kernels.test_triton_heads import CASES, PLACED, expected64, limit, worst_head
from tests.kernels.test_triton_products import ACTIVATION, FORMATS_HERE, LINEAR, MOE, PLAIN, all_bits, clamped64
from tests.kernels.test_triton_routing import ROUTERS, route64
from tests.runtime.test_graphs import BLOCK, PROMPTS, SMALL, differences, small_decoder

from tutel_pack.formats import PackedTensor
from tutel_pack.kernels.ops import ACTS, get_ops
from tutel_pack.kernels.triton.activations import quantizing
from tutel_pack.kernels.triton.chips import chip_of
from tutel_pack.kernels.triton.attention import joining
from tutel_pack.kernels.triton.heads import placing, placing_latents
from tutel_pack.kernels.triton.matmul import Epilogue, operand, problem_of, product
from tutel_pack.kernels.triton.tiles import tile_for
from tutel_pack.runtime.batch import Batch
from tutel_pack.runtime.engine import Engine
from tutel_pack.runtime.graphs import Graphs
from tutel_pack.runtime.sampling import SamplingParams
from tutel_pack.spec import Rope

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch asks for where results may not differ

LARGER = {
    "prefill": MoeCase(300, 4, 6, 512, 384),  # several full tiles of every expert
    "hot and ragged": MoeCase(200, 1, 5, 288, 160, [[3]] * 199 + [[0]]),
    "384 experts": MoeCase(64, 8, 384, 256, 128),
}


@pytest.fixture
def ops():
    return get_ops("triton", "cuda")


def on_gpu(*arguments):
    return [a.to("cuda") if isinstance(a, (torch.Tensor, PackedTensor)) else a for a in arguments]


def in_dtypes(*formats: str):
    """Every format in bfloat16, and one in all: each pair is compiled, for every tile."""
    pairs = [*((fmt, torch.bfloat16) for fmt in formats), ("mxfp4", torch.float32), ("mxfp4", torch.float16)]
    return pytest.mark.parametrize("fmt, dtype", pairs, ids=[f"{fmt}-{dtype}" for fmt, dtype in pairs])


@in_dtypes(*FORMATS_HERE)
@pytest.mark.parametrize("shape", LINEAR)
def test_linear(shape, fmt, dtype, ops):
    t, segments, k = LINEAR[shape]
    w, x = random_packed(fmt, (sum(segments), k), segments), x_of(t, k, dtype=dtype)
    bias = x_of(sum(segments), dtype=torch.bfloat16, seed=6)
    y = ops.linear(*on_gpu(x, w, bias)).cpu()
    assert worst_tile(y, linear64(x, decode64(w), bias)) < tolerance(dtype, k)


@pytest.mark.parametrize("case", PLAIN)
def test_linear_of_plain_weights(case, ops):
    """The last as long as real ones are: matrix units cut off what they add."""
    dtype, of_x = PLAIN[case]
    for t, n, k in ((33, 150, 96), (2, 17, 2880), (3, 300, 7168)):
        w, x = x_of(n, k, dtype=dtype, seed=3) * k**-0.5, x_of(t, k, dtype=of_x)
        y = ops.linear(*on_gpu(x, w)).cpu()
        assert worst_tile(y, linear64(x, w.double().numpy())) < tolerance(of_x, k)


def test_float32_tokens_keep_all_of_their_bits(ops):
    x = all_bits()
    assert torch.equal(ops.linear(*on_gpu(x, torch.eye(96, dtype=torch.bfloat16))).cpu(), x)


@in_dtypes(*FORMATS_HERE, "bf16")
@pytest.mark.parametrize("case", {**MOE, **LARGER})
def test_moe(case, fmt, dtype, ops):
    case = {**MOE, **LARGER}[case]
    x, ids, weights, gate_up, down = case.arguments(fmt, dtype)
    biases = [x_of(case.experts, n, dtype=torch.bfloat16) for n in (gate_up.shape[1], case.hidden)]
    y = ops.moe(*on_gpu(x, ids, weights, gate_up, down, ACTIVATION, *biases)).cpu()
    ids = ids.masked_fill(ids >= case.experts, -1)
    expected = moe64(x, ids, weights, decode64(gate_up), decode64(down), clamped64, *biases)
    assert worst_tile(y, expected, tokens_of_experts(ids, case.experts)) < tolerance(dtype, case.intermediate)


@pytest.mark.parametrize("name", ROUTERS)
def test_route(name, ops):
    moe = ROUTERS[name]
    logits = x_of(64, moe.experts, dtype=torch.float32) * 3
    correction = x_of(moe.experts, dtype=torch.float32, seed=9) * 0.1 if moe.router.correction else None
    ids, weights = ops.route(*on_gpu(logits, moe, correction))
    expected_ids, expected = route64(logits, moe, correction)
    assert np.array_equal(ids.cpu().numpy(), expected_ids)
    assert np.allclose(weights.cpu().double().numpy(), expected, rtol=1e-5, atol=1e-30)


def test_moe_in_a_graph(ops):
    """Replayed with other experts and dropped tokens, without a word from the host."""
    x, ids, weights, gate_up, down = LARGER["prefill"].arguments("mxfp4", torch.bfloat16)
    device = on_gpu(x, ids, weights, gate_up, down)
    ops.moe(*device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.moe(*device)
    ids = (ids + 1) % 6
    ids[::3] = -1
    device[1].copy_(ids)
    graph.replay()
    expected = moe64(x, ids, weights, decode64(gate_up), decode64(down))
    assert worst_tile(y.cpu(), expected, tokens_of_experts(ids, 6)) < tolerance(torch.bfloat16, 384)


LONG = {
    "many parts": Case([3000, 20, 700], [1, 1, 1], heads=16, kv_heads=2),
    "many parts of a window": Case([3000, 20], [1, 1], heads=16, kv_heads=2, window=1500),
    "mixed": Case([0, 7, 4, 30], [3, 1, 0, 6], window=9),
}


def layout_on_gpu(layout):
    return replace(layout, tables=on_gpu(*layout.tables))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", {**DECODE, **LONG})
def test_attention(name, dtype, ops):
    case = (LONG[name] if name in LONG else DECODE[name][0]).build(dtype)
    q, keys, values = on_gpu(case.q, case.keys, case.values)
    got = ops.attention(q, keys, values, layout_on_gpu(case.layout), case.window)
    assert case.error(got.cpu()) < case.limit()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*LATENTS, "real"])
def test_latents(name, dtype, ops):
    """real: of DeepSeek-V3's sizes, in many parts."""
    case = (LATENTS.get(name) or Latents([2000, 30], 128, 512, 64, 128, 128, block=64)).build(dtype)
    q, entries, up, *picks = on_gpu(case.q, case.entries, case.up, *(case.picks or []))
    got = ops.latent_attention(q, entries, up, layout_on_gpu(case.layout), case.scale, picks or None)
    assert case.error(got.cpu()) < case.limit()


def test_attention_in_a_graph(ops):
    """Replayed with other queries and lengths."""
    case = LONG["many parts"].build(torch.bfloat16)
    q, keys, values = on_gpu(case.q, case.keys, case.values)
    layout = layout_on_gpu(case.layout)
    ops.attention(q, keys, values, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.attention(q, keys, values, layout)
    q.copy_(q.flip(0))
    layout.flat.lengths.sub_(1)
    graph.replay()
    shorter = replace(layout, lengths=[n - 1 for n in layout.lengths])
    assert torch.equal(got, ops.attention(q, keys, values, shorter))
    assert not torch.equal(got, ops.attention(q, keys, values, layout_on_gpu(case.layout)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_rotations(dtype, ops):
    """To a last bit what torch has."""
    plain = get_ops("torch")
    x, weight = x_of(7, 3, 128, dtype=dtype), x_of(128, dtype=torch.bfloat16)
    rotation = plain.rotation(torch.arange(7) * 1000, Rope(1e4, 64))
    limit = 2 * UNIT[dtype]
    for got, expected in (
        (ops.rms_norm(*on_gpu(x, weight), 1e-6), plain.rms_norm(x, weight, 1e-6)),
        (ops.rope(x.cuda(), on_gpu(*rotation)), plain.rope(x, rotation)),
        (ops.rope(x.cuda(), on_gpu(*rotation), interleaved=True), plain.rope(x, rotation, interleaved=True)),
    ):
        assert torch.allclose(got.cpu().double(), expected.double(), rtol=limit, atol=8 * UNIT[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_heads_are_placed(name, dtype):
    case = Attention(dtype, **CASES[name])
    h = case.heads
    norms = {n: w if w is None else w.cuda() for n, w in (("q_norm", h.q_norm), ("k_norm", h.k_norm))}
    pools, turned = on_gpu(*case.pools), torch.full((7, 4, 32), torch.nan, dtype=dtype, device="cuda")
    rotation = case.rotation and on_gpu(*case.rotation)
    q, k, v, slots = on_gpu(case.q, case.k, case.v, case.layout.slots)
    placing(q, k, v, *pools, slots, rotation, replace(h, **norms), turned).run()
    assert worst_head([t.cpu() for t in (turned, *pools)], expected64(case)) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLACED)
def test_latents_are_placed(name, dtype):
    case = PLACED[name].build(dtype)
    q, kv, entries, slots, norm, *rotation = on_gpu(
        case.q, case.kv, case.entries, case.slots, case.norm, *case.rotation
    )
    turned = torch.full(q.shape, torch.nan, dtype=dtype, device="cuda")
    placing_latents(q, kv, entries, slots, rotation, replace(case.how, kv_norm=norm), turned).run()
    assert worst_head([t.cpu() for t in case.parts(turned, entries)], case.expected()) < limit(dtype)


@pytest.mark.parametrize("count, d", [(2, 128), (65, 512), (600, 100)])
def test_parts_are_joined(count, d):
    parts, stats = parts_of(count, d)
    out = torch.full((*parts.shape[:2], d), torch.nan, device="cuda")
    joining(*on_gpu(parts, stats, torch.arange(len(parts) + 1)), None, out).run()
    expected = merge64(parts, stats, None)
    rows, limit = [np.array([i]) for i in range(len(expected))], tolerance(torch.float32, count)
    assert worst_tile(out.cpu().flatten(0, 1), expected, rows) < limit + 16 * UNIT[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_share_a_sum(dtype, ops):
    """Of so few rows that K is cut into parts."""
    x, rows = normal(3, 2048, dtype=dtype), (96, 33)
    weights = [random_packed("fp8", (n, 2048), seed=n) for n in rows]
    got = ops.linears(x.cuda(), [(w.to("cuda"), None) for w in weights])
    assert got[0]._base is not None and got[0]._base is got[1]._base, "one tensor has both"
    for y, w in zip(got, weights):
        assert worst_tile(y.cpu(), linear64(x, decode64(w))) < tolerance(dtype, 2048)


@pytest.fixture(params=ACTS)
def act(request) -> str:
    chip = chip_of(torch.device("cuda"))
    if request.param not in chip.acts:
        pytest.skip(f"{chip.name} has no instructions for {request.param}")
    return request.param


def test_activations(act):
    x = unusual(20, 160, torch.bfloat16)
    made, launch = quantizing(x.cuda(), act)
    launch.run()
    got = stored64(*(t if t is None else t.cpu() for t in (made.data, made.scale, made.factors)), act, 160)
    assert np.allclose(got, act64(x, act), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_activations(shape, act):
    t, segments, k, split = SHAPES[shape]
    w, x = random_packed(ACTS[act], (sum(segments), k), segments), x_of(t, k, dtype=torch.bfloat16)
    weight, out = operand(w.to("cuda")), torch.full((t, sum(segments)), torch.nan, dtype=x.dtype, device="cuda")
    made, launch = quantizing(x.cuda(), act)
    chip = chip_of(out.device)
    tile = replace(tile_for(chip, problem_of(weight, t, x.dtype, act)), split=split)
    for run in (launch, *product(chip, made, weight, out, tile, Epilogue())):
        run.run()
    assert worst_tile(out.cpu(), expected(x, w, act)) < tolerance(torch.bfloat16, k)


@pytest.mark.parametrize("name", SMALL)
def test_recorded_steps(name):
    """Graphs of one and of four sequences in turn, against the same steps without."""
    decoder, lengths = small_decoder(name, "cuda"), [len(p) for p in PROMPTS]
    caches = [decoder.new_cache(12, BLOCK) for _ in range(2)]
    graphs = Graphs.of(decoder)
    graphs.bind(caches[0], 5)
    caches[1].allocate(1)
    caches[1].allocate_slot()
    tables = [[cache.allocate(3) for _ in PROMPTS] for cache in caches][0]
    slots = [[cache.allocate_slot() for _ in PROMPTS] for cache in caches][0]
    for cache in caches:
        decoder.forward(Batch.build(PROMPTS, [0] * 3, tables, "cuda", slots=slots), cache)
    for count, new in [(3, [7, 8, 9]), (1, [1]), (3, [2, 3, 4]), (1, [5])]:
        past = lengths[:count]
        got = graphs.forward(new, past, tables[:count], slots[:count])
        batch = Batch.build([[t] for t in new], past, tables[:count], "cuda", slots=slots[:count])
        assert max(differences([(decoder.forward(batch, caches[1]), got)])) < 1e-4
        lengths[:count] = [n + 1 for n in past]


@pytest.mark.parametrize("name", SMALL)
def test_an_engine_with_graphs(name):
    """As many tokens as it takes to need a larger cache, whose graphs are others."""
    decoder, found = small_decoder(name, "cuda"), []
    for recorded in (True, False):
        engine = Engine(decoder, max_active=3, block_size=BLOCK)
        assert engine._graphs is not None
        engine._graphs = engine._graphs if recorded else None
        for prompt in (*PROMPTS, [2, 7, 1]):
            engine.add(prompt, SamplingParams(max_new_tokens=40))
        found.append({e.index: e.result.tokens for e in engine.run() if e.result})
    assert found[0] == found[1]
