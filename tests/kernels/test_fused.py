"""Operations that a backend does several of in one call: as the same operations one by one, which others test."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from tests.kernels.reference import ON_A_CPU, UNIT, WITH_TILES, random_packed
from torch import Tensor

from tutel_pack.formats import FORMATS, PackedTensor
from tutel_pack.kernels.cpu import native
from tutel_pack.kernels.ops import Dense, Experts, Grouped, Heads, Latent, Layer, Layout, Ops, PlacedLayers
from tutel_pack.spec import ClampedSwiglu, Moe, Rope, Router, Swiglu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=ON_A_CPU)
def ops(request) -> Ops:
    if request.param == "cpu" and not native.LIBRARY.exists():
        pytest.skip("the native kernels were not built: there was no compiler")
    return Ops(request.param)


def alone(ops: Ops) -> Ops:
    """The same backend, by single operations."""
    single = Ops(ops.name)
    single._fused = dict.fromkeys(single._fused)
    return single


def normal(*shape: int, dtype=torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: Tensor, expected: Tensor, units: int = 4) -> None:
    """By a few roundings of the largest value."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    limit = units * UNIT[got.dtype] * expected.double().abs().max()
    assert (got.double() - expected.double()).abs().max() <= limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("biased", ["none", "all", "some"])
def test_linears(ops, tokens, biased, dtype):
    x, rows = normal(tokens, 96, dtype=dtype), (64, 17, 32)
    has = {"none": [0, 0, 0], "all": [1, 1, 1], "some": [1, 0, 1]}[biased]
    parts = [
        (random_packed("fp8", (n, 96), seed=n), normal(n, dtype=torch.bfloat16, seed=n) if bias else None)
        for n, bias in zip(rows, has)
    ]
    got, expected = ops.linears(x, parts), [ops.linear(x, w, bias) for w, bias in parts]
    assert len(got) == 3 and all(torch.equal(a, b) for a, b in zip(got, expected))
    assert tokens == 0 or not torch.equal(got[0][:, :17], got[1])
    with pytest.raises(ValueError, match="cannot take"):
        ops.linears(normal(2, 95, dtype=dtype), parts)


@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_linears_of_other_blocks(ops, tokens):
    """Which want x packed in other ways: in blocks of rows, and a scale for each row."""
    fp8, x = FORMATS["fp8"], normal(tokens, 128, dtype=torch.bfloat16)
    parts = []
    for rows, block in ((128, (128, 128)), (64, (1, 128)), (32, (32, 128)), (96, (128, 128))):
        fmt, data = fp8.with_block(block), normal(rows, 128, seed=rows).to(torch.float8_e4m3fn)
        scale = 0.5 + torch.rand(fmt.grid((rows,), 128), generator=torch.Generator().manual_seed(rows))
        parts.append((PackedTensor(fmt, (rows, 128), (rows,), data, scale), None))
    assert all(torch.equal(y, ops.linear(x, w)) for y, (w, _) in zip(ops.linears(x, parts), parts))


HEADS = {
    "plain": {},
    "normed": {"normed": True},
    "turned": {"rope": Rope(1e4, 32)},
    "all": {"normed": True, "rope": Rope(1e4, 32), "window": 7, "sinks": True},
    "a part, interleaved": {"rope": Rope(1e4, 20, interleaved=True), "scale": 0.3},
}


class Attention:
    """Three sequences, of 1, 0 and 6 new tokens after 70, 3 and 2 others, in blocks of 16 out of order."""

    def __init__(self, dtype, normed=False, rope=None, window=None, sinks=False, scale=None):
        self.q, self.k, self.v = (normal(7, n * 32, dtype=dtype, seed=n) for n in (4, 2, 3))
        self.v = self.v[:, :64].contiguous()
        norms = [1 + 0.3 * normal(32, seed=s) for s in (5, 6)] if normed else [None, None]
        self.heads = Heads(*norms, 1e-5, bool(rope and rope.interleaved), window, scale, normal(4) if sinks else None)
        self.pools = [normal(9, 16, 2, 32, dtype=dtype, seed=s) for s in (7, 8)]
        tables = [torch.tensor(t) for t in ([3, 1, 7, 0, 5], [2], [8])]
        slots = torch.tensor([5 * 16 + 6, *range(8 * 16 + 2, 8 * 16 + 8)])
        self.layout = Layout([0, 1, 1, 7], [71, 0, 8], tables, slots)
        positions = torch.tensor([70, *range(2, 8)])
        self.rotation = Ops("torch").rotation(positions, rope) if rope else None

    def run(self, ops: Ops, **changed) -> list[Tensor]:
        """The result, and the pools after it."""
        pools = [pool.clone() for pool in self.pools]
        heads = changed.get("heads", self.heads)
        out = ops.attend(self.q, self.k, self.v, *pools, self.layout, changed.get("rotation", self.rotation), heads)
        return [out, *pools]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_attend(ops, name, dtype):
    case = Attention(dtype, **HEADS[name])
    inputs = [t.clone() for t in (case.q, case.k, case.v)]
    got, expected = case.run(ops), case.run(alone(ops))
    for a, b in zip(got, expected):
        assert_close(a, b)
    # What nobody stored stays, and what was given is not written to.
    untouched = torch.ones(9 * 16, dtype=torch.bool).index_fill_(0, case.layout.slots, False)
    assert all(torch.equal(p.flatten(0, 1)[untouched], q.flatten(0, 1)[untouched]) for p, q in zip(got[1:], case.pools))
    assert all(torch.equal(a, b) for a, b in zip(inputs, (case.q, case.k, case.v)))
    if case.rotation:
        wrong = tuple(r.flip(0) for r in case.rotation)
        with pytest.raises(AssertionError):
            assert_close(case.run(ops, rotation=wrong)[1], expected[1])
    if case.heads.q_norm is not None:
        swapped = Heads(case.heads.k_norm, case.heads.q_norm, 1e-5)
        with pytest.raises(AssertionError):
            assert_close(case.run(ops, heads=swapped)[1], expected[1])


def test_attend_checks_its_arguments(ops):
    case = Attention(torch.float32)
    case.k = case.k[:, :-1]
    with pytest.raises(ValueError, match="attend cannot take"):
        case.run(ops)


def dense_of(activation: Swiglu | ClampedSwiglu = Swiglu(), biased: bool = False, fmt: str = "fp8") -> Dense:
    shapes = ((160, 96), (160, 96), (96, 160))
    parts = (
        (random_packed(fmt, shape, seed=n), normal(shape[0], dtype=torch.bfloat16, seed=n) if biased else None)
        for n, shape in enumerate(shapes, 20)
    )
    return Dense(*parts, activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 300])  # of 300, threads share the activations
@pytest.mark.parametrize("kind", ["plain", "biased and clamped"])
def test_dense(ops, kind, tokens, dtype):
    dense = dense_of() if kind == "plain" else dense_of(ClampedSwiglu(0.7, 1.702, 1.0), biased=True)
    x = normal(tokens, 96, dtype=dtype, seed=9)
    got, expected = ops.dense(x, dense), alone(ops).dense(x, dense)
    assert got.dtype == dtype and got.shape == x.shape
    if tokens:
        assert_close(got, expected)
        for changes in ({"gate": dense.up, "up": dense.gate}, {"activation": ClampedSwiglu(0.2)}):
            with pytest.raises(AssertionError):
                assert_close(ops.dense(x, Dense(**{**vars(dense), **changes})), expected)


def experts_of(router: Router, activation: Swiglu | ClampedSwiglu, biased: bool) -> Experts:
    spec = Moe(12, 3, 160, router, activation=activation, bias=biased)
    return Experts(
        spec, normal(12, 96, dtype=torch.bfloat16), random_packed("mxfp4", (12, 320, 96), (160, 160)),
        random_packed("mxfp4", (12, 96, 160), seed=1),
        normal(12, dtype=torch.bfloat16) if router.bias else None, normal(12, seed=3) if router.correction else None,
        *([normal(12, n, dtype=torch.bfloat16, seed=n) for n in (320, 96)] if biased else ()),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("kind", ["softmax", "gpt-oss", "deepseek"])
def test_routed(ops, kind, tokens, dtype):
    experts = {
        "softmax": lambda: experts_of(Router(), Swiglu(), False),
        "gpt-oss": lambda: experts_of(Router("softmax_chosen", bias=True), ClampedSwiglu(7.0, 1.702, 1.0), True),
        "deepseek": lambda: experts_of(Router("sigmoid", correction=True, groups=4, top_groups=2, scale=2.5), Swiglu(), False),
    }[kind]()
    x = normal(tokens, 96, dtype=dtype, seed=9)
    got, expected = ops.routed(x, experts), alone(ops).routed(x, experts)
    assert torch.equal(got, expected) and got.dtype == dtype and got.shape == x.shape
    if tokens:
        flipped = Experts(**{**vars(experts), "router": experts.router.flip(0)})
        assert not torch.equal(ops.routed(x, flipped), expected)


def test_tokens_that_are_not_used_pass_no_expert(ops):
    experts = experts_of(Router(), Swiglu(), False)
    x, unused = normal(5, 96, seed=9), torch.tensor([False, True, False, False, True])
    got, expected = ops.routed(x, experts, unused), ops.routed(x, experts)
    assert_close(got[~unused], expected[~unused])
    assert not got[unused].any() and expected[unused].abs().max() > 0.01


def with_shared(experts: Experts, gated: bool) -> Experts:
    gate = normal(1, 96, dtype=torch.bfloat16, seed=31) * 0.2 if gated else None
    return replace(experts, shared=dense_of(), shared_gate=gate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts(ops, gated, tokens, dtype):
    """Against the parts they are described by, and what is none of them."""
    experts = with_shared(experts_of(Router(), Swiglu(), False), gated)
    x, single = normal(tokens, 96, dtype=dtype, seed=9), alone(ops)
    got = ops.routed(x, experts)
    assert got.dtype == dtype and got.shape == x.shape
    if tokens:
        shared = single.dense(x, experts.shared).double()
        if gated:
            shared *= torch.sigmoid(x.double() @ experts.shared_gate.double().T)
        routed = single.routed(x, replace(experts, shared=None, shared_gate=None)).double()
        assert_close(got, (routed + shared).to(dtype))
        assert_close(got, single.routed(x, experts))
        for wrong in (routed, routed + shared.flip(0) if tokens > 1 else routed + 2 * shared):
            with pytest.raises(AssertionError):
                assert_close(got, wrong.to(dtype))


def test_routers_in_float32(ops):
    """Go with whole layers, and are not rounded."""
    case, x = Attention(torch.bfloat16), normal(7, 96, dtype=torch.bfloat16, seed=13)
    plain = layer_of(case, False)
    router = plain.mlp.router.float() * (1 + 2**-9)
    layer = replace(plain, mlp=replace(plain.mlp, router=router))
    pools = [[pool.clone() for pool in case.pools] for _ in range(3)]
    got = at_once(ops, x, layer, pools[0], case)
    assert (got is None) == (ops.name == "torch")
    if got is not None:
        assert torch.equal(got, by_parts(ops, x, layer, pools[1], case))
        rounded = replace(plain, mlp=replace(plain.mlp, router=router.bfloat16()))
        assert not torch.equal(at_once(ops, x, rounded, pools[2], case), got)


def layer_of(case: Attention, biased: bool, mlp: str = "experts") -> Layer:
    """Around the heads of a case, whose hidden size is 96."""
    rows = {"q": 128, "k": 64, "v": 64}
    *qkv, output = (
        (random_packed("fp8", shape, seed=n), normal(shape[0], dtype=torch.bfloat16, seed=n) if biased else None)
        for n, shape in enumerate([*((r, 96) for r in rows.values()), (96, 128)])
    )
    experts = experts_of(Router("softmax_chosen", bias=biased), Swiglu(), biased)
    shared, gated = with_shared(experts, False), with_shared(experts, True)
    mlps = {"experts": experts, "shared": shared, "gated": gated, "dense": dense_of()}
    norms = (1 + 0.3 * normal(96, dtype=torch.bfloat16, seed=s) for s in (11, 12))
    return Layer(*norms, 1e-5, Grouped(qkv, output, case.heads), mlps[mlp])


def at_once(ops: Ops, x: Tensor, layer: Layer, pools: list[Tensor], case: Attention | Latents) -> Tensor | None:
    rotations = [] if case.rotation is None else [case.rotation]
    return ops.layers(x, PlacedLayers([layer], [pools], [0 if rotations else None]), rotations, case.layout)


def by_parts(ops: Ops, x: Tensor, layer: Layer, pools: list[Tensor], case: Attention | Latents) -> Tensor:
    attended = grouped if isinstance(layer.attention, Grouped) else latent
    x = x + attended(ops, ops.rms_norm(x, layer.input_norm, layer.eps), layer.attention, pools, case)
    mlp = ops.routed if isinstance(layer.mlp, Experts) else ops.dense
    return x + mlp(ops.rms_norm(x, layer.post_norm, layer.eps), layer.mlp)


def grouped(ops: Ops, x: Tensor, a: Grouped, pools: list[Tensor], case: Attention) -> Tensor:
    q, k, v = ops.linears(x, a.qkv)
    if a.gated:
        q, gates = (part.flatten(1) for part in q.unflatten(1, (4, 2, 32)).unbind(2))
    if a.norms[0] is not None:
        parts = (part.unflatten(1, (-1, len(norm))) for part, norm in zip((q, k), a.norms))
        q, k = (ops.rms_norm(part, norm, a.heads.eps).flatten(1) for part, norm in zip(parts, a.norms))
    if a.clip is not None:
        q, k, v = (part.clamp(-a.clip, a.clip) for part in (q, k, v))
    heads = ops.attend(q, k, v, *pools, case.layout, case.rotation, a.heads)
    return ops.linear((heads.float() * gates.float().sigmoid()).to(x.dtype) if a.gated else heads, *a.output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name, mlp", [*((name, "experts") for name in HEADS), ("all", "shared"), ("all", "gated"), ("all", "dense")]
)
def test_layer(ops, name, mlp, dtype):
    case = Attention(dtype, **HEADS[name])
    layer, x = layer_of(case, name == "all", mlp), normal(7, 96, dtype=dtype, seed=13)
    before, pools = x.clone(), [[pool.clone() for pool in case.pools] for _ in range(2)]
    got = at_once(ops, x, layer, pools[0], case)
    assert torch.equal(x, before) and (got is None) == (ops.name == "torch")
    if got is not None:
        expected = by_parts(ops, x, layer, pools[1], case)
        assert torch.equal(got, expected) and all(torch.equal(a, b) for a, b in zip(*pools))
        swapped = replace(layer, input_norm=layer.post_norm, post_norm=layer.input_norm)
        assert not torch.equal(at_once(ops, x, swapped, pools[0], case), got)


def with_more(layer: Layer, kind: str) -> Layer:
    """With what some models do to queries, keys and values before or after their heads."""
    a = layer.attention
    if kind == "gated":
        return replace(layer, attention=replace(a, qkv=((random_packed("fp8", (256, 96), seed=40), None), *a.qkv[1:]), gated=True))
    sizes = (32, 32) if kind == "norms of heads" else (128, 64)
    norms = tuple(1 + 0.3 * normal(n, dtype=torch.bfloat16, seed=n + i) for i, n in enumerate(sizes))
    return replace(layer, attention=replace(a, norms=norms, clip=None if kind == "norms of all" else 0.8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gated", "norms of all", "norms of heads"])
@pytest.mark.parametrize("name", ["turned", "all"])
def test_layer_with_more(ops, name, kind, dtype):
    case = Attention(dtype, **HEADS[name])
    layer, x = with_more(layer_of(case, True), kind), normal(7, 96, dtype=dtype, seed=13)
    pools = [[pool.clone() for pool in case.pools] for _ in range(3)]
    got = at_once(ops, x, layer, pools[0], case)
    assert (got is None) == (ops.name == "torch")
    if got is not None:
        assert_close(got, by_parts(ops, x, layer, pools[1], case))
        assert all(torch.equal(a, b) for a, b in zip(*pools[:2]))
        a = layer.attention
        for changes in (
            [{"qkv": ((random_packed("fp8", (256, 96), seed=41), None), *a.qkv[1:])}] if a.gated
            else [{"norms": tuple(norm.flip(0) for norm in a.norms)}, {"clip": 0.4}]
        ):  # fmt: skip
            with pytest.raises(AssertionError):
                assert_close(at_once(ops, x, replace(layer, attention=replace(a, **changes)), pools[2], case), got)


@pytest.mark.parametrize(
    "more, mlp", [*((None, mlp) for mlp in ("experts", "gated", "dense")), ("gated", "experts"), ("norms of all", "experts")]
)
def test_layers_of_prompts(ops, more, mlp):
    """At once where there is a matrix unit: a layer twice, with pools of its own each time."""
    rope, dtype = Rope(1e4, 32), torch.bfloat16
    case, x = Attention(dtype, normed=True, rope=rope, window=7, sinks=True), normal(21, 96, dtype=dtype, seed=13)
    slots = torch.tensor([5 * 16 + 6, *range(8 * 16, 9 * 16), *range(2 * 16, 2 * 16 + 4)])
    case.layout = Layout([0, 1, 21], [71, 20], [torch.tensor([3, 1, 7, 0, 5]), torch.tensor([8, 2])], slots)
    case.rotation = Ops("torch").rotation(torch.tensor([70, *range(20)]), rope)
    layer, pools = layer_of(case, True, mlp), [[pool.clone() for pool in case.pools] for _ in range(4)]
    layer = with_more(layer, more) if more else layer
    placed = PlacedLayers([layer, layer], pools[:2], [0, None])
    got = ops.layers(x, placed, [case.rotation], case.layout)
    assert (got is None) == (ops.name == "torch" or native.selected() not in WITH_TILES)
    if got is not None:
        between = by_parts(ops, x, layer, pools[2], case)
        case.rotation = None
        assert torch.equal(got, by_parts(ops, between, layer, pools[3], case))
        assert all(torch.equal(a, b) for i in range(2) for a, b in zip(pools[i], pools[2 + i]))


def test_layers_know_what_they_were_described_for(ops):
    """The same layers for another dtype, and as before."""
    case = Attention(torch.float32)
    layer, x = layer_of(case, False), normal(7, 96, seed=13)
    placed = PlacedLayers([layer], [[pool.clone() for pool in case.pools]], [None])
    before = ops.layers(x, placed, [], case.layout)
    assert (before is None) == (ops.name == "torch")
    assert ops.layers(x.half(), placed, [], case.layout) is None
    again = ops.layers(x, placed, [], case.layout)
    assert again is None if before is None else torch.equal(again, before)


def test_layers_that_do_not_fit_together(ops):
    case = Attention(torch.float32)
    layer, x = layer_of(case, False), normal(7, 96, seed=13)
    with pytest.raises(ValueError, match="layers cannot take"):
        PlacedLayers([layer, replace(layer, input_norm=layer.input_norm[:-1])], [case.pools] * 2, [None] * 2)
    few, kept = [[case.pools[0], case.pools[1][1:]]], [case.pools]
    for pools, rotations in ((kept, []), ([], []), (few, [None]), ([case.pools[:1]], [None]), ([[*case.pools] * 2], [None])):
        with pytest.raises(ValueError, match="layers cannot take"):
            PlacedLayers([layer], pools, rotations)
    a = layer.attention
    wide = random_packed("fp8", (160, 96)), None
    for changes in (
        {"norms": (normal(32), None)}, {"norms": (normal(33), normal(32))}, {"clip": 0.0}, {"gated": True},
        {"qkv": (*a.qkv[:2], wide)}, {"qkv": (wide, *a.qkv[1:])}, {"output": wide},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="layers cannot take"):
            PlacedLayers([replace(layer, attention=replace(a, **changes))], kept, [None])
    with pytest.raises(ValueError, match="layers cannot take"):
        ops.layers(x[:, :-1].contiguous(), PlacedLayers([layer], [case.pools], [None]), [], case.layout)
    placed, angles = PlacedLayers([layer], [case.pools], [0]), torch.ones(6, 16)
    with pytest.raises(ValueError, match="layers cannot take"):
        ops.layers(x, placed, [(angles, angles)], case.layout)
    with pytest.raises(ValueError, match="layers cannot take"):
        ops.layers(x, PlacedLayers([layer], [case.pools], [None]), [], replace(case.layout, slots=case.layout.slots.int()))


@pytest.mark.parametrize("plain", [True, False])
def test_weights_are_forgotten(ops, plain):
    w = normal(96, 128, dtype=torch.bfloat16) if plain else random_packed("fp8", (96, 128))
    held = weakref.ref(w)
    ops.linear(normal(20, 128, dtype=torch.bfloat16), w)
    del w
    assert held() is None


class Latents:
    """Two sequences, of 1 and 5 new tokens after 40 and none, with heads of 24 + 16, latents of 32 and values of 20."""

    def __init__(self, dtype, compressed=True, biased=False, interleaved=False, fmt="fp8"):
        def projection(rows, columns, has_bias=False):
            bias = normal(rows, dtype=torch.bfloat16, seed=rows) if has_bias else None
            return random_packed(fmt, (rows, columns), seed=rows), bias

        q_norm, kv_norm = (1 + 0.3 * normal(n, dtype=torch.bfloat16, seed=n) for n in (64, 32))
        self.attention = Latent(
            projection(64, 96, biased) if compressed else None, q_norm if compressed else None,
            projection(3 * 40, 64 if compressed else 96), projection(48, 96, biased), kv_norm,
            (normal(3, 44, 32, seed=7) * 0.2).to(dtype), projection(96, 60, biased), 0.2, 1e-6, interleaved,
        )  # fmt: skip
        self.pools = [normal(5, 16, 48, dtype=dtype, seed=8)]
        slots = torch.tensor([1 * 16 + 8, *range(3 * 16, 3 * 16 + 5)])
        self.layout = Layout([0, 1, 6], [41, 5], [torch.tensor([4, 0, 1]), torch.tensor([3])], slots)
        self.rotation = Ops("torch").rotation(torch.tensor([40, *range(5)]), Rope(1e4, 16, interleaved=interleaved))
        norms = (1 + 0.3 * normal(96, dtype=torch.bfloat16, seed=s) for s in (11, 12))
        self.layer = Layer(*norms, 1e-5, self.attention, with_shared(experts_of(Router(), Swiglu(), False), False))


def latent(ops: Ops, x: Tensor, a: Latent, pools: list[Tensor], case: Latents) -> Tensor:
    new, key = ops.linear(x, *a.kv_down).split([32, 16], dim=-1)
    new = ops.rms_norm(new.contiguous(), a.kv_norm, a.eps)
    key = ops.rope(key[:, None], case.rotation, a.interleaved)[:, 0]
    pools[0].flatten(0, 1).index_copy_(0, case.layout.slots, torch.cat([new, key], dim=-1))
    down = ops.rms_norm(ops.linear(x, *a.q_down), a.q_norm, a.eps) if a.q_down else x
    nope, turned = ops.linear(down, *a.q_up).unflatten(1, (3, 40)).split([24, 16], dim=-1)
    q = torch.cat([nope, ops.rope(turned, case.rotation, a.interleaved)], dim=-1)
    return ops.linear(ops.latent_attention(q, pools[0], a.up, case.layout, a.scale).flatten(1), *a.output)


LATENTS = {"compressed": {}, "plain": {"compressed": False}, "all": {"biased": True, "interleaved": True}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LATENTS)
def test_layer_of_latents(ops, name, dtype):
    case = Latents(dtype, **LATENTS[name])
    x, pools = normal(6, 96, dtype=dtype, seed=13), [[case.pools[0].clone()] for _ in range(3)]
    before = x.clone()
    got = at_once(ops, x, case.layer, pools[0], case)
    assert torch.equal(x, before) and (got is None) == (ops.name == "torch")
    if got is not None:
        assert_close(got, by_parts(ops, x, case.layer, pools[1], case))
        assert_close(pools[0][0], pools[1][0])
        a = case.attention
        flips = {"kv_norm": a.kv_norm.flip(0)}, {"up": a.up.flip(0)}
        for changes in ({"scale": 0.1}, {"interleaved": not a.interleaved}, *flips):
            layer = replace(case.layer, attention=replace(a, **changes))
            with pytest.raises(AssertionError):
                assert_close(at_once(ops, x, layer, pools[2], case), got)


def test_what_a_layer_leaves_to_single_operations(ops):
    case = Attention(torch.float16)
    assert at_once(ops, normal(7, 96, dtype=torch.float16), layer_of(case, False), case.pools, case) is None
    case = Attention(torch.float32)
    case.layout = Layout([0, 9], [9], [torch.tensor([0])], torch.arange(9))  # so many that matrices are multiplied
    assert at_once(ops, normal(9, 96), layer_of(case, False), case.pools, case) is None


def attend_arguments(heads: int, width: int, rotated: int, dtype: torch.dtype) -> tuple:
    """(q, k, v, keys, values, layout, rotation) of two sequences of one new token, with two heads of keys."""
    layout = Layout([0, 1, 2], [3, 6], [torch.tensor([1]), torch.tensor([0, 2])], torch.tensor([6, 9]))
    q, k, v = normal(2, heads * width, dtype=dtype), *(normal(2, 2 * width, dtype=dtype, seed=s) for s in (1, 2))
    pools = [normal(3, 4, 2, width, dtype=dtype, seed=s) for s in (3, 4)]
    rotation = (normal(2, rotated // 2, seed=5), normal(2, rotated // 2, seed=6)) if rotated else None
    return q, k, v, *pools, layout, rotation


@pytest.mark.parametrize("second", [(4, 32, 0), (4, 32, 16), (2, 32, 32), (4, 64, 32)], ids=str)
def test_heads_serve_any_shape(ops, second):
    """A description made for one call must not be used for another."""
    heads = Heads()
    for shape in ((4, 32, 32), second):
        for dtype in DTYPES:
            ours, theirs = attend_arguments(*shape, dtype), attend_arguments(*shape, dtype)
            assert_close(ops.attend(*ours, heads), alone(ops).attend(*theirs, heads), units=16)
            assert all(torch.equal(a, b) for a, b in zip(ours[3:5], theirs[3:5])), "the cache"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "bf16"])
@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("added", [False, True])
def test_logits(ops, added, tokens, fmt, dtype):
    x, norm = strided(normal(tokens, 96, dtype=dtype)), 1 + 0.3 * normal(96, seed=1)
    more = 0.5 * normal(tokens, 96, dtype=dtype, seed=2) if added else None
    head = normal(300, 96, dtype=torch.bfloat16, seed=3) if fmt == "bf16" else random_packed(fmt, (300, 96))
    got, expected = ops.logits(x, more, norm, 1e-5, head), alone(ops).logits(x, more, norm, 1e-5, head)
    assert got.dtype == torch.float32 and got.shape == (tokens, 300)
    if tokens:
        assert_close(got, expected, 32)  # of which another order of sums takes some
        assert not torch.allclose(got, alone(ops).logits(x, more, norm.roll(1), 1e-5, head), rtol=1e-2)
    with pytest.raises(ValueError, match="cannot take"):
        ops.logits(x, more, norm[1:], 1e-5, head)


def test_logits_of_unlike_parts(ops):
    x, added, norm = normal(2, 32, dtype=torch.bfloat16), normal(2, 32, seed=1), 1 + 0.3 * normal(32, seed=2)
    head = normal(3, 32, dtype=torch.bfloat16, seed=3)
    expected = torch.nn.functional.rms_norm(x.double() + added, (32,), norm.double(), 1e-6) @ head.double().T
    assert_close(ops.logits(x, added, norm, 1e-6, head), expected.float(), 32)


def strided(x: Tensor) -> Tensor:
    """The same values, not one after another."""
    return torch.stack([x, torch.full_like(x, 1)], dim=-1)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arguments_may_be_strided(ops, dtype):
    q, k, v, keys, values, layout, rotation = attend_arguments(4, 32, 16, dtype)
    sinks = normal(4)
    expected = ops.attend(q, k, v, keys.clone(), values.clone(), layout, rotation, Heads(sinks=sinks))
    spread = Layout(layout.starts, layout.lengths, [strided(t) for t in layout.tables], strided(layout.slots))
    stored = keys.clone(), values.clone()
    got = ops.attend(*map(strided, (q, k, v)), *stored, spread, tuple(map(strided, rotation)), Heads(sinks=strided(sinks)))
    assert torch.equal(got, expected)
    x, w, bias = normal(3, 96, dtype=dtype), random_packed("fp8", (64, 96)), normal(64)
    assert torch.equal(ops.linears(strided(x), [(w, strided(bias))] * 2)[1], ops.linear(x, w, bias))
