"""ModelSpec: the same after a journey through JSON, and damage refused by name."""

import json
from dataclasses import replace

import pytest

from tutel_pack.errors import InputError
from tutel_pack.spec import (
    Attention, ClampedSwiglu, DeltaNet, Indexer, Layer, Llama3, Mla, Mlp, ModelSpec, Moe, Rope, Router, Yarn,
)  # fmt: skip
from tutel_pack.tensors import EXPERTS, HEAD, KEEP, MLP, canonical_tensors

ATTENTION = Attention(heads=4, kv_heads=2, head_dim=16, rope=Rope(1e6, 16), qk_norm="head", bias="qkv", window=64)
DENSE, SPARSE = Layer(ATTENTION, Mlp(48)), Layer(replace(ATTENTION, window=None), Moe(experts=3, top_k=2, intermediate=24, router=Router(renormalize=False)))
SPEC = ModelSpec("any", 32, 100, 512, 1e-6, False, (DENSE, SPARSE, SPARSE, DENSE))


def test_json_and_back():
    data = json.loads(json.dumps(SPEC.to_json()))
    assert ModelSpec.from_json(data) == SPEC
    assert data["layers"] == [0, 1, 1, 0] and len(data["layer_kinds"]) == 2  # like layers once
    assert ModelSpec.from_json(replace(SPEC, layers=()).to_json()).layers == ()


def test_every_kind_of_layer():
    rope = Rope(1e4, 64, interleaved=True, scaling=Yarn(40.0, 4096, 32.0, 1.0, True, 1.0))
    mla = Mla(4, 96, 64, 32, 32, rope, 0.1, indexer=Indexer(2, 64, 16, Rope(1e4, 32, scaling=Llama3(8.0, 512, 1.0, 4.0))))
    moe = Moe(8, 2, 24, Router("sigmoid", correction=True, groups=4, top_groups=2), Mlp(48), True, ClampedSwiglu(7.0, 1.702, 1.0), True)
    spec = replace(SPEC, layers=(Layer(mla, moe), Layer(DeltaNet(2, 4, 16, 16, 4, True), moe)), mtp=(DENSE,), names=(("router", "mlp.router"),))
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    names = canonical_tensors(spec)
    assert {"model.layers.0.mlp.router.weight", "model.layers.1.linear_attn.A_log", "model.layers.2.eh_proj.weight"} <= set(names)


def test_from_json_does_not_change_its_argument():
    data = SPEC.to_json()
    before = json.dumps(data)
    ModelSpec.from_json(data)
    assert json.dumps(data) == before


def change(data, place, value):
    for key in place[:-1]:
        data = data[key]
    data[place[-1]] = value


ATT, MOE, DENSE_MLP = ("layer_kinds", 0, "attention"), ("layer_kinds", 1, "mlp"), ("layer_kinds", 0, "mlp")


@pytest.mark.parametrize("place, values", [
    (("hidden",), ("32", 0, -1, 1.5, None, True, 10**30, [])), (("vocab",), ("x", 0)), (("context",), (None, -5)), (("family",), (1, None, [])),
    (("norm_eps",), ("1e-6", 0, -1, float("nan"), float("inf"), True, None)), (("tied_head",), (1, "false", None)), (("new_field",), (1,)),
    (("layers",), ([2], [-1], [True], ["0"], [[0]], 5, None, {"0": 0}, [0.0])), (("layer_kinds",), ([], None, {}, [1], [[]], "x", [{}])),
    ((*ATT, "heads"), (3, 0, "4", None)), ((*ATT, "kv_heads"), (3, 0)), ((*ATT, "head_dim"), (0, 8, "16")), ((*ATT, "window"), (0, -1, "64", True)),
    ((*ATT, "qk_norm"), (1, "yes", True)), ((*ATT, "bias"), (1, "x", None, True)), ((*ATT, "rope"), (1, {}, {"kind": "Rope"}, [1e6, 16])),
    ((*ATT, "rope", "theta"), ("x", float("nan"), None)), ((*ATT, "rope", "dim"), (15, 18, 0, "16")), ((*ATT, "rope", "scaling"), (1, {}, {"kind": "Mlp"})),
    ((*ATT, "sinks"), (1, None)), ((*MOE, "experts"), (1, 0, "3")), ((*MOE, "top_k"), (4, 0, None)), ((*MOE, "router", "renormalize"), (0, "no")),
    ((*MOE, "router", "score"), ("tanh", 1, None)), ((*MOE, "router", "groups"), (2, 0)), ((*MOE, "router", "top_groups"), (2,)),
    ((*MOE, "bias"), (1,)), ((*MOE, "more"), (1,)), ((*DENSE_MLP, "intermediate"), (0, "48", None)), (DENSE_MLP, (None, 1, [], {})),
    (("layer_kinds", 0, "more"), ({},)), (("layer_kinds", 0, "attention"), (None, [], {})),
])  # fmt: skip
def test_damage_is_refused(place, values):
    for value in values:
        data = json.loads(json.dumps(SPEC.to_json()))
        change(data, place, value)
        with pytest.raises(InputError) as caught:
            ModelSpec.from_json(data)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("data", [None, [], 1, "x", {}])
def test_what_is_no_description(data):
    with pytest.raises(InputError):
        ModelSpec.from_json(data)


def test_every_field_is_needed():
    for key in SPEC.to_json():
        data = SPEC.to_json()
        del data[key]
        with pytest.raises(InputError):
            ModelSpec.from_json(data)


def test_canonical_tensors():
    tensors = canonical_tensors(SPEC)
    assert list(tensors)[-3:] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert tensors["lm_head.weight"].role == HEAD and "lm_head.weight" not in canonical_tensors(replace(SPEC, tied_head=True))
    experts = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert (experts.shape, experts.role, experts.segments) == ((3, 48, 32), EXPERTS, (24, 24))
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (32, 48) and tensors["model.layers.0.mlp.up_proj.weight"].role == MLP
    assert tensors["model.layers.2.mlp.gate.weight"].role == KEEP and tensors["model.layers.3.self_attn.k_proj.bias"].shape == (32,)
    assert tensors["model.layers.0.self_attn.o_proj.weight"].shape == (32, 64)
