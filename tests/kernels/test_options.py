"""Options of attention, rope, routers and activations against float64 loops."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.reference import ON_A_CPU, DTYPES, decode64, random_packed, tolerance, tokens_of_experts, worst_tile
from tests.kernels.test_attention import Case
from tests.kernels.test_small_ops import assert_rounded_once, x_of

from tutel_pack.kernels import torch_backend
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import Layout, get_ops
from tutel_pack.spec import ClampedSwiglu, Dynamic, Linear, Llama3, Moe, Rope, Router, Swiglu, Yarn

OPS = get_ops("torch")


@pytest.fixture(autouse=True, params=ON_A_CPU)
def every_backend(request, monkeypatch):
    if request.param == "cpu" and not native.LIBRARY.exists():
        pytest.skip("the native kernels were not built: there was no compiler")
    monkeypatch.setitem(globals(), "OPS", get_ops(request.param))


# Attention


def expected_attention(case: Case, scale: float, sinks: np.ndarray | None) -> np.ndarray:
    """[T · heads, D], by loops."""
    out = []
    for s, (past, new) in enumerate(zip(case.past, case.new)):
        k, v = case.k[s].double().numpy(), case.v[s].double().numpy()
        for i in range(new):
            last = past + i
            first = 0 if case.window is None else max(0, last - case.window + 1)
            for h in range(case.heads):
                kv = h // (case.heads // case.kv_heads)
                logits = k[first : last + 1, kv] @ case.q[case.layout.starts[s] + i, h].double().numpy() * scale
                logits = logits if sinks is None else np.append(logits, sinks[h])
                p = np.exp(logits - logits.max())
                p = (p / p.sum())[: last + 1 - first]
                out.append(p @ v[first : last + 1, kv])
    return np.stack(out)


CASES = {
    "mixed": ([0, 7, 30, 0], [12, 1, 6, 3], {}),
    "window": ([0, 7, 30], [12, 1, 6], {"window": 5}),
    "few": ([0, 7, 30], [3, 1, 6], {"window": 6}),
    "one key": ([0], [1], {}),  # which shares its softmax with the sink alone
    "multi-query": ([3], [9], {"heads": 6, "kv_heads": 1}),
    "several query tiles": ([3], [300], {"window": 40}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_attention_with_sinks_and_a_scale(case, dtype):
    past, new, options = CASES[case]
    case = Case(past, new, **options).build(dtype)
    sinks = x_of(case.heads, dtype=torch.bfloat16, scale=2)
    scale = 0.1  # the tolerance is derived for logits around 1, which D^−½ gives; a larger scale would magnify their errors
    expected = expected_attention(case, scale, sinks.double().numpy())
    groups = [np.array([i]) for i in range(len(expected))]

    def error(scale=scale, sinks=sinks):
        got = OPS.attention(case.q, case.keys, case.values, case.layout, case.window, scale, sinks)
        assert got.dtype == dtype
        return worst_tile(got.flatten(0, 1), expected, groups)

    assert error() < case.limit()
    assert error(sinks=None) > case.limit() and error(sinks=sinks.flip(0)) > case.limit()
    if max(case.lengths) > 1:
        assert error(scale=None) > case.limit()


def test_masks_of_sinks_do_not_grow_with_the_context(monkeypatch):
    case, sinks = Case([3], [40]).build(torch.float32), x_of(4, dtype=torch.float32)
    arguments = case.q, case.keys, case.values, case.layout, None, None, sinks
    seen, made = [], torch_backend._sink_mask
    expected = OPS.attention(*arguments)
    monkeypatch.setattr(torch_backend, "_MASK", 8 * 2 * 45)  # 8 rows of 2 heads over 9 blocks of 5 keys
    monkeypatch.setattr(torch_backend, "_sink_mask", lambda *rest: seen.append(made(*rest)) or seen[-1])
    assert torch.allclose(OPS.attention(*arguments), expected, atol=1e-6)
    assert len(seen) == 10 and max(mask.numel() for mask in seen) <= 8 * 2 * (1 + 45)


def test_a_sink_that_takes_everything():
    case = Case([3], [4]).build(torch.float32)
    got = OPS.attention(case.q, case.keys, case.values, case.layout, sinks=torch.full((4,), 1e4))
    assert torch.equal(got, torch.zeros_like(got))
    with pytest.raises(ValueError, match=r"attention cannot .* \(3,\)"):
        OPS.attention(case.q, case.keys, case.values, case.layout, sinks=torch.zeros(3))


# Rope


def frequencies64(rope: Rope, length: int = 0) -> np.ndarray:
    """Dimension by dimension, as the papers have it."""
    out, scaling, theta = [], rope.scaling, rope.theta
    if isinstance(scaling, Dynamic) and length > scaling.original:
        theta *= (scaling.factor * length / scaling.original - scaling.factor + 1) ** (rope.dim / (rope.dim - 2))
    for j in range(rope.dim // 2):
        f = theta ** (-2 * j / rope.dim)
        if isinstance(scaling, Linear):
            f /= scaling.factor
        elif isinstance(scaling, Llama3):
            turns = scaling.original * f / (2 * math.pi)
            keep = min(1.0, max(0.0, (turns - scaling.low) / (scaling.high - scaling.low)))
            f = keep * f + (1 - keep) * f / scaling.factor
        elif isinstance(scaling, Yarn):
            ends = [rope.dim * math.log(scaling.original / (b * 2 * math.pi)) / (2 * math.log(rope.theta))
                    for b in (scaling.beta_fast, scaling.beta_slow)]  # fmt: skip
            low, high = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
            low, high = max(low, 0), min(high, rope.dim - 1)
            ramp = min(1.0, max(0.0, (j - low) / (high - low)))
            f = (1 - ramp) * f + ramp * f / scaling.factor
        out.append(f)
    return np.array(out)


ROPES = {
    "plain": Rope(1e4, 64),
    "linear": Rope(1e4, 64, False, Linear(3.0)),
    "yarn": Rope(1e4, 64, False, Yarn(8.0, 512, 32.0, 1.0, True, 1.2)),
    "yarn not rounded": Rope(1.5e5, 64, False, Yarn(32.0, 4096, 32.0, 1.0, False, 1.3466)),
    "llama3": Rope(5e5, 64, False, Llama3(8.0, 512, 1.0, 4.0)),
    "dynamic within": Rope(1e4, 64, False, Dynamic(2.0, 512)),
    "dynamic beyond": Rope(1e4, 64, False, Dynamic(2.0, 64)),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotation_with_scalings(name):
    rope, positions = ROPES[name], torch.arange(300)
    cos, sin = OPS.rotation(positions, rope)
    angles = positions.numpy()[:, None] * frequencies64(rope, 300)
    magnitude = rope.scaling.magnitude if isinstance(rope.scaling, Yarn) else 1.0
    # A float32 frequency is off by a few 2⁻²⁴, its angle by 300 times that.
    for got, expected in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        assert got.dtype == torch.float32 and np.abs(got.double().numpy() - magnitude * expected).max() < 1e-4
    if name not in ("plain", "dynamic within"):
        assert not torch.allclose(cos, OPS.rotation(positions, replace(rope, scaling=None))[0], atol=1e-2)


def test_dynamic_frequencies_follow_each_sequence_s_own_length():
    rope = ROPES["dynamic beyond"]
    layout = Layout([0, 3, 3, 5], [200, 0, 20], [], torch.empty(0))
    positions = torch.tensor([197, 198, 199, 18, 19])
    cos, _ = OPS.rotation(positions, rope, layout)
    for rows, length in ((slice(0, 3), 200), (slice(3, 5), 20)):
        expected = np.cos(positions[rows].numpy()[:, None] * frequencies64(rope, length))
        assert np.abs(cos[rows].double().numpy() - expected).max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [32, 20], ids=["all dimensions", "the first 20 of 32"])
def test_interleaved_rope(dim, dtype):
    x, rotation = x_of(4, 3, 32, dtype=dtype), OPS.rotation(torch.tensor([0, 1, 50, 3]), Rope(1e4, dim))
    cos, sin = (r.double().numpy() for r in rotation)
    x64 = x.double().numpy()
    expected, size = x64.copy(), np.abs(x64)
    for t in range(4):
        for i in range(dim // 2):
            a, b = x64[t, :, 2 * i], x64[t, :, 2 * i + 1]
            expected[t, :, 2 * i], expected[t, :, 2 * i + 1] = a * cos[t, i] - b * sin[t, i], b * cos[t, i] + a * sin[t, i]
            size[t, :, 2 * i] = size[t, :, 2 * i + 1] = np.abs(a) + np.abs(b)
    assert_rounded_once(OPS.rope(x, rotation, interleaved=True), expected, dtype, size)


# Routers


def route64(logits: np.ndarray, spec: Moe, correction: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Of each token: the chosen experts, the best first, and their weights."""
    router, chosen, weights = spec.router, [], []
    for row in logits:
        e = np.exp(row - row.max())
        scores = {
            "softmax": e / e.sum(), "sigmoid": 1 / (1 + np.exp(-row)), "sqrtsoftplus": np.sqrt(np.log1p(np.exp(row))), "softmax_chosen": row,
        }[router.score]  # fmt: skip
        choice = scores if correction is None else scores + correction
        size = len(row) // router.groups
        best = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(router.groups)]
        kept = sorted(range(router.groups), key=lambda g: -best[g])[: router.top_groups]
        allowed = [i for i in range(len(row)) if i // size in kept]
        ids = sorted(allowed, key=lambda i: -choice[i])[: spec.top_k]
        w = np.array([scores[i] for i in ids])
        if router.score == "softmax_chosen":
            w = np.exp(w - w.max()) / np.exp(w - w.max()).sum()
        if router.renormalize:
            w = w / max(w.sum(), router.epsilon)
        chosen.append(ids)
        weights.append(w * router.scale)
    return np.array(chosen), np.array(weights)


ROUTERS = {
    "softmax": Router(),
    "sigmoid": Router("sigmoid", renormalize=False),
    "sqrtsoftplus": Router("sqrtsoftplus", scale=1.5, correction=True),
    "chosen": Router("softmax_chosen", renormalize=False),
    "groups": Router("sigmoid", groups=4, top_groups=2, scale=2.5),
    "one group": Router("sigmoid", groups=3, top_groups=1),
    "corrected groups": Router("sigmoid", correction=True, groups=4, top_groups=2),
    "correction": Router(correction=True, renormalize=False),
    "epsilon": Router(epsilon=3.0),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name):
    spec = Moe(12, 3, 1, ROUTERS[name])
    logits = x_of(40, 12, dtype=torch.float32, scale=2)
    correction = x_of(12, dtype=torch.float32) if spec.router.correction else None
    ids, weights = OPS.route(logits, spec, correction)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    as64 = None if correction is None else correction.double().numpy()
    chosen, expected = route64(logits.double().numpy(), spec, as64)
    assert np.array_equal(ids.numpy(), chosen)
    assert np.allclose(weights.double().numpy(), expected, rtol=1e-5, atol=0)
    plain = replace(spec, router=Router(renormalize=spec.router.renormalize))
    others = OPS.route(logits, plain)
    assert name == "softmax" or not (torch.equal(others[0], ids) and torch.allclose(others[1], weights, rtol=1e-4))
    assert [part.shape for part in OPS.route(logits[:0], spec, correction)] == [(0, 3), (0, 3)]


def test_logits_far_apart_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0, 5.0]])
    for score in ("softmax", "sigmoid", "sqrtsoftplus", "softmax_chosen"):
        _, weights = OPS.route(logits, Moe(4, 4, 1, Router(score)))
        assert weights.isfinite().all() and weights.sum() == pytest.approx(1)


def test_a_correction_is_there_if_and_only_if_the_router_has_one():
    logits = torch.zeros(2, 4)
    for router, correction in ((Router(correction=True), None), (Router(), torch.zeros(4)), (Router(correction=True), torch.zeros(3))):
        with pytest.raises(ValueError, match="route cannot"):
            OPS.route(logits, Moe(4, 2, 1, router), correction)


# Activations and biases

CLAMPED = ClampedSwiglu(limit=1.5, alpha=1.702, shift=1.0)


def clamped64(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    g, u = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    return g / (1 + np.exp(-1.702 * g)) * (u + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_swiglu(dtype):
    gate, up = x_of(7, 33, dtype=dtype, scale=2), x_of(7, 33, dtype=dtype, scale=2).flip(0)
    gate[0, :3], up[0, :3] = torch.tensor([60.0, -60.0, 0.0]), torch.tensor([-60.0, 60.0, -1.0])
    g, u = gate.double().numpy(), up.double().numpy()
    got, expected = OPS.swiglu(gate, up, CLAMPED), clamped64(g, u)
    # u + 1 may cancel: its parts are what is rounded.
    size = np.abs(np.minimum(g, 1.5) / (1 + np.exp(-1.702 * np.minimum(g, 1.5)))) * (np.abs(np.clip(u, -1.5, 1.5)) + 1)
    tiny = torch.finfo(dtype).tiny
    assert_rounded_once(torch.where(got.abs() < tiny, 0, got), np.where(np.abs(expected) < tiny, 0, expected), dtype, size)
    assert not torch.allclose(got, OPS.swiglu(gate, up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [Swiglu(), CLAMPED], ids=["swiglu", "clamped"])
def test_moe_with_biases(activation, dtype):
    gate_up, down = random_packed("mxfp4", (4, 2 * 160, 96), (160, 160)), random_packed("mxfp4", (4, 96, 160), seed=1)
    gate_up_bias, down_bias = x_of(4, 320, dtype=torch.bfloat16), x_of(4, 96, dtype=torch.bfloat16)
    x, weights = x_of(9, 96, dtype=dtype), x_of(9, 2, dtype=torch.float32).abs()
    ids = torch.tensor([[e % 4, -1 if e == 3 else (e + 1) % 4] for e in range(9)])
    w1, w2, b1, b2 = decode64(gate_up), decode64(down), gate_up_bias.double().numpy(), down_bias.double().numpy()
    expected = np.zeros((9, 96))
    for t in range(9):
        for j, e in enumerate(ids[t].tolist()):
            if e >= 0:
                inner = w1[e] @ x[t].double().numpy() + b1[e]
                gate, up = inner[:160], inner[160:]
                inner = clamped64(gate, up) if activation is CLAMPED else gate / (1 + np.exp(-gate)) * up
                expected[t] += weights[t, j].item() * (w2[e] @ inner + b2[e])
    groups = tokens_of_experts(ids, 4)

    def error(*rest):
        return worst_tile(OPS.moe(x, ids, weights, gate_up, down, *rest), expected, groups)

    assert error(activation, gate_up_bias, down_bias) < tolerance(dtype, 160)
    swapped = torch.cat(gate_up_bias.chunk(2, dim=1)[::-1], dim=1)
    for wrong in ((activation, None, down_bias), (activation, gate_up_bias, None), (activation, swapped, down_bias),
                  (activation, gate_up_bias, down_bias.roll(1, 0)), (ClampedSwiglu(1.6, 1.702, 1.0), gate_up_bias, down_bias)):  # fmt: skip
        assert error(*wrong) > tolerance(dtype, 160)
    with pytest.raises(ValueError, match=r"moe cannot .* \(4, 320\)"):
        OPS.moe(x, ids, weights, gate_up, down, activation, gate_up_bias, gate_up_bias)
